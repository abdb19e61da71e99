package confine

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/landlock"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// TestMain makes the test binary the process to confine, because confinement cannot be undone.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "gateway" {
		if err := gatewayWithoutLandlock(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 3 && (os.Args[1] == "daemon" || os.Args[1] == "worker" || os.Args[1] == "face") {
		if err := confined(os.Args[2], os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestPlan(t *testing.T) {
	var b strings.Builder
	for _, abi := range []int{2, 3, 4, 5, 6, 8, 99} {
		for _, signals := range []bool{false, true} {
			d := Daemon{ABI: abi, Signals: signals, Data: "/data", Runtime: "/run/sandboxd", Socket: "/run/sandboxd/api.sock"}
			fmt.Fprintf(&b, "version %d, signals between threads %v\n%s", abi, signals, d.Plan())
			for _, missing := range d.Missing() {
				fmt.Fprintf(&b, "but %s\n", missing)
			}
			b.WriteString("\n")
		}
	}
	d := Daemon{ABI: 6, Data: "/data", Runtime: "/data/run", Socket: "/elsewhere/api.sock"}
	fmt.Fprintf(&b, "socket elsewhere\n%s", d.Plan())
	for _, abi := range []int{2, 6, landlock.Sockets} {
		w := Worker{
			ABI: abi, Signals: true, Socket: "/run/sandboxd/api.sock", Runs: "/data/agent", Files: []string{"/home/u/.llm-in-sandbox.yaml", "/run/resolve/stub.conf", "/etc/hosts"},
			Dirs: []string{"/run/resolve", "/inputs"},
		}
		fmt.Fprintf(&b, "\nworker, version %d\n%s", abi, w.Plan())
	}
	for _, abi := range []int{2, 4, landlock.Sockets} {
		g := Gateway{ABI: abi, Signals: true, Files: []string{"/run/resolve/stub.conf", "/etc/hosts"}, Dirs: []string{"/run/resolve"}}
		fmt.Fprintf(&b, "\ngateway, version %d\n%s", abi, g.Plan())
	}
	for _, abi := range []int{2, landlock.Sockets} {
		f := Face{ABI: abi, Signals: true, Socket: "/run/sandboxd/api.sock"}
		fmt.Fprintf(&b, "\nface, version %d\n%s", abi, f.Plan())
	}
	golden := filepath.Join("testdata", "plan.golden")
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("the plan has changed (-update writes it):\n%s", diff)
	}
}

// tries returns the attacks of a daemon that was taken over, and of the files it has left in its
// directories. Several threads try each, and undo it.
func tries(dir string) map[string]func() error {
	data, outside := filepath.Join(dir, "data"), filepath.Join(dir, "outside")
	file := func(path string, flags int) func() error {
		return func() error {
			f, err := os.OpenFile(path, flags, 0o600)
			if err != nil {
				return err
			}
			return f.Close()
		}
	}
	undone := func(err error, undo func() error) error {
		if err != nil {
			return err
		}
		return undo()
	}
	return map[string]func() error{
		"read a file of the user's":      file(filepath.Join(outside, "file"), os.O_RDONLY),
		"write to it":                    file(filepath.Join(outside, "file"), os.O_WRONLY),
		"truncate it":                    func() error { return os.Truncate(filepath.Join(outside, "file"), 5) },
		"follow a link to it":            file(filepath.Join(data, "link"), os.O_RDONLY),
		"reach it by a descriptor":       file("/proc/self/fd/"+strconv.Itoa(outsideFD)+"/file", os.O_RDONLY),
		"list a directory of the user's": func() error { _, err := os.ReadDir(outside); return err },
		"make a file there": func() error {
			path := filepath.Join(outside, "new")
			return undone(file(path, os.O_WRONLY|os.O_CREATE)(), func() error { return os.Remove(path) })
		},
		"move a file there": func() error {
			from, to := filepath.Join(data, "file"), filepath.Join(outside, "moved")
			return undone(os.Rename(from, to), func() error { return os.Rename(to, from) })
		},
		"link a file into the data": func() error {
			to := filepath.Join(data, "hard")
			return undone(os.Link(filepath.Join(outside, "file"), to), func() error { return os.Remove(to) })
		},
		"read /etc/passwd":                file("/etc/passwd", os.O_RDONLY),
		"read another process's command":  file("/proc/"+strconv.Itoa(os.Getppid())+"/cmdline", os.O_RDONLY),
		"look into another process":       file("/proc/"+strconv.Itoa(os.Getppid())+"/environ", os.O_RDONLY),
		"execute a program":               func() error { return exec.Command("/proc/self/exe", "nothing").Run() },
		"execute one of its own data":     func() error { return exec.Command(filepath.Join(data, "program")).Run() },
		"make a link in the data":         func() error { return os.Symlink("/", filepath.Join(data, "root")) },
		"make a FIFO in the data":         func() error { return unix.Mkfifo(filepath.Join(data, "fifo"), 0o600) },
		"mount":                           func() error { return unix.Mount(data, data, "", unix.MS_BIND, "") },
		"gain privileges by a new domain": func() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0) },
	}
}

