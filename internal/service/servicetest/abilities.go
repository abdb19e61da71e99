package servicetest

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/runtime"
)

// WithDiffer returns the engine with another ability.
func WithDiffer(e runtime.Engine, d runtime.Differ) runtime.Engine { return withDiffer{e, d} }

type withDiffer struct {
	runtime.Engine
	runtime.Differ
}

func (w withDiffer) Unwrap() runtime.Engine { return w.Engine }

// WithDescriptorStore returns the engine with another ability.
func WithDescriptorStore(e runtime.Engine, s runtime.DescriptorStore) runtime.Engine {
	return withDescriptorStore{e, s}
}

type withDescriptorStore struct {
	runtime.Engine
	runtime.DescriptorStore
}

func (w withDescriptorStore) Unwrap() runtime.Engine { return w.Engine }

// DescriptorStore is a [runtime.DescriptorStore] in memory.
type DescriptorStore struct {
	mu   sync.Mutex
	held map[[2]string][]*os.File
	Fail error
	Busy int // number of calls of StoredDescriptors that fail

	Stored  func() // called after the next StoreDescriptors
	Dropped func() // called after the next DropDescriptors
}

// NewDescriptorStore returns an empty store.
func NewDescriptorStore(t *testing.T) *DescriptorStore {
	t.Helper()
	s := &DescriptorStore{held: map[[2]string][]*os.File{}}
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

// StoreDescriptors implements [runtime.DescriptorStore].
func (s *DescriptorStore) StoreDescriptors(_ context.Context, d runtime.DescriptorSet) error {
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
	if f := s.Stored; f != nil {
		s.Stored = nil
		s.mu.Unlock()
		defer s.mu.Lock()
		f()
	}
	return nil
}

// StoredDescriptors implements [runtime.DescriptorStore].
func (s *DescriptorStore) StoredDescriptors(context.Context) ([]runtime.DescriptorSet, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Busy > 0 {
		s.Busy--
		return nil, fmt.Errorf("busy: %w", runtime.ErrUnavailable)
	}
	var all []runtime.DescriptorSet
	for k, files := range s.held {
		files, err := again(files)
		if err != nil {
			return nil, err
		}
		all = append(all, runtime.DescriptorSet{Sandbox: k[0], Name: k[1], Files: files})
	}
	return all, nil
}

// DropDescriptors implements [runtime.DescriptorStore].
func (s *DescriptorStore) DropDescriptors(_ context.Context, sandbox, name string) error {
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

// Count returns the number of sets.
func (s *DescriptorStore) Count() int {
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

// SetBusy makes the next n calls of StoredDescriptors fail.
func (s *DescriptorStore) SetBusy(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Busy = n
}
