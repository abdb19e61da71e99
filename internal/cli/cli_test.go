package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The test binary is the command when it is told so: no second build, and the race detector looks on.
const asCommand = "SANDBOXD_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		os.Exit(run(context.Background(), os.Args[1:], deps{
			stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
			serve: serveFake,
			checks: func(_ context.Context, dir string) []api.Check {
				return []api.Check{{Name: "data directory", Found: dir, Means: "nothing works", Fatal: true}}
			},
		}))
	}
	syscall.Umask(0o022) // the modes that the tests expect have gone through it
	os.Exit(m.Run())
}

var update = flag.Bool("update", false, "rewrite the golden files")

// shortDir is a temporary directory whose sockets have an address.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx") //nolint:usetesting // t.TempDir is too long for a socket's address
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// start serves the fake on a socket.
func (f *fakeDaemon) start(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(shortDir(t), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(f.handler())
	s.Listener = l
	f.stop = func() { _ = l.Close() }
	s.Start()
	t.Cleanup(s.Close)
	return socket
}

// command is a run of sandboxd that has not begun.
func command(t *testing.T, socket string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, exe, args...)
	home := t.TempDir()
	cmd.Env = []string{
		asCommand + "=1", "SANDBOXD_SOCKET=" + socket, "HOME=" + home, "TERM=vt52", "FROM_HERE=here", "GOCOVERDIR=" + home,
		"GORACE=atexit_sleep_ms=0",
	}
	cmd.Dir = t.TempDir()
	return cmd
}

type outcome struct {
	stdout, stderr string
	code           int
}

