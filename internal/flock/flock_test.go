package flock

import (
	"context"
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

// Who waits for a lock gives up with the context, and gets it when its holder lets go.
func TestExclusiveWaitsAsLongAsTheContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, second := open(t, path), open(t, path)
	if err := Exclusive(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*pause)
	defer cancel()
	if err := Exclusive(ctx, second); !errors.Is(err, unix.EWOULDBLOCK) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a lock that another has: %v", err)
	}
	time.AfterFunc(2*pause, func() { _ = first.Close() })
	if err := Exclusive(t.Context(), second); err != nil {
		t.Errorf("a lock that was let go: %v", err)
	}
}
