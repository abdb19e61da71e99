#!/bin/bash
# tools.sh: install the tools of the host that the test bed needs, where they are missing: QEMU 10, and what image.sh and
# newest.sh use. Called by the testbed program before anything else; where all are there it takes no time and asks nobody.
#
# Root is needed for this and nothing else (through sudo, if you are not root).
set -euo pipefail

work=$(mktemp -d "${TMPDIR:-/var/tmp}/testbed.XXXXXX")
trap 'rm -rf --one-file-system -- "$work"' EXIT
# shellcheck source=debian.sh
. "$(dirname "$0")/debian.sh"

missing=()
while read -r program package; do
	command -v "$program" >/dev/null || missing+=("$package")
done <<-END
	mmdebstrap mmdebstrap
	debugfs e2fsprogs
	newuidmap uidmap
	depmod kmod
END
# bookworm's QEMU 7.2 crashes guests under load (CMPXCHG16B in software emulation).
backports=bookworm-backports
if ! qemu-system-x86_64 --version 2>/dev/null | grep -Eq 'version [1-9][0-9]+\.'; then
	missing+=({qemu-system-x86,qemu-system-common,qemu-system-data,seabios}/$backports)
fi
[ ${#missing[@]} -gt 0 ] || exit 0

say "installing Debian packages: ${missing[*]}"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
[ ${#as_root[@]} -eq 0 ] || command -v sudo >/dev/null || die "not root and no sudo: install these yourself, then run this again"
use_suites bookworm $backports
our_apt apt-get -qq -o APT::Update::Error-Mode=any update || die "$mirror does not answer for bookworm and $backports: is there a network?"
# Somebody else may have dpkg's lock: a machine that has just been started upgrades itself for minutes.
until "${as_root[@]}" env APT_CONFIG="$work/apt/apt.conf" LC_ALL=C DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends "${missing[@]}" >"$work/install.log" 2>&1 </dev/null; do
	grep -q '^E: Could not get lock ' "$work/install.log" && ((SECONDS < 900)) || { cat "$work/install.log" >&2; die "installing packages: see above"; }
	sleep 5
done
