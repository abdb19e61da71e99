package servicetest

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// Shelf keeps the execs of a daemon, as the launcher does.
type Shelf struct {
	mu   sync.Mutex
	held map[[2]string][]*os.File
	Fail error
	Busy int // withdrawals that fail

	Deposited func() // called after the next deposit
	Dropped   func() // called after the next drop
}

// NewShelf returns an empty shelf.
func NewShelf(t *testing.T) *Shelf {
	t.Helper()
	s := &Shelf{held: map[[2]string][]*os.File{}}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, files := range s.held {
			CloseFiles(files)
		}
	})
	return s
}

func again(files []*os.File) ([]*os.File, error) {
	var out []*os.File
	for _, f := range files {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		out = append(out, os.NewFile(uintptr(fd), f.Name()))
	}
	return out, nil
}

// Deposit keeps copies of the files.
func (s *Shelf) Deposit(_ context.Context, d launcher.Deposit) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Fail != nil {
		return s.Fail
	}
	files, err := again(d.Files)
	if err != nil {
		return err
	}
	CloseFiles(s.held[[2]string{d.Sandbox, d.Name}])
	s.held[[2]string{d.Sandbox, d.Name}] = files
	if f := s.Deposited; f != nil {
		s.Deposited = nil
		s.mu.Unlock()
		defer s.mu.Lock()
		f()
	}
	return nil
}

// Withdraw returns copies of all.
func (s *Shelf) Withdraw(context.Context) ([]launcher.Deposit, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Busy > 0 {
		s.Busy--
		return nil, fmt.Errorf("busy: %w", runtime.ErrUnavailable)
	}
	var all []launcher.Deposit
	for k, files := range s.held {
		files, err := again(files)
		if err != nil {
			return nil, err
		}
		all = append(all, launcher.Deposit{Sandbox: k[0], Name: k[1], Files: files})
	}
	return all, nil
}

// Drop forgets one.
func (s *Shelf) Drop(_ context.Context, sandbox, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	CloseFiles(s.held[[2]string{sandbox, name}])
	delete(s.held, [2]string{sandbox, name})
	if f := s.Dropped; f != nil {
		s.Dropped = nil
		s.mu.Unlock()
		defer s.mu.Lock()
		f()
	}
	return nil
}

// Count returns the number of execs kept.
func (s *Shelf) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held)
}

// CloseFiles closes descriptors that were only read.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // never written
	}
}

// SetBusy makes the next n withdrawals fail.
func (s *Shelf) SetBusy(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Busy = n
}
