package memfd

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSealedFileStaysAsItIs(t *testing.T) {
	fd, err := unix.MemfdCreate("sealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "sealed")
	defer f.Close()
	if _, err := f.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(fd, 0, 7, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	if err := Seal(f); !errors.Is(err, unix.EBUSY) {
		t.Errorf("somebody can write to it, and sealing it says %v", err)
	}
	if err := unix.Munmap(mapped); err != nil {
		t.Fatal(err)
	}
	if err := Seal(f); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func() error{
		"write":  func() error { _, err := f.WriteAt([]byte("x"), 0); return err },
		"grow":   func() error { return f.Truncate(8) },
		"shrink": func() error { return f.Truncate(6) },
		"seal": func() error {
			_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
			return err
		},
		"map": func() error {
			_, err := unix.Mmap(fd, 0, 7, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			return err
		},
	} {
		if err := change(); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
