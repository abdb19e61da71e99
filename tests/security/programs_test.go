package security

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/seccomp"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// program is something that people run in sandboxes. Its script runs in an empty directory that it
// can write to.
type program struct {
	name   string
	needs  []string // on the host, whose /usr the sandboxes show; those that CI installs are always there
	script string
	root   bool // needs the sandbox's root, so it does not run under "hardened"
	rare   bool // not where no package of a distribution puts it
}

var programs = []program{
	{name: "shell and tools", needs: []string{"bash", "tar", "gzip"}, script: `
		for i in 1 2 3; do echo $i | sort | uniq; done; cat <(echo substitution)
		echo text >a; tar cf a.tar a; gzip -f a.tar; tar tzf a.tar.gz; find . -name a | xargs grep -l text
		cp -a a b; mv b c; ln -s c d; touch -d 2020-01-01 c; chmod 700 c; sed -i s/text/other/ c; awk '{print $1}' c
		mkfifo f; (echo fifo >f) & cat f; wait; timeout 600 true; flock lock true; dd if=/dev/zero of=z bs=1k count=4; truncate -s 10 z; ls -la; df .; ps aux; date`},
	{name: "python", needs: []string{"/usr/bin/python3"}, script: `exec /usr/bin/python3 -c '
import asyncio, multiprocessing, os, shutil, socket, sqlite3, ssl, subprocess, tempfile, threading
print(subprocess.run(["ls", "/"], capture_output=True, check=True).returncode)
with multiprocessing.Pool(2) as p: print(p.map(abs, [1, -2]))
asyncio.run(asyncio.sleep(0.01))
c = sqlite3.connect("x.db"); c.execute("create table t(a)"); c.commit()
shutil.copy2("x.db", "y.db"); os.rename("y.db", "z.db")
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
s = socket.create_server(("127.0.0.1", 0)); k = socket.create_connection(s.getsockname()); s.accept()[0].sendall(b"x"); print(k.recv(1))
with tempfile.TemporaryDirectory() as d: print(os.listdir(d))
'`},
	{name: "numpy", needs: []string{"/usr/lib/python3/dist-packages/numpy"}, script: `exec /usr/bin/python3 -c '
import numpy
a = numpy.random.rand(200, 200); print(numpy.linalg.inv(a @ a.T + numpy.eye(200)).shape)'`},
	{name: "pip", needs: []string{"/usr/lib/python3/dist-packages/pip"}, script: `
		/usr/bin/python3 - <<'X'
import zipfile
with zipfile.ZipFile("thing-1.0-py3-none-any.whl", "w") as z:
    z.writestr("thing.py", "print('installed')\n")
    z.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    z.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr("thing-1.0.dist-info/RECORD", "thing.py,,\nthing-1.0.dist-info/METADATA,,\nthing-1.0.dist-info/WHEEL,,\nthing-1.0.dist-info/RECORD,,\n")
X
		/usr/bin/python3 -m pip install --quiet --no-index --find-links . --target site thing
		PYTHONPATH=site /usr/bin/python3 -m thing`},
	{name: "gcc and make", needs: []string{"gcc", "make"}, script: `
		printf '#include <pthread.h>\n#include <stdio.h>\nvoid *f(void *x) { return x; }\nint main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("compiled"); }\n' >a.c
		printf 'all: a\n\t./a\na: a.c\n\tgcc -O2 -pthread -o a a.c\n' >Makefile
		make -j2`},
	{name: "git", needs: []string{"git"}, script: `
		git init -q r; cd r; echo x >f; git add f; git -c user.name=a -c user.email=a@b commit -qm one
		git gc -q; git clone -q . ../other; git -C ../other log --oneline`},
	{name: "node", needs: []string{"node"}, script: `exec node -e '
require("fs").writeFileSync("n.txt", "x"); console.log(require("child_process").execSync("ls").toString())
new (require("worker_threads").Worker)("1", {eval: true})
require("http").createServer((q, r) => r.end("x")).listen(0, "127.0.0.1", function () {
  require("http").get({host: "127.0.0.1", port: this.address().port}, r => { r.resume(); r.on("end", () => process.exit()) }) })'`},
	{name: "java", needs: []string{"java", "javac"}, script: `
		printf 'public class A { public static void main(String[] a) throws Exception { Thread t = new Thread(() -> System.out.println("hi")); t.start(); t.join(); } }\n' >A.java
		javac A.java; java -Xmx64m A`},
	{name: "ruby", needs: []string{"ruby"}, script: `exec ruby -rsocket -e 'Thread.new { puts 1 }.join; system("ls"); fork { exit }; Process.wait'`},
	{name: "perl", needs: []string{"perl"}, script: `exec perl -MSocket -e 'if (!fork) { exit } wait; open(F, ">p"); print F 1; close F; rename "p", "q"; print "done\n"'`},
	{name: "Go's tools", rare: true, needs: []string{"/usr/local/go/bin/go"}, script: `
		printf 'package main\nfunc main() { println("go") }\n' >a.go
		export GOCACHE=$PWD/cache GOPATH=$PWD/path GOTOOLCHAIN=local PATH=/usr/local/go/bin:$PATH
		go version; go env GOROOT; gofmt -l a.go; go list -e ./a.go; go tool compile -p main -o a.o a.go`}, // go build takes a minute
	{name: "dpkg-deb", needs: []string{"dpkg-deb"}, script: `
		mkdir -p d/DEBIAN d/opt; echo x >d/opt/thing; printf 'Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n' >d/DEBIAN/control
		dpkg-deb --root-owner-group --build d thing.deb; dpkg-deb -x thing.deb out; cat out/opt/thing`},
	{name: "apt", needs: []string{"apt-get", "dpkg-deb"}, script: aptIndex + `
		apt-get -q update; apt-get -q -y --print-uris install thing; apt-get -q download thing; dpkg-deb -x thing_1_all.deb out; cat out/opt/thing`},
	// Files of a package get their owners: for that it takes the sandbox's root.
	{name: "apt installs", needs: []string{"apt-get", "dpkg"}, root: true, script: aptIndex + `
		apt-get -q update; apt-get -q -y install thing; cat root/opt/thing; apt-get -q -y remove thing; test ! -e root/opt/thing`},
	{name: "another user", needs: []string{"setpriv"}, root: true, script: `
		touch mine; chown 7:8 mine; setpriv --reuid=7 --regid=8 --clear-groups sh -c 'id -u; kill -0 $$'; stat -c %u mine`},
	{name: "strace", needs: []string{"strace"}, root: true, script: `strace -f -o trace sh -c 'echo traced'; grep -q execve trace`},
	{name: "gdb", needs: []string{"gdb"}, root: true, script: `
		gdb -q -batch -ex starti -ex 'info registers' --args /bin/true 2>&1 | grep -q '^rip\|^pc'`},
}

