#!/bin/bash
# npm.sh DIR: fetch what tests/tsclient needs of npm's registry, as npm is configured here, into DIR, where it is not there yet: the
# packages that the lock of clients/typescript names, and a node of version 20 where the installed one is older, as Debian 12's is.
set -euo pipefail
project=$(realpath "$(dirname "$0")/../clients/typescript")
mkdir -p "$1"
cd "$1"
npm() { command npm --no-audit --no-fund --no-update-notifier --ignore-scripts --loglevel=error "$@" </dev/null; }
if ! cmp -s "$project/package-lock.json" installed.json; then
	rm -f installed.json
	cp "$project"/package.json "$project"/package-lock.json .
	npm ci
	mv package-lock.json installed.json # last, so that an installation that is cut off is begun again
fi
major=$(node --version 2>/dev/null | sed 's/^v\([0-9]*\).*/\1/')
if ((${major:-0} < 20)); then
	case $(uname -m) in x86_64) arch=x64 ;; aarch64) arch=arm64 ;; *) echo "no node of version 20 for $(uname -m)" >&2; exit 1 ;; esac
	if [[ ! -x node/node ]]; then
		mkdir -p node
		npm install --prefix node --no-save "node-linux-$arch@20.19.6"
		cp "node/node_modules/node-linux-$arch/bin/node" node/node.new && mv node/node.new node/node
	fi
fi
