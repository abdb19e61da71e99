package functional

import (
	"archive/tar"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// parallel are the tests that run in parallel: [testing.T.Parallel] takes no second call.
var parallel sync.Map

// inParallel has the test run in parallel with others, as those that start daemons of their own
// do: they mostly wait. To be called before anything is started.
func inParallel(t *testing.T) {
	t.Helper()
	if _, is := parallel.LoadOrStore(t, true); !is {
		t.Parallel()
	}
}

// start starts a daemon of the test's own.
func start(t *testing.T) *harness.Daemon {
	t.Helper()
	return startWith(t, harness.Options{})
}

// startWith is start with options.
func startWith(t *testing.T, options harness.Options) *harness.Daemon {
	t.Helper()
	inParallel(t)
	testenv.RequireUserNS(t)
	return harness.Start(t, options)
}

// busybox makes the image that most tests of images run: its files in a gzip layer, a mark in a
// zstd layer.
func busybox(t *testing.T) v1.Image {
	t.Helper()
	return harness.Image(t, v1.Config{Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}, WorkingDir: "/home", Cmd: []string{"sh"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)),
		harness.Layer(t, "zstd", harness.Tar(t, harness.File{Name: "home/second-layer", Body: "zstd\n"})))
}

// The first promise of all: an image index in a real registry, gzip and zstd layers, and the
// program's own output and exit code through the command line.
func TestRunFromARegistryPrintsAndPassesTheExitCodeThrough(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		tls  bool
	}{{"http", false}, {"https", true}} {
		t.Run(test.name, func(t *testing.T) {
			registry := harness.DebianRegistry(t, test.tls)
			reference := registry.Push(t, "test/busybox:1", harness.Index(t, busybox(t)))
			testenv.RequireUserNS(t)
			options := harness.Options{}
			if test.tls {
				options.Env = []string{"SSL_CERT_FILE=" + registry.CA}
			}
			d := harness.Start(t, options)

			got := d.CLI(t, "run", reference, "--", "sh", "-c", "echo hi; echo oops >&2; exit 3")
			if got.Code != 3 || got.Stdout != "hi\n" || !strings.Contains(got.Stderr, "oops\n") {
				t.Errorf("run ended with %+v, want exit 3, hi on stdout and oops on stderr", got)
			}
			got = d.CLI(t, "run", reference, "--", "sh", "-c", "pwd; echo $FROM_IMAGE; cat second-layer; ls / | grep wrong")
			if want := "/home\nyes\nzstd\n"; got.Stdout != want {
				t.Errorf("the image's working directory, environment and second layer show as %+v, want %q", got, want)
			}
			if list := d.List(t); len(list) != 0 {
				t.Errorf("run left %d sandboxes", len(list))
			}
		})
	}
}

// A self-signed registry is refused unless the user says that it may be insecure.
func TestUnverifiedCertificateIsRefused(t *testing.T) {
	testenv.SameForAll(t)
	registry := harness.DebianRegistry(t, true)
	reference := registry.Push(t, "test/busybox:1", busybox(t))
	d := shared(t)
	_, err := d.Pull(t.Context(), reference, false)
	wantProblem(t, err, api.CodeRegistry, "certificate")
	if _, err := d.Pull(t.Context(), reference, true); err != nil {
		t.Errorf("pull with insecure: %v", err)
	}
}

func TestPulledImageIsListed(t *testing.T) {
	testenv.SameForAll(t)
	registry := harness.DebianRegistry(t, false)
	reference := registry.Push(t, "test/busybox:1", harness.Index(t, busybox(t)))
	d := shared(t)
	image := d.MustPull(t, reference)
	if image.Reference != reference || image.Platform != harness.Platform() || image.Layers != 2 || image.Size <= 0 {
		t.Errorf("pulled %+v", image)
	}
	// A second pull has nothing left to do, and says the same.
	if again := d.MustPull(t, reference); again.Digest != image.Digest {
		t.Errorf("second pull: %s, first: %s", again.Digest, image.Digest)
	}
	var list api.ImageList
	if err := d.Call(t.Context(), "GET", "/v1/images", nil, &list); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(list.Images, func(i api.Image) bool { return i.Digest == image.Digest }) {
		t.Errorf("images: %+v, without %s", list.Images, image.Digest)
	}
	if got := d.CLI(t, "images"); got.Code != 0 || !strings.Contains(got.Stdout, "test/busybox") {
		t.Errorf("sandboxd images: %+v", got)
	}
}

