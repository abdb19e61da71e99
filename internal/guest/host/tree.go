package host

import (
	"context"
	"fmt"
	"io/fs"
	"math"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

// An Entry is one file of a list.
type Entry struct {
	FileInfo

	Path  string     // relative to the directory that is listed
	Errno unix.Errno // not 0: the reason why the content of this directory is missing
}

// List calls found for the entries of the directory at path and depth-1 levels below, parents
// first, in no other order. More reports that something was left out that no entry shows. Links are
// not followed and the kernel's file systems not entered, except for path itself. An error of found
// ends the list.
//
// A sandbox may have any number of entries: found has to set a limit.
func (c *Client) List(ctx context.Context, name string, depth int, found func(Entry) error) (more bool, err error) {
	conn, pkt, _, err := c.file(ctx, guest.KindList, guest.ListRequest{Depth: depth}, name, guest.KindEntries, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }()
	defer conn.endsWith(ctx)()
	patience := c.listFor // the time that found takes does not count
	for first := true; ; first = false {
		if pkt.Kind == guest.KindListed {
			var a guest.ListedAnswer
			if err := pkt.Into(&a, 0); err != nil {
				return false, fmt.Errorf("list %q: %w: %w", name, ErrLost, err)
			}
			return a.More, nil
		}
		entries, err := entriesOf(pkt, first)
		if err != nil {
			return false, fmt.Errorf("list %q: %w: %w", name, ErrLost, err)
		}
		for _, e := range entries {
			if err := found(e); err != nil {
				return false, err
			}
		}
		if pkt, err = c.next(ctx, conn, replyTimeout, &patience, guest.KindEntries, guest.KindListed); err != nil {
			return false, err
		}
	}
}

// entriesOf validates the entries of a packet. Only the first packet may be empty.
func entriesOf(p guest.Packet, first bool) ([]Entry, error) {
	var a guest.EntriesAnswer
	if err := p.Into(&a, -1); err != nil {
		return nil, err
	}
	if len(a.List) > guest.MaxBatch || len(a.List) == 0 && !first || len(p.Strs) != 2*len(a.List) {
		return nil, fmt.Errorf("%d entries with %d strings", len(a.List), len(p.Strs))
	}
	entries := make([]Entry, 0, len(a.List))
	for i := range a.List {
		e := &a.List[i]
		name := p.Strs[2*i]
		fi, ok := fileInfo(&e.InfoAnswer, path.Base(name), p.Strs[2*i+1])
		if !ok || !below(name) || e.Errno < 0 || e.Errno > 4095 || e.Errno != 0 && !fi.IsDir {
			return nil, fmt.Errorf("an entry that cannot be")
		}
		entries = append(entries, Entry{FileInfo: fi, Path: name, Errno: unix.Errno(e.Errno)})
	}
	return entries, nil
}

// below reports whether p is a relative path in its shortest form, which cannot lead out of its
// directory.
func below(p string) bool {
	if len(p) >= guest.MaxPath {
		return false
	}
	for e := range strings.SplitSeq(p, "/") {
		if e == "" || e == "." || e == ".." {
			return false
		}
	}
	return true
}

// Mkdir makes a directory. With parents, missing ones are made too, with mode 0755 and the same
// owner, and an existing directory is no error.
func (c *Client) Mkdir(ctx context.Context, path string, parents bool, mode fs.FileMode, uid, gid uint32) error {
	if uid == math.MaxUint32 || gid == math.MaxUint32 {
		return &guest.Error{Stage: guest.StageRequest, Errno: unix.EINVAL, Path: path}
	}
	return c.change(ctx, replyTimeout, guest.KindMkdir, guest.MkdirRequest{Mode: uint32(mode.Perm()), UID: uid, GID: gid, Parents: parents}, path)
}

// Move renames. Links in the last place of either path are not followed. With overwrite, the target
// is replaced atomically: a file by a file, an empty directory by a directory. Moves that need a
// copy are refused (EXDEV).
func (c *Client) Move(ctx context.Context, from, to string, overwrite bool) error {
	return c.change(ctx, replyTimeout, guest.KindMove, guest.MoveRequest{Overwrite: overwrite}, from, to)
}

// Remove removes a file, a link, an empty directory or, with recursive, a tree. Mount points stay
// (EBUSY). After an error a part of the tree may be gone. After 10 minutes init is told to give up,
// which does not count as lost: some trees are that large.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	ctx, cancel := context.WithTimeout(ctx, treeTimeout)
	defer cancel()
	return c.change(ctx, treeTimeout, guest.KindRemove, guest.RemoveRequest{Recursive: recursive}, path)
}

// change sends a request that is answered by done.
func (c *Client) change(ctx context.Context, timeout time.Duration, k guest.Kind, msg any, paths ...string) error {
	for _, p := range paths {
		if err := checkPath(p); err != nil {
			return err
		}
	}
	req, err := guest.Encode(k, msg, paths...)
	if err != nil {
		return err
	}
	conn, pkt, _, err := c.request(ctx, timeout, req, nil, guest.KindDone, 0)
	if err != nil {
		return err
	}
	_ = conn.Close()
	if err := pkt.Into(&guest.None{}, 0); err != nil {
		return fmt.Errorf("%s %q: %w: %w", k, paths[0], ErrLost, err)
	}
	return nil
}

