package security

import (
	"archive/tar"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func start(t *testing.T, env ...string) *harness.Daemon {
	t.Helper()
	testenv.RequireUserNS(t)
	return harness.Start(t, harness.Options{Env: env})
}

// CVE-2019-5736: the runtime's binary, seen from inside, must not be writable.
func TestInitBinaryCannotBeOverwritten(t *testing.T) {
	d := start(t)
	host := harness.Program(t, "sandboxd-init")
	before := digest(t, host)
	s := d.Create(t, api.CreateSandbox{})
	for _, script := range []string{
		"echo overwritten >/dev/sandboxd-init",
		"chmod 777 /dev/sandboxd-init",
		"rm -f /dev/sandboxd-init",
		"mv /dev/sandboxd-init /dev/moved",
		"echo x >/tmp/evil && mv /tmp/evil /dev/sandboxd-init",
		"exec 9>/proc/1/exe",
		"cp /proc/1/exe /tmp/stolen",
	} {
		// Control: the same on a file of the sandbox's own works.
		own := strings.ReplaceAll(strings.ReplaceAll(script, "/dev/sandboxd-init", "/tmp/own"), "/proc/1/exe", "/tmp/own")
		own = strings.ReplaceAll(own, "/dev/moved", "/tmp/moved")
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "echo x >/tmp/own; " + own}}); got.Exit.Code != 0 {
			t.Errorf("control: %s exits %d: %s", own, got.Exit.Code, got.Stderr)
		}
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", script}}); got.Exit.Code == 0 {
			t.Errorf("%s worked", script)
		}
	}
	if after := digest(t, host); after != before {
		t.Error("the host's sandboxd-init has changed")
	}
	if got := d.Create(t, api.CreateSandbox{}).Sh(t, "echo next"); got != "next\n" {
		t.Errorf("the next sandbox says %q", got)
	}
}

func digest(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

// CVE-2024-21626: no descriptor of the launcher, the init or the daemon reaches a program, and
// none that is its working directory leads out of the sandbox.
func TestNoDescriptorLeaksIntoAnExec(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	// ls itself opens the directory that it lists.
	got := strings.Fields(s.Sh(t, "exec ls /proc/self/fd"))
	if len(got) > 4 {
		t.Errorf("an exec has the descriptors %q", got)
	}
	// Control: one that a program inherits is seen, and can be the working directory of its children.
	if open := s.Sh(t, "exec 9</; cd /proc/self/fd/9 && /bin/pwd -P; exec ls /proc/self/fd"); !strings.HasPrefix(open, "/\n") || len(strings.Fields(open)) <= len(got)+1 {
		t.Errorf("control: with one more descriptor there are %q", open)
	}
	s.Sh(t, "echo of this sandbox >/mark")
	s.Sh(t, "mkdir /links; for i in $(seq 0 15); do ln -s /proc/self/fd/$i /links/$i; ln -s /proc/1/fd/$i /links/init$i; done")
	dirs := []string{"/dev/fd/4", "/proc/thread-self/fd/4", "/proc/1/fd/4", "/proc/1/task/1/fd/4"}
	for fd := range 64 {
		dirs = append(dirs, fmt.Sprintf("/proc/self/fd/%d", fd))
	}
	for fd := range 16 {
		dirs = append(dirs, fmt.Sprintf("/links/%d", fd), fmt.Sprintf("/links/init%d", fd))
	}
	for _, cwd := range dirs {
		// From wherever it is, enough dots lead to the sandbox's own root, which has its mark.
		result, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"/bin/sh", "-c", "/bin/pwd -P; cat ../../../../../../../../mark"}, Cwd: cwd})
		if err == nil && (!strings.HasPrefix(result.Stdout, "/") || !strings.HasSuffix(result.Stdout, "of this sandbox\n")) {
			t.Errorf("the working directory %s is %q %q", cwd, result.Stdout, result.Stderr)
		}
	}
}

// The daemon's environment holds keys of models and registries: no byte of it is inside.
func TestDaemonsEnvironmentIsNotInside(t *testing.T) {
	const secret = "sk-planted-0123456789"
	d := start(t, "OPENAI_API_KEY="+secret)
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", d.PID()))
	if err != nil || !strings.Contains(string(data), secret) {
		t.Fatalf("control: the daemon does not have the secret: %v", err)
	}
	s := d.Create(t, api.CreateSandbox{})
	if got := s.Sh(t, "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"); strings.Contains(got, secret) {
		t.Error("the secret is in the environment of a process in the sandbox")
	}
	// Init's own environment and arguments, as the host sees them.
	for _, file := range []string{"environ", "cmdline"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", s.PID, file))
		if err == nil && strings.Contains(string(data), secret) {
			t.Errorf("the secret is in the %s of init", file)
		}
	}
}