// Whiteouts and opaque directories hide what lower layers have, and nothing else.
func TestWhiteoutsHideLowerLayers(t *testing.T) {
	registry := harness.LyingRegistry(t, nil)
	image := harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, append(harness.Busybox(t),
			harness.File{Name: "data/", Type: tar.TypeDir}, harness.File{Name: "data/gone", Body: "1"}, harness.File{Name: "data/kept", Body: "2"},
			harness.File{Name: "opaque/", Type: tar.TypeDir}, harness.File{Name: "opaque/lower", Body: "3"},
			harness.File{Name: "replaced/", Type: tar.TypeDir}, harness.File{Name: "replaced/x", Body: "4"})...)),
		harness.Layer(t, "zstd", harness.Tar(t,
			harness.File{Name: "data/.wh.gone"},
			harness.File{Name: "opaque/", Type: tar.TypeDir}, harness.File{Name: "opaque/upper", Body: "5"}, harness.File{Name: "opaque/.wh..wh..opq"},
			harness.File{Name: "replaced", Body: "a file now"})))
	reference := registry.Push(t, "test/whiteout:1", image)
	d := shared(t)
	d.MustPull(t, reference)
	s := d.Create(t, api.CreateSandbox{Image: reference})
	got := s.Sh(t, "ls -A /data /opaque; cat /replaced")
	if want := "/data:\nkept\n\n/opaque:\nupper\na file now"; got != want {
		t.Errorf("the merged tree shows %q, want %q", got, want)
	}
	// The sandbox can make again a file that the image hid, and that stays its own.
	if got := s.Sh(t, "echo mine >/data/gone; cat /data/gone; ls /opaque"); got != "mine\nupper\n" {
		t.Errorf("after writing into the hidden places: %q", got)
	}
	if got := d.Create(t, api.CreateSandbox{Image: reference}).Sh(t, "ls /data"); got != "kept\n" {
		t.Errorf("another sandbox of the same image sees %q", got)
	}
}

func TestHostImageRunsPython(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	d := shared(t)
	got := d.CLI(t, "run", "host", "--", "python3", "-c", "print(1)")
	if got.Code != 0 || got.Stdout != "1\n" {
		t.Errorf("run host -- python3 -c 'print(1)' ended with %+v", got)
	}
}

