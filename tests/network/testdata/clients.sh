# Programs as they are installed. Prints "ok NAME" for each that got its answer.
failed=0
# check NAME WANT COMMAND… compares what a command prints.
check() {
	name=$1 want=$2
	shift 2
	if got=$("$@" 2>/tmp/errors) && [ "$got" = "$want" ]; then
		echo "ok $name"
	else
		failed=1
		echo "not ok $name: $got: $(tail -c 1000 /tmp/errors)"
	fi
}
# refused NAME PATTERN COMMAND… expects a command to fail, with an error like this.
refused() {
	name=$1 want=$2
	shift 2
	if got=$("$@" 2>&1); then
		failed=1
		echo "not ok $name: it was done: $got"
	elif echo "$got" | grep -Eq "$want"; then
		echo "ok $name"
	else
		failed=1
		echo "not ok $name: $got"
	fi
}
cd /tmp
# A connection that is refused at once may be reset before connect has returned.
reset="reset by peer|Recv failure|unexpected eof|SSL_ERROR_SYSCALL|Couldn't connect"

c="curl -sS"
for scheme in http https; do
	check "curl-$scheme-get" "GET /echo/x" $c $scheme://site.test/echo/x
	check "curl-$scheme-post" "POST /echo/x a=b" $c -d a=b $scheme://site.test/echo/x
	check "curl-$scheme-put" "PUT /echo/x data" sh -c "printf data | $c -T - $scheme://site.test/echo/x"
	check "curl-$scheme-head" "200" $c -I -o /dev/null -w '%{http_code}' $scheme://site.test/echo
	check "curl-$scheme-redirect" "GET /echo/redirected" $c -L $scheme://site.test/redirect
	check "curl-$scheme-kept" "1 0" sh -c "$c -o /dev/null -o /dev/null -w '%{num_connects}\n' $scheme://site.test/echo/1 $scheme://site.test/echo/2 | xargs echo"
