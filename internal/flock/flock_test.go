package flock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
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

// Exclusive gives up in time, and gets a lock that is released before.
func TestExclusiveWaitsNoLongerThanAsked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, second := open(t, path), open(t, path)
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		wait := func(want error, after time.Duration, err error) {
			t.Helper()
			if took := time.Since(begun); !errors.Is(err, want) || took < after || took > after+retry {
				t.Errorf("%v after %v, want %v after %v", err, took, want, after)
			}
			begun = time.Now()
		}
		wait(nil, 0, Exclusive(nil, time.Minute, first))
		wait(unix.EWOULDBLOCK, 5*retry/2, Exclusive(nil, 5*retry/2, second))
		stop := make(chan struct{})
		time.AfterFunc(3*retry/2, func() { close(stop) })
		wait(unix.EWOULDBLOCK, 3*retry/2, Exclusive(stop, Forever, second))
		time.AfterFunc(5*retry/2, func() { _ = first.Close() })
		wait(nil, 5*retry/2, Exclusive(nil, Forever, second))
	})
}
