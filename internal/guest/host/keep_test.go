package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/guest/guesttest"

	"github.com/sandboxd/sandboxd/internal/guest"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// memory is a sink of one file, without streams.
type memory struct {
	f    *os.File
	r, w *os.File
	some atomic.Bool   // it has taken something
	took chan struct{} // the pipe was empty, and no call uses the relay
}

func newMemory(t *testing.T, tty bool) *memory {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	m := &memory{f: os.NewFile(uintptr(fd), "test"), took: make(chan struct{}, 1)}
	t.Cleanup(func() { _ = m.f.Close() })
	if tty {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		m.r, m.w = os.NewFile(uintptr(p[0]), "relay"), os.NewFile(uintptr(p[1]), "relay")
		t.Cleanup(func() { _, _ = m.r.Close(), m.w.Close() })
	}
	return m
}

func (m *memory) Take(_ string, move func(int) (int, error)) (int, error) {
	n, err := move(int(m.f.Fd()))
	switch {
	case n > 0:
		m.some.Store(true)
	case m.some.Load():
		select {
		case m.took <- struct{}{}:
		default:
		}
	}
	return n, err
}

func (m *memory) Relay() (r, w *os.File) { return m.r, m.w }

func (m *memory) Followed() bool { return false }

// read returns everything that has been taken: up to the file's offset, which must be its size.
func (m *memory) read(t *testing.T) string {
	t.Helper()
	n, err := unix.Seek(int(m.f.Fd()), 0, unix.SEEK_CUR)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := m.f.Stat(); err != nil || fi.Size() != n {
		t.Errorf("offset %d, %v, %v", n, fi, err)
	}
	b := make([]byte, n)
	if _, err := m.f.ReadAt(b, 0); err != nil && n > 0 {
		t.Fatal(err)
	}
	return string(b)
}

// An exec that is kept goes from one holder to the next; both the output and the exit that came in
// between are there.
func TestKeptExecIsAdopted(t *testing.T) {
	s := startInit(t)
	for _, tty := range []bool{false, true} {
		t.Run(fmt.Sprint("tty=", tty), func(t *testing.T) {
			r := ExecRequest{Argv: []string{"sh", "-c", "echo first; read x; echo second $x; exit 7"}, Env: testEnv, TTY: tty, Keep: true, Timeout: time.Minute}
			e, err := s.Exec(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			m := newMemory(t, tty)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := e.Spool(ctx, m)
				ended <- err
			}()
			<-m.took
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			// The launcher's part: copies, while the first holder's are closed.
			k := e.Kept()
			copies := Kept{Conn: again(t, k.Conn), Stdin: again(t, k.Stdin), Stdout: again(t, k.Stdout), Stderr: again(t, k.Stderr)}
			_ = e.Close()
			in := copies.Stdin
			if tty {
				in = copies.Stdout
			}
			if _, err := in.WriteString("x\n"); err != nil {
				t.Fatal(err)
			}
			// Until it has ended, without a client.
			guesttest.WaitFor(t, func() bool { return s.processes(t) == 0 })
			e, err = s.Adopt(copies, r, e.PID, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = e.Close() }()
			exit, err := e.Spool(t.Context(), m)
			if err != nil || exit.Code != 7 {
				t.Errorf("%+v, %v", exit, err)
			}
			got := strings.ReplaceAll(m.read(t), "\r", "")
			if got = strings.ReplaceAll(got, "x\nsecond", "second"); got != "first\nsecond x\n" {
				t.Errorf("%q", m.read(t))
			}
			// The exit is still there for the next one.
			pkt, _, err := e.conn.peek()
			if err != nil || pkt.Kind != guest.KindExited {
				t.Errorf("%+v, %v", pkt, err)
			}
		})
	}
}

