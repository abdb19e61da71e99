package service

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestDiskIsShort(t *testing.T) {
	const gib = 1 << 30
	for _, test := range []struct {
		disk    Disk
		reserve int64
		short   bool
	}{
		{Disk{Bytes: 100 * gib, FreeBytes: gib}, -1, false},
		{Disk{Bytes: 100 * gib, FreeBytes: gib - 1}, -1, true},
		{Disk{Bytes: 100 << 20, FreeBytes: 5 << 20}, -1, false}, // a twentieth of a small one
		{Disk{Bytes: 100 << 20, FreeBytes: 5<<20 - 1}, -1, true},
		{Disk{Bytes: 100 * gib, FreeBytes: gib}, 2 * gib, true},
		{Disk{}, 0, false}, // none is asked for
		{Disk{Bytes: 100 * gib, FreeBytes: 50 * gib, Inodes: 10_000_000, FreeInodes: 9_999}, -1, true},
		{Disk{Bytes: 100 * gib, FreeBytes: 50 * gib, Inodes: 1000, FreeInodes: 10}, -1, false},
		{Disk{Bytes: 100 * gib, FreeBytes: 50 * gib}, -1, false}, // Btrfs counts none
	} {
		if got := test.disk.Short(test.reserve); (got != "") != test.short {
			t.Errorf("%+v, %d: %q", test.disk, test.reserve, got)
		}
	}
}

func TestOrderOfEviction(t *testing.T) {
	at := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	rec := func(id, reason string, hour int, change ...func(*runtime.Record)) runtime.Record {
		r := runtime.Record{Sandbox: api.Sandbox{ID: id, State: api.StateStopped, Reason: reason, EndedAt: at.Add(time.Duration(hour) * time.Hour)}}
		for _, f := range change {
			f(&r)
		}
		return r
	}
	all := []runtime.Record{
		rec("stopped", runtime.ReasonStopped, 0),
		rec("main", runtime.ReasonExited+"0", 1),
		rec("idle", runtime.ReasonIdle+"10m0s", 2),
		rec("deadline", "deadline reached", 4),
		rec("memory", "out of memory: the kernel ended all its processes", 3),
		rec("lost", "the launcher that held it died", 5, func(r *runtime.Record) { r.State = api.StateLost }),
		rec("kept", "deadline reached", 0, func(r *runtime.Record) { r.Labels = map[string]string{api.LabelKeep: ""} }),
		rec("tenant's", "deadline reached", 6, func(r *runtime.Record) { r.Tenant, r.Labels = "uid:5", map[string]string{api.LabelKeep: ""} }),
		rec("tenant's stopped", runtime.ReasonStopped, 0, func(r *runtime.Record) { r.Tenant = "uid:5" }),
		rec("tenant's kept", runtime.ReasonExited+"0", 0, func(r *runtime.Record) { r.Tenant, r.Labels = "uid:5", map[string]string{api.LabelKeep: ""} }),
		rec("gone", "deadline reached", 0, func(r *runtime.Record) { r.FilesGone = true }),
		rec("runs", "", 0, func(r *runtime.Record) { r.State = api.StateRunning }),
	}
	var got []string
	for _, r := range evictable(all) {
		got = append(got, r.ID)
	}
	if want := []string{"memory", "deadline", "tenant's", "main", "idle", "lost", "tenant's stopped"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// The end of an eviction whose client hung up is awaited, and comes with the daemon's though the
// disk stays short.
func TestEvictionEndsWithTheDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks, proceed := 0, make(chan struct{})
		s := &core{disk: disk{reserve: 1, closing: make(chan struct{})}}
		s.disk.measure = func() (Disk, error) {
			if looks++; looks == 2 { // after the one before an eviction
				<-proceed
			}
			return Disk{}, nil
		}
		ctx, hangUp := context.WithCancel(t.Context())
		client := make(chan error, 1)
		go func() { client <- s.spareDisk(ctx) }()
		synctest.Wait()
		hangUp()
		if err := <-client; !errors.Is(err, context.Canceled) {
			t.Errorf("a client that hung up: %v", err)
		}
		stopped := false
		go func() {
			s.disk.stop()
			stopped = true
		}()
		synctest.Wait()
		if stopped {
			t.Error("the eviction is not awaited")
		}
		close(proceed)
		synctest.Wait() // no time passes
		if !stopped {
			t.Error("the eviction goes on")
		}
	})
}