// What listens on the host is out of reach: TCP on loopback, and abstract Unix sockets, which only
// a network namespace keeps apart.
func TestHostsListenersAreUnreachable(t *testing.T) {
	python := testenv.RequirePeer(t, "python3")
	for network, address := range map[string]string{"tcp": "127.0.0.1:0", "unix": fmt.Sprintf("@planted-%d", os.Getpid())} {
		t.Run(network, func(t *testing.T) {
			listener, err := new(net.ListenConfig).Listen(t.Context(), network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			script := fmt.Sprintf("import socket; s=socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect('\\0%s')", strings.TrimPrefix(address, "@"))
			if network == "tcp" {
				port := listener.Addr().(*net.TCPAddr).Port
				script = fmt.Sprintf("import socket; socket.create_connection(('127.0.0.1', %d), 5)", port)
			}
			if out, err := exec.CommandContext(t.Context(), python, "-c", script).CombinedOutput(); err != nil {
				t.Fatalf("control: the host itself cannot connect: %v: %s", err, out)
			}
			s := start(t).Create(t, api.CreateSandbox{})
			got := s.Exec(t, api.ExecRequest{Argv: []string{"python3", "-c", script}, Timeout: testenv.HungAfter.Seconds()})
			if got.Exit.Code == 0 {
				t.Error("the sandbox reached the host's listener")
			} else if !strings.Contains(got.Stderr, "Error") {
				t.Errorf("python ended with %+v: %s", got.Exit, got.Stderr)
			}
		})
	}
}

// The control socket of the sandbox exists on the host only.
func TestControlSocketIsNotInside(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	const look = "find / -xdev -type s 2>/dev/null; cat /proc/net/unix | sed 1d | grep -v ' 0 *[0-9]*$' | awk '{print $8}' | grep / || true"
	if got := s.Sh(t, look); strings.TrimSpace(got) != "" {
		t.Errorf("sockets with a name in the sandbox: %q", got)
	}
	t.Run("control", func(t *testing.T) {
		testenv.RequirePeer(t, "python3")
		s.Sh(t, "python3 -c \"import socket; s=socket.socket(socket.AF_UNIX); s.bind('/tmp/planted-socket')\"")
		if got := s.Sh(t, look); !strings.Contains(got, "/tmp/planted-socket") {
			t.Errorf("a socket that is there is not found: %q", got)
		}
	})
}

// A fork bomb ends at its own sandbox's limit, and a neighbour does not notice.
func TestForkBombStaysInItsSandbox(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := start(t)
	bomb := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 64}})
	neighbour := d.Create(t, api.CreateSandbox{})
	// Control: without the limit so many can be started.
	count := func(s *harness.Sandbox) int {
		s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", "i=0; while [ $i -lt 150 ]; do sleep 600 & i=$((i+1)); done 2>/dev/null"}, Timeout: testenv.HungAfter.Seconds()})
		return len(s.Processes(t))
	}
	if n := count(neighbour); n < 150 {
		t.Fatalf("control: without a limit only %d processes run", n)
	}
	const initThreads = 16 // are the init's own and on top; those that it does not need, programs may use
	if n := count(bomb); n > 64+initThreads {
		t.Errorf("%d processes run under a limit of 64 and the init's %d", n, initThreads)
	}
	if got := neighbour.Sh(t, "echo ok"); got != "ok\n" {
		t.Errorf("the neighbour says %q", got)
	}
	bomb.Delete(t)
	neighbour.Delete(t)
}

