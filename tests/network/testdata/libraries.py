"""Clients of Python's libraries. Prints "ok NAME" for each that got its answer."""
import asyncio, hashlib, sys, threading

import aiohttp, grpc, httpx, requests

cases = []
LARGE = bytes(range(256)) * 16384


def case(f):
    cases.append(f)
    return f


def same(got, want):
    if got != want:
        raise AssertionError(f"{got!r:.200}, not {want!r:.200}")


def named(name):
    def name_it(f):
        f.__name__ = name
        return case(f)
    return name_it


for scheme in "http", "https":
    for method in "GET", "POST", "PUT", "DELETE":
        url, data = f"{scheme}://site.test/echo/x", b"data" if method in ("POST", "PUT") else None
        want = f"{method} /echo/x data" if data else f"{method} /echo/x"

        @named(f"requests_{scheme}_{method}")
        def _(url=url, method=method, data=data, want=want):
            same(requests.request(method, url, data=data).text.strip(), want)

        @named(f"httpx_{scheme}_{method}")
        def _(url=url, method=method, data=data, want=want):
            same(httpx.request(method, url, content=data).text.strip(), want)

        @named(f"aiohttp_{scheme}_{method}")
        async def _(url=url, method=method, data=data, want=want):
            async with aiohttp.ClientSession() as s, s.request(method, url, data=data) as r:
                same((await r.text()).strip(), want)

    @named(f"requests_session_{scheme}")
    def _(scheme=scheme):
        with requests.Session() as s:
            for i in range(20):
                same(s.post(f"{scheme}://site.test/echo/{i}", data=iter([b"in ", b"chunks"])).text.strip(), f"POST /echo/{i} in chunks")

    @named(f"httpx_events_{scheme}")
    def _(scheme=scheme):
        url = f"{scheme}://site.test/events?id=httpx-{scheme}"
        with httpx.stream("GET", url, timeout=None) as r:
            for i, line in enumerate(line for line in r.iter_lines() if line.strip()):
                same(line.strip(), f"data: {i}")
                same(httpx.post(url, timeout=None).status_code, 204)

    @named(f"aiohttp_websocket_{scheme}")
    async def _(scheme=scheme):
        async with aiohttp.ClientSession() as s, s.ws_connect(f"{scheme}://site.test/chat") as ws:
            for text in "a", "b" * 20000, "c" * 100000:
                await ws.send_str(text)
                same((await ws.receive_str()), "echo " + text)


@case
def requests_redirect():
    same(requests.get("https://site.test/redirect").text, "GET /echo/redirected\n")


@case
def requests_redirect_to_metadata():
    same(requests.get("http://site.test/redirect?to=http://169.254.169.254/latest/meta-data/").status_code, 403)


@case
def requests_refused_name():
    try:
        requests.get("https://evil.test/")
    except requests.exceptions.ConnectionError as e:
        if "resolve" in str(e) or "resolution" in str(e) or "Name or service" in str(e):
            return
        raise
    raise AssertionError("it was answered")


@case
def requests_download():
    n = 0
    for b in requests.get("https://site.test/bytes/8388608", stream=True).iter_content(65536):
        n += len(b)
    same(n, 8 << 20)


@case
def requests_upload():
    same(requests.put("https://site.test/sum", data=LARGE).text, hashlib.sha256(LARGE).hexdigest())


@case
def httpx_http2():
    with httpx.Client(http2=True, timeout=None) as c:
        r = c.post("https://site.test/echo/x", content=b"data")
        same((r.http_version, r.text.strip()), ("HTTP/2", "POST /echo/x data"))
        same(c.put("https://site.test/sum", content=LARGE).text, hashlib.sha256(LARGE).hexdigest())
        same(len(c.get("https://site.test/bytes/8388608").content), 8 << 20)


@case
async def httpx_http2_at_once():
    async with httpx.AsyncClient(http2=True, timeout=None) as c:
        all_of_them = await asyncio.gather(*(c.get(f"https://site.test/echo/{i}") for i in range(50)))
        same([(r.http_version, r.text) for r in all_of_them], [("HTTP/2", f"GET /echo/{i}\n") for i in range(50)])


@case
async def aiohttp_at_once():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as s:
        async def one(i):
            async with s.get(f"https://site.test/echo/{i}") as r:
                return await r.text()
        same(await asyncio.gather(*(one(i) for i in range(50))), [f"GET /echo/{i}\n" for i in range(50)])


@case
async def aiohttp_transfers():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as s:
        async with s.put("https://site.test/sum", data=LARGE) as r:
            same(await r.text(), hashlib.sha256(LARGE).hexdigest())
        async with s.get("https://site.test/bytes/8388608") as r:
            same(len(await r.read()), 8 << 20)


@case
async def aiohttp_ipv6():
    async with aiohttp.ClientSession() as s, s.get("https://six.site.test/echo/6") as r:
        same(await r.text(), "GET /echo/6\n")


def channel():
    return grpc.secure_channel("site.test:443", grpc.ssl_channel_credentials())


@case
def grpc_unary():
    with channel() as c:
        call = c.unary_unary("/test.Echo/Echo")
        for i in range(20):
            same(call(b"message %d" % i), b"message %d" % i)
        same(call(LARGE[:3 << 20]), LARGE[:3 << 20])


@case
def grpc_streams():
    with channel() as c:
        same(list(c.unary_stream("/test.Echo/Thrice")(b"a")), [b"a"] * 3)
        same(c.stream_unary("/test.Echo/Last")(iter([b"a", b"b", b"c"])), b"c")


@case
def grpc_both_ways():
    with channel() as c:
        answered = threading.Semaphore(1)

        def messages():
            for i in range(20):
                answered.acquire()  # each message waits for the answer to the one before
                yield b"message %d" % i
        for i, got in enumerate(c.stream_stream("/test.Echo/Echo")(messages())):
            same(got, b"message %d" % i)
            answered.release()
        same(i, 19)


@case
def grpc_at_once():
    with channel() as c:
        calls = [c.unary_unary("/test.Echo/Echo").future(b"%d" % i) for i in range(50)]
        same([call.result() for call in calls], [b"%d" % i for i in range(50)])


@case
def grpc_error():
    with channel() as c:
        try:
            c.unary_unary("/test.Echo/Refuse")(b"x")
        except grpc.RpcError as e:
            same((e.code(), e.details()), (grpc.StatusCode.NOT_FOUND, "nothing is here"))
            return
    raise AssertionError("no error")


failed = 0
for f in cases:
    try:
        done = f()
        if done is not None:
            asyncio.run(done)
        print("ok", f.__name__)
    except Exception as e:
        failed = 1
        print("not ok", f.__name__, repr(e)[:2000])
sys.exit(failed)
