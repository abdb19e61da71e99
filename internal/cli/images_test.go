package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func TestImageCommands(t *testing.T) {
	dir := t.TempDir()
	archive := filepath.Join(dir, "in.tar")
	if err := os.WriteFile(archive, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out.tar")
	for _, test := range []struct {
		name   string
		args   []string
		images []string
		code   int
		stdout string // a substring
		stderr string // a substring
	}{
		{name: "rmi", args: []string{"rmi", "a:1", "b:1"}, stdout: "a:1\nb:1\n"},
		{name: "rmi of one in use", args: []string{"rmi", "used:1"}, code: 1, stderr: "held by work"},
		{name: "rmi goes on after one in use", args: []string{"rmi", "used:1", "b:1"}, code: 1, stdout: "b:1\n", stderr: "held by work"},
		{name: "rmi --force", args: []string{"rmi", "--force", "used:1"}, stdout: "used:1\n"},
		{name: "rmi --json", args: []string{"rmi", "--json", "a:1", "b:1"}, stdout: `"bytes": 20`},
		{name: "rmi of nothing", args: []string{"rmi"}, code: 2, stderr: "no argument is given; as in: sandboxd rmi [flags] REFERENCE..."},
		{name: "prune", args: []string{"images", "prune"}, stdout: "old:1\n1 images, 0 steps of builds, 1.5MB\n"},
		{name: "prune ended", args: []string{"prune"}, stdout: "3600 map[]\n", stderr: "2 more have ended since then and stay"},
		{name: "prune all ended of a label", args: []string{"prune", "--older-than", "0s", "-l", "a=b"}, stdout: "0 map[a:b]\n"},
		{name: "prune with a negative age", args: []string{"prune", "--older-than", "-1s"}, code: 2, stderr: "is negative"},
		{name: "prune snapshots", args: []string{"snapshots", "prune", "--older-than", "0s"}, stdout: "true map[]\n1 snapshots, 1.5MB\n"},
		{name: "prune snapshots of a label", args: []string{"snapshots", "prune", "-l", "a=b"}, stdout: "false map[a:b]\n"},
		{name: "prune snapshots without saying which", args: []string{"snapshots", "prune"}, code: 2, stderr: "which snapshots?"},
		{name: "prune --all", args: []string{"images", "prune", "--all"}, stdout: "unused:1\n2 images"},
		{name: "tag", args: []string{"tag", "a:1", "b:1"}, stdout: "b:1 sha256:0123\n"},
		{name: "inspect", args: []string{"image", "inspect", "a:1"}, stdout: `"reference": "a:1"`},
		{name: "history, last step first and nothing for the terminal", args: []string{"image", "history", "a:1"}, stdout: "first\\x1b[31m step\n"},
		{name: "verify", args: []string{"images", "--verify"}, stdout: "3 blobs (1kB) read, 1 trees compared, 7 entries"},
		{name: "verify finds damage", args: []string{"images", "--verify"}, images: []string{"damaged"}, code: 1, stderr: "sha256:0123"},
		{name: "import", args: []string{"import", archive, "a:1"}, stdout: "a:1 sha256:0123\n"},
		{name: "import of what is not there", args: []string{"import", dir + "/none"}, code: 1, stderr: "none"},
		{name: "import of a directory that is no layout", args: []string{"import", dir, "a:1"}, code: 1, stderr: "not an OCI layout"},
		{name: "import of a root that is a directory", args: []string{"import", "--rootfs", dir, "a:1"}, code: 2, stderr: "tar -C"},
		{name: "import of a root without a name", args: []string{"import", "--rootfs", archive}, code: 2, stderr: "REFERENCE"},
		{name: "flags of a root without one", args: []string{"import", "-u", "1", archive}, code: 2, stderr: "--rootfs"},
		{name: "export to stdout", args: []string{"export", "--format", "docker", "a:1"}, stdout: "archive in docker"},
		{name: "export to a file", args: []string{"export", "-o", out, "a:1"}},
		{name: "export in an unknown format", args: []string{"export", "--format", "zip", "a:1"}, code: 2, stderr: "zip"},
		{name: "export that breaks off", args: []string{"export", "-o", filepath.Join(dir, "half.tar"), "damaged"}, code: 1, stderr: "--verify"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := cmdtest.New()
			f.Images = test.images
			got := inline(t, f.Start(t), "", test.args...)
			if got.Code != test.code || !strings.Contains(got.Stdout, test.stdout) || !strings.Contains(got.Stderr, test.stderr) {
				t.Errorf("%q ended with %d\nstdout %q\nstderr %q", test.args, got.Code, got.Stdout, got.Stderr)
			}
		})
	}
	if data, err := os.ReadFile(out); err != nil || string(data) != "archive in oci" {
		t.Errorf("the exported file has %q (%v)", data, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left beside the archives: %v (%v)", entries, err)
	}
}

// The configuration of an imported root file system is sent with it.
func TestImportSendsTheConfiguration(t *testing.T) {
	f := cmdtest.New()
	archive := filepath.Join(t.TempDir(), "root.tar")
	if err := os.WriteFile(archive, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := cmdtest.Finish(t, cmdtest.Command(t, f.Start(t), "import", "--rootfs", "--entrypoint", "sh", "--entrypoint", "-c", "--cmd", "a, b", "-e", "A=b,c", "-w", "/w", "-u", "1:2", archive, "a:1"))
	const want = `import {"entrypoint":["sh","-c"],"cmd":["a, b"],"env":["A=b,c"],"working_dir":"/w","user":"1:2"} bytes`
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if log := strings.Join(f.Log, "\n"); got.Code != 0 || !strings.Contains(log, want) {
		t.Errorf("exit %d, %s; the daemon got\n%s", got.Code, got.Stderr, log)
	}
}

// Exports keep links, devices and pipes under the target's name.
func TestExportKeepsWhatTheNameStandsFor(t *testing.T) {
	d := cmdtest.New().Start(t)
	dir := t.TempDir()
	fifo, link, file := filepath.Join(dir, "fifo"), filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	read := make(chan string, 1)
	go func() {
		data, err := os.ReadFile(fifo)
		read <- fmt.Sprint(string(data), err)
	}()
	for _, target := range []string{fifo, link} {
		if got := cmdtest.Finish(t, cmdtest.Command(t, d, "export", "-o", target, "a:1")); got.Code != 0 {
			t.Errorf("%s: exit code %d: %s", target, got.Code, got.Stderr)
		}
	}
	if got := <-read; !strings.HasPrefix(got, "archive in oci") {
		t.Errorf("the FIFO had %q", got)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link is %v (%v)", fi, err)
	}
	if data, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(data), "archive in oci") {
		t.Errorf("behind the link: %q (%v)", data, err)
	}
}