func TestSandboxRunsUnderSeccompAndNoNewPrivs(t *testing.T) {
	d := shared(t)
	status := statusFields(d.Create(t, api.CreateSandbox{}).Sh(t, "cat /proc/self/status"))
	for field, want := range map[string]string{"Seccomp": "2", "NoNewPrivs": "1", "CapInh": "0000000000000000", "CapAmb": "0000000000000000"} {
		if status[field] != want {
			t.Errorf("%s is %q, want %q", field, status[field], want)
		}
	}
	// An exec can at most get the capabilities of the profile's bounding set: never an
	// administrator's.
	bounding, err := strconv.ParseUint(status["CapBnd"], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	if n := bits.OnesCount64(bounding); n != 8 {
		t.Errorf("the bounding set %x has %d capabilities, and SPECIFICATION.md says 8", bounding, n)
	}
	const capNetAdmin, capSysPtrace, capSysAdmin = 12, 19, 21
	for _, c := range []int{capNetAdmin, capSysPtrace, capSysAdmin} {
		if bounding&(1<<c) != 0 {
			t.Errorf("the bounding set %x holds capability %d", bounding, c)
		}
	}
}

// statusFields parses /proc/<pid>/status.
func statusFields(status string) map[string]string {
	fields := map[string]string{}
	for line := range strings.Lines(status) {
		if key, value, ok := strings.Cut(line, ":"); ok {
			fields[key] = strings.TrimSpace(value)
		}
	}
	return fields
}

func TestSandboxHasNoRoute(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	if got := s.Sh(t, "cat /proc/net/route"); strings.Count(got, "\n") > 1 {
		t.Errorf("routes: %q", got)
	}
	if got := s.Sh(t, "ls /sys/class/net 2>/dev/null || sed -n 's/^ *\\([^:]*\\):.*/\\1/p' /proc/net/dev"); strings.TrimSpace(got) != "lo" {
		t.Errorf("network interfaces: %q", got)
	}
}

// A file planted on the host, where the daemon's user can read it, is not there; nor is anything
// but the few directories that the host image shows.
func TestHostFilesAreNotThere(t *testing.T) {
	planted := t.TempDir() + "/secret"
	if err := os.WriteFile(planted, []byte("of the host"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	for _, path := range []string{planted, "/etc/shadow", "/etc/subuid", d.DataDir, d.Socket, "/var/lib/dpkg", "/run/user", "/boot/*", "/root/.bashrc"} {
		if got := s.Sh(t, fmt.Sprintf("ls -d %s 2>/dev/null || true", path)); got != "" {
			t.Errorf("%s is visible: %q", path, got)
		}
	}
	// No name of the host's homes, whatever the image has of its own.
	homes, _ := filepath.Glob("/home/*") // the pattern is well-formed
	for _, home := range homes {
		if got := s.Sh(t, fmt.Sprintf("ls -d '%s' 2>/dev/null || true", home)); got != "" {
			t.Errorf("%s is visible: %q", home, got)
		}
	}
	// Visible directories of the host are read-only.
	for _, path := range []string{"/usr/bin", "/usr/lib"} {
		s.Sh(t, fmt.Sprintf("touch %s/planted-by-a-sandbox 2>/dev/null || true", path))
		if _, err := os.Stat(path + "/planted-by-a-sandbox"); err == nil {
			t.Errorf("a sandbox wrote into the host's %s", path)
		}
	}
}

func TestOtherSandboxesProcessesAreInvisible(t *testing.T) {
	d := shared(t)
	a, b := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{})
	// It is there when it is itself: while a process is about to be another program it has no command
	// line.
	a.Sh(t, `sleep 98765 >/dev/null 2>&1 & until [ "$(tr '\0' ' ' </proc/$!/cmdline)" = "sleep 98765 " ]; do :; done`)
	if got := a.Sh(t, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); !strings.Contains(got, "sleep 98765") {
		t.Fatalf("control: the sandbox that started the process does not see it: %q", got)
	}
	if got := b.Sh(t, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(got, "98765") {
		t.Errorf("another sandbox sees it: %q", got)
	}
	if got := b.Sh(t, "ls /proc | grep -c '^[0-9]'"); len(strings.TrimSpace(got)) > 1 {
		t.Errorf("a sandbox with nothing running counts %s processes", got)
	}
}

// Read from the host: no process of a sandbox is the host's root or the daemon's user.
func TestSandboxProcessesAreNeitherRootNorTheDaemonsUser(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	if s.Enforced.IDs != api.IDsShared && s.Enforced.IDs != api.IDsOwn {
		t.Fatalf("enforced.ids is %q", s.Enforced.IDs)
	}
	s.Sh(t, "nohup sleep 1000 >/dev/null 2>&1 &")
	processes := s.Processes(t)
	if len(processes) < 2 {
		t.Fatalf("the host sees %d processes of the sandbox, want init and sleep", len(processes))
	}
	number := regexp.MustCompile(`\d+`)
	for _, pid := range processes {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		fields := statusFields(string(data))
		for _, field := range []string{"Uid", "Gid"} {
			own := os.Getuid()
			if field == "Gid" {
				own = os.Getgid()
			}
			for _, id := range number.FindAllString(fields[field], -1) {
				if id == "0" || id == strconv.Itoa(own) {
					t.Errorf("process %d (%s) has %s %s", pid, fields["Name"], field, fields[field])
				}
			}
		}
		if fields["Groups"] != "" && slices.Contains(strings.Fields(fields["Groups"]), "0") {
			t.Errorf("process %d (%s) is in the host's group 0", pid, fields["Name"])
		}
		if fields["Seccomp"] != "2" || fields["NoNewPrivs"] != "1" {
			t.Errorf("process %d (%s): seccomp %s, no_new_privs %s", pid, fields["Name"], fields["Seccomp"], fields["NoNewPrivs"])
		}
	}
}

// Missing enforcement is reported, never hidden.
func TestEnforcedIsHonest(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	e := s.Enforced
	for _, ns := range []string{"user", "mount", "pid", "ipc", "uts", "cgroup", "net"} {
		if !slices.Contains(e.Namespaces, ns) {
			t.Errorf("namespaces %q lack %s", e.Namespaces, ns)
		}
	}
	if !e.NoNewPrivs || e.Seccomp == "" || e.Network != "none" {
		t.Errorf("enforced: %+v", e)
	}
	// The defaults limit memory and not cpu: limits that they ask for and the host lacks are missing,
	// and no more.
	limited, err := d.TryCreate(t.Context(), api.CreateSandbox{Limits: api.Limits{Memory: 64 << 20, CPUs: 1}})
	if e.Memory != "cgroup" {
		if len(e.Missing) == 0 {
			t.Errorf("memory is held by %q and cpu by %q, and nothing is reported missing", e.Memory, e.CPU)
		}
		wantProblem(t, err, api.CodeUnenforceable, "memory")
		return
	}
	if err != nil || limited.Enforced.Memory != "cgroup" || limited.Enforced.CPU != "cgroup" {
		t.Errorf("with both limits: %+v, %v", limited, err)
	}
}
