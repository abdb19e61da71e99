#!/bin/bash
# make.sh: print where the images of `make bench-image` are, an OCI layout, and make them first where this recipe has not been
# followed yet. mmdebstrap needs no root where there are subordinate ids.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
recipe=$(cat "$here"/* | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandboxd-tests/bench-image-$recipe
if [ ! -f "$cache/layout/done" ]; then
	echo "making the images of the benchmark in $cache: some minutes" >&2
	rm -rf "$cache"
	mkdir -p "$cache"
	mmdebstrap --quiet --variant=minbase --include=ca-certificates \
		--customize-hook='cd "$1" && find . -xdev -printf "%P\n" >.base.list' \
		--customize-hook='chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install python3-numpy nodejs npm >/dev/null' \
		bookworm "$cache/root.tar" >&2
	(cd "$here" && go run -buildvcs=false . "$cache/root.tar" "$cache/layout")
	rm "$cache/root.tar"
	touch "$cache/layout/done"
fi
echo "$cache/layout"
