package functional

import (
	"archive/tar"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// committed makes an image of a sandbox that has done to its image all that a layer can carry, and
// returns the sandbox's view of it. Lister is the program that lists it.
func committed(t *testing.T, d *harness.Daemon, registry *harness.Registry, reference string) (shown, lister string) {
	t.Helper()
	lister = harness.Helper(t, "lister")
	program, err := os.ReadFile(lister)
	if err != nil {
		t.Fatal(err)
	}
	dir := func(name string) harness.File { return harness.File{Name: name, Type: tar.TypeDir} }
	lower := append(harness.Busybox(t), harness.File{Name: "bin/lister", Body: string(program), Mode: 0o755},
		dir("gone/"), harness.File{Name: "gone/file", Body: "1"}, dir("opaque/"), harness.File{Name: "opaque/old", Body: "1"}, dir("opaque/sub/"), harness.File{Name: "opaque/sub/old", Body: "1"},
		dir("kept/"), harness.File{Name: "kept/file", Body: "1"}, harness.File{Name: "kept/deleted", Body: "1"}, harness.File{Name: "kept/hard", Type: tar.TypeLink, Link: "kept/file"},
		harness.File{Name: "link", Type: tar.TypeSymlink, Link: "kept"}, harness.File{Name: "file", Body: "1"}, dir("dir/"), harness.File{Name: "dir/old", Body: "1"},
		harness.File{Name: "fifo", Type: tar.TypeFifo}, dir("moved/"), harness.File{Name: "moved/a", Body: "1"})
	upper := []harness.File{{Name: "kept/second", Body: "2"}, {Name: "opaque/second", Body: "2"}, {Name: "gone/second", Body: "2"}}
	base := registry.Push(t, "team/base:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Cmd: []string{"sh"}},
		harness.Layer(t, "gzip", harness.Tar(t, lower...)), harness.Layer(t, "zstd", harness.Tar(t, upper...))))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	s.Sh(t, `set -e
		chmod 711 /; rm -r /gone; rm /kept/deleted; chmod 2750 /kept
		rm -r /opaque; mkdir -m 1777 /opaque; echo 3 > /opaque/new; mkdir /opaque/sub; echo 3 > /opaque/sub/new
		rm /link; echo 3 > /link                       # a file in the place of a link
		rm /file; ln -s /kept/file /file               # a link in the place of a file
		rm -r /dir; ln -s ../kept /dir                 # ... of a directory
		rm /fifo; mkdir /fifo; echo 3 > /fifo/in       # a directory in the place of a FIFO
		mv /moved /elsewhere; mkfifo -m 640 /moved     # a directory that was the image's, under another name
		echo 3 >> /kept/file                           # one of two names of a file of the image
		mkdir /new; cd /new; echo hard > one; ln one two; ln one ../kept/three; ln -s dangling link; ln link link2
		echo x > 'with space'; echo x > "$(printf 'new\nline')"; echo x > "$(printf 'tab\ttab')"; echo x > -dash; echo x > 'quote"\\'; echo x > "$(printf '\377\376')"
		echo x > "$(printf 'n%.0s' $(seq 255))"; echo x > ümläut; echo x > .hidden; echo x > 'wh.x'; mkdir '...'; ln -s "$(printf 'to\nnowhere')" 'odd link'
		l=/new/long; for i in $(seq 12); do l=$l/$(printf 'd%.0s' $(seq 30)); done; mkdir -p $l; echo deep > $l/file; ln -s $l/file long-link; ln $l/file long-hard
		echo x > setuid; chmod 4755 setuid; echo x > setgid; chmod 2711 setgid; echo x > nothing; chmod 0 nothing; mkdir -m 0 closed
		touch empty; yes | head -c 3000000 > large; dd if=/dev/zero of=holes bs=1 count=1 seek=5000000 2>/dev/null
		touch -d '2001-02-03 04:05:06' old; touch -d '2100-01-01 00:00:00' future
		mkdir attrs; touch attrs/file; lister set attrs user.dir value; lister set attrs/file user.odd "$(printf 'a\nb=\377')"; lister set /kept/second user.kept x
	`)
	if d.System(t).Enforced.IDs != api.IDsSingle {
		s.Sh(t, `set -e; cd /new; touch owned; chown 1000:1001 owned; chmod 4755 owned; mkdir owned-dir; chown 65534:0 owned-dir; ln -s x owned-link; chown -h 33:33 owned-link; chown 7:7 /kept/second`)
	}
	shown = s.Sh(t, "lister /")
	if got := d.CLI(t, "commit", s.Name, reference); got.Code != 0 {
		t.Fatalf("commit: %+v", got)
	}
	return shown, lister
}

