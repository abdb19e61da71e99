package security

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A thing is one that the kernel counts for the daemon's user over all that he runs.
type thing struct {
	name string
	take string       // an expression in Python that takes one more, where libc is the C library and n the number that there are
	most int          // how many the kernel gives the user
	one  int          // how many of them one user of a sandbox gets at most
	host func() error // takes one as a program of the user's, to the end of the test
}

// taking has users of a sandbox, one after the other, take of a thing until they are refused more;
// it says how many each has got, and keeps them until it is ended.
const taking = `
import ctypes, os, time
libc = ctypes.CDLL(None)
def take(say):
    n = 0
    while %s: n += 1
    os.write(say, b"%%d\n" %% n)
    time.sleep(3600)
taken = []
for user in range(%d):
    r, w = os.pipe()
    if os.fork() == 0:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        take(w)
    os.close(w)
    taken.append(os.read(r, 16).decode().strip())
open("/tmp/said", "w").write(" ".join(taken))
os.rename("/tmp/said", "/tmp/taken")
time.sleep(3600)`

// One user of a sandbox gets at most a quarter of the kernel's allowance of inotify, POSIX timers
// and message queues for the daemon's user. All sandboxes together get at most half: a neighbour,
// the files that the API watches, and that user's other programs have theirs.
func TestWhatUsersShareIsLeftToOthers(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	neighbour := d.Create(t, api.CreateSandbox{})
	// The ceilings stand there, and no root of a sandbox changes them.
	instances := sysctl(t, "fs/inotify/max_user_instances")
	for name, host := range map[string]int{"instances": instances, "watches": sysctl(t, "fs/inotify/max_user_watches")} {
		file := "/proc/sys/user/max_inotify_" + name
		if got, want := neighbour.Sh(t, "cat "+file), fmt.Sprintln(host/4); got != want {
			t.Errorf("a user of a sandbox has %q of %s, want %q", got, name, want)
		}
		if got := neighbour.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "echo 1000000 >" + file}}); got.Exit.Code == 0 {
			t.Errorf("a sandbox gives itself more %s", name)
		}
	}
	const queue = `libc.mq_open(b"/%d-%d" % (os.getuid(), n), os.O_CREAT | os.O_RDWR, 0o600, None) >= 0`
	signals, bytes := limit(t, unix.RLIMIT_SIGPENDING), limit(t, unix.RLIMIT_MSGQUEUE)
	for _, thing := range []thing{
		{"inotify", "libc.inotify_init() >= 0", instances, instances / 4, func() error {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			if err == nil {
				t.Cleanup(func() { _ = unix.Close(fd) })
			}
			return err
		}},
		{"timers", "libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0", signals, min(signals/4, 1024), func() error {
			var id int32
			if _, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(&id))); errno != 0 {
				return errno
			}
			t.Cleanup(func() { _, _, _ = unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(id), 0, 0) })
			return nil
		}},
		// A queue of the default size takes 80 KiB and something for each of its ten messages.
		{"queues", queue, bytes / (80 << 10), bytes / 4 / (80 << 10), func() error {
			name := append([]byte("sandboxd-test-"+strconv.Itoa(os.Getpid())), 0)
			const flags = unix.O_CREAT | unix.O_RDWR | unix.O_CLOEXEC
			fd, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(&name[0])), flags, 0o600, 0, 0, 0)
			if errno != 0 {
				return errno
			}
			t.Cleanup(func() { _ = unix.Close(int(fd)) })
			// It counts until it is closed. The next is another one.
			if _, _, errno := unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&name[0])), 0, 0); errno != 0 {
				return errno
			}
			return nil
		}},
	} {
		for _, users := range []int{1, 8} {
			t.Run(fmt.Sprintf("%s by %d", thing.name, users), func(t *testing.T) {
				taken, end := take(t, d, api.CreateSandbox{}, thing.take, users)
				defer end()
				t.Logf("of %d they get %v", thing.most, taken)
				sum := 0
				for _, n := range taken {
					sum += n
					if n > thing.one {
						t.Errorf("one gets %d of %d", n, thing.most)
					}
				}
				if sum == 0 || sum > thing.most/2 {
					t.Errorf("all of them get %d of %d", sum, thing.most)
				}
				if err := thing.host(); err != nil {
					t.Errorf("another program of the daemon's user: %v", err)
				}
				if users > 1 {
					return
				}
				one := "import ctypes, os; libc = ctypes.CDLL(None); n = 0; print(" + thing.take + ")"
				if got := neighbour.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", one}}); got.Stdout != "True\n" {
					t.Errorf("a neighbour: %+v", got)
				}
				c := client.New(d.Socket)
				defer c.Close()
				ready := errors.New("ready")
				err := c.WatchFiles(t.Context(), neighbour.ID, "/tmp", false, func(api.FileChange) error { return ready })
				if !errors.Is(err, ready) {
					t.Errorf("a watch of a neighbour's files: %v", err)
				}
			})
		}
	}
}

