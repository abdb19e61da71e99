package service_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A volume is its tenant's: others have another one of the name, or none, and no removal of theirs
// reaches it.
func TestVolumesOfTenants(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	one := r.D.Service().For(service.Caller{Tenant: "1", UID: 1})
	two := r.D.Service().For(service.Caller{Tenant: "2", UID: 2})
	with := func(name string) api.CreateSandbox {
		return api.CreateSandbox{Settings: api.Settings{Mounts: []api.Mount{{Type: api.MountVolume, Source: name, Target: "/v"}}}}
	}
	s, err := one.CreateSandbox(t.Context(), with("data"))
	if err != nil {
		t.Fatal(err)
	}
	if got := two.Volumes(service.VolumeFilter{}); len(got.Volumes) != 0 {
		t.Errorf("another tenant lists %+v", got)
	}
	if _, err := two.Volume(t.Context(), "data"); !errors.Is(err, class.ErrNoVolume) {
		t.Errorf("another tenant's look: %v", err)
	}
	if err := two.RemoveVolume(t.Context(), "data"); !errors.Is(err, class.ErrNoVolume) {
		t.Errorf("another tenant's removal: %v", err)
	}
	if err := two.ExportVolume(t.Context(), "data", new(bytes.Buffer)); !errors.Is(err, class.ErrNoVolume) {
		t.Errorf("another tenant's export: %v", err)
	}
	if out, err := two.PruneVolumes(t.Context(), api.PruneVolumes{All: true}); err != nil || len(out.Removed) > 0 {
		t.Errorf("another tenant's prune: %+v, %v", out, err)
	}
	if _, err := two.ImportVolume(t.Context(), strings.NewReader("theirs"), api.CreateVolume{Name: "data"}); err != nil {
		t.Fatal(err)
	}
	var mine bytes.Buffer
	if err := one.ExportVolume(t.Context(), "data", &mine); err != nil || mine.Len() != 0 {
		t.Errorf("the first tenant's: %q, %v", mine.String(), err)
	}
	if err := two.RemoveVolume(t.Context(), "data"); err != nil {
		t.Errorf("removal of an own one, of which another tenant's sandbox has the name: %v", err)
	}
	if err := one.RemoveVolume(t.Context(), "data"); !errors.Is(err, class.ErrVolumeInUse) || !strings.Contains(err.Error(), s.Name) {
		t.Errorf("in use: %v", err)
	}
	if err := one.DeleteSandbox(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := one.RemoveVolume(t.Context(), "data"); err != nil {
		t.Error(err)
	}
}

// A volume that is made for a sandbox that cannot be created is not left, and one that was there
// is.
func TestVolumesOfFailedCreations(t *testing.T) {
	r := daemontest.New(t, servicetest.RealInit(t)).Start()
	a := r.D.Service().For(service.Caller{Rights: service.Administer})
	if _, _, err := a.CreateVolume(t.Context(), api.CreateVolume{Name: "there"}); err != nil {
		t.Fatal(err)
	}
	first, err := a.CreateSandbox(t.Context(), api.CreateSandbox{Name: "taken"})
	if err != nil {
		t.Fatal(err)
	}
	req := api.CreateSandbox{Name: "taken", Settings: api.Settings{Mounts: []api.Mount{
		{Type: api.MountVolume, Source: "there", Target: "/a"}, {Type: api.MountVolume, Source: "new", Target: "/b"}, {Type: api.MountVolume, Target: "/c"},
	}}}
	if _, err := a.CreateSandbox(t.Context(), req); !errors.Is(err, class.ErrExists) {
		t.Fatalf("a name that is taken: %v", err)
	}
	// A round of the daemon's may be at one of the volumes, which then removes it.
	volumes := func() []api.Volume { return a.Volumes(service.VolumeFilter{}).Volumes }
	r.Await(func() string { return fmt.Sprintf("after the failure: %+v", volumes()) }, func() bool {
		got := volumes()
		return len(got) == 1 && got[0].Name == "there"
	})
	req.Name = ""
	s, err := a.CreateSandbox(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if got := a.Volumes(service.VolumeFilter{}).Volumes; len(got) != 3 {
		t.Errorf("after the creation: %+v", got)
	}
	dangling := false
	if got := a.Volumes(service.VolumeFilter{Dangling: &dangling}).Volumes; len(got) != 3 || got[0].Sandboxes[0].ID != s.ID {
		t.Errorf("in use: %+v", got)
	}
	for _, id := range []string{s.ID, first.ID} {
		if err := a.DeleteSandbox(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	r.Await(func() string { return fmt.Sprintf("when the sandbox is gone: %+v", volumes()) }, func() bool {
		got := volumes()
		return len(got) == 2 && got[0].Name == "new" && got[1].Name == "there"
	})
	out, err := a.PruneVolumes(t.Context(), api.PruneVolumes{})
	if err != nil || len(out.Removed) != 0 {
		t.Errorf("prune: %+v, %v", out, err)
	}
	if out, err = a.PruneVolumes(t.Context(), api.PruneVolumes{All: true}); err != nil || len(out.Removed) != 2 {
		t.Errorf("prune all: %+v, %v", out, err)
	}
}
