package flock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// Who waits for a lock gives up in time, and gets it when its holder lets go.
func TestExclusiveWaitsNoLongerThanAsked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, second := open(t, path), open(t, path)
	if err := Exclusive(nil, time.Minute, first); err != nil {
		t.Fatal(err)
	}
	if err := Exclusive(nil, 3*pause, second); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("a lock that another has: %v", err)
	}
	stop := make(chan struct{})
	close(stop)
	if err := Exclusive(stop, time.Hour, second); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("a lock that another has, and who wants it is to stop: %v", err)
	}
	time.AfterFunc(2*pause, func() { _ = first.Close() })
	if err := Exclusive(nil, time.Minute, second); err != nil {
		t.Errorf("a lock that was let go: %v", err)
	}
}
