package inside

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"
)

const (
	watchEvents = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_EXCL_UNLINK
	watchSelf = unix.IN_DELETE_SELF | unix.IN_MOVE_SELF // of the watched file itself
	// otherHalf bounds the wait for the second half of a move that [watcher.settle] has not brought;
	// the kernel queues both in one system call.
	otherHalf = 10 * time.Millisecond
)

// A watcher reports changes of one file, one directory or one tree. Its memory is a node for each
// directory, and all watchers together have at most MaxWatched; paths are composed from them for
// each event. A directory is watched before it is read, so that entries that appear meanwhile are
// reported at least once.
type watcher struct {
	s         *server
	c         *conn
	at        string // path of the watched file, without links; a descriptor would delay its end (IN_DELETE_SELF)
	recursive bool
	inotify   file
	fd        int // inotify's
	closed    atomic.Bool
	nodes     map[int32]*watchNode
	top       *watchNode
	started   bool // the first scan has ended: entries found from now on are new
	full      bool // a directory exceeded the limit
	over      bool // the watched file is gone

	list []guest.EventAnswer
	strs []string
	size int
}

// A watchNode is a watched directory. While renames follow each other quickly, it may have an old
// name for a while, or even be its own ancestor; path copes with that.
type watchNode struct {
	wd     int32
	parent *watchNode // nil: the root
	name   string
}

// path returns the directory's path relative to the root, with a slash at its end; "" for the root.
func (n *watchNode) path() (string, bool) {
	var names []string
	size := 0
	for ; n.parent != nil; n = n.parent {
		names = append(names, n.name)
		if size += len(n.name) + 1; len(names) > guest.MaxListDepth || size >= guest.MaxPath {
			return "", false
		}
	}
	b := make([]byte, 0, size)
	for _, name := range slices.Backward(names) {
		b = append(append(b, name...), '/')
	}
	return string(b), true
}

func (n *watchNode) below(other *watchNode) bool {
	for range guest.MaxListDepth + 1 {
		if n == nil || n == other {
			return n == other
		}
		n = n.parent
	}
	return false
}

func (s *server) watch(c *conn, pkt guest.Packet, fds []int) error {
	var m guest.WatchRequest
	if err := expect(pkt, &m, 1, fds, 0); err != nil {
		return err
	}
	path := pkt.Strs[0]
	select {
	case s.watches <- struct{}{}:
		defer func() { <-s.watches }()
	default:
		return fail(guest.StageWatch, unix.EMFILE, path)
	}
	root, err := openPath(unix.AT_FDCWD, path, 0)
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	release := sync.OnceFunc(func() { _ = unix.Close(root) })
	defer release()
	if err := usable(root, path); err != nil { // the kernel's file systems send no events
		return err
	}
	at, err := readLink(s.proc, "self/fd/"+strconv.Itoa(root))
	if err != nil {
		return fail(guest.StageOpen, err, path)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fail(guest.StageWatch, err, path)
	}
	w := &watcher{
		s: s, c: c, at: at, recursive: m.Recursive, inotify: s.poller.open(fd, "inotify"),
		nodes: make(map[int32]*watchNode),
	}
	if rc, err := w.inotify.SyscallConn(); err != nil || rc.Control(func(fd uintptr) { w.fd = int(fd) }) != nil {
		_ = w.inotify.Close()
		return fail(guest.StageWatch, unix.EMFILE, path)
	}
	defer func() {
		_ = w.inotify.Close()
		s.watched.Add(-int32(len(w.nodes))) //nolint:gosec // there are few
	}()
	settled := c.onClose(func() {
		w.closed.Store(true)
		_ = w.inotify.SetDeadline(guest.Expired)
	})
	defer settled()

	if w.top, err = w.add(root, nil, "", watchSelf); err != nil {
		return fail(guest.StageWatch, err, path)
	}
	release()
	if w.recursive {
		if err := w.rescan(); err != nil {
			return err
		}
	}
	if err := c.reply(guest.KindWatching, guest.None{}); err != nil {
		return err
	}
	w.started = true
	if err := w.flush(); err != nil {
		return err
	}
	for !w.over {
		if err := w.read(); err != nil || w.closed.Load() {
			return err
		}
	}
	return c.reply(guest.KindDone, guest.None{})
}

