"""Clients of Python's standard library. Prints "ok NAME" for each that got its answer."""
import asyncio, hashlib, http.client, socket, ssl, sys, urllib.error, urllib.request

context = ssl.create_default_context()
cases = []


def case(f):
    cases.append(f)
    return f


def fetch(url, **options):
    secure = {"context": context} if url.startswith("https:") else {}
    return urllib.request.urlopen(urllib.request.Request(url, **options), **secure)


def same(got, want):
    if got != want:
        raise AssertionError(f"{got!r}, not {want!r}")


for scheme in "http", "https":
    for method in "GET", "POST", "PUT", "DELETE":
        def urllib_method(scheme=scheme, method=method):
            data = b"data" if method in ("POST", "PUT") else None
            body = fetch(f"{scheme}://site.test/echo/x", method=method, data=data).read().decode().strip()
            same(body, f"{method} /echo/x data" if data else f"{method} /echo/x")
        urllib_method.__name__ = f"urllib_{scheme}_{method}"
        case(urllib_method)

    def http_client_kept(scheme=scheme):
        c = http.client.HTTPSConnection("site.test", context=context) if scheme == "https" else http.client.HTTPConnection("site.test")
        for i in range(20):
            c.request("POST", f"/echo/{i}", body=iter([b"in ", b"chunks"]), headers={"Transfer-Encoding": "chunked"}, encode_chunked=True)
            same(c.getresponse().read().decode().strip(), f"POST /echo/{i} in chunks")
    http_client_kept.__name__ = f"http_client_kept_{scheme}"
    case(http_client_kept)


@case
def urllib_redirect():
    same(fetch("https://site.test/redirect").read(), b"GET /echo/redirected\n")


@case
def urllib_redirect_to_a_refused_name():
    try:
        fetch("http://site.test/redirect?to=http://evil.test/")
    except urllib.error.URLError as e:
        if isinstance(e.reason, socket.gaierror):
            return
        raise
    raise AssertionError("it was followed")


@case
def urllib_redirect_to_metadata():
    try:
        fetch("http://site.test/redirect?to=http://169.254.169.254/latest/meta-data/")
    except urllib.error.HTTPError as e:
        same(e.code, 403)
        return
    raise AssertionError("it was followed")


@case
def urllib_status():
    try:
        fetch("https://site.test/status/404")
    except urllib.error.HTTPError as e:
        same(e.code, 404)
        return
    raise AssertionError("no error")


@case
def urllib_download():
    h, n = hashlib.sha256(), 0
    with fetch("https://site.test/bytes/8388608") as r:
        while b := r.read(65536):
            h.update(b)
            n += len(b)
    same(n, 8 << 20)


@case
def urllib_upload():
    data = bytes(range(256)) * 16384
    same(fetch("https://site.test/sum", method="PUT", data=data).read().decode(), hashlib.sha256(data).hexdigest())


@case
def ssl_alpn():
    alpn = ssl.create_default_context()
    alpn.set_alpn_protocols(["h2"])
    with socket.create_connection(("site.test", 443)) as s, alpn.wrap_socket(s, server_hostname="site.test") as t:
        same(t.selected_alpn_protocol(), "h2")


@case
def ssl_1_2():
    old = ssl.create_default_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("site.test", 443)) as s, old.wrap_socket(s, server_hostname="site.test") as t:
        same(t.version(), "TLSv1.2")


@case
def socket_ipv6():
    same({a[0] for a in socket.getaddrinfo("six.site.test", 80)}, {socket.AF_INET6})
    same(fetch("http://six.site.test/echo/6").read(), b"GET /echo/6\n")


@case
def socket_both_families():
    same({a[0] for a in socket.getaddrinfo("site.test", 80)}, {socket.AF_INET, socket.AF_INET6})


@case
def socket_alias():
    same(fetch("http://www.site.test/echo/alias").read(), b"GET /echo/alias\n")


@case
def socket_no_such_name():
    try:
        socket.getaddrinfo("none.site.test", 80)
    except socket.gaierror as e:
        if e.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return
        raise
    raise AssertionError("it was resolved")


@case
def socket_half_close():
    with socket.create_connection(("raw.site.test", 9000)) as s:
        s.sendall(b"\0binary")
        s.shutdown(socket.SHUT_WR)
        same(b"".join(iter(lambda: s.recv(100), b"")), b"\0binary")


@case
def socket_reset_upstream():
    c = http.client.HTTPConnection("resets.site.test")
    c.request("GET", "/")
    try:
        r = c.getresponse()
    except (ConnectionResetError, http.client.RemoteDisconnected):
        return
    if r.status != 502:
        raise AssertionError(f"{r.status}")


async def stream(host, port, tls=None):
    r, w = await asyncio.open_connection(host, port, ssl=tls)
    w.write(f"GET /echo/async HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    body = (await r.read()).split(b"\r\n\r\n", 1)[1]
    w.close()
    same(body, b"GET /echo/async\n")


@case
def asyncio_many():
    async def all_of_them():
        await asyncio.gather(*(stream("site.test", 80) for _ in range(50)), *(stream("site.test", 443, context) for _ in range(20)))
    asyncio.run(all_of_them())


failed = 0
for f in cases:
    try:
        f()
        print("ok", f.__name__)
    except Exception as e:
        failed = 1
        print("not ok", f.__name__, repr(e))
sys.exit(failed)
