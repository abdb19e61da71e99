#!/bin/bash
# bench-image.sh: pull one image with sandboxd, with skopeo and umoci, and with podman, in turns, and write the figures
# into docs/performance.md. As root it measures as the ordinary user of the tests: all three are rootless there.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build

layout=$(tests/performance/image/layers/make.sh)
work=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX)
# What the peers unpack has directories that nobody may write into, and podman's belongs to subordinate ids.
trap 'chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work"' EXIT
chmod 755 "$work"
go test -buildvcs=false -c -o "$work/image.test" ./tests/performance/image
go build -buildvcs=false -o "$work/table" ./tests/performance/image/table
mkdir "$work/bin" "$work/tmp" "$work/run"
cp bin/sandboxd bin/sandboxd-launcher bin/sandboxd-init "$work/bin/"
cp -r "$layout" "$work/layout"

as=()
if [ "$(id -u)" -eq 0 ]; then
	user=${BENCH_USER:-sandboxd-test}
	id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
	chown -R "$user" "$work/tmp" "$work/run" "$work/layout"
	as=(setpriv --reuid "$user" --regid "$user" --init-groups)
fi
"${as[@]}" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" \
	XDG_RUNTIME_DIR="$work/run" SANDBOXD_BIN="$work/bin" SANDBOXD_BENCH_LAYOUT="$work/layout" bash -c 'cd "$1" && exec "$2" -test.v -test.run "^$" \
	-test.bench "$3" -test.benchtime 1x -test.timeout 60m -rounds "$4" -out "$5"' bench "$work/tmp" "$work/image.test" "${RUN:-.}" "${ROUNDS:-7}" "$work/tmp/out" |
	tee build/bench-image.txt
{ "${as[@]}" "$work/table" docs/performance.md; } <build/bench-image.txt >build/performance.md
cp build/performance.md docs/performance.md