// add watches an open file. It may be watched already, under this or an earlier name.
func (w *watcher) add(fd int, parent *watchNode, name string, also uint32) (*watchNode, error) {
	// The system call takes no descriptors. If another file system were mounted on /proc, the watch
	// would be on another file of the sandbox.
	wd, err := unix.InotifyAddWatch(w.fd, "/proc/self/fd/"+strconv.Itoa(fd), watchEvents|unix.IN_MASK_ADD|also)
	if err != nil {
		return nil, err
	}
	n := w.nodes[int32(wd)] //nolint:gosec // the kernel's are ints
	switch {
	case n == nil:
		n = &watchNode{wd: int32(wd), parent: parent, name: name} //nolint:gosec // as above
		w.nodes[n.wd] = n
		w.s.watched.Add(1)
	case n.parent != nil:
		n.parent, n.name = parent, name
	}
	return n, nil
}

type watchLevel struct {
	dirReader

	node   *watchNode
	prefix string
	tell   bool // report the entries
}

// open opens the watched directory. The watch is over once it has left its place; another type is
// an error.
func (w *watcher) open() (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS,
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, w.at, &how)
	if err != nil {
		return -1, err
	}
	nodes := len(w.nodes)
	if n, err := w.add(fd, nil, "", 0); err != nil || n != w.top {
		if len(w.nodes) > nodes { // a new file is there now
			_, _ = unix.InotifyRmWatch(w.fd, uint32(n.wd)) //nolint:gosec // it is one that the kernel gave
			w.forget(n)
		}
		_ = unix.Close(fd)
		return -1, unix.ENOENT
	}
	return fd, nil
}

// rescan finds all directories again.
func (w *watcher) rescan() error {
	r, err := w.s.reader(w.open)
	switch {
	case errors.Is(err, unix.ENOTDIR):
		return nil // the watch is of one file
	case swapped(err):
		return w.gone()
	case err != nil:
		return w.miss("")
	}
	return w.scan(&watchLevel{dirReader: r, node: w.top})
}

// gone reports that the watched file has left its place.
func (w *watcher) gone() error {
	w.over = true
	return w.emit(guest.ChangeDeleted, false, "", "")
}

// watchBelow watches the directory of this name, and those below it.
func (w *watcher) watchBelow(at *watchNode, prefix, name string, tell bool) error {
	if len(prefix)+len(name) >= guest.MaxPath-1 {
		return w.miss("")
	}
	root, err := w.open()
	if err != nil {
		if swapped(err) {
			return w.gone()
		}
		return w.miss("")
	}
	level, err := w.descend(root, prefix+name, at, prefix, name, tell)
	_ = unix.Close(root)
	if level == nil || err != nil {
		return err
	}
	return w.scan(level)
}

// descend opens a directory below a descriptor, and watches it. The result is nil if there is none
// to enter.
func (w *watcher) descend(at int, path string, parent *watchNode, prefix, name string, tell bool) (*watchLevel, error) {
	// The name may belong to another file by now; then more events follow.
	r, err := w.s.reader(func() (int, error) { return openDir(at, path, 0) })
	switch {
	case swapped(err):
		return nil, nil
	case err != nil:
		return nil, w.miss(prefix + name)
	}
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(r.fd, &fsys); err != nil {
		r.close()
		return nil, w.miss(prefix + name)
	}
	if guest.IsKernelFS(fsys.Type) {
		r.close()
		return nil, nil
	}
	known := len(w.nodes)
	var n *watchNode
	if w.s.watched.Load() < guest.MaxWatched {
		n, err = w.add(r.fd, parent, name, 0)
	} else {
		err = unix.ENOSPC
	}
	if err != nil {
		r.close()
		w.full = true
		return nil, w.miss(prefix + name)
	}
	return &watchLevel{dirReader: r, node: n, prefix: prefix + name + "/", tell: tell || w.started && len(w.nodes) > known}, nil
}

// scan reads a directory that is watched already, and watches those below it. It takes level over.
func (w *watcher) scan(level *watchLevel) error {
	stack := []*watchLevel{level}
	defer func() {
		for _, level := range stack {
			level.close()
		}
	}()
	for len(stack) > 0 && !w.closed.Load() {
		top := stack[len(stack)-1]
		name, typ, err := top.next()
		if err != nil {
			if err := w.miss(top.prefix); err != nil {
				return err
			}
		}
		if name == "" {
			top.close()
			stack = stack[:len(stack)-1]
			continue
		}
		if typ == unix.DT_UNKNOWN {
			var st unix.Stat_t
			if unix.Fstatat(top.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				typ = unix.DT_DIR
			}
		}
		if top.tell {
			if err := w.emit(guest.ChangeCreated, typ == unix.DT_DIR, top.prefix+name, ""); err != nil {
				return err
			}
		}
		if typ != unix.DT_DIR || w.full {
			continue
		}
		if len(stack) == guest.MaxListDepth || len(top.prefix)+len(name) >= guest.MaxPath-1 {
			if err := w.miss(top.prefix); err != nil {
				return err
			}
			continue
		}
		below, err := w.descend(top.fd, name, top.node, top.prefix, name, top.tell)
		if err != nil {
			return err
		}
		if below != nil {
			stack = append(stack, below)
		}
	}
	return nil
}

