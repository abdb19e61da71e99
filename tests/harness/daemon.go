// Package harness starts the built binaries on directories of their own and gives tests the peers
// that a real installation has: a registry, images, a client that speaks the bare wire format.
//
// Of the daemon's packages it imports the wire types only: tests see the view of a user's program.
package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/contract"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// Program returns the path of a built binary: in $SANDBOXD_BIN, else in bin/ of the tree that the
// test lies in.
func Program(t testing.TB, name string) string {
	t.Helper()
	dir := os.Getenv("SANDBOXD_BIN")
	if dir == "" {
		dir = filepath.Join(Root(t), "bin")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	return path
}

// Helper is the path of a program that tests need beside the product's (package testtree). The
// lanes run where no compiler need be, and have it built; for a plain `go test` it is built here.
func Helper(t testing.TB, name string) string {
	t.Helper()
	if dir := os.Getenv("SANDBOXD_BIN"); dir != "" {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	path, err := testtree.Helper(t.Context(), Root(t), name, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Root is the directory of the module.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the working directory")
	return ""
}

// Options says how a daemon is started.
type Options struct {
	Args []string // further flags of `sandboxd serve`
	Env  []string // added to the environment
	// Programs is the directory of the binaries; "": that of [Program].
	Programs string
	// User is the user to become; nil: the test's own. Only root can ask for it.
	User *syscall.Credential
	// Within calls start on a thread that is in other namespaces, which the daemon then begins in; nil:
	// those of the test. The namespaces must show the daemon's directories.
	Within func(start func() error) error
	// Cgroup is the directory of the cgroup to start in; "": where the test is.
	Cgroup string
	// Processes is how many its user may have (the soft RLIMIT_NPROC); 0: as the test. With
	// ProcessesHard it cannot have more (the hard one).
	Processes     int
	ProcessesHard bool
}

// A Daemon is one `sandboxd serve` on directories of its own. It is stopped, and must have left
// nothing behind, when the test ends.
type Daemon struct {
	DataDir, RuntimeDir, Socket string
	// HTTP speaks to the socket; Do and the methods built on it use it.
	HTTP *http.Client

	options    Options
	program    string
	cmd        *exec.Cmd
	exited     chan struct{} // closed when cmd has ended
	log        *logBuffer
	violations *violations
	marks      *Footprint // everything that was ever seen to be ours
	shared     bool       // by several tests, see [Shared]
}

// Start starts a daemon and waits until it answers.
func Start(t testing.TB, options Options) *Daemon {
	t.Helper()
	// Not t.TempDir: a socket's path has 108 bytes, and a test's name is long.
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{
		DataDir: filepath.Join(dir, "data"), RuntimeDir: filepath.Join(dir, "run"),
		options: options, log: new(logBuffer), marks: newFootprint(), violations: &violations{all: map[string]error{}},
	}
	if d.program = filepath.Join(options.Programs, "sandboxd"); options.Programs == "" {
		d.program = Program(t, "sandboxd")
	}
	d.Socket = filepath.Join(d.RuntimeDir, "api.sock")
	// As in /var/lib: the ids that sandboxes map to must be able to pass through.
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if options.User != nil {
		if err := os.Chown(dir, int(options.User.Uid), int(options.User.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	d.HTTP = &http.Client{Transport: d.checked(t, &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.Socket)
		},
		MaxIdleConnsPerHost: 64, // clients beside each other keep their connections
	})}
	t.Cleanup(func() {
		d.stop(t)
		d.violations.report(t)
		for _, bug := range []string{"illegal phase of a sandbox", "panic in a request"} {
			if strings.Contains(d.Log(), bug) {
				t.Errorf("the daemon has a bug: %s", bug)
			}
		}
		d.marks.check(t, "after the daemon was shut down", d.DataDir, d.RuntimeDir)
		if t.Failed() {
			t.Logf("the daemon said:\n%s", d.said())
		}
		if err := d.keepLog(t.Name()); err != nil {
			t.Errorf("keep the daemon's log: %v", err)
		}
		// Where all of it is removed together when everything has run: removed inodes cost whoever needs
		// new ones next, see scratch of tests/lanes.
		if os.Getenv("SANDBOXD_TEST_DISPOSABLE") == filepath.Dir(dir) {
			return
		}
		if err := RemoveAll(dir); err != nil {
			t.Errorf("remove the daemon's directories: %v", err)
		}
	})
	d.Launch(t)
	return d
}

// checked validates every response that passes next against the OpenAPI document. A benchmark does
// without: it would be measured.
func (d *Daemon) checked(t testing.TB, next http.RoundTripper) http.RoundTripper {
	t.Helper()
	if _, ok := t.(*testing.B); ok {
		return next
	}
	c, err := contract.Load()
	if err != nil {
		t.Fatalf("load the OpenAPI document: %v", err)
	}
	return c.Check(next, d.violations.add)
}

// violations are responses that the OpenAPI document does not allow, reported when the test ends.
type violations struct {
	mu  sync.Mutex
	all map[string]error // by text, so that each is reported once
}

func (v *violations) add(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.all[err.Error()] = err
}

func (v *violations) report(t testing.TB) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, err := range v.all {
		t.Errorf("a response violates docs/reference/openapi.json: %v", err)
	}
}

// Client returns a client of the API whose responses are validated.
func (d *Daemon) Client(t testing.TB) *client.Client {
	t.Helper()
	c := client.New(d.Socket, func(next http.RoundTripper) http.RoundTripper { return d.checked(t, next) })
	t.Cleanup(c.Close)
	return c
}

// keepLog writes the output of the daemon and its launcher to a file of the directory that
// SANDBOXD_TEST_LOGS names.
func (d *Daemon) keepLog(test string) error {
	dir := os.Getenv("SANDBOXD_TEST_LOGS")
	if dir == "" {
		return nil
	}
	f, err := os.CreateTemp(dir, strings.ReplaceAll(test, "/", "-")+".*.log")
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, d.said())
	return errors.Join(err, f.Close())
}

// said returns the daemon's output so far, and after it that of its launchers.
func (d *Daemon) said() string {
	said := new(strings.Builder)
	said.WriteString(d.Log())
	for _, name := range []string{"launcher.log.1", "launcher.log"} {
		data, err := os.ReadFile(filepath.Join(d.RuntimeDir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		fmt.Fprintf(said, "-- %s:\n%s", name, data)
		if err != nil {
			fmt.Fprintf(said, "-- %v\n", err)
		}
	}
	return said.String()
}

// RemoveAll removes a daemon's directories. Layers belong to subordinate ids, which their owner
// can only touch as root of a user namespace that maps them: unshare of util-linux makes one
// through newuidmap.
func RemoveAll(dir string) error {
	if err := os.RemoveAll(dir); err == nil {
		return nil
	}
	args := []string{"--user", "--map-root-user", "rm", "-rf", "--one-file-system", "--", dir}
	for _, ids := range [][]string{{"--map-auto"}, nil} { // without subordinate ids there is nothing else to map
		if err := exec.Command("unshare", append(ids, args...)...).Run(); err == nil {
			break
		}
	}
	return os.RemoveAll(dir)
}

// Launch starts the daemon again on the same directories, after [Daemon.Kill9].
func (d *Daemon) Launch(t testing.TB) {
	t.Helper()
	args := append([]string{"serve", "--socket", d.Socket, "--data-dir", d.DataDir, "--runtime-dir", d.RuntimeDir}, d.options.Args...)
	d.cmd = exec.Command(d.program, args...)
	if n := d.options.Processes; n > 0 {
		limit := fmt.Sprintf("--nproc=%d:", n)
		if d.options.ProcessesHard {
			limit = fmt.Sprintf("--nproc=%d", n) // both
		}
		d.cmd = exec.Command("prlimit", append([]string{limit, "--", d.program}, args...)...) // which executes it
	}
	d.cmd.Env = d.environment()
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	// The launcher outlives a killed daemon and keeps the log open.
	d.cmd.WaitDelay = time.Second
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: d.options.User}
	if d.options.Cgroup != "" {
		group, err := os.Open(d.options.Cgroup)
		if err != nil {
			t.Fatalf("start the daemon in a cgroup: %v", err)
		}
		defer group.Close()
		d.marks.given[d.options.Cgroup] = struct{}{}
		d.cmd.SysProcAttr.UseCgroupFD, d.cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	start := d.cmd.Start
	if d.options.Within != nil {
		start = func() error {
			return d.options.Within(func() error {
				for _, link := range namespacesOf(unix.Gettid()) {
					d.marks.given[link] = struct{}{}
				}
				return d.cmd.Start()
			})
		}
	}
	if err := start(); err != nil {
		t.Fatalf("start the daemon: %v", err)
	}
	d.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		defer close(exited)
		_ = cmd.Wait() // how it ended is in ProcessState
	}(d.cmd, d.exited)

	Eventually(t, func() error {
		select {
		case <-d.exited:
			t.Fatalf("the daemon ended at its start (%v) and said:\n%s", d.cmd.ProcessState, d.said())
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		response, err := d.Do(ctx, http.MethodGet, "/healthz", nil)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("/healthz answers %s", response.Status)
		}
		return nil
	})
	d.Mark(t)
}

// LaunchIn is Launch with the cgroup that the next daemon finds itself in.
func (d *Daemon) LaunchIn(t testing.TB, cgroup string) {
	t.Helper()
	d.options.Cgroup = cgroup
	d.Launch(t)
}

// LaunchWith is Launch with these further flags instead of those that the daemon had before.
func (d *Daemon) LaunchWith(t testing.TB, args ...string) {
	t.Helper()
	d.options.Args = args
	d.Launch(t)
}

// environment is clean: nothing of the tester's own configuration may decide a test.
func (d *Daemon) environment() []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
		"HOME=" + filepath.Dir(d.DataDir), "TMPDIR=" + os.TempDir(), "XDG_RUNTIME_DIR=" + d.RuntimeDir,
		// Certificates of the host's bundle are parsed at every start; its directory has them all again.
		"SSL_CERT_DIR=/proc/nowhere",
	}
	return append(env, d.options.Env...)
}