// abstractName returns the name of an abstract socket that another process listens on.
func abstractName(dir string) string { return "@sandboxd" + dir }

// outsideFD is the descriptor of the directory outside, opened with O_PATH.
const outsideFD = 200

// confined attacks, confines itself, attacks again, and then does the work of a daemon or a worker.
func confined(dir, what string) error {
	d := Daemon{Data: filepath.Join(dir, "data"), Runtime: filepath.Join(dir, "run"), Socket: filepath.Join(dir, "run", "api.sock")}
	if !d.Probe() {
		return errors.New("no Landlock")
	}
	fd, err := unix.Open(filepath.Join(dir, "outside"), unix.O_PATH, 0)
	if err != nil {
		return err
	}
	if err := unix.Dup2(fd, outsideFD); err != nil {
		return err
	}
	all := tries(dir)
	apply := d.Plan().Apply
	switch what {
	case "face":
		f := Face{Socket: d.Socket}
		f.Probe()
		apply = f.Apply
		delete(all, "make a link in the data") // the link leads out; following it is one of the attacks
		all["read what is in the runtime directory"] = func() error { _, err := os.ReadDir(d.Runtime); return err }
		all["read the data"] = func() error { _, err := os.ReadFile(filepath.Join(d.Data, "file")); return err }
		all["make a socket of the Internet"] = func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			return unix.Close(fd)
		}
	case "worker":
		files, dirs, err := Resolver()
		if err != nil {
			return err
		}
		w := Worker{Socket: d.Socket, Runs: d.Data, Files: append(files, filepath.Join(dir, "settings", "settings.yaml")), Dirs: append(dirs, filepath.Join(dir, "inputs"))}
		w.Probe()
		apply = w.Plan().Apply
		delete(all, "make a link in the data") // the link leads out; following it is one of the attacks
		write := func(path string) func() error {
			return func() error {
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					return err
				}
				return os.Remove(path)
			}
		}
		all["write below the input"] = write(filepath.Join(dir, "inputs", "new"))
		all["write beside the settings"] = write(filepath.Join(dir, "settings", "new"))
		all["read beside the settings"] = func() error { _, err := os.ReadFile(filepath.Join(dir, "settings", "other")); return err }
		all["change what is in the runtime directory"] = write(filepath.Join(dir, "run", "new"))
		all["listen in the data"] = func() error {
			l, err := net.Listen("unix", filepath.Join(d.Data, "sock"))
			if err != nil {
				return err
			}
			return l.Close()
		}
	}
	if d.Signals && d.ABI >= 6 {
		all["signal another process"] = func() error { return unix.Kill(os.Getppid(), 0) }
		all["reach an abstract socket"] = func() error {
			c, err := net.Dial("unix", abstractName(dir))
			if err != nil {
				return err
			}
			return c.Close()
		}
	}
	if d.ABI >= landlock.Sockets {
		all["reach a socket of the user's"] = func() error {
			c, err := net.Dial("unix", filepath.Join(dir, "outside", "sock"))
			if err != nil {
				return err
			}
			return c.Close()
		}
	}
	var errs []error
	// The control: without confinement every attack works, except those that need privileges or that
	// the test binary does not support.
	for name, try := range all {
		switch name {
		case "mount", "gain privileges by a new domain", "execute a program", "make a link in the data", "make a FIFO in the data",
			"listen in the data":
			continue
		}
		if err := try(); err != nil {
			errs = append(errs, fmt.Errorf("control: %s: %w", name, err))
		}
	}
	l, err := net.Listen("unix", d.Socket)
	if err != nil {
		return err
	}
	defer l.Close()
	held, err := apply()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer held.Close()
	var threads sync.WaitGroup
	var mu sync.Mutex
	for range 8 {
		threads.Go(func() {
			for name, try := range all {
				if err := try(); err == nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("%s works", name))
					mu.Unlock()
				}
			}
		})
	}
	threads.Wait()
	switch what {
	case "worker":
		errs = append(errs, workOnRun(dir, d))
	case "face":
		errs = append(errs, relay(l, d.Socket))
	default:
		errs = append(errs, l.Close(), work(d))
	}
	return errors.Join(errs...)
}

// relay does the work of a face, which must still be possible: connections, accepted and made.
func relay(l net.Listener, socket string) error {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer c.Close()
	accepted, err := l.Accept()
	if err != nil {
		return err
	}
	defer accepted.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err = accepted.Read(make([]byte, 1))
	return err
}

