package layer

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A directory that cannot be opened for want of something of this host's has not been replaced, and
// goes without its mode only with an error.
func TestHostsErrorsAreNotTakenForReplacedDirectories(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	x, err := newExtractor(root, Options{Limits: DefaultLimits(), SingleID: true, Lower: []*os.Root{}})
	if err != nil {
		t.Fatal(err)
	}
	defer x.close()
	if _, err := x.tree.directory("a/b", true); err != nil {
		t.Fatal(err)
	}
	if err := x.hide(*x.tree.cached, "gone"); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP} {
		if !isReplaced(fmt.Errorf("open: %w", err)) {
			t.Errorf("%v is not taken for a directory that was replaced", err)
		}
	}
	for _, err := range []error{nil, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EIO, unix.EACCES} {
		if isReplaced(err) {
			t.Errorf("%v is taken for a directory that was replaced", err)
		}
	}
	x.tree.forget()
	if err := x.tree.dir.Close(); err != nil { // every open fails from now on
		t.Fatal(err)
	}
	if err := x.finishDir("a/b", byDefault); !errors.Is(err, unix.EBADF) {
		t.Errorf("finish: %v", err)
	}
	if is, err := x.merged("a/b", map[string]bool{}); !errors.Is(err, unix.EBADF) {
		t.Errorf("merged: %v, %v", is, err)
	}
	if err := x.applyLower(); !errors.Is(err, unix.EBADF) {
		t.Errorf("apply to the layers below: %v", err)
	}
}

// Omissions are shown to people, on terminals too, and their names come from the author of the
// layer.
func TestNamesOfWhatIsSkippedAreFitToBeShown(t *testing.T) {
	for name, want := range map[string]string{
		"a/b c":                  "a/b c",
		"größe":                  "größe",
		"a\x1b[31mred":           `"a\x1b[31mred"`,
		"a\nb: xattr user.x":     `"a\nb: xattr user.x"`,
		"a\x9bb":                 `"a\x9bb"`,
		"\u202egpj.exe":          `"\u202egpj.exe"`,
		`"quoted"`:               `"\"quoted\""`,
		"":                       `""`,
		strings.Repeat("n", 201): strings.Repeat("n", 200) + "...",
	} {
		if got := shown(name); got != want {
			t.Errorf("%q is shown as %s, want %s", name, got, want)
		}
	}
}
