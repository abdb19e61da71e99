package attack

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// envTerminal makes this binary a program of a terminal that tries the control of an attack on
// terminals.
const envTerminal = "ATTACK_TEST_TERMINAL"

func TestMain(m *testing.M) {
	if code, handled := Main(os.Args[1:]); handled {
		os.Exit(code)
	}
	if os.Getenv(envTerminal) != "" {
		all, err := Controls(context.Background(), "/proc/self/exe", "vhangup")
		fmt.Fprintln(os.Stderr, all["vhangup"].Worked, all["vhangup"].Found, err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A control that works does so to itself. As root one hung up the terminal of whoever ran
// `sandboxd doctor --attack`, and ended it.
func TestControlsLeaveTheTerminalAlone(t *testing.T) {
	testenv.RequireUserNS(t)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close() // nothing is written
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close() // nothing is written
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), envTerminal+"=yes")
	cmd.Stdin, cmd.Stderr = slave, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Run(); err != nil {
		t.Fatalf("who tried the control ended with it: %v %s", err, &said)
	}
	if worked := strings.HasPrefix(said.String(), "true"); worked != (os.Geteuid() == 0) {
		t.Errorf("as uid %d the control said: %s", os.Geteuid(), &said)
	}
}

func TestCorpusIsWellFormed(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9-]+$`)
	seen := make(map[string]bool)
	for _, a := range append(Corpus(), Egress()...) {
		if !name.MatchString(a.Name) || seen[a.Name] || a.Layer == "" || a.try == nil {
			t.Errorf("%q: no name, there twice, or incomplete", a.Name)
		}
		seen[a.Name] = true
	}
}

func TestMainLeavesOtherArgumentsAlone(t *testing.T) {
	for _, args := range [][]string{nil, {"run"}, {"attack"}, {"run", "attack", "try"}} {
		if _, handled := Main(args); handled {
			t.Errorf("%q was taken", args)
		}
	}
	if code, handled := Main([]string{"attack", "try", "nothing"}); !handled || code != 2 {
		t.Errorf("an attack that is not there: %d, %v", code, handled)
	}
}

func TestResultsAreDecoded(t *testing.T) {
	text, err := json.Marshal(Result{Attack: "x", Worked: true})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := Decode(string(text) + "\n"); err != nil || !r.Worked || r.Attack != "x" {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []string{"", "worked", `{"attack":"x","detail":"control cannot mount /proc: no"}`} {
		if _, err := Decode(bad); err == nil {
			t.Errorf("%q was taken for a result", bad)
		}
	}
}

// The numbers are the kernel's, as golang.org/x/sys/unix has them.
func TestCallsAreThoseOfTheKernel(t *testing.T) {
	if n := len(callTable()); n < 300 {
		t.Fatalf("%d names", n)
	}
	for number, want := range map[int]string{
		unix.SYS_READ: "read", unix.SYS_OPENAT: "openat", unix.SYS_MOUNT: "mount", unix.SYS_CLONE3: "clone3", unix.SYS_RSEQ: "rseq",
		unix.SYS_SOCKET: "socket", unix.SYS_NEWFSTATAT: "newfstatat", unix.SYS_IO_URING_SETUP: "io_uring_setup", unix.SYS_MSEAL: "mseal",
		maxCall: "",
	} {
		if got := CallName(number); got != want {
			t.Errorf("%d is %q, want %q", number, got, want)
		}
	}
}

// The calls and attacks named for Docker exist.
func TestDockersFactsAreAboutThisCorpus(t *testing.T) {
	calls := DockerCalls("amd64")
	if len(calls) < 300 || !slices.IsSorted(calls) || !slices.Contains(calls, "read") || slices.Contains(calls, "mount") {
		t.Errorf("%d calls: %v", len(calls), calls)
	}
	if got := DockerCalls("arm64"); got != nil {
		t.Errorf("of arm64: %v", got)
	}
	all := Corpus()
	for _, name := range DockerFeatures() {
		if !slices.ContainsFunc(all, func(a Attack) bool { return a.Name == name }) && goruntime.GOARCH == "amd64" {
			t.Errorf("%s is no attack", name)
		}
	}
}

// The list agrees with its source, if the module cache has that source.
func TestDockersCallsAreThoseOfItsProfile(t *testing.T) {
	module, version, _ := strings.Cut(DockerSource, " ")
	cache, err := exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Skipf("no Go here: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(cache)), module+"@"+version, "default.json"))
	if err != nil {
		t.Skipf("its source is not in the module cache: %v", err)
	}
	type conditions struct{ Caps, Arches []string }
	var profile struct {
		Syscalls []struct {
			Names              []string
			Action             string
			Includes, Excludes conditions
		}
	}
	if err := json.Unmarshal(text, &profile); err != nil {
		t.Fatal(err)
	}
	has := func(given []string, want ...string) bool {
		return slices.ContainsFunc(want, func(w string) bool { return slices.Contains(given, w) })
	}
	known := slices.Collect(maps.Values(callTable()))
	var want []string
	for _, rule := range profile.Syscalls {
		// Of the capabilities that rules ask for, Docker gives but this one.
		if rule.Action != "SCMP_ACT_ALLOW" || len(rule.Includes.Caps) > 0 && !has(rule.Includes.Caps, "CAP_SYS_CHROOT") ||
			len(rule.Includes.Arches) > 0 && !has(rule.Includes.Arches, "amd64") {
			continue
		}
		for _, name := range rule.Names {
			if slices.Contains(known, name) {
				want = append(want, name)
			}
		}
	}
	slices.Sort(want)
	if diff := cmp.Diff(slices.Compact(want), DockerCalls("amd64")); diff != "" && goruntime.GOARCH == "amd64" {
		t.Error(diff)
	}
}

func TestMeasuredIsJudged(t *testing.T) {
	plan := &specs.LinuxSeccomp{
		DefaultAction: specs.ActErrno, DefaultErrnoRet: new(uint(38)),
		Syscalls: []specs.LinuxSyscall{{Names: []string{"read", "write", "mseal", "close", "sync"}, Action: specs.ActAllow}},
	}
	numbers := make(map[string]int)
	for n, name := range callTable() {
		numbers[name] = n
	}
	m := Measured{Answers: map[int]string{
		numbers["read"]: "EBADF", numbers["write"]: Reached, numbers["mseal"]: "ENOSYS", numbers["close"]: Killed,
		numbers["mount"]: "ENOSYS", numbers["bpf"]: "EPERM", numbers["sync"]: NotMade,
	}}
	want := Judged{
		Reached: []string{"read", "write"}, Unclear: []string{"mseal", "sync"},
		Wrong: []string{"bpf answers EPERM, planned was ENOSYS", "close is allowed, and kills"},
	}
	got := m.Judge(plan)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"mseal", "read", "sync", "write"}, got.Open()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"open"}, Beyond([]string{"open", "read", "uretprobe"}, []string{"read"})); diff != "" {
		t.Error(diff)
	}
}

// Every call has its answer, those that are not made too, while others are just being answered.
func TestEveryCallHasItsAnswer(t *testing.T) {
	m, err := measure(func(number int) (string, error) {
		goruntime.Gosched() // so that several are under way
		return strconv.Itoa(number), nil
	})
	if err != nil || len(m.Answers) != maxCall+1 {
		t.Fatalf("%d answers, %v", len(m.Answers), err)
	}
	names := callTable()
	for number, got := range m.Answers {
		want := strconv.Itoa(number)
		if notMade(names[number]) {
			want = NotMade
		}
		if got != want {
			t.Errorf("call %d: %q, want %q", number, got, want)
		}
	}
	failed := errors.New("it has not come to it")
	if _, err := measure(func(number int) (string, error) {
		if number == maxCall {
			return "", failed
		}
		return "", nil
	}); !errors.Is(err, failed) || !strings.Contains(err.Error(), strconv.Itoa(maxCall)) {
		t.Errorf("%v, want that of the last call", err)
	}
}

// shell starts a script, as called starts a child.
func shell(t *testing.T, script string, files ...*os.File) func() (int, error) {
	t.Helper()
	path, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	return func() (int, error) {
		p, err := os.StartProcess(path, []string{"sh", "-c", script}, &os.ProcAttr{Files: files, Sys: &syscall.SysProcAttr{Setpgid: true}})
		if err != nil {
			return 0, err
		}
		return p.Pid, nil
	}
}

// A child's child, which a fork leaves behind, does not outlive it.
func TestChildrenOfACallEndWithIt(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close() // only read
	state := callBegun
	_, err = called(time.Minute, &state, shell(t, "sleep 3600 &", nil, w))
	_ = w.Close() // nothing is written
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetReadDeadline(time.Now().Add(testenv.HungAfter)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("it lives on, and has the pipe open: %v", err)
	}
}

// A call is judged by what comes after the child has come to it: how long that took, and whether it
// did, says nothing about the call.
func TestTimeOfACallBeginsWithIt(t *testing.T) {
	late := strconv.FormatFloat((callTimeout + time.Second).Seconds(), 'f', -1, 64)
	denied := callBegun + 1 + callState(unix.EPERM)
	var wg sync.WaitGroup
	for _, tc := range []struct {
		script string
		state  callState // once it reads of its own end
		come   time.Duration
		want   string
		failed bool
	}{
		{"sleep " + late + "; echo; read x", denied, time.Minute, "EPERM", false},
		{"echo; exec sleep 3600", callBegun, time.Minute, Reached, false},
		{"echo; read x; kill -SYS $$", callBegun, time.Minute, Killed, false},
		{"exec sleep 3600", 0, time.Second, "", true},
		{"exit 1", 0, time.Minute, "", true},
	} {
		wg.Go(func() {
			in, ours, err := os.Pipe()
			if err != nil {
				t.Error(err)
				return
			}
			theirs, out, err := os.Pipe()
			if err != nil {
				t.Error(err)
				return
			}
			defer theirs.Close() // only read
			var state callState
			begins := shell(t, tc.script, in, out)
			got, err := called(tc.come, &state, func() (int, error) {
				pid, err := begins()
				_, _ = in.Close(), out.Close() // the script's
				go func() {
					defer ours.Close() // which ends a read
					if n, _ := theirs.Read(make([]byte, 1)); n == 1 {
						atomic.StoreUint32((*uint32)(&state), uint32(tc.state))
					}
				}()
				return pid, err
			})
			if got != tc.want || (err != nil) != tc.failed {
				t.Errorf("%s: %q, %v, want %q", tc.script, got, err, tc.want)
			}
		})
	}
	wg.Wait()
}

// Calls that crash, end, fork or hang the child have reached the kernel.
func TestCallsAreMadeInChildren(t *testing.T) {
	m, err := measureEach(callTable())
	if err != nil {
		t.Fatal(err)
	}
	numbers := make(map[string]int)
	for n, name := range callTable() {
		numbers[name] = n
	}
	for name, want := range map[string]string{
		"close": "EBADF", "execve": "EFAULT", "getpid": Reached, "exit": Reached, "exit_group": Reached, "clone": Reached, "pause": Reached, "rt_sigreturn": Reached,
		"fork": Reached, "vfork": Reached, "unshare": "EINVAL", "setsid": "EPERM", "sync": NotMade,
	} {
		n, is := numbers[name]
		if got := m.Answers[n]; is && got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := m.Answers[maxCall]; got != "ENOSYS" {
		t.Errorf("a call that no kernel has: %q", got)
	}
}