// PID is the daemon's process.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Log returns the daemon's output so far.
func (d *Daemon) Log() string { return d.log.String() }

// Kill9 ends the daemon as a crash would. Its sandboxes go on.
func (d *Daemon) Kill9(t testing.TB) {
	t.Helper()
	d.Mark(t)
	if err := d.cmd.Process.Kill(); err != nil {
		t.Fatalf("kill the daemon: %v", err)
	}
	<-d.exited
	d.HTTP.CloseIdleConnections()
}

// WaitExit waits until the daemon has ended by itself.
func (d *Daemon) WaitExit(t testing.TB) {
	t.Helper()
	select {
	case <-d.exited:
	case <-time.After(testenv.HungAfter):
		t.Fatalf("the daemon still runs after %s", testenv.HungAfter)
	}
	d.HTTP.CloseIdleConnections()
}

// stop asks the daemon to delete everything and end, and makes sure that it does.
func (d *Daemon) stop(t testing.TB) {
	t.Helper()
	select {
	case <-d.exited:
		// Killed and not started again: the launcher and the sandboxes still run. The next daemon is the
		// way to end them.
		d.Launch(t)
	default:
	}
	d.Mark(t)
	d.HTTP.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
	defer cancel()
	response, err := d.Do(ctx, http.MethodPost, "/v1/system/shutdown", api.Shutdown{})
	if err != nil {
		t.Errorf("shut the daemon down: %v", err)
	} else {
		if response.StatusCode >= 300 {
			t.Errorf("shut the daemon down: %v", problem(response))
		}
		_ = response.Body.Close()
	}
	select {
	case <-d.exited:
	case <-ctx.Done():
		t.Errorf("the daemon still runs %s after it was asked to shut down", testenv.HungAfter)
		_ = d.cmd.Process.Kill()
		<-d.exited
	}
	d.HTTP.CloseIdleConnections()
}