func finish(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var out, errs bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	cmd.Stderr = &errs
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatalf("%v: %v (%v)", cmd.Args, err, exit)
	}
	return outcome{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// TestCommands drives the command line against the fake daemon. A nil want means: anything.
func TestCommands(t *testing.T) {
	is := func(want string) func(string) bool { return func(s string) bool { return s == want } }
	has := func(parts ...string) func(string) bool {
		return func(s string) bool {
			for _, p := range parts {
				if !strings.Contains(s, p) {
					return false
				}
			}
			return true
		}
	}
	none := is("")
	tests := []struct {
		name   string
		args   string // split at spaces; "_" is an empty argument
		stdin  string
		setup  func(*fakeDaemon)
		stdout func(string) bool
		stderr func(string) bool
		code   int
		check  func(*fakeDaemon) string // what is wrong
	}{
		{name: "run passes output on", args: "run -- echo hi there", stdout: is("hi there\n"), stderr: is("\xff\n"), check: func(f *fakeDaemon) string {
			want := []string{"POST /v1/sandboxes", "POST /v1/sandboxes/sb1/exec", "DELETE /v1/sandboxes/sb1"}
			return cmp.Diff(want, f.log)
		}},
		{name: "run passes the exit code on", args: "run -- exit3", stdout: none, stderr: none, code: 3, check: nothingLeft},
		{name: "flags behind the image are the program's", args: "run host echo --json -t", stdout: is("--json -t\n")},
		{name: "the first -- behind the image is ours, the second is not", args: "run host -- echo -- x", stdout: is("-- x\n")},
		{name: "a signal is 128+n, and memory is mentioned", args: "run -- killed", stderr: has("ran out of memory"), code: 137},
		{
			name: "timeout is 124", args: "run --timeout 1.5 -- slow", stderr: is("sandboxd: the program was stopped: its timeout of 1.5s had ended\n"), code: 124,
			check: func(f *fakeDaemon) string { return cmp.Diff(1.5, f.execs[0].Timeout) },
		},
		{name: "no such program", args: "run -- missing", stderr: is("sandboxd: there is no program \"missing\" in the sandbox\nhint: name a program that is in the image\n"), code: 127, check: nothingLeft},
		{name: "not executable", args: "run -- denied", stderr: has("denied", "hint: chmod"), code: 126, check: nothingLeft},
		{name: "the sandbox dies", args: "run -- die", stderr: is("sandboxd: the sandbox ended\nhint: see its reason\n"), code: 125, check: nothingLeft},
		{name: "an exit code that cannot be", args: "run -- wild", stderr: has("1048576"), code: 125},
		{name: "run without a program", args: "run debian", stdout: none, stderr: has("no program is named", "sandboxd run debian -- PROGRAM", "hint: sandboxd run --help"), code: 125},
		{name: "run without anything", args: "run", stderr: has("sandboxd run host -- PROGRAM"), code: 125},
		{name: "run with an unknown flag", args: "run --nope -- x", stderr: has("unknown flag: --nope", "hint:"), code: 125},
		{name: "run with an empty program", args: "run -- _", stderr: has("empty name"), code: 125},
		{name: "run pulls what is not here", args: "run debian:12 -- echo hi", stdout: is("hi\n"), stderr: is("\xff\n"), check: func(f *fakeDaemon) string {
			want := []string{"POST /v1/sandboxes", "POST /v1/images/pull", "POST /v1/sandboxes", "POST /v1/sandboxes/sb1/exec", "DELETE /v1/sandboxes/sb1"}
			return cmp.Diff(want, f.log)
		}},
		{
			name: "run of an image that cannot be had, said without its escape sequences", args: "run missing:1 -- echo", code: 125,
			stderr: is("sandboxd: pull missing:1: the registry says \\x1b[31mMANIFEST_UNKNOWN\nhint: check the name\n"),
		},
		{
			name: "everything that can be asked for", args: "run -e A=1 -e FROM_HERE -e NOT_HERE --cwd /w -u 7:8 --name n -l a=b -l c --memory 512m --swap 0 --cpus 0.5 --pids 9 --nofile 10 --profile p --network none --lifetime 2h --idle-timeout 30 -- echo",
			check: func(f *fakeDaemon) string {
				want := api.CreateSandbox{
					Name: "n", Env: []string{"A=1", "FROM_HERE=here"}, Cwd: "/w", User: "7:8", Labels: map[string]string{"a": "b", "c": ""}, Profile: "p",
					Limits:  api.Limits{Memory: 512 << 20, Swap: new(int64), CPUs: 0.5, Pids: 9, Nofile: 10},
					Network: api.Network{Mode: api.NetworkNone}, Timeout: 7200, IdleTimeout: 30,
				}
				return cmp.Diff(want, f.creates[0])
			},
		},
		{name: "a long timeout lengthens the sandbox's life", args: "run --timeout 2h -- echo", check: func(f *fakeDaemon) string { return cmp.Diff(7260.0, f.creates[0].Timeout) }},
		{name: "memory of nothing", args: "run --memory 0 -- x", stderr: has("--memory"), code: 125, check: nothingAsked},
		{name: "memory of words", args: "run --memory lots -- x", stderr: has(`"lots" is no size such as 512m`), code: 125, check: nothingAsked},
		{name: "no cores", args: "run --cpus 0 -- x", stderr: has("--cpus 0"), code: 125, check: nothingAsked},
		{name: "cores that are not a number", args: "run --cpus NaN -- x", stderr: has("--cpus NaN"), code: 125, check: nothingAsked},
		{name: "no processes", args: "run --pids 0 -- x", stderr: has("--pids 0"), code: 125, check: nothingAsked},
		{name: "a negative timeout", args: "run --timeout -1s -- x", stderr: has("--timeout", "greater than zero"), code: 125, check: nothingAsked},
		{name: "a network we do not have", args: "run --network host -- x", stderr: has("so far there is only none"), code: 125, check: nothingAsked},
		{name: "a variable without a name", args: "run -e =x -- x", stderr: has("has no name"), code: 125, check: nothingAsked},
		{name: "a label without a key", args: "run -l =x -- x", stderr: has("has no key"), code: 125, check: nothingAsked},
		{name: "run --json", args: "run --json -- exit3", stdout: has(`"code": 3`, `"stdout": "out"`), stderr: none, code: 3},
		{name: "run --json -i", args: "run --json -i -- x", stderr: has("--json waits"), code: 125, check: nothingAsked},
		{name: "run --keep", args: "run --keep -- echo", stderr: has("the sandbox stays: sb1 (name1)"), check: func(f *fakeDaemon) string { return cmp.Diff(1, len(f.sandboxes)) }},
		{name: "run -d", args: "run -d", stdout: is("sb1\n"), stderr: none},
		{name: "run -d with a program", args: "run -dit host x -y", stdout: is("sb1\n"), stderr: none, check: mainProcess("host", true, "x", "-y")},
		{name: "run -d with the image's program", args: "run -d --image-command host", stdout: is("sb1\n"), check: mainProcess("host", false)},
		{name: "run -dt of nothing", args: "run -dt host", stderr: has("there is none"), code: 125, check: nothingAsked},
		{name: "run -d with a timeout", args: "run -d --timeout 3s host x", stderr: has("--lifetime"), code: 125, check: nothingAsked},
		{name: "run with the image's program", args: "run --image-command host -- x", stderr: has("--detach"), code: 125, check: nothingAsked},
		{
			name: "run, and the sandbox cannot be deleted", args: "run -- exit3", code: 3, stderr: has("sandbox sb1 was left behind: busy", "hint: wait"),
			setup: func(f *fakeDaemon) { f.deleteErr = &api.Problem{Code: api.CodeInternal, Detail: "busy", Hint: "wait"} },
		},
		{name: "run -i", args: "run -i -- cat", stdin: "some\nlines\n", stdout: is("some\nlines\n"), check: func(f *fakeDaemon) string {
			return cmp.Diff([]string{`{"stdin_close":true}`}, f.controls) + nothingLeft(f)
		}},
		{name: "run -i: the program ends first", args: "run -i -- cat", stdin: "q", stdout: is("q"), code: 7, check: nothingLeft},
		{name: "run without -i does not pass stdin on", args: "run -- echo x", stdin: "secret", stdout: is("x\n"), check: func(f *fakeDaemon) string { return cmp.Diff([]byte(nil), f.execs[0].Stdin) }},

		{name: "create", args: "create --name work debian:12", stdout: is("sb1\n"), stderr: none, setup: func(f *fakeDaemon) { f.images = []string{"debian:12"} }},
		{name: "create --json", args: "create --json", stdout: has(`"id": "sb1"`, `"state": "running"`)},
		{name: "create, two images", args: "create a b", stderr: has("behind \"--\""), code: 2},
		{name: "create with a program", args: "create host -it -- x -y", stdout: is("sb1\n"), check: mainProcess("host", true, "x", "-y")},
		{name: "create of the host with a program", args: "create -- x", stdout: is("sb1\n"), check: mainProcess("", false, "x")},
		{name: "create with a terminal for nothing", args: "create -t", stderr: has("there is none"), code: 2, check: nothingAsked},

		{name: "exec", args: "exec -e K=v -w /d -u me sb1 -- echo a b", setup: oneSandbox, stdout: is("a b\n"), check: func(f *fakeDaemon) string {
			want := api.ExecRequest{Argv: []string{"echo", "a", "b"}, Env: []string{"K=v"}, Cwd: "/d", User: "me"}
			return cmp.Diff(want, f.execs[0]) + cmp.Diff(1, len(f.sandboxes))
		}},
		{name: "exec by name, without --", args: "exec first echo -e", setup: oneSandbox, stdout: is("-e\n")},
		{name: "exec in nothing", args: "exec nope -- echo", stderr: is("sandboxd: there is no sandbox \"nope\"\nhint: sandboxd ps lists them\n"), code: 125},
		{name: "exec of nothing", args: "exec sb1", setup: oneSandbox, stderr: has("no program is named"), code: 125},
		{name: "exec without a sandbox", args: "exec", stderr: has("no sandbox is named"), code: 125},
		{name: "exec in a path trick", args: "exec .. -- echo", stderr: has(`".." is not the id`), code: 125, check: nothingAsked},

		{name: "ps", args: "ps", setup: oneSandbox, stdout: func(s string) bool {
			return strings.Join(strings.Fields(s), " ") == "ID NAME IMAGE STATE CREATED ENDS sb1 first host running - -"
		}},
		{name: "ps -q", args: "ps -q", setup: oneSandbox, stdout: is("sb1\n")},
		{
			name: "update", args: "update sb1 --memory 512m --cpus 0 --cpuset _ --oom-group=false --io-write-bps 1m --lifetime 2h --label a=b --label c-", setup: oneSandbox,
			stdout: is("sb1\n"), stderr: none, check: func(f *fakeDaemon) string {
				return cmp.Diff([]string{`{"limits":{"memory":536870912,"oom_group":false,"cpus":0,"cpuset":"","io":{"write_bps":1048576}},` +
					`"labels":{"a":"b","c":null},"timeout":7200}`}, f.updates)
			},
		},
		{name: "update of one of io", args: "update sb1 --io-read-iops 0 --io-weight 5", setup: oneSandbox, check: func(f *fakeDaemon) string {
			return cmp.Diff([]string{`{"limits":{"io":{"weight":5,"read_iops":0}}}`}, f.updates)
		}},
		{name: "update of nothing", args: "update sb1", setup: oneSandbox, stderr: has("nothing is to be changed"), code: 2},
		{name: "update with half a label", args: "update sb1 --label a", setup: oneSandbox, stderr: has("neither key=value nor key-"), code: 2},
		{name: "update of NaN cores", args: "update sb1 --cpus nan", setup: oneSandbox, stderr: has("--cpus"), code: 2},
		{name: "update of an unknown one", args: "update sb2 --pids 5", setup: oneSandbox, stderr: has("sb2"), code: 1},
		{name: "stats", args: "stats sb1", setup: oneSandbox, stderr: none, stdout: func(s string) bool {
			return has("running for", "1m1.5s", "64MiB", "1.5s", "disk 259:0 written", "1MiB in 16", "12.3 % of 10 s")(s) && !strings.Contains(s, "swap") && !strings.Contains(s, "killed")
		}},
		{name: "stats --json", args: "stats sb1 --json", setup: oneSandbox, stdout: func(s string) bool {
			return has(`"current": 67108864`)(s) && !strings.Contains(s, "swap")
		}},
		{name: "create with limits", args: "create --memory-high 1g --oom-group --cpu-weight 50 --cpuset 0-1 --io-read-iops 7", check: func(f *fakeDaemon) string {
			return cmp.Diff(api.Limits{MemoryHigh: 1 << 30, OOMGroup: true, CPUWeight: 50, CPUSet: "0-1", IO: api.IOLimits{ReadIOPS: 7}}, f.creates[0].Limits)
		}},
		{name: "create with a memory-high of nothing", args: "create --memory-high 0", stderr: has("--memory-high"), code: 2},
		{name: "create with no writes", args: "create --io-write-iops 0", stderr: has("--io-write-iops"), code: 2},
		{name: "create with a weight of nothing", args: "create --cpu-weight 0", stderr: has("--cpu-weight"), code: 2},
		{name: "ps of nothing", args: "ps -q", stdout: none, stderr: none},
		{name: "ps --label", args: "ps -q --label k=other", setup: oneSandbox, stdout: none},
		{name: "ps with half a label", args: "ps --label k", stderr: has("is not key=value"), code: 2},
		{name: "ps --json of nothing is a list", args: "ps --json", stdout: has(`"sandboxes": []`)},
		{name: "a state that would act on the terminal", args: "ps", stdout: has(`stopped (\x1b[2J)`), setup: func(f *fakeDaemon) {
			f.sandboxes = []api.Sandbox{{ID: "x", State: api.StateStopped, Reason: "\x1b[2J"}}
		}},

		{name: "stop", args: "stop -t 0.5 sb1", setup: oneSandbox, stdout: is("sb1\n"), check: func(f *fakeDaemon) string {
			return cmp.Diff([]string{`stop {"grace":0.5}`}, f.updates)
		}},
		{name: "stop at once", args: "stop -t 0 --json sb1", setup: oneSandbox, stdout: has(`"state": "stopped"`), check: func(f *fakeDaemon) string {
			return cmp.Diff([]string{`stop {"grace":0}`}, f.updates)
		}},
		{name: "stop with a negative grace", args: "stop -t -1 sb1", setup: oneSandbox, stderr: has("grace"), code: 2},
		{name: "stop of nothing", args: "stop", code: 2},
		{name: "start", args: "start --lifetime 2h nope sb1", setup: oneSandbox, stdout: is("sb1\n"), stderr: has("nope"), code: 1, check: func(f *fakeDaemon) string {
			return cmp.Diff([]string{`start {"timeout":7200}`}, f.updates)
		}},
		{name: "pause", args: "pause sb1", setup: oneSandbox, stdout: is("sb1\n")},
		{name: "resume", args: "resume sb1 --json", setup: oneSandbox, stdout: has(`"state": "running"`)},
		{name: "rm", args: "rm sb1", setup: oneSandbox, stdout: is("sb1\n"), check: nothingLeft},
		{name: "rm --all", args: "rm --all", setup: oneSandbox, stdout: is("sb1\n"), check: nothingLeft},
		{name: "rm of one that is gone", args: "rm nope", stderr: has(`no sandbox "nope"`), code: 1},
		{name: "rm goes on after an error", args: "rm nope sb1", setup: oneSandbox, stdout: is("sb1\n"), stderr: has("nope"), code: 1, check: nothingLeft},
		{name: "rm --json", args: "rm --json sb1", setup: oneSandbox, stdout: has(`"deleted": [`, `"sb1"`)},
		{name: "rm of nothing", args: "rm", stderr: has("no sandbox is named"), code: 2},
		{name: "rm of all and some", args: "rm --all x", stderr: has("exclude"), code: 2},

		{name: "pull", args: "pull debian:12", stdout: is("debian:12 sha256:0123\n"), stderr: none},
		{name: "pull --json", args: "pull --json debian:12", stdout: has(`"reference": "debian:12"`)},
		{name: "pull of what is not there", args: "pull missing", stderr: has("MANIFEST_UNKNOWN", "hint: check the name"), code: 1},
		{name: "pull of nothing", args: "pull", stderr: has("accepts 1 arg"), code: 2},
		{name: "images", args: "images", setup: func(f *fakeDaemon) { f.images = []string{"debian:12"} }, stdout: has("REFERENCE", "debian:12", "0123456789ab", "1.5MB")},
		{name: "images --json of nothing is a list", args: "images --json", stdout: has(`"images": []`)},

		{name: "doctor asks the daemon", args: "doctor", stdout: has("ok    user namespaces: 3 of 3", "lack  cgroup: v1", "means: no memory limit", "remedy: boot with", "1 of 2 checks are ok")},
		{name: "doctor --json", args: "doctor --json", stdout: has(`"checks": [`)},
		{name: "version", args: "version", stdout: has("v9.9.9-fake")},
		{name: "version --json", args: "version --json", stdout: has(`"version": "v9.9.9-fake"`)},
		{name: "shutdown", args: "shutdown", stdout: none, stderr: none},

		{name: "cp between nothing", args: "cp a b", stderr: has("neither"), code: 2},
		{name: "cp between two sandboxes", args: "cp x:/a y:/b", stderr: has("both"), code: 2},
		{name: "cp to no path", args: "cp a x:", stderr: has("no path after the colon"), code: 2},
		{name: "cp of what is not there", args: "cp a sb1:/b", setup: oneSandbox, stderr: has("no such file"), code: 1},
		{name: "cp out of nothing", args: "cp nope:/a .", stderr: has(`no sandbox "nope"`), code: 1},
		{name: "cp of nothing out", args: "cp sb1:/a .", setup: oneSandbox, stderr: has(`there is no "/a"`), code: 1},

		{name: "an unknown command", args: "rum", stderr: has("sandboxd: unknown command \"rum\" for \"sandboxd\" Did you mean this?", "\nhint: sandboxd --help\n"), code: 2},
		{name: "an unknown flag", args: "ps --nope", stderr: has("unknown flag", "hint: sandboxd ps --help"), code: 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			if tt.setup != nil {
				tt.setup(f)
			}
			args := strings.Fields(tt.args)
			for i := range args {
				if args[i] == "_" {
					args[i] = ""
				}
			}
			cmd := command(t, f.start(t), args...)
			cmd.Stdin = strings.NewReader(tt.stdin)
			got := finish(t, cmd)
			if tt.stdout != nil && !tt.stdout(got.stdout) || tt.stderr != nil && !tt.stderr(got.stderr) || got.code != tt.code {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.code, tt.code, got.stdout, got.stderr)
			}
			if tt.check != nil {
				f.mu.Lock()
				defer f.mu.Unlock()
				if wrong := tt.check(f); wrong != "" {
					t.Error(wrong) // of a difference: -want +got
				}
			}
		})
	}
}

