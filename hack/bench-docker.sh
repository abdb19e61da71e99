#!/bin/bash
# bench-docker.sh: measure Docker's clients with sandboxd and with dockerd, in turns, and write the section "Docker" of
# docs/performance.md. Only root can run dockerd. ROUNDS=40.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
((EUID == 0)) || { echo "bench-docker.sh: run as root, whom dockerd needs" >&2; exit 1; }
mkdir -p build
user=${BENCH_USER:-sandboxd-test}
id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
bin=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX) # a place where that user can execute the binaries
trap 'rm -rf "$bin"' EXIT
chmod 755 "$bin"
cp bin/sandboxd bin/sandboxd-agent bin/sandboxd-launcher bin/sandboxd-init "$bin/"
rows=build/bench-docker.md
rm -f "$rows"
SANDBOXD_BIN=$bin CGO_ENABLED=0 go test -buildvcs=false -v ./tests/performance/clients -run '^$' -bench . -benchtime 1x -timeout 60m \
	-args -rounds "${ROUNDS:-40}" -uid "$(id -u "$user")" -gid "$(id -g "$user")" -rows "$PWD/$rows"
{
	awk '/^## Docker$/ { exit } { print }' docs/performance.md | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
	cat <<-END

	## Docker

	Written by \`make bench-docker\` on $(date -u +%F), on a machine with $(nproc) processors, Linux $(uname -r). The client is Docker's own, the same on all sides; dockerd is Debian's
	20.10 with containerd 1.6, runc and overlay2, without a network bridge. The ratio is that of the medians, to dockerd.
	The client's own start is in every line. What serves are daemon, broker, launcher and face here, dockerd and containerd there, without the shim of each container.

	| what | served by | times | p50 ms | p99 ms | ratio | goal |
	|---|---|---:|---:|---:|---:|---|
	END
	cat "$rows"
	awk 'found && /^## / { rest = 1; print "" } /^## Docker$/ { found = 1 } rest { print }' docs/performance.md
} >build/performance.md
cp build/performance.md docs/performance.md
