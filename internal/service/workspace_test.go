package service

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestWorkspaceOfARequest(t *testing.T) {
	for name, tc := range map[string]struct {
		w      api.Workspace
		tenant string
		cwd    string // of the image, or with asked of the request
		asked  bool
		user   string
		tmpfs  string
		target string // empty: refused, with words
		words  string
	}{
		"plain":                 {w: api.Workspace{Source: "/a/b"}, target: "/workspace"},
		"an image's directory":  {w: api.Workspace{Source: "/a"}, cwd: "/app", target: "/app"},
		"an image without one":  {w: api.Workspace{Source: "/a"}, cwd: "/", target: "/workspace"},
		"asked for":             {w: api.Workspace{Source: "/a", Target: "/x/y"}, cwd: "/app", target: "/x/y"},
		"by numbers":            {w: api.Workspace{Source: "/a"}, user: "1000:1001", target: "/workspace"},
		"a tenant":              {w: api.Workspace{Source: "/a"}, tenant: "1001", words: "only the daemon's own user"},
		"relative":              {w: api.Workspace{Source: "a"}, words: "workspace.source"},
		"the host's root":       {w: api.Workspace{Source: "/"}, words: "workspace.source"},
		"not the shortest":      {w: api.Workspace{Source: "/a/../etc"}, words: "workspace.source"},
		"over our own":          {w: api.Workspace{Source: "/a", Target: "/proc/x"}, words: "workspace.target"},
		"over /dev":             {w: api.Workspace{Source: "/a", Target: "/dev"}, words: "workspace.target"},
		"over all":              {w: api.Workspace{Source: "/a", Target: "/"}, words: "workspace.target"},
		"below a tmpfs":         {w: api.Workspace{Source: "/a", Target: "/t/x"}, tmpfs: "/t", words: "would hide it"},
		"hidden":                {w: api.Workspace{Source: "/a", Hidden: []string{"x/y", "x", "x-y", "x/y/z", "b", "b"}}, target: "/workspace"},
		"hidden outside":        {w: api.Workspace{Source: "/a", Hidden: []string{"x/../../y"}}, words: "workspace.hidden"},
		"hidden, absolute":      {w: api.Workspace{Source: "/a", Hidden: []string{"/a/x"}}, words: "workspace.hidden"},
		"all hidden":            {w: api.Workspace{Source: "/a", Hidden: []string{"."}}, words: "workspace.hidden"},
		"a name":                {w: api.Workspace{Source: "/a"}, user: "node", words: "--user 1000:1000"},
		"the root as directory": {w: api.Workspace{Source: "/a"}, cwd: "/", asked: true, target: "/workspace"},
	} {
		r := runtime.Request{Cwd: tc.cwd, User: tc.user, Settings: api.Settings{Workspace: &tc.w}}
		if tc.tmpfs != "" {
			r.Tmpfs = []api.Scratch{{Path: tc.tmpfs}}
		}
		s := &API{caller: Caller{Tenant: tc.tenant}}
		err := s.workspace(&r, tc.asked)
		if tc.target == "" {
			if err == nil || !strings.Contains(err.Error(), tc.words) {
				t.Errorf("%s: %v, want %q", name, err, tc.words)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := strings.Join(r.Workspace.Hidden, " "); len(tc.w.Hidden) > 0 && got != "b x x-y" {
			t.Errorf("%s: hides %q", name, got)
		}
		if r.Workspace.Target != tc.target || tc.w.Since != (time.Time{}) || r.Workspace.Since.IsZero() || r.Cwd == "" {
			t.Errorf("%s: %+v, directory %q", name, r.Workspace, r.Cwd)
		}
		if tc.user != "" && (r.Workspace.UID != 1000 || r.Workspace.GID != 1001) {
			t.Errorf("%s: ids %d:%d", name, r.Workspace.UID, r.Workspace.GID)
		}
	}
}

// The time lies between those of files written before and after, within one tick of the clock too.
// The stat makes Linux 6.13 and later give a file a finer time at the next write.
func TestBetween(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	write := func(content string) time.Time {
		t.Helper()
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			t.Fatal(err)
		}
		return time.Unix(st.Ctim.Unix())
	}
	for range 50 {
		before := write("before")
		since, err := between()
		if err != nil {
			t.Fatal(err)
		}
		if after := write("after"); !before.Before(since) || after.Before(since) {
			t.Fatalf("written before %s and after %s: %s is not between", before, after, since)
		}
	}
}

// Clients refuse other keys of filters than these.
func TestEventFilterKeys(t *testing.T) {
	for _, key := range api.EventFilterKeys() {
		if eventKeys[key] == nil {
			t.Errorf("there is no filter by %s", key)
		}
	}
	if len(eventKeys) != len(api.EventFilterKeys()) {
		t.Errorf("%d keys, %d are told", len(eventKeys), len(api.EventFilterKeys()))
	}
}
