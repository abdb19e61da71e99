package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Device is the whole block device behind a directory, on which io.max works. The zero value is
// none.
type Device struct {
	Number    string `json:"number,omitempty"` // "major:minor"; empty where there is none
	Name      string `json:"name,omitempty"`   // "nvme0n1", for messages
	Writeback bool   `json:"writeback,omitempty"`
	// Weight is the file by which shares of the device are set: io.weight where iocost is switched on
	// for it, io.bfq.weight where bfq schedules it, else empty.
	Weight string `json:"weight,omitempty"`
	Reason string `json:"reason,omitempty"` // why there is no device, or no writeback
}

// writeback are the file systems that tell the kernel the cgroup of each page that they write out
// (cgroup-v2.rst, "Writeback"). Pages that others write out are charged to no cgroup.
var writeback = []string{"ext2", "ext4", "btrfs", "f2fs", "xfs"}

// DeviceOf finds the device that holds the directory. Mount is where cgroup v2 is mounted.
func DeviceOf(dir, mount string) (Device, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st); err != nil {
		return Device{}, fmt.Errorf("find the device of %s: %w", dir, err)
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Device{}, fmt.Errorf("find the device of %s: %w", dir, err)
	}
	number := fmt.Sprintf("%d:%d", st.Dev_major, st.Dev_minor)
	fs, source := mountOf(string(mountinfo), st.Mnt_id, number)
	if st.Dev_major == 0 {
		// The number is the file system's own: btrfs has one for each subvolume.
		if number = blockDevice(source); number == "" {
			return Device{Reason: fmt.Sprintf("%s is on %s, which is on no block device that could be found", dir, fs)}, nil
		}
	}
	return describe("/sys", mount, number, fs), nil
}

// blockDevice is the number of the device at path, empty where there is none.
func blockDevice(path string) string {
	var st unix.Stat_t
	if !filepath.IsAbs(path) || unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return ""
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
}

// mountOf is pure: type and source of the mount with the id, or, where the kernel tells no ids
// (before Linux 5.8), of one with the device's number.
func mountOf(mountinfo string, id uint64, number string) (fs, source string) {
	for line := range strings.Lines(mountinfo) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 3 || len(r) < 2 {
			continue
		}
		if l[0] == strconv.FormatUint(id, 10) {
			return r[0], r[1]
		}
		if l[2] == number {
			fs, source = r[0], r[1]
		}
	}
	return fs, source
}

// describe looks the device up in sysfs. Of a partition, only the whole disk can be limited. A
// device-mapper or RAID device can be limited itself: the kernel throttles requests submitted to it
// like those to any other.
func describe(sys, mount, number, fs string) Device {
	dir, err := filepath.EvalSymlinks(filepath.Join(sys, "dev/block", number))
	if err != nil {
		return Device{Reason: fmt.Sprintf("block device %s: %v", number, errors.Unwrap(err))}
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dir = filepath.Dir(dir)
	}
	whole, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return Device{Reason: fmt.Sprintf("block device %s: %v", number, err)}
	}
	d := Device{Number: strings.TrimSpace(string(whole)), Name: filepath.Base(dir), Writeback: slices.Contains(writeback, fs)}
	if !d.Writeback {
		d.Reason = fmt.Sprintf("%s does not tell whose pages it writes out, so only direct I/O is held", fs)
	}
	if fs == "btrfs" {
		// Its writes go to all of its devices, and a limit on one of them holds a part.
		uses, _ := filepath.Glob(filepath.Join(sys, "fs/btrfs/*/devices", "*"))
		for _, use := range uses {
			if of, _ := filepath.EvalSymlinks(use); of != "" && strings.HasPrefix(of+"/", dir+"/") {
				if all, _ := os.ReadDir(filepath.Dir(use)); len(all) > 1 {
					return Device{Reason: fmt.Sprintf("the btrfs on %s has %d devices, and a limit is about one", d.Name, len(all))}
				}
			}
		}
	}
	// Both files can exist and have no effect: a scheduler or iocost must weigh.
	if scheduler, err := os.ReadFile(filepath.Join(dir, "queue/scheduler")); err == nil && strings.Contains(string(scheduler), "[bfq]") {
		d.Weight = "io.bfq.weight"
	}
	if qos, err := os.ReadFile(filepath.Join(mount, "io.cost.qos")); err == nil { // at the top only
		for line := range strings.Lines(string(qos)) {
			if strings.HasPrefix(line, d.Number+" ") && strings.Contains(line, "enable=1") {
				d.Weight = "io.weight"
			}
		}
	}
	return d
}
