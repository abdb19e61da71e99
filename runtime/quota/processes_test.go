package quota

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMappingsOfDeletedFiles(t *testing.T) {
	file := inode{unix.Mkdev(0xfd, 0x21), 77}
	for line, want := range map[string]int64{
		"7f00-8f00 rw-s 00002000 fd:21 77      /root/a b (deleted)\n": 0x3000,
		"7f00-8f00 r--s 00000000 fd:21 77 /x (deleted)":               0x1000,
		"7f00-8f00 rw-p 00002000 fd:21 77 /x (deleted)\n":             -1, // private: nothing is written to the file
		"7f00-8f00 rw-s 00002000 fd:21 77 /x\n":                       -1,
		"7f00-8f00 rw-s 00002000 fd:21 (deleted)\n":                   -1,
		"8f00-7f00 rw-s 00002000 fd:21 77 /x (deleted)\n":             -1,
		"0-ffffffffffffffff rw-s 00002000 fd:21 77 /x (deleted)\n":    -1,
		"7f00-8f00 rw-s 7fffffffffffffff fd:21 77 /x (deleted)\n":     -1,
		"7f00-8f00 rw-s 00002000 fd 77 /x (deleted)\n":                -1,
		"7f00 rw-s 00002000 fd:21 77 /x (deleted)\n":                  -1,
		"7f00-8f00 rw-s 00002000 fd:100000000 77 /x (deleted)\n":      -1,
		"": -1,
	} {
		got, end, ok := parseMapping([]byte(line))
		if !ok {
			end = -1
		}
		if end != want || ok && got != file {
			t.Errorf("%q: %v, %#x", line, got, end)
		}
	}
}

func FuzzMapping(f *testing.F) {
	f.Add([]byte("7f00-8f00 rw-s 00002000 fd:21 77 /root/a (deleted)\n"))
	f.Add([]byte("0-ffffffffffffffff rw-s 7fffffffffffffff ffffffff:ffffffff 18446744073709551615 /x (deleted)"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if _, end, ok := parseMapping(line); ok && end < 0 {
			t.Errorf("%q ends at %d", line, end)
		}
	})
}

// A deleted file on another file system than an overlay, such as a memfd, takes nothing of the
// disk.
func TestOtherDeletedFilesDoNotCount(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if got := (Processes{Proc: "/proc"}).Measure([]int{os.Getpid(), 1 << 30}); got != (Usage{}) {
		t.Errorf("%+v", got)
	}
}

func TestOverlays(t *testing.T) {
	got := overlays([]byte(`22 1 0:64 / / ro,nosuid - overlay overlay ro,lowerdir=/a - b
23 22 0:65 / /work\040space rw,nosuid master:1 - overlay none rw
24 22 0:66 / /dev rw - tmpfs tmpfs rw
25 22 8:1 /overlay /overlay rw - ext4 /dev/sda1 rw
26 22 x:y / /odd rw - overlay overlay rw
27 22
`))
	if len(got) != 2 || !got[unix.Mkdev(0, 64)] || !got[unix.Mkdev(0, 65)] {
		t.Errorf("%v", got)
	}
}

// A mount of a directory is known by the end of its root, which no program can choose.
func TestMountsOf(t *testing.T) {
	ids, devices := mountsOf([]byte(`22 1 0:64 / / ro - overlay overlay ro
31 22 8:1 /d/sandboxes/.volumes/ab/data /data rw - ext4 /dev/sda1 rw
32 22 8:2 /d/sandboxes/.volumes/cd/data /.volumes/ab/data rw - ext4 /dev/sda1 rw
33 22 8:3 /x/.volumes/ab/data/deeper /y rw - ext4 /dev/sda1 rw
34 22
`), []string{"/.volumes/ab/data"})
	if len(ids) != 1 || !ids["31"] || len(devices) != 1 || !devices[unix.Mkdev(8, 1)] {
		t.Errorf("%v, %v", ids, devices)
	}
}