// Do sends one request. A body that is not nil is sent as JSON, but for []byte and io.Reader,
// which are sent as they are.
func (d *Daemon) Do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	contentType := api.TypeJSON
	switch b := body.(type) {
	case nil:
		contentType = ""
	case []byte:
		r = bytes.NewReader(b)
	case io.Reader:
		r = b
	default:
		data, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://sandboxd"+path, r)
	if err != nil {
		return nil, err
	}
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	return d.HTTP.Do(request)
}

// Call sends one request and decodes the answer into out, which may be nil. An answer that is an
// error is returned as *api.Problem.
func (d *Daemon) Call(ctx context.Context, method, path string, body, out any) error {
	response, err := d.Do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return problem(response)
	}
	if out == nil {
		_, err := io.Copy(io.Discard, response.Body)
		return err
	}
	dec := json.NewDecoder(response.Body)
	if err := dec.Decode(out); err != nil {
		return fmt.Errorf("decode the answer to %s %s: %w", method, path, err)
	}
	return nil
}

// problem reads an error as the API promises to write it, and complains where it does not keep the
// promise.
func problem(response *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return err
	}
	if got := response.Header.Get("Content-Type"); !strings.HasPrefix(got, api.TypeProblem) {
		return fmt.Errorf("%s with content type %q instead of %s: %.200s", response.Status, got, api.TypeProblem, data)
	}
	var p api.Problem
	if err := json.Unmarshal(data, &p); err != nil {
		return fmt.Errorf("decode problem %.200s: %w", data, err)
	}
	if p.Status != response.StatusCode ||
		p.Code.Status() != response.StatusCode && response.StatusCode != http.StatusMethodNotAllowed {
		return fmt.Errorf("problem %q of status %d came with %s", p.Code, p.Status, response.Status)
	}
	return &p
}

