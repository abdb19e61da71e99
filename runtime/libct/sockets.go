package libct

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Memory of unread messages (docs/decisions/0030).
//
// Answers that wait in netlink sockets, and errors that wait in those of UDP, are memory that no
// cgroup counts (Linux 6.18) and no limit bounds: one process takes a GiB in a second. Programs
// need both kinds of sockets, to list interfaces and to look up names. The kernel lists the sockets
// of a network namespace with the bytes that wait, so the launcher ends the sandbox with too many.

const (
	// maxUnread is the memory in bytes of the unread messages of a sandbox.
	maxUnread = 64 << 20
	// emptySocket is the memory in bytes of a socket without messages.
	emptySocket = 2 << 10
	// unreadInterval is the time between two looks at the kernel's memory, which takes some 50 µs.
	unreadInterval = 250 * time.Millisecond
	// unreadStep is the growth in bytes of the kernel's memory after which sandboxes are looked at. In
	// between none can have taken more.
	unreadStep = 32 << 20
)

// socketLists are the lists of a network namespace, and how a line of each counts.
var socketLists = map[string]func(columns []string) (int64, error){"netlink": ofNetlink, "udp": ofUDP, "udp6": ofUDP}

// unreadWatch looks after the sandboxes that run. Its goroutine ends with the last of them.
type unreadWatch struct {
	grown func() (int64, error) // bytes of the kernel's objects

	mu       sync.Mutex
	subjects map[string]func() // look at a sandbox
	running  bool
	blind    bool
}

func newUnreadWatch() *unreadWatch {
	return &unreadWatch{grown: func() (int64, error) { return unreclaimable("/proc/meminfo") }, subjects: make(map[string]func())}
}

// set watches a sandbox from now on.
func (w *unreadWatch) set(id string, look func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subjects[id] = look
	if !w.running {
		w.running = true
		go w.run()
	}
}

// remove ends the watch of a sandbox.
func (w *unreadWatch) remove(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.subjects, id)
}

func (w *unreadWatch) run() {
	ticker := time.NewTicker(unreadInterval)
	defer ticker.Stop()
	var base int64
	for range ticker.C {
		var ok bool
		if base, ok = w.look(base); !ok {
			return
		}
	}
}

// look looks at all sandboxes if the kernel's memory has grown by a step since base, and returns
// the next base. It returns false if there is nothing to watch.
func (w *unreadWatch) look(base int64) (next int64, ok bool) {
	now, err := w.grown()
	w.mu.Lock()
	if len(w.subjects) == 0 {
		w.running = false
		w.mu.Unlock()
		return 0, false
	}
	if err != nil && !w.blind {
		slog.Error("unread messages of sandboxes are not bounded", "error", err)
	}
	w.blind = err != nil
	var looks []func()
	if err == nil && now >= base+unreadStep {
		for _, look := range w.subjects {
			looks = append(looks, look)
		}
	}
	w.mu.Unlock()
	if looks == nil {
		return min(base, now), true
	}
	for _, look := range looks {
		look()
	}
	return now, true
}

// watchUnread ends the sandbox when its unread messages hold too much.
func (e *Engine) watchUnread(in *instance, id string) {
	e.unread.set(id, func() {
		n, err := unread("/proc/"+strconv.Itoa(in.pid)+"/net/", maxUnread)
		switch {
		case in.hasEnded(): // the lists may be those of a later process with its pid
			return
		case err != nil: // of the launcher: it is not the sandbox's fault
			slog.Warn("unread messages were not counted", "id", id, "error", err)
			return
		case n <= maxUnread:
			return
		}
		e.mu.Lock()
		in.excess = fmt.Sprintf("unread messages of its sockets hold more than %d MiB", maxUnread>>20)
		e.mu.Unlock()
		slog.Warn("a sandbox is ended for its unread messages", "id", id)
		_ = e.strike(in, id) // it is tried again while they grow
	})
	if in.hasEnded() {
		e.unread.remove(id)
	}
}

// unread returns the memory of the sockets in the lists of a network namespace. It counts no
// further than the limit: a program can make the lists as long as it likes.
func unread(dir string, limit int64) (sum int64, err error) {
	for list, of := range socketLists {
		n, err := unreadIn(dir+list, limit-sum, of)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6
			return sum, fmt.Errorf("list %s sockets: %w", list, err)
		}
		if sum += n; sum > limit {
			break
		}
	}
	return sum, nil
}

func unreadIn(path string, limit int64, of func(columns []string) (int64, error)) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close() // only read
	return sumOf(f, limit, of)
}

func sumOf(list io.Reader, limit int64, of func(columns []string) (int64, error)) (sum int64, err error) {
	lines := bufio.NewScanner(list)
	for head := true; lines.Scan() && sum <= limit; head = false {
		if head {
			continue
		}
		n, err := of(strings.Fields(lines.Text()))
		if err != nil {
			return sum, fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		sum += max(0, n) + emptySocket
	}
	return sum, lines.Err()
}

// errColumns is the error of a line that is no line of a list.
var errColumns = errors.New("it lacks columns")

// ofNetlink counts a line of /proc/net/netlink: bytes received, in decimal.
func ofNetlink(columns []string) (int64, error) {
	const received = 4
	if len(columns) <= received {
		return 0, errColumns
	}
	return strconv.ParseInt(columns[received], 10, 64)
}

// ofUDP counts a line of /proc/net/udp: bytes sent and received, in hexadecimal. Those received
// include the queue of errors.
func ofUDP(columns []string) (int64, error) {
	const queues = 4
	if len(columns) <= queues {
		return 0, errColumns
	}
	_, received, found := strings.Cut(columns[queues], ":")
	if !found {
		return 0, errColumns
	}
	n, err := strconv.ParseUint(received, 16, 32)
	return int64(int32(n)), err //nolint:gosec // G115: the kernel prints an int
}

// unreclaimable returns the bytes of the kernel's objects that it cannot drop.
func unreclaimable(meminfo string) (int64, error) {
	text, err := os.ReadFile(meminfo)
	if err != nil {
		return 0, err
	}
	_, line, found := strings.Cut(string(text), "\nSUnreclaim:")
	if !found {
		return 0, fmt.Errorf("%s has no SUnreclaim", meminfo)
	}
	line, _, _ = strings.Cut(line, " kB")
	n, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: SUnreclaim: %w", meminfo, err)
	}
	return n << 10, nil
}