// miss reports that events of a place will be missing.
func (w *watcher) miss(path string) error {
	if !w.started && len(w.list) > 0 {
		return nil // reported already, and the packet has to wait
	}
	return w.emit(guest.ChangeOverflow, false, trimDir(path), "")
}

func trimDir(path string) string {
	if n := len(path); n > 0 && path[n-1] == '/' {
		return path[:n-1]
	}
	return path
}

func (w *watcher) emit(k guest.ChangeKind, dir bool, path, to string) error {
	if len(path) >= guest.MaxPath || len(to) >= guest.MaxPath {
		k, path, to = guest.ChangeOverflow, "", "" // no request could name it
	}
	w.list = append(w.list, guest.EventAnswer{Kind: k, Dir: dir})
	w.strs = append(w.strs, path, to)
	w.size += len(path) + len(to)
	if len(w.list) == guest.MaxBatch || w.size > guest.MaxBatchBytes {
		return w.flush()
	}
	return nil
}

// flush sends the events, and waits for the daemon to read them. Meanwhile the kernel queues
// events, and reports when there were too many.
func (w *watcher) flush() error {
	if len(w.list) == 0 {
		return nil
	}
	p, err := guest.Encode(guest.KindEvents, guest.EventsAnswer{List: w.list}, w.strs...)
	if err == nil {
		err = w.c.Send(p)
	}
	w.list, w.strs, w.size = w.list[:0], w.strs[:0], 0
	return err
}

// A watchEvent is an event of inotify(7).
type watchEvent struct {
	wd           int32
	mask, cookie uint32
	name         string
}

