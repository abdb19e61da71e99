package host

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// probe is the time between two looks at the load of an init that is late.
	probe = time.Second
	// starvedFor bounds the time by which all looks together may extend one wait: a hostile init can
	// pretend to get no processor.
	starvedFor = 2 * time.Minute
)

// A Load holds the processor time and the waits of an init, or of the host. Only differences count.
type Load struct {
	Run  time.Duration // on a processor
	Wait time.Duration // runnable without one; all threads together
	Due  bool          // a thread can run at this moment, or waits in the kernel
	Host bool          // the values are those of the host
}

// Starved reports whether l, read over after was, shows an init that got no processor, or hardly
// any.
func (l Load) Starved(was Load, over time.Duration) bool {
	wait, run := l.Wait-was.Wait, l.Run-was.Run
	if l.Host || was.Host {
		// Other programs may have waited: only where hardly a moment was without one.
		return l.Host == was.Host && wait >= over*9/10
	}
	return wait >= over/5 || l.Due && was.Due && run < over/20
}

// A patience extends one wait for an init that is late.
type patience struct {
	client  *Client
	began   time.Time // first look
	at      time.Time // last look; zero means that the next one is a first one again
	last    Load
	starved bool // as the last two looks showed
}

// lateness returns the patience that all packets of an answer share.
func (c *conn) lateness(client *Client) *patience {
	if c.late == nil {
		c.late = &patience{client: client}
	}
	return c.late
}

// extend returns a later deadline for a wait that has ended at now, if init could not run during a
// part of it: because the sandbox was held, or because init gets no processor. Two looks, a probe
// apart, show the latter. When init runs again, it is given grace once more.
func (p *patience) extend(now time.Time, grace time.Duration) (time.Time, bool) {
	c := p.client
	if c.Held != nil {
		if until := c.Held().Add(grace); now.Before(until) {
			p.at, p.starved = time.Time{}, false
			return until, true
		}
	}
	if c.Load == nil {
		return time.Time{}, false
	}
	if p.began.IsZero() {
		p.began = now
	}
	load, ok := c.Load()
	if !ok || now.Sub(p.began) > starvedFor {
		return time.Time{}, false
	}
	was, since := p.last, p.at
	p.last, p.at = load, now
	switch {
	case since.IsZero():
		return now.Add(probe), true
	case load.Starved(was, now.Sub(since)):
		p.starved = true
		return now.Add(probe), true
	case p.starved:
		p.at, p.starved = time.Time{}, false
		return now.Add(grace), true
	}
	return time.Time{}, false
}

// pressure is a descriptor of the host's /proc/pressure/cpu, plus one; 0 if there is none.
var pressure atomic.Int64

// OpenPressure opens the host's measure of processes that wait for a processor, for a daemon that
// confines itself afterwards. A kernel may have none.
func OpenPressure() {
	fd, err := unix.Open("/proc/pressure/cpu", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	if !pressure.CompareAndSwap(0, int64(fd)+1) {
		_ = unix.Close(fd)
	}
}

// LoadOf reads the load of the process with this pid from its files of /proc, or, where they cannot
// be read (Landlock), that of the host after [OpenPressure]. It reports whether there is either.
func LoadOf(pid int) (Load, bool) {
	if pid > 0 {
		if l, ok := threads(filepath.Join("/proc", strconv.Itoa(pid), "task")); ok {
			return l, true
		}
	}
	fd := pressure.Load() - 1
	if fd < 0 {
		return Load{}, false
	}
	var b [256]byte
	n, err := unix.Pread(int(fd), b[:], 0)
	if err != nil {
		return Load{}, false
	}
	return hostLoad(string(b[:n]))
}

// hostLoad parses "some avg10=… avg60=… avg300=… total=MICROSECONDS", of all processes of the host.
func hostLoad(pressure string) (Load, bool) {
	line, _, _ := strings.Cut(pressure, "\n")
	_, total, ok := strings.Cut(line, " total=")
	us, err := strconv.ParseInt(total, 10, 64)
	if !ok || err != nil || !strings.HasPrefix(line, "some ") {
		return Load{}, false
	}
	return Load{Wait: time.Duration(us) * time.Microsecond, Host: true}, true
}

// maxThreads is the number of threads of an init that are looked at; ours has some ten. The daemon
// reads them at a time when it has little time itself, and a taken-over init can have thousands.
const maxThreads = 64

// threads adds the threads of a process up. Those of its first thread alone say little: others
// work.
func threads(dir string) (l Load, ok bool) {
	d, err := os.Open(dir)
	if err != nil {
		return l, false
	}
	defer d.Close() // only read
	names, err := d.Readdirnames(maxThreads)
	if err != nil {
		return l, false
	}
	for _, name := range names {
		// Nanoseconds on a processor, nanoseconds of waiting for one, number of turns.
		b, err := os.ReadFile(filepath.Join(dir, name, "schedstat"))
		if err != nil {
			continue // it has ended
		}
		f := strings.Fields(string(b))
		if len(f) < 2 {
			continue
		}
		run, err := strconv.ParseInt(f[0], 10, 64)
		if err != nil {
			continue
		}
		wait, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			continue
		}
		l.Run += time.Duration(run)
		l.Wait += time.Duration(wait)
		ok = true
		if b, err = os.ReadFile(filepath.Join(dir, name, "stat")); err == nil {
			if _, state, found := bytes.Cut(b, []byte(") ")); found && len(state) > 0 {
				l.Due = l.Due || state[0] == 'R' || state[0] == 'D'
			}
		}
	}
	return l, ok
}
