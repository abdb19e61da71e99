#!/bin/bash
# npm.sh DIR: install the packages of tests/docker/testdata/npm, as its lock file has them, below DIR, and print the directory of the
# modules. Those of another lock file are kept beside them. No script of a package is run.
set -euo pipefail
from=$(dirname "$0")/../tests/docker/testdata/npm
mkdir -p "$1"
dir=$(realpath "$1")
lock=$(sha256sum "$from/package-lock.json")
dir+=/${lock:0:16}
if [[ ! -d $dir ]]; then
	# Beside it, so that an installation that is cut off is never taken for a whole one.
	new=$(mktemp -d "$dir.new-XXXXXX")
	trap 'rm -rf "$new"' EXIT
	cp "$from"/package.json "$from"/package-lock.json "$new"
	(cd "$new" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error) >&2
	chmod 755 "$new"
	mv -T "$new" "$dir"
fi
echo "$dir/node_modules"
