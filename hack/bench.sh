#!/bin/bash
# bench.sh: measure what docs/performance.md shows and write the page, with the machine and the day. As root it measures
# as the ordinary user of the tests, because rootless is what is compared with rootless runc.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
work=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
go test -buildvcs=false -c -o "$work/performance.test" ./tests/performance
go build -buildvcs=false -o "$work/table" ./tests/performance/table
mkdir "$work/bin" "$work/tmp" "$work/run"
cp bin/sandboxd bin/sandboxd-launcher bin/sandboxd-init "$work/bin/"

as=()
if [ "$(id -u)" -eq 0 ]; then
	user=sandboxd-test
	id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
	chown -R "$user" "$work/tmp" "$work/run"
	as=(setpriv --reuid "$user" --regid "$user" --init-groups)
fi
"${as[@]}" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" \
	XDG_RUNTIME_DIR="$work/run" SANDBOXD_BIN="$work/bin" bash -c 'cd "$1" && exec "$2" -test.run "^$" -test.bench . \
	-test.benchtime "$3" -test.count "$4" -test.timeout 30m' bench "$work/tmp" "$work/performance.test" "${BENCHTIME:-300x}" "${COUNT:-3}" |
	tee build/bench.txt
{
	"${as[@]}" "$work/table"
	# What `make bench-image` wrote stays.
	sed -n '/^## Images$/,$p' docs/performance.md | sed '1s/^/\n/'
} <build/bench.txt >build/performance.md
cp build/performance.md docs/performance.md