func oneSandbox(f *fakeDaemon) {
	f.sandboxes = []api.Sandbox{{ID: "sb1", Name: "first", Image: "host", State: api.StateRunning, Labels: map[string]string{"k": "v"}}}
}

// mainProcess checks that a sandbox was asked for with this main process; none is the image's.
func mainProcess(image string, terminal bool, argv ...string) func(*fakeDaemon) string {
	return func(f *fakeDaemon) string {
		if len(f.creates) != 1 {
			return fmt.Sprintf("asked for %+v", f.creates)
		}
		c := f.creates[0]
		if c.Image != image || c.TTY != terminal || c.StdinOpen != terminal || c.ImageCommand != (argv == nil) || !slices.Equal(c.Command, argv) || len(f.execs) > 0 {
			return fmt.Sprintf("asked for %+v and %+v", c, f.execs)
		}
		return ""
	}
}

func nothingLeft(f *fakeDaemon) string {
	if len(f.sandboxes) > 0 {
		return fmt.Sprintf("left behind: %v", f.sandboxes)
	}
	return ""
}

func nothingAsked(f *fakeDaemon) string {
	if len(f.log) > 0 {
		return fmt.Sprintf("a wrong command line led to requests: %v", f.log)
	}
	return ""
}

// A signal kills the program, deletes the sandbox, and is our exit code.
func TestRunInterrupted(t *testing.T) {
	for _, tt := range []struct {
		sig  syscall.Signal
		args []string
		code int
	}{
		{syscall.SIGINT, []string{"run", "--", "wait"}, 130},
		{syscall.SIGTERM, []string{"run", "--", "wait"}, 143},
		{syscall.SIGINT, []string{"run", "-i", "--", "cat"}, 130},
	} {
		t.Run(fmt.Sprint(tt.sig, tt.args), func(t *testing.T) {
			t.Parallel()
			f := newFake()
			cmd := command(t, f.start(t), tt.args...)
			in, err := cmd.StdinPipe() // open, and silent
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			var errs bytes.Buffer
			cmd.Stderr = &errs
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			<-f.started
			if err := cmd.Process.Signal(tt.sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != tt.code || errs.Len() > 0 {
				t.Errorf("exit %d, want %d; stderr %q", got, tt.code, errs.String())
			}
			<-f.killed
			f.mu.Lock()
			defer f.mu.Unlock()
			if left := nothingLeft(f); left != "" {
				t.Error(left)
			}
		})
	}
}

// `sandboxd run … | head -1`: the program is killed and the sandbox deleted, though nobody reads any more.
func TestRunIntoClosedPipe(t *testing.T) {
	f := newFake()
	cmd := command(t, f.start(t), "run", "--", "flood")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	cmd.Stdout = w
	got := finish(t, cmd)
	_ = w.Close()
	if got.code != 128+int(syscall.SIGPIPE) || got.stderr != "" {
		t.Errorf("exit %d, stderr %q", got.code, got.stderr)
	}
	<-f.killed
	f.mu.Lock()
	defer f.mu.Unlock()
	if left := nothingLeft(f); left != "" {
		t.Error(left)
	}
}

// Without a daemon: what needs one to look at says so, doctor looks for itself, shutdown has nothing to do.
func TestNoDaemon(t *testing.T) {
	socket := filepath.Join(shortDir(t), "none", "s")
	tests := []struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{[]string{"ps"}, 1, "", "no daemon is running at " + socket},
		{[]string{"exec", "x", "--", "y"}, 125, "", "sandboxd serve"},
		{[]string{"rm", "--all"}, 1, "", "no daemon is running"},
		{[]string{"images"}, 1, "", "no daemon is running"},
		{[]string{"cp", "x:/y", "."}, 1, "", "no daemon is running"},
		{[]string{"shutdown"}, 0, "", "no daemon is running"},
		{[]string{"doctor"}, 1, "FAIL  data directory:", ""},
		{[]string{"doctor", "--data-dir", "/d"}, 1, "FAIL  data directory: /d", ""},
		{[]string{"version"}, 0, "not running", ""},
	}
	for _, tt := range tests {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			t.Parallel()
			got := finish(t, command(t, socket, tt.args...))
			if got.code != tt.code || !strings.Contains(got.stdout, tt.stdout) || !strings.Contains(got.stderr, tt.stderr) {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.code, tt.code, got.stdout, got.stderr)
			}
		})
	}
}