done
check curl-version-1.0 "GET /echo/old" $c -0 http://site.test/echo/old
check curl-version-2 "2" $c --http2 -o /dev/null -w '%{http_version}' https://site.test/echo/x
check curl-version-1.1-tls "1.1" $c --http1.1 -o /dev/null -w '%{http_version}' https://site.test/echo/x
check curl-tls-1.2 "GET /echo/x" $c --tls-max 1.2 https://site.test/echo/x
check curl-ipv6 "GET /echo/x" $c -6 https://site.test/echo/x
check curl-ipv4 "GET /echo/x" $c -4 https://site.test/echo/x
check curl-address "GET /echo/x" $c http://10.1.0.7/echo/x
check curl-port "GET /echo/x" $c https://site.test:8443/echo/x
check curl-inspected "GET /echo/x" $c http://read.test/echo/x
check curl-bytes "1000000" $c -o /dev/null -w '%{size_download}' https://site.test/bytes/1000000
check curl-refused-method "403" $c -o /dev/null -w '%{http_code}' -X DELETE http://read.test/echo/x
check curl-refused-path "403" $c -o /dev/null -w '%{http_code}' http://read.test/status/200
refused curl-refused-name "resolve host" $c https://evil.test/
refused curl-refused-address "$reset" $c https://169.254.169.254/
refused curl-refused-connect-to "$reset" $c --connect-to site.test:443:93.184.215.66:443 https://site.test/
refused curl-refused-name-of-address "$reset" $c --resolve evil.test:443:93.184.215.80 https://evil.test/
check wget "GET /echo/x" wget -q -O - ${CA:+--ca-certificate=$CA} https://site.test/echo/x
check wget-http "GET /echo/x" wget -q -O - http://site.test/echo/x
check openssl "Verify return code: 0 (ok)" sh -c 'echo | openssl s_client -connect site.test:443 -servername site.test -verify_return_error | grep -m1 -o "Verify return code: 0 (ok)"'
refused openssl-another-name "errno|reset|unexpected" openssl s_client -connect site.test:443 -servername evil.test
refused openssl-no-name "errno|reset|unexpected" openssl s_client -connect site.test:443 -noservername
check git-clone "first" sh -c 'rm -rf repo && git clone -q https://site.test/git/demo.git repo && git -C repo log -1 --format=%s'
check git-shallow "1" sh -c 'rm -rf flat && git clone -q --depth 1 http://site.test/git/demo.git flat && git -C flat rev-list --count HEAD'
check git-remote "refs/heads/main" sh -c 'git ls-remote --heads https://site.test/git/demo.git | cut -f 2'
refused git-refused "resolve host" git clone https://evil.test/git/demo.git refused
check perl "GET /echo/x" perl -MHTTP::Tiny -e 'print HTTP::Tiny->new->get("http://site.test/echo/x")->{content}'
check ruby "GET /echo/x" ruby -rnet/http -e 'puts Net::HTTP.get(URI("http://site.test/echo/x"))'
check ruby-tls "GET /echo/x" ruby -rnet/http -e 'puts Net::HTTP.get(URI("https://site.test/echo/x"))'
check pip "1.0" sh -c '/usr/bin/python3 -m pip install -q --no-cache-dir --disable-pip-version-check --no-input --index-url https://site.test/simple/ --target /tmp/pip demo && PYTHONPATH=/tmp/pip /usr/bin/python3 -c "import demo; print(demo.version)"'
refused pip-refused "resolution|resolve|No matching" /usr/bin/python3 -m pip install -q --no-cache-dir --disable-pip-version-check --no-input --retries 0 --index-url https://evil.test/simple/ --target /tmp/pip2 demo
check npm "1.0.0" sh -c 'mkdir -p npm && cd npm && echo "{}" > package.json && npm install --silent --no-audit --no-fund --no-update-notifier --registry=https://site.test/npm/ --cache=/tmp/npm-cache demo && node -p "require(\"demo\")"'
go=$(command -v go || echo /usr/local/go/bin/go)
check go-module "example.test/demo@v1.0.0" sh -c "mkdir -p mod && cd mod && printf 'module x\n\nrequire example.test/demo v1.0.0\n' > go.mod && $go mod download && ls -d /tmp/gopath/pkg/mod/example.test/demo@v1.0.0 | cut -d / -f 6-"
check apt "demo_1.0_all.deb" sh -c 'mkdir -p apt/apt.conf.d apt/preferences.d apt/state/lists/partial apt/cache/archives/partial && : > apt/status && echo "deb [arch=amd64 trusted=yes] https://site.test/debian stable main" > apt/sources.list && cd apt &&
	o="-qq -o Dir::Etc=/tmp/apt -o Dir::Etc::sourcelist=/tmp/apt/sources.list -o Dir::Etc::sourceparts=/nowhere -o Dir::State=/tmp/apt/state -o Dir::State::status=/tmp/apt/status -o Dir::Cache=/tmp/apt/cache -o APT::Sandbox::User= ${CA:+-o Acquire::https::CAInfo=$CA}" &&
	apt-get $o update >&2 && apt-get $o download demo >&2 && ls *.deb'
# It asks for the compiler's version, and compiles nothing.
printf '#!/bin/sh\nprintf "rustc 1.96.0\\nbinary: rustc\\ncommit-hash: unknown\\ncommit-date: unknown\\nhost: x86_64-unknown-linux-gnu\\nrelease: 1.96.0\\nLLVM version: 22.1.0\\n"\n' > rustc && chmod 755 rustc
check cargo "demo" sh -c 'mkdir -p crate/src crate/.cargo && cd crate && : > src/lib.rs &&
	printf "[registries]\nsite = {index = \"sparse+https://site.test/cargo/index/\"}\n" > .cargo/config.toml &&
	printf "[package]\nname = \"x\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[dependencies]\ndemo = {version = \"1\", registry = \"site\"}\n" > Cargo.toml &&
	CARGO_HOME=/tmp/cargo-home RUSTC=/tmp/rustc LD_LIBRARY_PATH=/tmp/cargo/usr/lib/x86_64-linux-gnu /tmp/cargo/usr/bin/cargo vendor -q >/dev/null && ls vendor'
exit $failed
