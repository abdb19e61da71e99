#!/bin/bash
# bench-image.sh: pull one image with sandboxd, with skopeo and umoci, and with podman, in turns, and write the figures
# into docs/performance.md. ROUNDS=7 RUNS=100 RUN=regexp.
#
# As root it measures as the ordinary user of the tests, all three being rootless there, and on a file system of its own:
# an ext4 as mkfs makes it, in a file. What others write is then not waited for by our syncs, and a host whose ext4 has no
# journal does not decide the figures: such a one looks at every inode that was deleted in the last minutes before it
# makes a new one, and that is most of what is measured there.
set -euo pipefail
self=$(realpath "$0")
cd "$(dirname "$self")/.."
mkdir -p build

if [ $# -eq 0 ]; then
	layout=$(tests/performance/image/layers/make.sh)
	work=$(mktemp -d -p /var/tmp sandboxd-bench-XXXXXX)
	trap 'rm -rf "$work"' EXIT
	chmod 755 "$work"
	go test -buildvcs=false -c -o "$work/image.test" ./tests/performance/image
	go build -buildvcs=false -o "$work/table" ./tests/performance/image/table
	mkdir "$work/bin" "$work/tmp" "$work/run"
	cp bin/sandboxd bin/sandboxd-agent bin/sandboxd-launcher bin/sandboxd-init "$work/bin/"
	cp -r "$layout" "$work/layout"
	alone=()
	if [ "$(id -u)" -eq 0 ]; then
		truncate -s 24G "$work/disk"
		mkfs.ext4 -q -F "$work/disk"
		alone=(unshare --mount --propagation private)
	fi
	"${alone[@]}" "$self" "$work" | tee build/bench-image.txt
	"$work/table" docs/performance.md <build/bench-image.txt >build/performance.md
	cp build/performance.md docs/performance.md
	exit
fi

work=$1
as=()
if [ "$(id -u)" -eq 0 ]; then
	mount -o loop "$work/disk" "$work/tmp"
	user=${BENCH_USER:-sandboxd-test}
	id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
	chown -R "$user" "$work/tmp" "$work/run" "$work/layout"
	as=(setpriv --reuid "$user" --regid "$user" --init-groups)
fi
cd "$work/tmp"
"${as[@]}" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" \
	XDG_RUNTIME_DIR="$work/run" SANDBOXD_BIN="$work/bin" SANDBOXD_BENCH_LAYOUT="$work/layout" \
	"$work/image.test" -test.v -test.run '^$' -test.bench "${RUN:-.}" -test.benchtime 1x -test.timeout 60m -rounds "${ROUNDS:-7}" -runs "${RUNS:-100}"