// withHome gives a command a home of its own. As root the data directory does not depend on it, so the commands that
// start a daemon are tested as an ordinary user only.
func withHome(t *testing.T, cmd *exec.Cmd, home string) *exec.Cmd {
	t.Helper()
	cmd.Env = append(cmd.Env, "HOME="+home)
	return cmd
}

// run without a daemon starts one, says so, and the next run uses it.
func TestRunStartsDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := shortDir(t)
	chown(t, cred, home)
	socket := filepath.Join(home, "s")
	spawn := func(args ...string) outcome {
		cmd := withHome(t, command(t, socket, args...), home)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		return finish(t, cmd)
	}
	defer spawn("shutdown")

	got := spawn("run", "--", "echo", "hi")
	if got.code != 0 || got.stdout != "hi\n" {
		t.Fatalf("exit %d\nstdout: %q\nstderr: %q", got.code, got.stdout, got.stderr)
	}
	log := filepath.Join(home, ".local", "share", "sandboxd", "daemon.log")
	first, _, _ := strings.Cut(got.stderr, "\n")
	var pid int
	if _, err := fmt.Sscanf(first, "sandboxd: no daemon was running; started one (pid %d, log "+log+"); stop it with: sandboxd shutdown", &pid); err != nil {
		t.Fatalf("stderr %q: %v", first, err)
	}
	// It leads a session of its own, so that our terminal's signals do not reach it.
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	if f := strings.Fields(rest); f[3] != strconv.Itoa(pid) {
		t.Errorf("session %s, want %d", f[3], pid)
	}
	if got := spawn("run", "--", "exit3"); got.code != 3 || got.stderr != "" {
		t.Errorf("second run: exit %d, stderr %q", got.code, got.stderr)
	}
	if got := spawn("shutdown"); got.code != 0 || got.stderr != "" {
		t.Errorf("shutdown: exit %d, stderr %q", got.code, got.stderr)
	}
	if got := spawn("ps"); got.code != 1 {
		t.Errorf("ps after shutdown: exit %d", got.code)
	}
}

