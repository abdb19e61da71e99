package functional

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The daemon's operator limits images, and the limits hold for all layers of one together. A
// refusal names the limit and its flag, and leaves nothing.
func TestUnpackLimits(t *testing.T) {
	testenv.SameForAll(t)
	testenv.RequireUserNS(t)
	inParallel(t)
	registry := harness.LyingRegistry(t, nil)
	busybox := harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))
	image := func(name string, layers ...v1.Layer) string {
		t.Helper()
		return registry.Push(t, name, harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, append([]v1.Layer{busybox}, layers...)...))
	}
	deep := image("team/deep:1", harness.Layer(t, "gzip", harness.Tar(t, harness.File{Name: strings.Repeat("d/", 130) + "f", Body: "deep"})))
	half := func(n int) v1.Layer {
		return harness.Layer(t, "gzip", harness.Tar(t, harness.File{Name: fmt.Sprint("half", n), Body: strings.Repeat(fmt.Sprint(n), 4<<20)}))
	}
	one, two := image("team/one:1", half(1)), image("team/two:1", half(1), half(2))

	refused := func(err error, code api.Code, limit string) {
		t.Helper()
		wantProblem(t, err, code)
		var p *api.Problem
		if errors.As(err, &p) && !strings.Contains(p.Hint, "serve --unpack-limits "+limit+"=") {
			t.Errorf("%s: the hint is %q", p.Detail, p.Hint)
		}
	}
	pull := func(d *harness.Daemon, reference, limit string) {
		t.Helper()
		before := stored(t, d)
		_, err := d.Pull(t.Context(), reference, false)
		refused(err, api.CodeImage, limit)
		if diff := cmp.Diff(before, stored(t, d)); diff != "" {
			t.Errorf("what was refused left (-before +after):\n%s", diff)
		}
	}
	d := start(t)
	d.MustPull(t, two)
	pull(d, deep, "depth")

	busyboxSize := len(harness.Tar(t, harness.Busybox(t)...))
	d = harness.Start(t, harness.Options{Args: []string{"--unpack-limits", fmt.Sprintf("depth=200,bytes=%d", busyboxSize+7<<20)}})
	d.MustPull(t, deep)
	s := d.Create(t, api.CreateSandbox{Image: deep})
	if got := s.Sh(t, "cat /"+strings.Repeat("d/", 130)+"f"); got != "deep" {
		t.Errorf("in a sandbox: %q", got)
	}
	// With the lowest layer there already, and no other; then with all but one.
	pull(d, two, "bytes")
	d.MustPull(t, one)
	pull(d, two, "bytes")

	// A sandbox's files are held to the same limits when they become part of an image.
	commit := func(s *harness.Sandbox) error {
		return d.Call(t.Context(), "POST", "/v1/sandboxes/"+s.ID+"/commit", api.CommitSandbox{Reference: "team/made:1"}, nil)
	}
	s.Sh(t, `d=/deep; for i in $(seq 140); do d=$d/d; done; mkdir -p $d`)
	if err := commit(s); err != nil {
		t.Errorf("commit of what is within the limits: %v", err)
	}
	before := stored(t, d)
	filled := d.Create(t, api.CreateSandbox{Image: one})
	filled.Sh(t, "yes | head -c 4194304 > /more")
	refused(commit(filled), api.CodeImage, "bytes")
	if diff := cmp.Diff(before, stored(t, d)); diff != "" {
		t.Errorf("a commit that was refused left (-before +after):\n%s", diff)
	}

	if got := d.CLI(t, "serve", "--unpack-limits", "bytes=none"); got.Code == 0 || !strings.Contains(got.Stderr, "bytes=none") {
		t.Errorf("a limit that is none: %+v", got)
	}
}
