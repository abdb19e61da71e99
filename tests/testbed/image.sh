#!/bin/bash
# image.sh DIR GUESTDIR: make DIR/{root.img,vmlinuz-6.1,vmlinuz-6.12,versions} from Debian packages. Called by the testbed
# program, which knows DIR by the hash of the recipe: the scripts and GUESTDIR.
#
# Needs no root: the image is made in a user namespace. The tools are tools.sh's part.
set -euo pipefail

dir=$1 guest=$2
suite=bookworm backports=bookworm-backports

work=$(mktemp -d "${TMPDIR:-/var/tmp}/testbed.XXXXXX")
chmod 755 "$work"
in_userns=()
if [ "$(id -u)" -ne 0 ]; then
	# The image's files belong to many users: all of them are subordinate ids of ours.
	in_userns=(unshare --user --map-root-user --map-auto --)
fi
trap '"${in_userns[@]}" rm -rf --one-file-system -- "$work"' EXIT

# shellcheck source=debian.sh
. "$(dirname "$0")/debian.sh"
use_suites $suite $backports
our_apt apt-get -qq -o APT::Update::Error-Mode=any update || die "$mirror does not answer for $suite and $backports: is there a network?"

# --- kernels

# offered SUITE: the version of linux-image-cloud-amd64 there.
offered() { our_apt apt-cache show "linux-image-cloud-$arch/$1" | sed -n 's/^Version: //p' | head -n 1; }
mkdir "$work/out"
say "fetching kernels"
for s in $suite $backports; do
	version=$(offered $s) && [ -n "$version" ] || die "no cloud kernel in $s"
	release=$(fetch_kernel "$version" "$work/out")
	mv "$work/out/vmlinuz-$release" "$work/out/vmlinuz-$(cut -d. -f1,2 <<<"$release")"
done
for v in 6.1 6.12; do [ -f "$work/out/vmlinuz-$v" ] || die "Debian's $suite and $backports no longer have a kernel $v"; done

# --- the root file system

say "making the root file system"
packages=systemd-sysv,dbus-user-session,libpam-systemd,uidmap,iproute2,procps,kmod,python3,busybox-static,docker-registry,runc,ca-certificates,curl
mode=unshare
[ "$(id -u)" -ne 0 ] || mode=root
mmdebstrap --quiet --variant=minbase --mode=$mode --architectures=$arch --keyring=$keyring --include=$packages \
	--aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "3"' \
	--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--customize-hook='chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash dev' \
	--customize-hook='chroot "$1" dpkg-query -W >"$1/var/lib/testbed-packages"' \
	--format=tar $suite "$work/root.tar" "$mirror"

cat >"$work/assemble.sh" <<'END'
set -euo pipefail
work=$1 guest=$2
root=$work/root
mkdir "$root"
tar -C "$root" --numeric-owner --exclude='./dev/*' -xf "$work/root.tar"
mkdir -p "$root/usr/lib/modules"
cp -a --no-preserve=ownership "$work"/out/modules/* "$root/usr/lib/modules/"
rm -r "$work/out/modules"
for m in "$root"/usr/lib/modules/*; do depmod --basedir "$root/usr" --moduledir lib/modules "${m##*/}" 2>/dev/null || depmod --basedir "$root" "${m##*/}"; done
install -m 755 "$guest"/testbed-{init,agent,as} "$root/usr/sbin/"
cat "$root/var/lib/testbed-packages" >>"$work/out/versions"
# bookworm's useradd gives subordinate ids.
grep -q '^dev:100000:65536$' "$root/etc/subuid" && grep -q '^dev:100000:65536$' "$root/etc/subgid"

units=$root/etc/systemd/system
mkdir -p "$units/multi-user.target.wants" "$units/user@.service.d" "$root/var/lib/systemd/linger"
install -m 644 "$guest/testbed.service" "$units/"
ln -sf ../testbed.service "$units/multi-user.target.wants/"
install -m 644 "$guest/delegate.conf" "$units/user@.service.d/"
touch "$root/var/lib/systemd/linger/dev"
# Nothing of a machine's life that no test looks at: emulated processors would run it at every start, and the generators at
# every daemon-reload.
for u in getty@tty1.service serial-getty@ttyS0.service serial-getty@hvc0.service apt-daily.timer apt-daily-upgrade.timer \
	dpkg-db-backup.timer e2scrub_all.timer fstrim.timer e2scrub_reap.service systemd-firstboot.service systemd-tmpfiles-clean.timer \
	docker-registry.service systemd-networkd.service systemd-networkd.socket systemd-network-generator.service systemd-binfmt.service \
	proc-sys-fs-binfmt_misc.automount systemd-pstore.service systemd-random-seed.service systemd-modules-load.service \
	systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-journal-flush.service; do
	ln -sf /dev/null "$units/$u"
done
mkdir -p "$root/etc/systemd/system-generators" "$root/etc/systemd/journald.conf.d"
for g in "$root"/usr/lib/systemd/system-generators/* "$root"/lib/systemd/system-generators/*; do
	[ ! -f "$g" ] || ln -sf /dev/null "$root/etc/systemd/system-generators/${g##*/}"
done
printf '[Journal]\nStorage=volatile\nReadKMsg=no\n' >"$root/etc/systemd/journald.conf.d/testbed.conf"
echo testbed >"$root/etc/hostname"
[ -e "$root/etc/resolv.conf" ] || : >"$root/etc/resolv.conf" # a mount point for tests
printf '127.0.0.1 localhost testbed\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/etc/fstab"
# Or every start is the first: all units are enabled or disabled anew, and caches made.
echo 5a4db0cd000040008000000000000001 >"$root/etc/machine-id"
touch "$root/etc/.updated" "$root/var/.updated"
# A gigabyte to work in; the file is sparse.
uuid=5a4db0cd-0000-4000-8000-000000000001
mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -L root -U $uuid -E hash_seed=$uuid,lazy_itable_init=1 \
	-d "$root" "$work/out/root.img" $(($(du -sm "$root" | cut -f1) * 12 / 10 + 1024))M >/dev/null
END
"${in_userns[@]}" bash "$work/assemble.sh" "$work" "$guest"
qemu-system-x86_64 --version | head -n 1 >>"$work/out/versions"

mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
cp -r --sparse=always "$work/out" "$dir.partial.$$"
mv "$dir.partial.$$" "$dir"
say "made $dir ($(du -sm "$dir" | cut -f1) MB)"
