package service

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// The ids of mounts are those of the programs' user, which must be known without the image's files.
func TestIDsOfMountsAreTheUsers(t *testing.T) {
	seven, eight := uint32(7), uint32(8)
	for _, tt := range []struct {
		user     string
		mount    api.Mount
		uid, gid uint32
		err      string
	}{
		{user: ""},
		{user: "root"},
		{user: "root:root"},
		{user: "0:5", gid: 5},
		{user: "1000", uid: 1000, gid: 1000},
		{user: "1000:50", uid: 1000, gid: 50},
		{user: "node", err: "a name"},
		{user: "1000:users", err: "a name"},
		{user: "node", mount: api.Mount{UID: &seven}, uid: 7, gid: 7},
		{user: "1000", mount: api.Mount{UID: &seven, GID: &eight}, uid: 7, gid: 8},
		{user: "1000", mount: api.Mount{GID: &eight}, uid: 1000, gid: 8},
	} {
		tt.mount.Type, tt.mount.Source, tt.mount.Target = api.MountBind, "/a", "/b"
		asked := []api.Mount{tt.mount}
		set := api.Settings{Mounts: asked}
		err := fillMounts(&set, &runtime.Profile{}, tt.user)
		switch {
		case tt.err != "":
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("user %q: %v", tt.user, err)
			}
		case err != nil:
			t.Errorf("user %q: %v", tt.user, err)
		case *set.Mounts[0].UID != tt.uid || *set.Mounts[0].GID != tt.gid:
			t.Errorf("user %q: %d:%d", tt.user, *set.Mounts[0].UID, *set.Mounts[0].GID)
		case asked[0] != tt.mount:
			t.Errorf("user %q: the request is changed", tt.user)
		}
	}
	two := api.Settings{Mounts: []api.Mount{
		{Type: api.MountBind, Source: "/a", Target: "/a", UID: &seven}, {Type: api.MountBind, Source: "/b", Target: "/b", UID: &eight},
	}}
	if err := fillMounts(&two, &runtime.Profile{}, ""); err == nil || !strings.Contains(err.Error(), "have the same") {
		t.Errorf("two users: %v", err)
	}
	memory := api.Settings{Mounts: []api.Mount{{Type: api.MountBind, Source: "/a", Target: "/work/a"}}}
	if err := fillMounts(&memory, &runtime.Profile{Mounts: []api.Scratch{{Path: "/work"}}}, ""); err == nil || !strings.Contains(err.Error(), "/work") {
		t.Errorf("below a mount of the profile: %v", err)
	}
	old := api.Settings{Mounts: make([]api.Mount, maxMounts+1)}
	if err := validateMounts(&old, nil); err == nil {
		t.Error("any number is accepted")
	}
}