// Several at once start one daemon, and one of them says so.
func TestRunStartsOneDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := shortDir(t)
	chown(t, cred, home)
	socket := filepath.Join(home, "s")
	spawn := func(args ...string) outcome {
		cmd := withHome(t, command(t, socket, args...), home)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		return finish(t, cmd)
	}
	defer spawn("shutdown")
	const n = 4
	results := make(chan outcome, n)
	for range n {
		go func() { results <- spawn("run", "--", "exit3") }()
	}
	started := 0
	for range n {
		got := <-results
		if got.code != 3 {
			t.Errorf("exit %d, stderr %q", got.code, got.stderr)
		}
		started += strings.Count(got.stderr, "started one")
	}
	if started != 1 {
		t.Errorf("%d said that they started a daemon", started)
	}
}

// A daemon that cannot start is reported with what it logged.
func TestRunCannotStartDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := shortDir(t)
	chown(t, cred, home)
	cmd := withHome(t, command(t, filepath.Join(home, "s"), "run", "--", "echo"), home)
	cmd.Dir = "/"
	cmd.Env = append(cmd.Env, "FAKE_BROKEN=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	got := finish(t, cmd)
	if got.code != 125 || !strings.Contains(got.stderr, "it ended at once (exit status 1)") || !strings.Contains(got.stderr, "the data directory is no good") {
		t.Errorf("exit %d, stderr %q", got.code, got.stderr)
	}
}

