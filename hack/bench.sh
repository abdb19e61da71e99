#!/bin/bash
# bench.sh: measure what the first part of docs/performance.md shows and write it, with the machine and the day. As root it
# measures as the ordinary user of the tests, because rootless is what is compared with rootless peers; only the memory of
# sandboxes is looked at by root, who alone may. ITERATIONS=300 COUNT=3 RUN=regexp PAGE=docs/performance.md.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
page=${PAGE:-docs/performance.md}
work=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
go test -buildvcs=false -c -o "$work/performance.test" ./tests/performance
go build -buildvcs=false -o "$work/table" ./tests/performance/table
mkdir "$work/bin" "$work/tmp" "$work/run"
cp bin/sandboxd bin/sandboxd-agent bin/sandboxd-launcher bin/sandboxd-init "$work/bin/"

bench() { # COUNT RUN [COMMAND…]: the command becomes whom to measure as
	local count=$1 run=$2
	shift 2
	"$@" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" \
		XDG_RUNTIME_DIR="$work/run" SANDBOXD_BIN="$work/bin" bash -c 'cd "$1" && exec "$2" -test.run "^$" -test.bench "$3" \
		-test.benchtime "$4" -test.count "$5" -test.timeout 60m' \
		bench "$work/tmp" "$work/performance.test" "$run" "${ITERATIONS:-300}x" "$count"
}

as=()
if [ "$(id -u)" -eq 0 ]; then
	user=${BENCH_USER:-sandboxd-test}
	id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
	chown -R "$user" "$work/tmp" "$work/run"
	as=(setpriv --reuid "$user" --regid "$user" --init-groups)
fi
{
	bench "${COUNT:-3}" "${RUN:-ExecTrue|CreateRunDelete|Warm|ManyLive|Throughput|Health|AgentRun$}" "${as[@]}"
	if [ -z "${RUN:-}" ]; then # once: these take many sandboxes, and no turns
		bench 1 DaemonGrowth "${as[@]}"
		ITERATIONS=200 bench 1 'Snapshot|Fork' "${as[@]}"
		ITERATIONS=20 bench 3 'Output|DiskLimit|Workspace' "${as[@]}"
		ITERATIONS=1 bench 3 AgentRunsAtOnce "${as[@]}"
		[ "$(id -u)" -ne 0 ] || bench 1 IdleMemory
	fi
} | tee build/bench.txt
{
	"${as[@]}" "$work/table"
	# What `make bench-image` wrote, and what people did, stays.
	sed -n '/^## /,$p' docs/performance.md | sed '1s/^/\n/'
} <build/bench.txt >build/performance.md
[ build/performance.md -ef "$page" ] || cp build/performance.md "$page"
