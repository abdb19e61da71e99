package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// defaultReserve is the maximum of the default reserve, reserveParts the part of the disk that it
	// otherwise is.
	defaultReserve = 1 << 30
	reserveParts   = 20
	// inodeReserve and inodeParts are the same for inodes, of which there is no option.
	inodeReserve = 10_000
	inodeParts   = 100
	// settleTime is the time in which the kernel frees what was removed, settleTotal the bound of all
	// such waits of one request.
	settleTime  = 200 * time.Millisecond
	settleTotal = 3 * time.Second
)

// Disk is the room of a file system for users.
type Disk struct {
	Bytes, FreeBytes   int64
	Inodes, FreeInodes int64 // zero if the file system does not count them
}

// MeasureDisk returns the room of the file system that dir is on.
func MeasureDisk(dir string) (Disk, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Disk{}, fmt.Errorf("measure the disk of %s: %w", dir, err)
	}
	size := st.Frsize
	return Disk{
		Bytes: int64(st.Blocks) * size, FreeBytes: int64(st.Bavail) * size, //nolint:gosec // G115: no disk has 8 EiB
		Inodes: int64(st.Files), FreeInodes: int64(st.Ffree), //nolint:gosec // G115: see above
	}, nil
}

// Reserve returns the reserve in bytes that is asked for; negative means the default.
func (d Disk) Reserve(asked int64) int64 {
	if asked < 0 {
		return min(defaultReserve, d.Bytes/reserveParts)
	}
	return asked
}

// Short returns the reason why the disk has not the reserve that is asked for; empty if it has.
// Negative means the default, zero none.
func (d Disk) Short(reserve int64) string {
	if reserve == 0 {
		return ""
	}
	reserve = d.Reserve(reserve)
	if d.FreeBytes < reserve {
		return fmt.Sprintf("the disk has %d MiB free, and %d MiB are reserved for the daemon", d.FreeBytes>>20, reserve>>20)
	}
	if inodes := min(inodeReserve, d.Inodes/inodeParts); d.Inodes > 0 && d.FreeInodes < inodes {
		return fmt.Sprintf("the disk has %d inodes free, and %d are reserved for the daemon", d.FreeInodes, inodes)
	}
	return ""
}

// disk keeps the reserve of the disk.
type disk struct {
	reserve int64
	measure func() (Disk, error)
	// evictions has one at a time, which serves all requests that come meanwhile: a tenant with many
	// keeps none of the others waiting for more.
	evictions singleflight.Group
	requests  sync.WaitGroup // for the eviction under way; some have no client any more
	closing   chan struct{}  // closed when the daemon ends, and the eviction with it
}

// spareDisk fails if the disk has less free than the reserve, after the files of ended sandboxes
// have made what room they can. It is called before anything is made.
func (s *core) spareDisk(ctx context.Context) error {
	short, err := s.diskShort()
	if short == "" || err != nil {
		return err
	}
	evicted := make(chan struct{})
	s.disk.requests.Go(func() {
		defer close(evicted)
		_, _, _ = s.disk.evictions.Do("", func() (any, error) {
			s.evict(context.WithoutCancel(ctx), short) // a client that hangs up does not end it for the others
			return nil, nil
		})
	})
	select {
	case <-evicted:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if short, err = s.diskShort(); short == "" || err != nil {
		return err
	}
	return class.Mark(class.ErrNoDisk, errors.New(short))
}

// stop ends the eviction under way, and waits for it. No request may be under way.
func (d *disk) stop() {
	close(d.closing)
	d.requests.Wait()
}

// evict removes files of ended sandboxes until the disk is not short, none are left, or the daemon
// ends. It does not end with a context.
func (s *core) evict(ctx context.Context, short string) {
	patience := settleTotal
	if s.settles(&patience) {
		return
	}
	for _, rec := range evictable(s.supervisor.List(runtime.Filter{AllTenants: true})) {
		switch err := s.supervisor.DropFiles(ctx, &rec, "the disk was short"); {
		case err == nil:
			s.log.Warn("files of an ended sandbox were removed, because the disk is short", "id", rec.ID, "name", rec.Name, "tenant", rec.Tenant, "ended", rec.Reason, "disk", short)
		case errors.Is(err, runtime.ErrClosed):
			return
		case errors.Is(err, runtime.ErrNotEnded), errors.Is(err, runtime.ErrNotFound), errors.Is(err, runtime.ErrState):
		default:
			s.log.Warn("files of an ended sandbox could not be removed", "id", rec.ID, "error", err)
		}
		if s.settles(&patience) {
			return
		}
	}
}

// settles reports whether nothing more is to be removed: the disk is not short any more, or the
// daemon ends. The kernel frees the files of a sandbox
// that was just killed or removed a moment later, when it has taken its mounts apart: settles waits
// for that, as long as there is patience left, so that no other files are removed in vain.
func (s *core) settles(patience *time.Duration) bool {
	wait := min(*patience, settleTime)
	*patience -= wait
	over := time.NewTimer(wait)
	defer over.Stop()
	look := time.NewTicker(settleTime / 10)
	defer look.Stop()
	for {
		if short, err := s.diskShort(); short == "" || err != nil {
			return err == nil
		}
		select {
		case <-look.C:
		case <-over.C:
			return false
		case <-s.disk.closing:
			return true
		}
	}
}

func (s *core) diskShort() (string, error) {
	if s.disk.reserve == 0 {
		return "", nil
	}
	d, err := s.disk.measure()
	if err != nil {
		return "", err
	}
	return d.Short(s.disk.reserve), nil
}

// evictable returns the ended sandboxes with files, in the order in which these are removed if the
// disk is short: those that were ended by a deadline, a kill or an error, then those that ended by
// themselves or with the host, then those that a tenant stopped; of each the oldest first. Those of
// the daemon's own user that were stopped, to be started again, or are labelled to be kept, stay. A
// tenant's label does not protect one that was ended, or a full disk would stay full.
func evictable(all []runtime.Record) []runtime.Record {
	rank := func(rec *runtime.Record) int {
		switch {
		case rec.Reason == runtime.ReasonStopped:
			return 2
		case rec.State == api.StateLost:
			return 1
		case strings.HasPrefix(rec.Reason, runtime.ReasonExited), strings.HasPrefix(rec.Reason, runtime.ReasonIdle):
			return 1
		}
		return 0
	}
	var ended []runtime.Record
	for _, rec := range all {
		own := rec.Tenant == ""
		switch {
		case rec.State != api.StateStopped && rec.State != api.StateLost, rec.Ephemeral, rec.FilesGone:
		case own && rec.Reason == runtime.ReasonStopped:
		case api.Kept(rec.Labels) && (own || rank(&rec) > 0):
		default:
			ended = append(ended, rec)
		}
	}
	slices.SortStableFunc(ended, func(a, b runtime.Record) int {
		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), a.EndedAt.Compare(b.EndedAt))
	})
	return ended
}