// ordinaryUser is whom a command runs as that must not be root: nil where we are not root ourselves.
func ordinaryUser(t *testing.T) *syscall.Credential {
	t.Helper()
	if os.Getuid() != 0 {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	// go test builds into a directory that nobody else may enter.
	for dir := filepath.Dir(exe); ; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm()&0o001 == 0 {
			if err := os.Chmod(dir, fi.Mode().Perm()|0o011); err != nil {
				t.Fatal(err)
			}
		}
		if dir == "/" || dir == os.TempDir() {
			break
		}
	}
	return &syscall.Credential{Uid: nobody, Gid: nobody}
}

func chown(t *testing.T, cred *syscall.Credential, path string) {
	t.Helper()
	if cred == nil {
		return
	}
	if err := os.Chown(path, int(cred.Uid), int(cred.Gid)); err != nil {
		t.Fatal(err)
	}
}

// The help texts are part of the interface: a change shows in review.
func TestHelpGolden(t *testing.T) {
	root := func(out *bytes.Buffer, args ...string) *cobra.Command {
		root := newRoot(deps{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr})
		root.SetOut(out)
		root.SetArgs(args)
		return root
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Name() == "completion" || cmd.Name() == "help" {
			return // cobra's
		}
		path := strings.Fields(cmd.CommandPath())
		name := strings.Join(path, "-")
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := root(&out, append(path[1:], "--help")...).Execute(); err != nil {
				t.Fatal(err)
			}
			for i, line := range strings.Split(out.String(), "\n") {
				if strings.TrimRight(line, " ") != line {
					t.Errorf("line %d ends with spaces", i+1)
				}
			}
			// The list of codes ends every help.
			if i := strings.LastIndex(out.String(), "\nEXIT STATUS\n"); i < 0 || strings.Contains(out.String()[i+1:], "\n\n") {
				t.Error("it does not end with EXIT STATUS")
			}
			golden := filepath.Join("testdata", "help", name+".txt")
			if *update {
				if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), out.String()); diff != "" {
				t.Errorf("help (-want +got; go test ./internal/cli -run Golden -update):\n%s", diff)
			}
		})
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root(new(bytes.Buffer)))
}

// Output that is JSON is exactly one document.
func TestJSONIsOneDocument(t *testing.T) {
	for _, args := range []string{"ps --json", "stats --json sb1", "update --json --pids 5 sb1", "images --json", "doctor --json", "version --json", "run --json -- echo", "run -d --json", "create --json", "rm --all --json", "pull --json x"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			oneSandbox(f)
			got := finish(t, command(t, f.start(t), strings.Fields(args)...))
			var v any
			if err := json.Unmarshal([]byte(got.stdout), &v); err != nil || got.code != 0 {
				t.Errorf("exit %d, %v in %q; stderr %q", got.code, err, got.stdout, got.stderr)
			}
		})
	}
}

func dirEntry(name string) tarEntry {
	return tarEntry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}}
}

func fileEntry(name, body string) tarEntry {
	return tarEntry{Header: tar.Header{Name: name}, body: body}
}
