package launcher

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestWithOwner(t *testing.T) {
	many := []idmap.Range{{Inside: 0, Outside: 1, Size: 65536}}
	want := append(slices.Clone(many), idmap.Range{Inside: 65536, Outside: 0, Size: 1})
	if got := WithOwner(many); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	single := []idmap.Range{{Inside: 0, Outside: 0, Size: 1}}
	if got := WithOwner(single); !slices.Equal(got, single) {
		t.Errorf("a map that holds the owner became %v", got)
	}
}

// A range is taken only for the mount that was made for it; without a mount the launcher names one,
// and keeps none.
func TestTakeForAWorkspace(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	r := &Ranges{count: 4, mounted: make([]bool, 3)}
	wants := func(w *runtime.Workspace, number int) {
		t.Helper()
		lease, err := r.TakeForWorkspace(w)
		wanted, ok := errors.AsType[*wantsWorkspaceError](err)
		if !ok || wanted.number != number || !errors.Is(err, errWantsWorkspace) {
			t.Errorf("%+v: %v, %v, want the mount for range %d", w, lease, err, number)
		}
	}
	wants(&runtime.Workspace{}, 1)
	wants(&runtime.Workspace{}, 1)
	first, err := r.Take()
	if err != nil {
		t.Fatal(err)
	}
	wants(&runtime.Workspace{Mount: null, Range: 1}, 2) // another sandbox was faster
	wants(&runtime.Workspace{Mount: null, Range: 9}, 2)
	wants(&runtime.Workspace{Mount: null, Range: 0}, 2)
	lease, err := r.TakeForWorkspace(&runtime.Workspace{Mount: null, Range: 2})
	if err != nil || lease.number != 2 || !r.mounted[1] {
		t.Errorf("range 2: %+v, %v", lease, err)
	}
	wants(&runtime.Workspace{Mount: null, Range: 2}, 3)
	first.Release()
	lease.Release()
	if slices.Contains(r.mounted, true) {
		t.Errorf("ranges are left taken: %v", r.mounted)
	}
	shared := &Ranges{}
	if lease, err := shared.TakeForWorkspace(&runtime.Workspace{Mount: null}); err != nil || lease.number != 0 {
		t.Errorf("the shared range: %+v, %v", lease, err)
	}
}

// A mount through which the host's files could be changed is refused.
func TestMountOfAWorkspaceIsVerified(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	req := &request{Op: opCreate, Spec: &runtime.Spec{Workspace: &runtime.Workspace{Sent: true}}}
	if !withMount(req) {
		t.Error("no mount comes with the request")
	}
	if err := takeMount(req, []*os.File{nil, dir}); err == nil || req.Spec.Workspace.Mount != nil {
		t.Errorf("a writable mount was taken: %v", err)
	}
	req.Spec.Workspace.Sent = false
	if withMount(req) || withMount(&request{Op: opKill}) || withMount(&request{Op: opCreate}) {
		t.Error("a mount comes with a request that has none")
	}
}

func TestHiddenFile(t *testing.T) {
	for _, want := range [][]string{{"a"}, {"a/b\n", ".env", "x\xff"}} {
		f, err := hiddenFile(want)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if got, err := readHidden(f); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q became %q, %v", want, got, err)
		}
		if _, err := f.WriteAt([]byte("x"), 0); err == nil {
			t.Error("it can be written to")
		}
	}
	for _, bad := range [][]string{{"../x"}, {"a", ""}, {strings.Repeat("x", 1<<20)}} {
		f, err := hiddenFile(bad)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if got, err := readHidden(f); err == nil {
			t.Errorf("%.40q was taken as %.40q", bad, got)
		}
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := readHidden(null); err == nil {
		t.Error("an empty file was taken")
	}
}

// FuzzReadHidden reads files of any content.
func FuzzReadHidden(f *testing.F) {
	f.Add([]byte("a\x00b/c\x00"))
	f.Add([]byte("../x\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if _, err := file.Write(data); err != nil {
			t.Fatal(err)
		}
		paths, err := readHidden(file)
		if err != nil {
			return
		}
		for _, p := range paths {
			if !filepath.IsLocal(p) || filepath.Clean(p) != p {
				t.Fatalf("%q was taken", p)
			}
		}
	})
}