// sameTree compares a peer's unpacked image with the sandbox's own view.
func sameTree(t *testing.T, want, got string) {
	t.Helper()
	if strings.Count(want, "\n") < 100 {
		t.Fatalf("the sandbox lists its tree as\n%s", want)
	}
	// Neither of the peers takes the root's own permissions from a layer that describes it, the first
	// line.
	if diff := cmp.Diff(strings.Split(want, "\n")[1:], strings.Split(got, "\n")[1:]); diff != "" {
		t.Errorf("the tree differs (-sandbox +peer):\n%s", diff)
	}
}

// podman makes of the committed and pushed image the tree of the sandbox, to the last name, owner
// and byte.
func TestPodmanMakesTheSameTreeOfACommit(t *testing.T) {
	podman := testenv.RequirePeer(t, "podman")
	inParallel(t)
	if os.Geteuid() != 0 {
		testenv.RequireSubIDs(t) // which podman needs
	}
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	made := registry.Name("team/made:1")
	shown, lister := committed(t, d, registry, made)
	if got := d.CLI(t, "push", made); got.Code != 0 {
		t.Fatalf("push: %+v", got)
	}
	env, home, run := harness.Podman(t)
	args := []string{"--root", filepath.Join(home, "storage"), "--runroot", filepath.Join(run, "storage"), "--storage-driver", "overlay"}
	peer := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = env
		var said strings.Builder
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, &said)
		}
		return string(out)
	}
	call := append([]string{podman}, args...)
	peer(append(call, "pull", "--quiet", "--tls-verify=false", made)...)
	// A mount of an ordinary user's is in the namespaces that podman keeps, where the owners are as
	// in the image, too.
	script := `p="$1"; l="$2"; i="$3"; shift 3; m=$("$p" "$@" image mount "$i") && "$l" "$m" && "$p" "$@" image unmount "$i" >/dev/null`
	sh := append([]string{"sh", "-c", script, "sh", podman, lister, made}, args...)
	if os.Geteuid() != 0 {
		sh = append(append(call, "unshare"), sh...)
	}
	sameTree(t, shown, peer(sh...))
}

// The same for Docker, which gets the image as an archive.
func TestDockerMakesTheSameTreeOfACommit(t *testing.T) {
	testenv.RequireRoot(t)
	unshare := testenv.RequirePeer(t, "unshare")
	d := start(t)
	shown, lister := committed(t, d, harness.LyingRegistry(t, nil), "team/made:1")
	archive := filepath.Join(t.TempDir(), "made.tar")
	if got := d.CLI(t, "export", "--format", "docker", "-o", archive, "team/made:1"); got.Code != 0 {
		t.Fatalf("export: %+v", got)
	}
	docker := harness.Docker(t)
	docker.Run(t, "load", "--quiet", "--input", archive)
	// The layers as its storage driver would mount them. A container has files of Docker's besides.
	layers := docker.Run(t, "image", "inspect", "--format", "{{.GraphDriver.Data.UpperDir}}:{{.GraphDriver.Data.LowerDir}}", "team/made:1")
	out, err := exec.CommandContext(t.Context(), unshare, "--mount", "sh", "-c", `mount -t overlay -o "ro,lowerdir=$1" overlay "$2" && "$3" "$2"`,
		"sh", strings.TrimSpace(layers), t.TempDir(), lister).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	sameTree(t, shown, string(out))
}
