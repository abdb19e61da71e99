#!/bin/bash
# npm.sh DIR: install the npm packages that tests run or build with, as the lock files of their projects have them, into DIR/PROJECT,
# where they are not there yet; and a node of version 20 into DIR/node, where the installed one is older, as Debian 12's is. No script
# of a package is run.
set -euo pipefail
umask 022 # other users read the packages
root=$(realpath "$(dirname "$0")/..")
declare -A projects=([docker]=tests/docker/testdata/npm [mcpclients]=tests/mcpclients/testdata [typescript]=clients/typescript)
mkdir -p "$1"
dir=$(realpath "$1")
rm -rf "$dir"/.new-* # of a run that was killed
npm() { command npm --no-audit --no-fund --no-update-notifier --ignore-scripts --loglevel=error "$@" </dev/null >&2; }
for name in "${!projects[@]}"; do
	from=$root/${projects[$name]}
	cmp -s "$from/package-lock.json" "$dir/$name/package-lock.json" && continue
	# Beside it, so that an installation that is cut off is never taken for a whole one.
	new=$(mktemp -d "$dir/.new-XXXXXX")
	trap 'rm -rf "$new"' EXIT
	cp "$from"/package.json "$from"/package-lock.json "$new"
	(cd "$new" && npm ci)
	chmod 755 "$new"
	rm -rf "${dir:?}/$name"
	mv -T "$new" "$dir/$name"
done
major=$(node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/' || true)
if ((${major:-0} < 20)) && [[ ! -x $dir/node/node ]]; then
	case $(uname -m) in x86_64) arch=x64 ;; aarch64) arch=arm64 ;; *) echo "no node of version 20 for $(uname -m)" >&2; exit 1 ;; esac
	mkdir -p "$dir/node"
	npm install --prefix "$dir/node" --no-save "node-linux-$arch@20.19.6"
	cp "$dir/node/node_modules/node-linux-$arch/bin/node" "$dir/node/node.new"
	mv "$dir/node/node.new" "$dir/node/node"
fi
