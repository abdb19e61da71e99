package osthread

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// What f does to its thread is not done to one that is unfit, or to the process.
func TestRunKeepsAwayFromUnfitThreads(t *testing.T) {
	var held []int
	unfit := func() bool {
		if len(held) == 3 {
			return false
		}
		held = append(held, unix.Gettid())
		return true
	}
	want := errors.New("f's")
	var at int
	err := run(func() error {
		at = unix.Gettid()
		return errors.Join(unix.Unshare(unix.CLONE_FS), unix.Chdir("/proc"), want)
	}, unfit)
	if !errors.Is(err, want) {
		t.Error(err)
	}
	seen := map[int]bool{}
	for _, tid := range append(held, at) {
		if seen[tid] {
			t.Errorf("thread %d twice: unfit were %d, f ran on %d", tid, held, at)
		}
		seen[tid] = true
	}
	if dir, err := os.Readlink(fmt.Sprintf("/proc/self/task/%d/cwd", unix.Gettid())); err != nil || dir == "/proc" {
		t.Errorf("the caller's thread is in %s, %v", dir, err)
	}
}

// However many threads there are, the main one is never taken.
func TestRunIsNeverOnTheMainThread(t *testing.T) {
	const n = 100
	done := make(chan error)
	for range n {
		go func() {
			done <- Run(func() error {
				if isMain() {
					return errors.New("it runs on the main thread")
				}
				return nil
			})
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
