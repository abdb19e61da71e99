#!/bin/bash
# bench-net.sh: measure networks of sandboxes against a plain veth, slirp4netns and pasta, and write the section "Networks" of
# docs/performance.md. Only root can make the namespaces. ROUNDS=5 REQUESTS=200 RUN=regexp PAGE=docs/performance.md.
#
# Everything happens in a network, mount and PID namespace that end with it:
#
#   upstream, 93.184.215.14 ── veth, MTU 1500 ── world: the daemon and its gateway, slirp4netns, pasta ── sandboxes, namespaces of peers
#                                                  └── veth, MTU 1500 ── namespace of the plain veth, routed
#
# No link leads to the host's network.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/.."

if [ $# -eq 0 ]; then
	((EUID == 0)) || { echo "bench-net.sh: run as root, who can make the namespaces that this measures in" >&2; exit 1; }
	mkdir -p build
	work=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX)
	trap 'rm -rf "$work"' EXIT
	chmod 755 "$work"
	go test -buildvcs=false -c -o "$work/networks.test" ./tests/performance/networks
	CGO_ENABLED=0 go build -buildvcs=false -o "$work/load" ./tests/performance/networks/load
	go build -buildvcs=false -o "$work/table" ./tests/performance/networks/table
	go test -buildvcs=false -c -o "$work/netns.test" ./netns
	mkdir "$work/bin" "$work/tmp" "$work/proc"
	chmod 1777 "$work/tmp"
	cp bin/sandboxd bin/sandboxd-agent bin/sandboxd-launcher bin/sandboxd-init "$work/bin/"
	unshare --net --mount --propagation private --pid --fork --kill-child "$self" "$work" | tee build/bench-net.txt
	"$work/table" docs/performance.md <build/bench-net.txt >build/performance.md
	[ build/performance.md -ef "${PAGE:-docs/performance.md}" ] || cp build/performance.md "${PAGE:-docs/performance.md}"
	exit
fi

work=$1
# As systemd has it for services, where root may raise it: the gateway serves as many networks as this has room for.
ulimit -n 524288 2>/dev/null || true
user=${BENCH_USER:-sandboxd-test}
id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
mount --rbind /proc "$work/proc" # the processor time of kernel threads is there
mount -t proc proc /proc
echo '93.184.215.14 bench.test' >"$work/hosts"
echo 'nameserver 127.0.0.1' >"$work/resolv.conf" # nothing listens: hosts has the only name
mount --bind "$work/hosts" /etc/hosts
mount --bind "$work/resolv.conf" /etc/resolv.conf
if [ -e /dev/net/tun ]; then
	mknod -m 666 "$work/tun" c 10 200 # as udev has it; slirp4netns and pasta run as the user
	mount --bind "$work/tun" /dev/net/tun
fi

for ns in upstream veth; do
	touch "$work/$ns"
	unshare --net="$work/$ns" true
done
within() { nsenter --net="$work/$1" "${@:2}"; }
ip link set lo up
ip link add uplink mtu 1500 type veth peer name eth0 mtu 1500
ip link set eth0 netns "$work/upstream"
ip link add plain mtu 1500 type veth peer name eth0 mtu 1500
ip link set eth0 netns "$work/veth"
ip address add 93.184.215.1/24 dev uplink
ip address add 10.64.0.1/24 dev plain
within upstream ip address add 93.184.215.14/24 dev eth0
within upstream ip address add 93.184.215.2/24 dev eth0
within veth ip address add 10.64.0.2/24 dev eth0
for ns in upstream veth; do
	within $ns ip link set lo up
	within $ns ip link set eth0 up
done
ip link set uplink up
ip link set plain up
ip route add default via 93.184.215.2 # pasta has a use of its own for the address of the default route
within upstream ip route add default via 93.184.215.1
within veth ip route add default via 10.64.0.1
echo 1 >/proc/sys/net/ipv4/ip_forward
nsenter --net="$work/upstream" "$work/load" serve -certificate "$work/server.pem" &
server=$!
until [ -s "$work/server.pem" ]; do sleep 0.1; done
cat /etc/ssl/certs/ca-certificates.crt "$work/server.pem" >"$work/authorities.pem"
mount --bind "$work/authorities.pem" /etc/ssl/certs/ca-certificates.crt # a gateway that inspects checks the server

cd "$work/tmp"
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" SANDBOXD_BIN="$work/bin" \
	SANDBOXD_BENCH_NET="$work" SANDBOXD_BENCH_USER="$user" SANDBOXD_BENCH_SERVER=$server \
	"$work/networks.test" -test.v -test.run '^$' -test.bench "${RUN:-.}" -test.benchtime 1x -test.timeout 60m -rounds "${ROUNDS:-5}" -requests "${REQUESTS:-200}"
[ -n "${RUN:-}" ] || "$work/netns.test" -test.run '^$' -test.bench '^BenchmarkMake$/^full$/^1$' -test.benchtime 5x