// aptIndex makes a package, a repository of files with an index that has it, and a configuration
// by which apt-get and dpkg work below the directory: the database of the host's packages is not
// the sandbox's.
const aptIndex = `
		mkdir -p d/DEBIAN d/opt repo root/var/lib/dpkg/info root/var/lib/dpkg/updates state/lists/partial cache/archives/partial
		printf 'Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n' >d/DEBIAN/control
		echo installed >d/opt/thing; dpkg-deb --root-owner-group --build d repo/thing.deb; touch root/var/lib/dpkg/status
		(dpkg-deb -f repo/thing.deb; echo Filename: ./thing.deb; echo "Size: $(stat -c %s repo/thing.deb)"
			echo "SHA256: $(sha256sum repo/thing.deb | cut -d' ' -f1)") >repo/Packages
		echo "deb [trusted=yes] file:$PWD/repo ./" >sources.list
		printf '%s;\n' "Dir::Etc::sourcelist \"$PWD/sources.list\"" 'Dir::Etc::sourceparts "-"' "Dir::State \"$PWD/state\"" \
			"Dir::State::status \"$PWD/root/var/lib/dpkg/status\"" "Dir::Cache \"$PWD/cache\"" "Dir::Log \"$PWD\"" \
			"DPkg::Options { \"--root=$PWD/root\"; \"--log=$PWD/dpkg.log\"; }" 'APT::Sandbox::User "root"' >apt.conf
		export APT_CONFIG=$PWD/apt.conf`

// missing says what of a program this host lacks.
func (p *program) missing() string {
	for _, need := range p.needs {
		if filepath.IsAbs(need) {
			if _, err := os.Stat(need); err != nil {
				return need
			}
		} else if path, err := exec.LookPath(need); err != nil || !strings.HasPrefix(path, "/usr/") && !strings.HasPrefix(path, "/bin/") {
			return need
		}
	}
	return ""
}

func (p *program) shell() []string {
	return []string{"bash", "-c", "set -eu; dir=$(mktemp -d); cd \"$dir\"\n" + p.script}
}