// work does the work of a daemon, which must still be possible.
func work(d Daemon) error {
	made := filepath.Join(d.Data, "dir", "file")
	if err := os.Mkdir(filepath.Dir(made), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(made, []byte("x"), 0o600); err != nil {
		return err
	}
	if err := os.Rename(made, filepath.Join(d.Data, "renamed")); err != nil {
		return fmt.Errorf("rename between directories: %w", err)
	}
	if err := os.RemoveAll(filepath.Dir(made)); err != nil {
		return err
	}
	l, err := net.Listen("unix", d.Socket)
	if err != nil {
		return err
	}
	c, err := net.Dial("unix", d.Socket)
	if err != nil {
		return err
	}
	if err := errors.Join(c.Close(), l.Close()); err != nil {
		return err
	}
	for _, path := range []string{"/proc/self/fdinfo/0", "/proc/meminfo", os.DevNull} {
		if _, err := os.ReadFile(path); err != nil {
			return err
		}
	}
	return nil
}

// workOnRun does the work of a worker, which must still be possible.
func workOnRun(dir string, d Daemon) error {
	run := filepath.Join(d.Data, "20260116_143000")
	if err := os.MkdirAll(filepath.Join(run, "files"), 0o755); err != nil {
		return err
	}
	if err := os.Symlink("anywhere", filepath.Join(run, "files", "link")); err != nil {
		return err
	}
	for _, name := range []string{"record.jsonl", "files/a"} {
		if err := os.WriteFile(filepath.Join(run, name), []byte("x"), 0o600); err != nil {
			return err
		}
	}
	if err := os.Link(filepath.Join(run, "files/a"), filepath.Join(run, "files/b")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(run, "files"), filepath.Join(run, "files.1")); err != nil {
		return err
	}
	if err := os.RemoveAll(run); err != nil {
		return err
	}
	for _, path := range []string{"inputs/sub/file", "settings/settings.yaml"} {
		if _, err := os.ReadFile(filepath.Join(dir, path)); err != nil {
			return err
		}
	}
	if _, err := os.ReadDir(filepath.Join(dir, "inputs")); err != nil {
		return err
	}
	if _, err := os.ReadFile("/etc/hosts"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	c, err := net.Dial("unix", d.Socket)
	if err != nil {
		return err
	}
	return c.Close()
}

func TestConfinedProcess(t *testing.T) { testConfined(t, "daemon") }

func TestConfinedWorker(t *testing.T) { testConfined(t, "worker") }

func TestConfinedFace(t *testing.T) { testConfined(t, "face") }

func testConfined(t *testing.T, what string) {
	t.Helper()
	testenv.RequireLandlock(t, 2)
	// t.TempDir is too long: a socket's path has 108 bytes.
	dir, err := os.MkdirTemp("", "confine") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, name := range []string{"data", "run", "outside", "settings", "inputs/sub"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	planted := filepath.Join(dir, "outside", "file")
	for path, data := range map[string]string{
		planted: "plant", filepath.Join(dir, "data", "file"): "", filepath.Join(dir, "data", "program"): "#!/bin/sh\n",
		filepath.Join(dir, "settings", "settings.yaml"): "", filepath.Join(dir, "settings", "other"): "", filepath.Join(dir, "inputs/sub/file"): "",
	} {
		if err := os.WriteFile(path, []byte(data), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(planted, filepath.Join(dir, "data", "link")); err != nil {
		t.Fatal(err)
	}
	abstract, err := net.Listen("unix", abstractName(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	named, err := net.Listen("unix", filepath.Join(dir, "outside", "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer named.Close()
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		t.Skip("this program has cgo, with which there is no system call on all threads; the lanes build it without")
	}
	out, err := exec.CommandContext(t.Context(), "/proc/self/exe", what, dir).CombinedOutput()
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
	if data, err := os.ReadFile(planted); err != nil || string(data) != "plant" {
		t.Errorf("the planted file is %q, %v", data, err)
	}
}

// A resolv.conf in a shared directory does not make that directory readable.
func TestResolverDirectory(t *testing.T) {
	for dir, want := range map[string]bool{
		"/run/systemd/resolve": true, "/run/NetworkManager": true, "/mnt/wsl": true,
		"/": false, "/etc": false, "/run": false, "/run/": false, "/root": false, "/run/x/..": false,
	} {
		if got := isServiceDir(dir); got != want {
			t.Errorf("%s: %v", dir, got)
		}
	}
}

// Verify reports a plan that is not enforced.
func TestVerify(t *testing.T) {
	if err := (Plan{}).Verify(); err == nil || !strings.Contains(err.Error(), "in spite of") {
		t.Errorf("without Landlock: %v", err)
	}
}
