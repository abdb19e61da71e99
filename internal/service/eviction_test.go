package service_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
)

// Requests that come while room is made wait for that and no longer than their client; the end of
// one does not end it for the others.
func TestRequestsWaitForOneEviction(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	s := r.D.Service()
	var (
		mu      sync.Mutex
		evicts  = make(chan struct{}) // the first request has begun to make room
		proceed = make(chan struct{})
		disk    service.Disk
		inside  int // looks at the disk
	)
	s.MeasuresDisk(func() (service.Disk, error) {
		mu.Lock()
		inside++
		n := inside
		mu.Unlock()
		if n == 2 { // after the one before an eviction
			close(evicts)
			<-proceed
		}
		mu.Lock()
		defer mu.Unlock()
		return disk, nil
	})
	hungUp, hangUp := context.WithCancel(t.Context())
	one := make(chan error, 1)
	go func() { one <- s.SpareDisk(hungUp) }()
	<-evicts
	other, leave := context.WithCancelCause(t.Context())
	left := errors.New("left")
	leave(left)
	if err := s.SpareDisk(other); !errors.Is(err, left) {
		t.Errorf("a client that has left: %v", err)
	}
	two := make(chan error, 1)
	go func() { two <- s.SpareDisk(t.Context()) }()
	hangUp()
	if err := <-one; !errors.Is(err, context.Canceled) {
		t.Errorf("a client that hung up: %v", err)
	}
	mu.Lock()
	disk.FreeBytes = 1
	mu.Unlock()
	close(proceed)
	if err := <-two; err != nil {
		t.Errorf("there is room: %v", err)
	}
}

func TestShutdownEndsEvictions(t *testing.T) {
	r := daemontest.New(t, nil).Start()
	s := r.D.Service()
	r.Cancel()
	r.Wait()
	select {
	case <-s.Closing():
	default:
		t.Error("the daemon has ended, and an eviction would go on")
	}
}