// All sandboxes together have no more than half of the processes that the kernel gives the
// daemon's user: he, the daemon and its launcher go on starting theirs, whatever one sandbox may
// have by its own limit.
func TestProcessesAreLeftToTheDaemonsUser(t *testing.T) {
	testenv.RequireUserNS(t)
	// What he runs besides, and of the other tests there may be more where there are more processors,
	// takes a part of his half and no more.
	most := 2000 + 2*harness.Threads(t)
	d := harness.Start(t, harness.Options{Processes: most})
	before := d.Create(t, api.CreateSandbox{})
	const thread = "libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sleep, ctypes.c_void_p(3600)) == 0"
	taken, end := take(t, d, api.CreateSandbox{Limits: api.Limits{Pids: int64(most)}}, thread, 1)
	if taken[0] < most/4 || taken[0] > most/2 {
		t.Errorf("a sandbox gets %d of %d", taken[0], most)
	}
	const forks = "for i in 1 2 3 4 5 6 7 8 9; do /bin/true || exit 1; done"
	if out, err := exec.Command("prlimit", fmt.Sprintf("--nproc=%d:", most), "--", "sh", "-c", forks).CombinedOutput(); err != nil {
		t.Errorf("another program of the daemon's user: %v\n%s", err, out)
	}
	before.Delete(t) // by a launcher that needs threads for it
	end()
	after := d.Create(t, api.CreateSandbox{})
	if got := after.Sh(t, "echo ok"); got != "ok\n" {
		t.Errorf("a sandbox made afterwards says %q", got)
	}
	after.Delete(t)
}

// filling takes every thread that it can get, and says how many: at first, and for each line that
// it reads. Before that it lets one go, or takes what others have let go of meanwhile where the
// line says so.
const filling = `
import ctypes, os, sys
libc = ctypes.CDLL(None)
held = ctypes.create_string_buffer(64)
libc.sem_init(held, 0, 0)
def threads(): return len(os.listdir("/proc/self/task"))
def fill():
    while libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sem_wait, held) == 0: pass
fill()
print(threads(), flush=True)
for line in sys.stdin:
    n = threads()
    if line == "fill\n": fill()
    else:
        libc.sem_post(held)
        while threads() == n: os.sched_yield()
    print(threads(), flush=True)`