// Waiting for the first output takes none of it, ends with the context and the process, and can be
// done again.
func TestOutputIsAwaited(t *testing.T) {
	s := startInit(t)
	start := func(script string) *Exec {
		e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", script}, Env: testEnv, Keep: true, Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		return e
	}
	e := start("read x; echo $x; read x; exit 7")
	ctx, cancel := context.WithCancel(t.Context())
	awaited := make(chan error, 1)
	go func() { awaited <- e.AwaitOutput(ctx) }()
	cancel()
	if err := <-awaited; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := e.Write([]byte("first\n")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := e.AwaitOutput(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if e.Reported() {
		t.Error("it has ended")
	}
	if _, err := e.Write([]byte("second\n")); err != nil {
		t.Fatal(err)
	}
	guesttest.WaitFor(t, e.Reported)
	m := newMemory(t, false)
	if exit, err := e.Spool(t.Context(), m); err != nil || exit.Code != 7 || m.read(t) != "first\n" {
		t.Errorf("%+v, %v", exit, err)
	}
	if err := start("exit 3").AwaitOutput(t.Context()); err == nil {
		t.Error("a process without output had some")
	}
}

// A terminal's output that comes byte by byte, as the echo of a person's keys does, is taken to its
// end.
func TestKeptTerminalsSingleBytesAreTaken(t *testing.T) {
	s := startInit(t)
	const script = "stty raw -echo; for i in 1 2 3 4; do printf $i; head -c 1 >/dev/null; done; printf 5"
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", script}, Env: testEnv, TTY: true, Keep: true, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	m := newMemory(t, true)
	ended := make(chan error, 1)
	go func() {
		exit, err := e.Spool(t.Context(), m)
		if exit.Code != 0 {
			err = fmt.Errorf("%+v, %w", exit, err)
		}
		ended <- err
	}()
	for i := range 4 {
		guesttest.WaitFor(t, func() bool {
			fi, err := m.f.Stat()
			return err != nil || fi.Size() > int64(i)
		})
		if _, err := e.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got := m.read(t); got != "12345" {
		t.Errorf("%q", got)
	}
}

// A hostile init has made the master blocking and taken the input, or keeps writes from being read.
// Reads and writes that are held then are abandoned with their exec, and no call waits for them.
func TestHeldTerminalDelaysNoCall(t *testing.T) {
	s := startInit(t)
	r := ExecRequest{Argv: []string{"sh", "-c", "stty raw -echo; echo; sleep 600"}, Env: testEnv, TTY: true, Keep: true}
	e, err := s.Exec(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	m := newMemory(t, true)
	ctx, cancel := context.WithCancel(t.Context())
	spooled := make(chan error, 1)
	go func() {
		_, err := e.Spool(ctx, m)
		spooled <- err
	}()
	<-m.took
	hold := again(t, e.Stdout) // in reality init's
	defer func() { _ = hold.Close() }()
	if err := unix.SetNonblock(int(hold.Fd()), false); err != nil {
		t.Fatal(err)
	}
	entered := make(chan struct{}, 2)
	ended := make(chan error, 2)
	go func() {
		_, err := e.relay(m, func(int) bool { entered <- struct{}{}; return true }, 1)
		ended <- err
	}()
	go func() {
		entered <- struct{}{}
		_, err := e.Write(make([]byte, 1<<20))
		ended <- err
	}()
	<-entered
	<-entered
	cancel()
	for _, c := range []chan error{spooled, ended, ended} {
		select {
		case err := <-c:
			if !errors.Is(err, context.Canceled) && !errors.Is(err, errHeld) {
				t.Error(err)
			}
		case <-time.After(testenv.HungAfter):
			t.Fatal("the terminal holds somebody")
		}
	}
	closed := make(chan struct{})
	go func() {
		_, _, _ = m.r.Close(), m.w.Close(), e.Close() // which ends the program
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(testenv.HungAfter):
		t.Fatal("the terminal holds who closes it")
	}
	_ = s.cmd.Process.Kill()
	guesttest.WaitFor(t, func() bool { return !held(s) })
}

// A sandbox whose init holds terminals occupies no more of the daemon's threads than its share, and
// gives them back.
func TestHeldTerminalsAreBounded(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sleep", "600"}, Env: testEnv, TTY: true})
	if err != nil {
		t.Fatal(err)
	}
	hold := again(t, e.Stdout) // in reality init's
	defer func() { _ = hold.Close() }()
	if err := unix.SetNonblock(int(hold.Fd()), false); err != nil {
		t.Fatal(err)
	}
	const all = 3 * maxTerminalOps
	entered, ended := make(chan struct{}, all), make(chan error, all)
	for range all {
		go func() {
			_, err := e.abandonable(func(own []int) (int, error) {
				entered <- struct{}{}
				return unix.Read(own[0], make([]byte, 1))
			})
			ended <- err
		}()
	}
	for range maxTerminalOps {
		<-entered
	}
	e.abandon()
	for range all {
		if err := <-ended; !errors.Is(err, errHeld) {
			t.Error(err)
		}
	}
	if n := len(entered); n != 0 {
		t.Errorf("%d more are held than may be", n)
	}
	_ = e.Close() // with which the program ends, and so the terminal
	guesttest.WaitFor(t, func() bool { return !held(s) })
}

// held reports whether reads or writes of the sandbox's terminals are under way.
func held(s *sandbox) bool {
	terminals.mu.Lock()
	defer terminals.mu.Unlock()
	return terminals.of[s.path] != nil
}

func again(t *testing.T, f *os.File) *os.File {
	t.Helper()
	if f == nil {
		return nil
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// However output comes, and whatever process holds the pipe open, all output up to the exit is
// taken.
func TestSpoolTakesEverything(t *testing.T) {
	s := startInit(t)
	want := strings.Repeat("0123456789abcdef\n", 20000)
	for name, script := range map[string]string{
		"much":        "head -c %d <$0",
		"left behind": "head -c %d <$0; sleep 600 & exit 0",
	} {
		t.Run(name, func(t *testing.T) {
			file := t.TempDir() + "/data"
			if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
			e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", fmt.Sprintf(script, len(want)), file}, Env: testEnv, Keep: true, NoStdin: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = e.Close() }()
			m := newMemory(t, false)
			exit, err := e.Spool(t.Context(), m)
			if err != nil || exit.Code != 0 {
				t.Errorf("%+v, %v", exit, err)
			}
			if got := m.read(t); got != want {
				t.Errorf("%d bytes of %d", len(got), len(want))
			}
		})
	}
}

func TestProcessesAreListed(t *testing.T) {
	s := startInit(t)
	if list, err := s.Processes(t.Context()); err != nil || len(list) != 0 {
		t.Fatalf("%+v, %v", list, err)
	}
	long := strings.Repeat("x", 8000)
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "setsid sleep 600 & echo; wait", long, "\xff a"}, Env: testEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	var b [1]byte
	if _, err := e.Stdout.Read(b[:]); err != nil {
		t.Fatal(err)
	}
	var list []Process
	guesttest.WaitFor(t, func() bool {
		if list, err = s.Processes(t.Context()); err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(list, func(a, b Process) int { return a.PID - b.PID })
		return len(list) == 2 && len(list[1].Argv) > 0 && list[1].Argv[0] == "sleep" && list[1].State == "S"
	})
	sh, sleep := list[0], list[1]
	if sh.PID != e.PID || sh.PPID != 1 || sh.Main != e.PID || sh.Name != "sh" || !sh.Cut || sh.Argv[1] != "-c" || sh.RSS == 0 || sh.Age < 0 || sh.Age > time.Minute {
		t.Errorf("%+v", sh)
	}
	if sleep.Main != e.PID || sleep.State != "S" || sleep.Cut || len(sleep.Argv) != 2 {
		t.Errorf("%+v", sleep)
	}
}

// The process that has a socket is found, with its exec, also where it has left its parent. A
// socket of no process, and init's own, is of none.
func TestHolder(t *testing.T) {
	s := startInit(t)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	number := func(f *os.File) uint32 {
		t.Helper()
		fi, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return uint32(fi.Sys().(*syscall.Stat_t).Ino)
	}
	e, err := s.Exec(t.Context(), ExecRequest{Argv: []string{"sh", "-c", "exec 3<&0 </dev/null; (setsid sleep 600 & ) 4<&3 3<&-; exec 3<&-; echo; sleep 600"}, Env: testEnv, StdinFile: theirs})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	var b [1]byte
	if _, err := e.Stdout.Read(b[:]); err != nil { // the shell has closed its own
		t.Fatal(err)
	}
	var p Process
	guesttest.WaitFor(t, func() bool {
		if p, err = s.Holder(t.Context(), number(theirs)); err != nil {
			t.Fatal(err)
		}
		return p.Name == "sleep" && len(p.Argv) > 0 // execve gives a program its name before its arguments
	})
	if p.Main != e.PID || p.PID == e.PID || p.PPID != 1 || len(p.Argv) != 2 {
		t.Errorf("%+v", p)
	}
	for _, of := range []uint32{number(ours), 0} {
		if p, err := s.Holder(t.Context(), of); !refusedWith(err, unix.ESRCH) {
			t.Errorf("%+v, %v", p, err)
		}
	}
}

func refusedWith(err error, errno syscall.Errno) bool {
	refusal, ok := errors.AsType[*guest.Error](err)
	return ok && refusal.Errno == errno
}

func TestHostileHolder(t *testing.T) {
	for name, packet := range map[string]string{
		"a listing": "listing {}", "init": `process {"pid":1,"ppid":1,"uid":0,"state":"S","age":1,"cpu":1,"rss":1,"name":"x"}`,
		"a long name": `process {"pid":7,"ppid":1,"uid":0,"state":"S","age":1,"cpu":1,"rss":1,"name":"` + strings.Repeat("x", 257) + `"}`,
	} {
		c := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte(packet)) })
		if p, err := c.Holder(t.Context(), 7); !errors.Is(err, ErrLost) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

func TestHostileListing(t *testing.T) {
	const good = `process {"pid":7,"ppid":1,"uid":0,"state":"S","age":1,"cpu":1,"rss":1,"name":"x"}` + "\x00x"
	for name, packets := range map[string][]string{
		"nothing":       {},
		"no end":        {"listing {}", good},
		"not a listing": {"done {}"},
		"init":          {"listing {}", strings.Replace(good, `"pid":7`, `"pid":1`, 1), "done {}"},
		"state":         {"listing {}", strings.Replace(good, `"S"`, `"SS"`, 1), "done {}"},
		"negative age":  {"listing {}", strings.Replace(good, `"age":1`, `"age":-1`, 1), "done {}"},
		"huge rss":      {"listing {}", strings.Replace(good, `"rss":1`, `"rss":9223372036854775807`, 1), "done {}"},
		"long argument": {"listing {}", good + strings.Repeat("x", guest.MaxProcessArgs+1), "done {}"},
		"unknown field": {"listing {}", strings.Replace(good, `"uid"`, `"gid"`, 1), "done {}"},
		"another kind":  {"listing {}", good, "exited {}"},
		"too many":      append([]string{"listing {}"}, slices.Repeat([]string{good}, guest.MaxProcesses+1)...),
	} {
		t.Run(name, func(t *testing.T) {
			c := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) {
				for _, p := range packets {
					if c.Send([]byte(p)) != nil {
						return
					}
				}
			})
			if list, err := c.Processes(t.Context()); !errors.Is(err, ErrLost) {
				t.Errorf("%d, %v", len(list), err)
			}
		})
	}
	// Arguments within the bounds of each process, but not of all, are cut.
	c := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) {
		_ = c.Send([]byte("listing {}"))
		for range guest.MaxProcesses {
			if c.Send([]byte(good+strings.Repeat("x", guest.MaxProcessArgs-2))) != nil {
				return
			}
		}
		_ = c.Send([]byte("done {}"))
	})
	list, err := c.Processes(t.Context())
	if err != nil || len(list) != guest.MaxProcesses || list[0].Cut || list[guest.MaxProcesses-1].Argv != nil || !list[guest.MaxProcesses-1].Cut {
		t.Errorf("%d, %v", len(list), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	silent := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) { _ = c.Send([]byte("listing {}")); c.await() })
	if _, err := silent.Processes(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// Limits are in force before the program's first instruction, and one that cannot be set is an
// error.
func TestLimits(t *testing.T) {
	s := startInit(t)
	limited := func(argv []string, limits ...guest.Rlimit) (string, ExecExit, error) {
		out, _, exit, err := s.run(t, ExecRequest{Argv: argv, Env: testEnv, Limits: limits})
		return out, exit, err
	}
	nofile := guest.Rlimit{Resource: unix.RLIMIT_NOFILE, Value: 64}
	if out, exit, err := limited([]string{"sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -Hc"}, nofile, guest.Rlimit{Resource: unix.RLIMIT_CORE, Value: 0}); err != nil || exit.Code != 0 || out != "64\n64\n0\n" {
		t.Errorf("%q, %+v, %v", out, exit, err)
	}
	if out, exit, err := limited([]string{"sh", "-c", "ulimit -Sn; ulimit -Hn"}, guest.Rlimit{Resource: unix.RLIMIT_NOFILE, Value: 64, Soft: new(uint64(32))}); err != nil || exit.Code != 0 || out != "32\n64\n" {
		t.Errorf("%q, %+v, %v", out, exit, err)
	}
	for name, tc := range map[string]struct {
		argv  []string
		limit guest.Rlimit
		stage guest.Stage
		errno syscall.Errno
	}{
		"too high":    {[]string{"true"}, guest.Rlimit{Resource: unix.RLIMIT_NOFILE, Value: 1 << 40}, guest.StageLimit, unix.EPERM},
		"no resource": {[]string{"true"}, guest.Rlimit{Resource: 99, Value: 1}, guest.StageLimit, unix.EINVAL},
		"no program":  {[]string{"no-such-program"}, nofile, guest.StageLookup, unix.ENOENT},
	} {
		_, _, err := limited(tc.argv, tc.limit)
		if e, ok := errors.AsType[*guest.Error](err); !ok || e.Stage != tc.stage || e.Errno != tc.errno {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := s.processes(t); n != 0 {
		t.Errorf("%d processes are left", n)
	}
	for range 20 { // the reaper and the shim do not get in each other's way
		if _, exit, err := limited([]string{"sh", "-c", "exit 3"}, nofile); err != nil || exit.Code != 3 {
			t.Fatalf("%+v, %v", exit, err)
		}
	}
}

// A client that leaves a program on a terminal has all output until then, and the next holder has
// all that follows, with the exit.
func TestLeftExecLosesNothing(t *testing.T) {
	s := startInit(t)
	e, err := s.Exec(t.Context(), ExecRequest{
		Argv: []string{"sh", "-c", "i=0; while [ $i -lt 5000 ]; do echo $i; i=$((i+1)); done; exit 7"}, Env: testEnv, TTY: true, Keep: true, Timeout: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var before strings.Builder
	_, err = e.Stream(ctx, func(_ string, p []byte) error {
		before.Write(p)
		cancel(ErrLeft)
		return nil
	})
	if !errors.Is(err, ErrLeft) {
		t.Fatal(err)
	}
	next, err := e.Leave()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Close() }()
	_ = e.Close() // changes nothing for the next holder
	m := newMemory(t, true)
	exit, err := next.Spool(t.Context(), m)
	if err != nil || exit.Code != 7 {
		t.Errorf("%+v, %v", exit, err)
	}
	var want strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&want, "%d\r\n", i)
	}
	if got := before.String() + m.read(t); got != want.String() {
		t.Errorf("%d bytes before and %d after, want %d", before.Len(), len(m.read(t)), want.Len())
	}
}
