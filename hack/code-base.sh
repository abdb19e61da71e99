#!/bin/bash
# code-base.sh OUT IMAGE...: write OUT, the root file system of a Debian that is a repository of its own: the packages that the
# Dockerfiles images/IMAGE/Dockerfile install lie in /srv/debs, the one source of its apt. So the builds need no network. It asks the
# mirror that this machine is configured for, and needs mmdebstrap and dpkg-dev.
set -euo pipefail
# An ordinary user is root of a namespace, with all of its subordinate ids.
[ "$(id -u)" -eq 0 ] || exec unshare --user --mount --map-root-user --map-auto -- "$0" "$@"
out=$(realpath "$1")
shift
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck source=../tests/testbed/debian.sh
. "$here/../tests/testbed/debian.sh"
suite=trixie
use_suites $suite
our_apt apt-get -qq update
mmdebstrap --quiet --variant=apt --mode=root --architectures=$arch --keyring=$keyring --aptopt='Acquire::Languages "none"' \
	--dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--format=directory $suite "$work/root" "$mirror"

# What apt in there would install is what it downloads here.
packages() {
	local image
	for image in "$@"; do
		sed -n '/install -y/,/rm -rf/p' "$here/../images/$image/Dockerfile" | tr -d '\\&' | tr ' ' '\n' | grep -E '^[a-z0-9][a-z0-9+.-]+$' |
			grep -vxE 'apt-get|install|rm|root|update'
	done | sort -u
}
mkdir -p "$work/root/srv/debs" "$work/partial"
mapfile -t wanted < <(packages "$@")
our_apt apt-get -qq -y --no-install-recommends -o Dir::State::status="$work/root/var/lib/dpkg/status" -o Dir::Cache::archives="$work/root/srv/debs" \
	--download-only install "${wanted[@]}"
rm -rf "$work/root/srv/debs/partial" "$work/root/srv/debs/lock"
(cd "$work/root/srv/debs" && dpkg-scanpackages --multiversion . /dev/null >Packages 2>/dev/null)
rm -rf "$work/root"/etc/apt/sources.list*
echo 'deb [trusted=yes] file:/srv/debs ./' >"$work/root/etc/apt/sources.list"
tar -C "$work/root" --numeric-owner --exclude='./dev/*' -cf "$out.partial" .
mv "$out.partial" "$out"