// parseEvents reads struct inotify_event: wd, mask, cookie, length of the name with NULs, name.
func parseEvents(b []byte) []watchEvent {
	var events []watchEvent
	for len(b) >= unix.SizeofInotifyEvent {
		e := watchEvent{
			wd:     int32(binary.NativeEndian.Uint32(b)), //nolint:gosec // it is an int
			mask:   binary.NativeEndian.Uint32(b[4:]),
			cookie: binary.NativeEndian.Uint32(b[8:]),
		}
		n := int(binary.NativeEndian.Uint32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if n > len(b) {
			break // the kernel never cuts an event
		}
		name, _, _ := bytes.Cut(b[:n], []byte{0})
		e.name = string(name)
		b = b[n:]
		events = append(events, e)
	}
	return events
}

// read waits for events and reports them.
func (w *watcher) read() error {
	buf := make([]byte, 16<<10)
	n, err := w.inotify.Read(buf)
	if err != nil {
		if w.closed.Load() {
			return nil
		}
		return fail(guest.StageWatch, err, "")
	}
	events := w.rest(buf, parseEvents(buf[:n]))
	if w.closed.Load() { // the deadline may have been reset
		return nil
	}
	for i := range events {
		if err := w.event(events, i); err != nil {
			return err
		}
		if w.over {
			break
		}
	}
	return w.flush()
}

// rest adds the second halves of moves to events, with the events between. It takes them from the
// queue however late they are, so a delay of this process or of the one that moves does no harm.
func (w *watcher) rest(buf []byte, events []watchEvent) []watchEvent {
	from := halfMoved(events)
	if len(from) == 0 {
		return events
	}
	w.settle(from)
	if events = w.queued(buf, events); len(halfMoved(events)) == 0 {
		return events
	}
	return w.late(buf, events, otherHalf)
}

// late adds the events that come within wait.
func (w *watcher) late(buf []byte, events []watchEvent, wait time.Duration) []watchEvent {
	_ = w.inotify.SetReadDeadline(time.Now().Add(wait))
	n, err := w.inotify.Read(buf)
	_ = w.inotify.SetReadDeadline(time.Time{})
	if err == nil {
		return append(events, parseEvents(buf[:n])...)
	}
	return w.queued(buf, events) // the poller does not look at the queue after its deadline
}

// queued adds the events that can be read without waiting.
func (w *watcher) queued(buf []byte, events []watchEvent) []watchEvent {
	if n, err := unix.Read(w.fd, buf); err == nil {
		events = append(events, parseEvents(buf[:n])...)
	}
	return events
}

// settle waits for the renames under way in directories. A rename holds the lock of its directory
// until both its halves are in the queue (vfs_rename), and listing the directory takes that lock
// too. A directory that has lost its name is left out.
func (w *watcher) settle(dirs map[int32]bool) {
	for wd := range dirs {
		n := w.nodes[wd]
		if n == nil {
			continue
		}
		path, ok := n.path()
		if !ok {
			continue
		}
		r, err := w.s.reader(func() (int, error) {
			root, err := w.open()
			if err != nil || path == "" {
				return root, err
			}
			defer func() { _ = unix.Close(root) }()
			return openDir(root, trimDir(path), 0)
		})
		if err != nil {
			continue
		}
		_, _, _ = r.next() // to take the lock
		r.close()
	}
}

// halfMoved returns the watches of directories that a name was moved out of, so far without a
// second half.
func halfMoved(events []watchEvent) (from map[int32]bool) {
	for i := range events {
		if events[i].mask&unix.IN_MOVED_FROM != 0 && otherEnd(events, i) < 0 {
			if from == nil {
				from = make(map[int32]bool)
			}
			from[events[i].wd] = true
		}
	}
	return from
}

func otherEnd(events []watchEvent, i int) int {
	for j := i + 1; j < len(events); j++ {
		if events[j].mask&unix.IN_MOVED_TO != 0 && events[j].cookie == events[i].cookie {
			return j
		}
	}
	return -1
}

// event reports one event, or two that are a move.
func (w *watcher) event(events []watchEvent, i int) error {
	e := &events[i]
	if e.mask&unix.IN_Q_OVERFLOW != 0 {
		if err := w.emit(guest.ChangeOverflow, false, "", ""); err != nil || !w.recursive {
			return err
		}
		return w.rescan()
	}
	n := w.nodes[e.wd]
	if n == nil {
		return nil // removed meanwhile
	}
	if n == w.top && e.mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_IGNORED|unix.IN_UNMOUNT) != 0 {
		return w.gone()
	}
	if e.mask&unix.IN_IGNORED != 0 {
		w.forget(n)
		return nil
	}
	prefix, ok := n.path()
	if !ok {
		return w.miss("")
	}
	dir := e.mask&unix.IN_ISDIR != 0
	if e.name == "" {
		if n != w.top {
			return nil // its parent reports it too
		}
		prefix = ""
	}
	path := prefix + e.name
	switch {
	case e.mask&unix.IN_MOVED_FROM != 0:
		if j := otherEnd(events, i); j >= 0 {
			return w.moved(n, &events[j], path, e.name, dir)
		}
		if dir {
			w.drop(n, e.name)
		}
		return w.emit(guest.ChangeDeleted, dir, path, "")
	case e.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		err := w.emit(guest.ChangeCreated, dir, path, "")
		if err == nil && dir && w.recursive {
			err = w.watchBelow(n, prefix, e.name, true)
		}
		return err
	case e.mask&unix.IN_DELETE != 0:
		return w.emit(guest.ChangeDeleted, dir, path, "")
	case e.mask&unix.IN_MODIFY != 0:
		return w.emit(guest.ChangeModified, dir, path, "")
	case e.mask&unix.IN_ATTRIB != 0:
		return w.emit(guest.ChangeAttributes, dir, path, "")
	}
	return nil
}

// moved reports a move within the watched tree, and removes its second event.
func (w *watcher) moved(from *watchNode, to *watchEvent, path, name string, dir bool) error {
	at := w.nodes[to.wd]
	to.mask = 0
	if at == nil {
		return w.emit(guest.ChangeDeleted, dir, path, "")
	}
	prefix, ok := at.path()
	if !ok {
		return w.miss("")
	}
	if err := w.emit(guest.ChangeMoved, dir, path, prefix+to.name); err != nil || !dir || !w.recursive {
		return err
	}
	if at == from && name == to.name {
		return nil
	}
	// Nodes below it find their new path by this one. It is watched again all the same, because it may
	// have moved before it was watched.
	return w.watchBelow(at, prefix, to.name, false)
}

// drop ends the watches of a directory that has left the tree, and of those in it.
func (w *watcher) drop(at *watchNode, name string) {
	for _, n := range w.nodes {
		if n.parent != at || n.name != name {
			continue
		}
		for _, m := range w.nodes {
			if m != w.top && m.below(n) {
				_, _ = unix.InotifyRmWatch(w.fd, uint32(m.wd)) //nolint:gosec // it is one that the kernel gave
				w.forget(m)
			}
		}
		return
	}
}

func (w *watcher) forget(n *watchNode) {
	delete(w.nodes, n.wd)
	w.s.watched.Add(-1)
	w.full = false
}