// System asks for the daemon's description of itself.
func (d *Daemon) System(t testing.TB) api.SystemInfo {
	t.Helper()
	var info api.SystemInfo
	if err := d.Call(t.Context(), http.MethodGet, "/v1/system", nil, &info); err != nil {
		t.Fatalf("system info: %v", err)
	}
	return info
}

// logBuffer is a bytes.Buffer that a process may write while a test reads.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Eventually calls check until it returns nil. It fails the test with the last error after
// [testenv.HungAfter].
func Eventually(t testing.TB, check func() error) {
	t.Helper()
	deadline := time.After(testenv.HungAfter)
	for {
		began := time.Now()
		err := check()
		if err == nil {
			return
		}
		// Mostly the processors are left to the awaited: on an emulated one a check takes longer than
		// the least pause.
		pause := min(max(3*time.Since(began), 20*time.Millisecond), time.Second)
		select {
		case <-time.After(pause):
		case <-deadline:
			t.Fatalf("not within %s: %v", testenv.HungAfter, err)
		}
	}
}

// Result is how a command ended.
type Result struct {
	Code           int
	Stdout, Stderr string
}

// CLI runs the built command line against this daemon: args[0] is the subcommand, and the flags
// that lead to the daemon follow it.
func (d *Daemon) CLI(t testing.TB, args ...string) Result {
	t.Helper()
	full := append([]string{args[0], "--socket", d.Socket}, args[1:]...)
	return d.run(t, nil, full)
}

// CLIInput is CLI with something on standard input.
func (d *Daemon) CLIInput(t testing.TB, stdin io.Reader, args ...string) Result {
	t.Helper()
	full := append([]string{args[0], "--socket", d.Socket}, args[1:]...)
	return d.run(t, stdin, full)
}

func (d *Daemon) run(t testing.TB, stdin io.Reader, args []string) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter) // it only ends what hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, d.program, args...)
	cmd.Env = d.environment()
	cmd.Stdin = stdin
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: d.options.User}
	var running []byte // when it was given up: the process that it waited for may be among them
	cmd.Cancel = func() error {
		running, _ = exec.Command("ps", "-eo", "pid,ppid,user,stat,wchan:24,etimes,args").CombinedOutput()
		return cmd.Process.Kill()
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("sandboxd %q: %v", args, err)
	}
	if ctx.Err() != nil {
		t.Fatalf("sandboxd %q did not end; stderr:\n%s\nthese ran:\n%s", args, &stderr, running)
	}
	if strings.Contains(stderr.String(), "no daemon was running; started one") {
		t.Errorf("sandboxd %q found no daemon, and started one: %s", args, &stderr)
		if out, err := exec.Command(d.program, "shutdown", "--delete", "--socket", d.Socket).CombinedOutput(); err != nil { // or it goes on for minutes
			t.Errorf("end it: %v: %s", err, out)
		}
	}
	return Result{Code: cmd.ProcessState.ExitCode(), Stdout: stdout.String(), Stderr: stderr.String()}
}

// StartsNoDaemon keeps a command that finds none from starting a daemon, which would work in the
// directories of whoever runs the test: it finds none where that could have any. Root has fixed
// ones, whatever the environment says, and so calls itself another user.
func StartsNoDaemon(cmd *exec.Cmd) {
	const nowhere = "/proc/nowhere"
	cmd.Env = append(cmd.Env, "XDG_DATA_HOME="+nowhere)
	if os.Geteuid() != 0 {
		return
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	const uid = 1000
	cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: os.Geteuid(), Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: os.Getegid(), Size: 1}}
}
