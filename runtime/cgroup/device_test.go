package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMountOf(t *testing.T) {
	const mountinfo = "22 1 259:1 / / rw shared:1 - ext4 /dev/root rw\n" +
		"40 22 0:33 /@home /home rw - btrfs /dev/sda2 rw,subvol=/@home\n" +
		"41 22 0:34 / /tmp rw - tmpfs tmpfs rw\nbroken\n"
	for _, c := range []struct {
		id             uint64
		number         string
		fs, source, of string
	}{
		{22, "259:1", "ext4", "/dev/root", "the id"},
		{40, "0:99", "btrfs", "/dev/sda2", "the id, whatever the number: btrfs has others in stat"},
		{0, "0:34", "tmpfs", "tmpfs", "the number, where the kernel tells no id"},
		{0, "9:9", "", "", "nothing"},
	} {
		if fs, source := mountOf(mountinfo, c.id, c.number); fs != c.fs || source != c.source {
			t.Errorf("by %s: %q, %q", c.of, fs, source)
		}
	}
}

// sysfs builds the kernel's tree for some disks.
func sysfs(t *testing.T) (sys, mount string) {
	t.Helper()
	sys, mount = t.TempDir(), t.TempDir()
	for name, content := range map[string]string{
		"devices/nvme/nvme0n1/dev":                       "259:0\n",
		"devices/nvme/nvme0n1/queue/scheduler":           "[none] mq-deadline bfq\n",
		"devices/nvme/nvme0n1/nvme0n1p2/dev":             "259:2\n",
		"devices/nvme/nvme0n1/nvme0n1p2/partition":       "2\n",
		"devices/ata/sda/dev":                            "8:0\n",
		"devices/ata/sda/queue/scheduler":                "none [bfq]\n",
		"devices/virtual/block/dm-0/dev":                 "253:0\n",
		"devices/virtual/block/dm-0/slaves/sda/dev":      "8:0\n",
		"devices/pci/sdb/dev":                            "8:16\n",
		"devices/pci/sdc/dev":                            "8:32\n",
		"fs/btrfs/1234/devices/.keep/../../label":        "",
		"devices/virtual/block/dm-0/queue/scheduler":     "none\n",
		"devices/nvme/nvme0n1/nvme0n1p2/holders/nothing": "",
	} {
		path := filepath.Join(sys, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(sys, "fs/btrfs/1234/devices"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{
		"dev/block/259:0": "devices/nvme/nvme0n1", "dev/block/259:2": "devices/nvme/nvme0n1/nvme0n1p2", "dev/block/8:0": "devices/ata/sda",
		"dev/block/253:0": "devices/virtual/block/dm-0", "dev/block/8:16": "devices/pci/sdb",
		"fs/btrfs/1234/devices/sdb": "devices/pci/sdb", "fs/btrfs/1234/devices/sdc": "devices/pci/sdc",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(sys, link)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(sys, target), filepath.Join(sys, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(mount, "io.cost.qos"), []byte("259:0 enable=1 ctrl=auto rpct=0.00\n253:0 enable=0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return sys, mount
}

func TestDeviceIsTheWholeDisk(t *testing.T) {
	sys, mount := sysfs(t)
	for name, c := range map[string]struct {
		number, fs string
		want       Device
	}{
		"a whole disk":      {"8:0", "ext4", Device{Number: "8:0", Name: "sda", Writeback: true, Weight: "io.bfq.weight"}},
		"a partition":       {"259:2", "xfs", Device{Number: "259:0", Name: "nvme0n1", Writeback: true, Weight: "io.weight"}},
		"device mapper":     {"253:0", "ext4", Device{Number: "253:0", Name: "dm-0", Writeback: true}},
		"without writeback": {"8:0", "jfs", Device{Number: "8:0", Name: "sda", Weight: "io.bfq.weight", Reason: "jfs"}},
		"btrfs on several":  {"8:16", "btrfs", Device{Reason: "2 devices"}},
		"none":              {"1:1", "ext4", Device{Reason: "1:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := describe(sys, mount, c.number, c.fs)
			if !strings.Contains(got.Reason, c.want.Reason) || (got.Reason == "") != (c.want.Reason == "") {
				t.Errorf("reason %q", got.Reason)
			}
			if got.Reason = c.want.Reason; got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// Wherever this runs: a device or a reason, and no device behind /proc.
func TestDeviceOfThisHost(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "/proc"} {
		d, err := DeviceOf(dir, "/sys/fs/cgroup")
		if err != nil || d.Number == "" && d.Reason == "" || dir == "/proc" && d.Number != "" {
			t.Errorf("%s: %+v, %v", dir, d, err)
		}
		t.Logf("%s: %+v", dir, d)
	}
	if _, err := DeviceOf(filepath.Join(t.TempDir(), "nothing"), ""); err == nil {
		t.Error("a directory that is not there has a device")
	}
}