// A file that belongs to the daemon's user and stands open to it is out of reach by every path
// that leads back to the host: it is planted, and looked for.
func TestPlantedHostFileIsOutOfReach(t *testing.T) {
	dir := planted(t)
	secret := filepath.Join(dir, "secret")
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	if os.Geteuid() == 0 {
		// Control: no mode keeps another user from it, only that it is not there.
		cmd := exec.CommandContext(t.Context(), "sh", "-c", `cat "$0" && echo made >"$0.new" && rm "$0.new"`, secret)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: stranger, Gid: stranger}}
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != "of the host" {
			t.Fatalf("control: %q, %v", out, err)
		}
	}
	up := strings.Repeat("../", 30)
	paths := []string{
		secret, "/" + up + secret, "/proc/1/root" + secret, "/proc/self/root" + secret, "/proc/1/cwd/" + up + secret,
		"/proc/self/cwd/" + up + secret, "/dev/fd/../" + up + secret,
	}
	for _, path := range paths {
		if got := s.Exec(t, api.ExecRequest{Argv: []string{"cat", path}}); got.Exit.Code == 0 {
			t.Errorf("cat %s says %q", path, got.Stdout)
		}
		if response, err := s.Get(t.Context(), path); err == nil {
			_ = response.Body.Close()
			t.Errorf("GET of %s worked", path)
		}
	}
	for _, path := range paths {
		_ = s.Put(t.Context(), path, []byte("overwritten")) // may succeed, in the sandbox
		_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "mkdir -p \"$(dirname \"$0\")\"; echo overwritten >\"$0\"", path}})
	}
	untouched(t, dir)
}

// stranger is the id of a user of the host that owns nothing.
const stranger = 65534

// CVE-2026-30892, CVE-2024-40635, CVE-2022-29162: an image names users and groups so that a parser
// which ignores errors, or counts in too few bits, makes root of them. None runs as root, whether a
// request, or the image itself, names it. A user has the groups of the image and its own, and none
// of init's.
func TestUsersOfAnImageAreNoOthers(t *testing.T) {
	testenv.RequireUserNS(t)
	testenv.RequireSubIDs(t)
	r := harness.DebianRegistry(t, false)
	d := harness.Start(t, harness.Options{})
	base := busybox(t)
	const passwd = "root:x:0:0::/:\napp:x:1000:1001::/:\nminus:x:-1:-1::/:\nhuge:x:4294967296:0::/:\nwords:x:zero:0::/:\nempty:x:::::\n" +
		"hex:x:0x10:0::/:\nspace:x: 0: 0::/:\nbadgid:x:1005:none::/:\nshort:x:1006\nhigh:x:70000:70000::/:\n"
	const group = "root:x:0:\naudio:x:29:app\nwheel:x:bad:app\nminus:x:-5:app\nroots:x:4294967296:app\n"
	etc := []harness.File{
		{Name: "etc/", Type: tar.TypeDir}, {Name: "etc/passwd", Body: passwd}, {Name: "etc/group", Body: group},
	}
	const who = "id -u; id -g; id -G; grep -E '^(Cap(Inh|Amb)|Groups)' /proc/self/status | tr -d '\t '"
	s := d.Create(t, api.CreateSandbox{Image: pulled(t, d, r, base, "users", v1.Config{}, etc...)})
	for user, want := range map[string]string{
		"":         "0\n0\n0\nGroups:0\n", // the control: root is there
		"app":      "1000\n1001\n1001 29\nGroups:291001\n",
		"1000":     "1000\n1001\n1001 29\nGroups:291001\n",
		"app:7":    "1000\n7\n7\nGroups:7\n",
		"12:12":    "12\n12\n12\nGroups:12\n",
		"0:29":     "0\n29\n29\nGroups:29\n",
		"app:root": "1000\n0\n0\nGroups:0\n",
	} {
		got := s.Exec(t, api.ExecRequest{Argv: []string{"sh", "-c", who}, User: user}).Stdout
		if want += "CapInh:0000000000000000\nCapAmb:0000000000000000\n"; got != want {
			t.Errorf("user %q is %q, want %q", user, got, want)
		}
	}
	for i, user := range []string{
		"minus", "huge", "words", "empty", "hex", "space", "badgid", "short", "high", "stranger", "-1", "+0", "0x0", " 0", "4294967295",
		"4294967296", "18446744073709551616", "65536", "0:65536", "app:wheel", "app:minus", "app:roots", "app:4294967296", "1000:", ":0", "app:-1",
	} {
		if got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", who}, User: user}); err == nil {
			t.Errorf("user %q runs: %q %q", user, got.Stdout, got.Stderr)
		}
		// The image's own choice is not asked for, and must be no other either.
		if !slices.Contains([]string{"huge", "words", "0x0", "4294967296", "app:roots"}, user) {
			continue // one is parsed as the other
		}
		ref := pulled(t, d, r, base, fmt.Sprintf("user%d", i), v1.Config{User: user}, etc...)
		named, err := d.TryCreate(t.Context(), api.CreateSandbox{Image: ref})
		if err != nil {
			continue
		}
		d.Mark(t)
		if got, err := named.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", who}}); err == nil {
			t.Errorf("an image's user %q runs: %q %q", user, got.Stdout, got.Stderr)
		}
		named.Delete(t)
	}
}
