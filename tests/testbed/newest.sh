#!/bin/bash
# newest.sh DIR: find the newest cloud kernel that Debian offers today and make DIR/newest-VERSION/{root.img,vmlinuz,versions}
# of it, unless it is there: a copy of DIR/root.img with that kernel's modules. DIR/newest then has the name.
#
# Needs no root: debugfs writes into the image. Which suite has the newest differs over time: backports overtakes sid during a
# freeze. Release candidates (experimental) are not asked for.
set -euo pipefail

dir=$1
work=$(mktemp -d "${TMPDIR:-/var/tmp}/testbed.XXXXXX")
trap 'rm -rf --one-file-system -- "$work" "$dir"/newest-*.partial."$$"' EXIT
# shellcheck source=debian.sh
. "$(dirname "$0")/debian.sh"

suites=(sid trixie-backports bookworm-backports)
use_suites "${suites[@]}"
# What does not answer is missing in the list.
our_apt apt-get -qq update || true
offered=$(our_apt apt-cache madison linux-image-cloud-$arch)
version='' from=''
for s in "${suites[@]}"; do
	v=$(awk -F ' *[|] *' -v source=" $s/main " 'index(" " $3 " ", source) { print $2; exit }' <<<"$offered")
	if [ -z "$v" ]; then
		say "$s offers no cloud kernel, or does not answer: the newest is looked for without it"
	elif [ -z "$version" ] || dpkg --compare-versions "$v" gt "$version"; then
		version=$v from=$s
	fi
done
[ -n "$version" ] || die "none of ${suites[*]} answers: is there a network, and a mirror that has them?"

name=newest-$version
if [ ! -d "$dir/$name" ]; then
	say "fetching Linux $version of $from"
	mkdir "$work/out"
	release=$(fetch_kernel "$version" "$work/out")
	mkdir -p "$work/depmod/lib"
	mv "$work/out/modules" "$work/depmod/lib/modules"
	depmod --basedir "$work/depmod" "$release"
	mv "$work/out/vmlinuz-$release" "$work/out/vmlinuz"
	cp --sparse=always "$dir/root.img" "$work/out/root.img"
	# debugfs wants its words one by one, makes no parents, and says with words only that something went wrong.
	(
		cd "$work/depmod/lib/modules"
		find "$release" -type d | sed 's|.*|mkdir "/usr/lib/modules/&"|'
		find "$release" -type f -printf 'cd "/usr/lib/modules/%h"\nwrite "%p" "%f"\n'
	) >"$work/commands"
	(cd "$work/depmod/lib/modules" && debugfs -w -f "$work/commands" "$work/out/root.img") >"$work/debugfs.log" 2>&1
	if grep -Ev '^(debugfs( .*)?: |debugfs [0-9]|Allocated inode: |$)' "$work/debugfs.log" >&2 || ! e2fsck -fn "$work/out/root.img" >"$work/fsck.log" 2>&1; then
		tail -n 20 "$work/fsck.log" >&2 || true
		die "writing the modules of $release into the image: see above"
	fi
	cp -r --sparse=always "$work/out" "$dir/$name.partial.$$"
	mv "$dir/$name.partial.$$" "$dir/$name"
	say "made $dir/$name ($(du -sm "$dir/$name" | cut -f1) MB)"
fi
echo "$name" >"$work/newest"
mv "$work/newest" "$dir/newest"