// A Change is one event of a watch.
type Change struct {
	Kind guest.ChangeKind
	Path string // relative to the watched path; empty: the path itself
	To   string // new path of a moved file
	Dir  bool   // the file is a directory
}

// Watch calls ready when changes at path are reported from now on, and then told for each change.
// It ends without an error when the watched file is gone from its path, and otherwise with ctx or
// an error of told. No time limit applies to silence in between.
//
// Recursive also watches the directories below; a sandbox has 8192 watched ones at most.
// Directories that cannot be watched, and missed changes, are reported as [guest.ChangeOverflow].
// Entries of a new directory are reported at least once; a change may come twice. Links are
// followed in path only. A path in a file system of the kernel's is refused.
func (c *Client) Watch(ctx context.Context, name string, recursive bool, ready func() error, told func(Change) error) error {
	if err := checkPath(name); err != nil {
		return err
	}
	req, err := guest.Encode(guest.KindWatch, guest.WatchRequest{Recursive: recursive}, name)
	if err != nil {
		return err
	}
	conn, pkt, _, err := c.request(ctx, treeTimeout, req, nil, guest.KindWatching, 0)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	defer conn.endsWith(ctx)()
	if err := pkt.Into(&guest.None{}, 0); err != nil {
		return fmt.Errorf("watch %q: %w: %w", name, ErrLost, err)
	}
	if err := ready(); err != nil {
		return err
	}
	for {
		pkt, err := c.next(ctx, conn, 0, nil, guest.KindEvents, guest.KindDone)
		if err != nil {
			return err
		}
		if pkt.Kind == guest.KindDone {
			if err := pkt.Into(&guest.None{}, 0); err != nil {
				return fmt.Errorf("watch %q: %w: %w", name, ErrLost, err)
			}
			return nil
		}
		changes, err := changesOf(pkt)
		if err != nil {
			return fmt.Errorf("watch %q: %w: %w", name, ErrLost, err)
		}
		for _, change := range changes {
			if err := told(change); err != nil {
				return err
			}
		}
	}
}

// changesOf validates the events of a packet.
func changesOf(p guest.Packet) ([]Change, error) {
	var a guest.EventsAnswer
	if err := p.Into(&a, -1); err != nil {
		return nil, err
	}
	if len(a.List) > guest.MaxBatch || len(a.List) == 0 || len(p.Strs) != 2*len(a.List) {
		return nil, fmt.Errorf("%d events with %d strings", len(a.List), len(p.Strs))
	}
	changes := make([]Change, 0, len(a.List))
	for i, e := range a.List {
		c := Change{Kind: e.Kind, Path: p.Strs[2*i], To: p.Strs[2*i+1], Dir: e.Dir}
		moved := c.Kind == guest.ChangeMoved
		if !guest.ValidChange(c.Kind) || !below(c.Path) && (c.Path != "" || moved) || moved != (c.To != "") || moved && !below(c.To) {
			return nil, fmt.Errorf("an event that cannot be")
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// endsWith ends all waits for init when ctx ends, until the returned function is called.
func (c *conn) endsWith(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(guest.Expired) })
}

// next receives another packet of an answer that has several: one of two kinds, or an error. Init
// has timeout to send it, and patience for all of them; a timeout of zero means no limit. Next
// subtracts the time that init has used from patience, without the time in which it was held. The
// connection must end with ctx.
func (c *Client) next(ctx context.Context, conn *conn, timeout time.Duration, patience *time.Duration, one, other guest.Kind) (guest.Packet, error) {
	const doing = "await more of init's answer"
	var deadline time.Time
	begun := time.Now()
	if timeout > 0 {
		timeout = min(timeout, *patience)
		deadline = begun.Add(timeout)
		defer func() {
			could := begun // since when init could run
			if c.Held != nil {
				if held := c.Held(); held.After(could) {
					could = held
				}
			}
			*patience -= max(min(time.Since(could), timeout), 0)
		}()
	}
	if err := conn.SetReadDeadline(deadline); err != nil {
		return guest.Packet{}, fmt.Errorf("%s: %w", doing, err)
	}
	if ctx.Err() != nil { // it may have set its deadline before this one was set
		return guest.Packet{}, fmt.Errorf("%s: %w", doing, context.Cause(ctx))
	}
	// One for all packets: an init that drips must not get it anew for each.
	pkt, fds, err := c.awaitBy(conn.answer, ctx.Done(), conn, timeout, conn.lateness(c))
	if err != nil {
		return guest.Packet{}, lostUnless(ctx, doing, err)
	}
	unixmsg.CloseAll(fds)
	switch {
	case len(fds) != 0:
		return guest.Packet{}, fmt.Errorf("%s: %w: %d descriptors instead of none", doing, ErrLost, len(fds))
	case pkt.Kind == guest.KindError:
		return guest.Packet{}, refusal(pkt)
	case pkt.Kind != one && pkt.Kind != other:
		return guest.Packet{}, fmt.Errorf("%s: %w: %s instead of %s or %s", doing, ErrLost, strconv.Quote(pkt.Kind), one, other)
	}
	return pkt, nil
}