// Real programs run, under each profile that allows them: the evidence for the contents of the
// filters.
func TestRealProgramsRun(t *testing.T) {
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	ran := 0
	for _, profile := range profiles(t, d) {
		s := d.Create(t, api.CreateSandbox{Profile: profile})
		for _, p := range programs {
			missing := p.missing()
			if missing != "" && p.rare {
				t.Logf("%s: not on this host: %s", p.name, missing)
				continue
			}
			if p.root && profile == "hardened" || p.name == "another user" && s.Enforced.IDs == "single" {
				continue
			}
			t.Run(profile+"/"+p.name, func(t *testing.T) {
				if missing != "" {
					testenv.RequirePeer(t, missing)
					t.Skipf("%s is not where sandboxes of the host image have it", missing)
				}
				got := s.Exec(t, api.ExecRequest{Argv: p.shell(), Timeout: testenv.HungAfter.Seconds()})
				if got.Exit.Code != 0 || got.Exit.Signal != "" {
					t.Errorf("%+v\nstdout: %s\nstderr: %s", got.Exit, got.Stdout, got.Stderr)
				}
				ran++
			})
		}
	}
	if ran < 5 {
		t.Errorf("only %d programs ran", ran)
	}
}

// fallbacks are calls that programs make where they can and do without where they cannot: each was
// seen in a trace of a program that runs all the same in TestRealProgramsRun.
var fallbacks = []string{
	"clone3",                                                                                                            // glibc: clone
	"lchown",                                                                                                            // apt: root gives files to their owners; other users do not try
	"fgetxattr", "flistxattr", "fsetxattr", "getxattr", "lgetxattr", "listxattr", "llistxattr", "lsetxattr", "setxattr", // cp, tar, ls: no attributes
	"get_mempolicy", "set_mempolicy", // numpy's BLAS, the Java virtual machine: one node
	"pkey_alloc", "pkey_free", "pkey_mprotect", // node's engine: no protection keys; the last two only where the processor has them
}

// The recorder: the system calls of programs, traced on the host, are allowed by the profiles or
// known to be dispensable.
func TestRecordedCallsAreAllowed(t *testing.T) {
	testenv.SameForAll(t)
	strace := testenv.RequirePeer(t, "strace")
	if err := exec.CommandContext(t.Context(), strace, "-qq", "-o", "/dev/null", "true").Run(); err != nil {
		t.Skipf("strace does not work here: %v", err)
	}
	for _, filter := range seccomp.Embedded() {
		plan, err := seccomp.Plan(filter, seccomp.AMD64, seccomp.Abilities{Actions: []string{"errno", "allow"}})
		if err != nil {
			t.Fatal(err)
		}
		allowed := seccomp.Reachable(plan)
		for _, p := range programs {
			if missing := p.missing(); missing != "" || p.root {
				continue
			}
			t.Run(filter.Name+"/"+p.name, func(t *testing.T) {
				for _, call := range record(t, strace, p) {
					switch {
					case slices.Contains(allowed, call):
					case slices.Contains(fallbacks, call):
						t.Logf("%s is called, and done without", call)
					default:
						t.Errorf("%s is called, and neither allowed nor known to be done without", call)
					}
				}
			})
		}
	}
}

// callName matches the name of a system call.
var callName = regexp.MustCompile(`^[a-z0-9_]+$`)

// recorded are the traces that were made.
var recorded = make(map[string][]string)

// record runs a program on the host and returns the names of the calls that it makes.
func record(t *testing.T, strace string, p program) []string {
	t.Helper()
	if calls, ok := recorded[p.name]; ok {
		return calls
	}
	out := filepath.Join(t.TempDir(), "counts")
	argv := append([]string{"-f", "-qq", "-c", "-U", "name", "-o", out}, p.shell()...)
	cmd := exec.CommandContext(t.Context(), strace, argv...)
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir(), "HOME="+t.TempDir(), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("on the host: %v\n%s", err, said)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var calls []string
	for line := range strings.Lines(string(data)) {
		name := strings.TrimSpace(line)
		// Of a thread that ends while strace looks at it a line may say but that it is let go.
		if name != "syscall" && name != "total" && callName.MatchString(name) {
			calls = append(calls, name)
		}
	}
	if len(calls) < 10 {
		t.Fatalf("strace counted %q", data)
	}
	recorded[p.name] = calls
	return calls
}
