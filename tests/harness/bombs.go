package harness

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// A Bomb is a program that takes of one thing whatever it gets, and goes on until it is ended. It
// writes /tmp/ready when it is about to, and "limit" to its standard output each time that it was
// refused more; a first "limit" says that something holds.
type Bomb struct {
	Name string
	// Script is Python: the program that every host image and the machines of the test bed have.
	Script string
	TTY    bool // on a terminal of its own
	// Needs is the controller of cgroup v2 without which nothing holds it: on a host without that it
	// would take the machine.
	Needs string
	// Unheld says that nothing but the deadline and the rate of the disk ends it: it is never refused.
	Unheld bool
}

// bombHead is what each of them begins with.
const bombHead = `import os, time
told = 0
def limit():
    global told
    if not told: os.write(1, b"limit\n")
    told = 1
    time.sleep(0.001)
open("/tmp/ready", "w").close()
`

// Argv is the command of the bomb in a sandbox.
func (b *Bomb) Argv() []string { return []string{"python3", "-c", bombHead + b.Script} }

// Bombs are one of each kind that is known to have been thrown at shared sandboxes.
func Bombs() []Bomb {
	return []Bomb{
		{Name: "fork", Script: `
while True:
    try: os.fork()
    except OSError: limit()`},
		{Name: "memory", Needs: "memory", Script: `
while True:
    child = os.fork()
    if child == 0:
        held = []
        while True: held.append(b"\x01" * (1 << 20))
    os.waitpid(child, 0)
    limit()`},
		// Takes nearly all the memory that it may and then wants pages back that are on the disk:
		// without a limit of its own the kernel would swap out others for it, and here it thrashes
		// alone. Of a limit of 64 MiB.
		{Name: "swap", Needs: "memory", Script: `
import mmap
top, more = 48 << 20, 16 << 20
held = mmap.mmap(-1, top)
big = open("/tmp/pages", "wb+")
for i in range(more >> 20): big.write(b"\x01" * (1 << 20))
big.flush()
pages = mmap.mmap(big.fileno(), more)
while True:
    for i in range(0, top, 4096): held[i] = 1
    for i in range(0, more, 4096): pages[i]`},
		{Name: "io", Needs: "io", Script: `
import mmap
f = os.open("/tmp/io", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
block = mmap.mmap(-1, 64 << 10)
while True:
    for i in range(64): os.pwrite(f, block, i << 16)
    limit()`},
		{Name: "descriptors", Script: `
for i in range(4): os.fork()
held = []
while True:
    try: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: limit()`},
		{Name: "inodes", Unheld: true, Script: `
n = 0
while True:
    os.mkdir("/tmp/%d" % n)
    for i in range(100): os.close(os.open("/tmp/%d/%d" % (n, i), os.O_CREAT | os.O_WRONLY))
    n += 1`},
		{Name: "disk", Needs: "io", Unheld: true, Script: `
n = 0
while True:
    f = os.open("/tmp/disk", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for i in range(4): os.write(f, b"\x01" * (1 << 20))
    os.fsync(f)
    os.close(f)`},
		{Name: "log", Unheld: true, Script: `
while True: os.write(1, b"log " * 4096)`},
		{Name: "terminals", TTY: true, Script: `
held = []
while True:
    try: held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    except OSError: limit()
    os.write(1, b"\x07\x1b[2J\r" * 64)`},
		{Name: "pipes", Script: `
import fcntl
for i in range(4): os.fork()
held = []
while True:
    try:
        r, w = os.pipe()
        held += [r, w]
        os.set_blocking(w, False)
        fcntl.fcntl(w, 1031, 1 << 20)
    except OSError: limit()
    try:
        while True: os.write(w, b"x" * 65536)
    except OSError: pass`},
		// Ten times as often, and the interrupts take the machine, whatever holds the sandbox: see
		// SECURITY.md.
		{Name: "timers", Script: `
import ctypes, signal
libc = ctypes.CDLL(None)
for i in range(5): os.fork()
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
held = []
spec = (ctypes.c_long * 4)(0, 100000, 0, 100000)
while True:
    fd = libc.timerfd_create(1, 0)
    if fd < 0: limit()
    else: libc.timerfd_settime(fd, 0, spec, None)`},
		{Name: "inotify", Script: `
import ctypes
libc = ctypes.CDLL(None)
n = 0
while True:
    fd = libc.inotify_init()
    if fd < 0: limit()
    for d in ("/usr", "/tmp", "/etc", "/dev", "/proc"): libc.inotify_add_watch(fd, d.encode(), 0xfff)
    os.close(os.open("/tmp/touched%d" % (n % 100), os.O_CREAT | os.O_WRONLY))
    n += 1`},
		{Name: "zombies", Script: `
while True:
    try: child = os.fork()
    except OSError: limit(); continue
    if child == 0: os._exit(0)`},
		{Name: "output", Unheld: true, Script: `
os.fork()
while True:
    os.write(1, b"output " * 9000)
    os.write(2, b"error " * 9000)`},
	}
}

// Request is how the bomb is started: its deadline is all that ends it.
func (b *Bomb) Request(seconds float64) api.ExecRequest {
	return api.ExecRequest{Argv: b.Argv(), TTY: b.TTY, Timeout: seconds}
}

// Await waits until the bomb is about to begin, and reports whether it came to that before it
// ended. A result received from ended is put back. It asks for the file and runs no program: there
// may be no room for one.
func (b *Bomb) Await(t testing.TB, s *Sandbox, ended chan error) (begun bool) {
	t.Helper()
	Eventually(t, func() error {
		over := false
		select {
		case err := <-ended:
			ended <- err
			over = true
		default:
		}
		response, err := s.Get(t.Context(), "/tmp/ready")
		if err == nil {
			begun = true
			return response.Body.Close()
		}
		if over {
			return nil
		}
		return err
	})
	return begun
}