// If all sandboxes together have as many processes as they may, a request for one more, a sandbox
// or a program, is refused with a hint, whichever process of the start gets none. All is well when
// there is room again.
func TestWantOfProcessesIsTold(t *testing.T) {
	testenv.RequireUserNS(t)
	most := 2000 + 2*harness.Threads(t) // as above: what runs besides leaves most of the half
	d := harness.Start(t, harness.Options{Processes: most})
	c := client.New(d.Socket)
	defer c.Close()
	before := d.Create(t, api.CreateSandbox{})
	full := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: int64(most)}})
	exec, err := c.Detach(t.Context(), full.ID, api.ExecRequest{Argv: []string{"python3", "-c", filling}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	counts, attached := make(chan string, 100), make(chan error, 1)
	go func() {
		_, err := c.AttachStream(t.Context(), full.ID, exec.ID, 0, func(e api.ExecEvent) error {
			for line := range strings.Lines(e.Text) {
				counts <- strings.TrimSpace(line)
			}
			return nil
		})
		attached <- err
	}()
	wait := func() string {
		t.Helper()
		select {
		case n := <-counts:
			return n
		case err := <-attached:
			t.Fatalf("it has ended: %v", err)
		case <-time.After(testenv.HungAfter):
			t.Fatal("it says nothing")
		}
		return ""
	}
	t.Logf("it has %s threads", wait())
	told := func(what string, err error) {
		t.Helper()
		p, ok := errors.AsType[*api.Problem](err)
		if !ok || p.Code != api.CodeConflict || !strings.Contains(p.Hint, "ulimit -u") {
			t.Errorf("%s: %+v", what, err)
		}
	}
	ask := func(line string) {
		t.Helper()
		if err := c.WriteStdin(t.Context(), full.ID, exec.ID, strings.NewReader(line), false); err != nil {
			t.Fatal(err)
		}
		wait()
	}
	program := api.ExecRequest{Argv: []string{"true"}}
	// What tests beside this one let go of counts as well, and leaves room that was not there a
	// moment ago.
	harness.Eventually(t, func() error {
		if _, err := before.TryExec(t.Context(), program); err != nil {
			told("a program in another sandbox", err)
			return nil
		}
		ask("fill\n")
		return errors.New("nothing is refused")
	})
	harness.Eventually(t, func() error {
		refused := 0
		for {
			created, err := d.TryCreate(t.Context(), api.CreateSandbox{})
			if err == nil {
				_, err = created.TryExec(t.Context(), program)
				created.Delete(t)
			}
			if err == nil {
				break
			}
			told(fmt.Sprintf("a sandbox, with %d places", refused), err)
			ask("\n")
			if refused++; refused > 256 {
				t.Fatalf("%d were refused", refused)
			}
		}
		if refused == 0 {
			ask("fill\n")
			return errors.New("nothing is refused")
		}
		return nil
	})
	if _, err := before.TryExec(t.Context(), program); err != nil {
		t.Errorf("a program in another sandbox, where there is room again: %v", err)
	}
	full.Delete(t)
	t.Logf("its program ended with it: %v", <-attached)
}

// take is what so many users of a new sandbox get, which they keep until end.
func take(t *testing.T, d *harness.Daemon, of api.CreateSandbox, expression string, users int) (taken []int, end func()) {
	t.Helper()
	s := d.Create(t, of)
	ended := make(chan string, 1)
	go func() {
		script := fmt.Sprintf(taking, expression, users)
		result, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"python3", "-c", script}, Timeout: 600})
		ended <- fmt.Sprintf("they have ended: %+v, %v", result, err)
	}()
	harness.Eventually(t, func() error {
		select {
		case how := <-ended:
			t.Fatal(how)
		default:
		}
		response, err := s.Get(t.Context(), "/tmp/taken") // it may be that no program can be started any more
		if err != nil {
			return fmt.Errorf("not all of them have taken theirs: %w", err)
		}
		defer response.Body.Close()
		got, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		for word := range strings.FieldsSeq(string(got)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			taken = append(taken, n)
		}
		return nil
	})
	return taken, func() {
		s.Delete(t)
		<-ended
	}
}

func sysctl(t *testing.T, name string) int {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// limit is a resource limit of this program's, and so of the daemon that it starts.
func limit(t *testing.T, resource int) int {
	t.Helper()
	var own unix.Rlimit
	if err := unix.Getrlimit(resource, &own); err != nil {
		t.Fatal(err)
	}
	return int(min(own.Cur, math.MaxInt32))
}
