package service

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// database opens /etc/passwd and /etc/group of a sandbox that holds these.
func database(t *testing.T, passwd, group string) func(context.Context, string) (*os.File, error) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{"passwd": passwd, "group": group} {
		if content != "" {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return func(_ context.Context, path string) (*os.File, error) {
		f, err := os.Open(filepath.Join(dir, filepath.Base(path)))
		if err != nil {
			return nil, &guest.Error{Stage: guest.StageOpen, Errno: syscall.ENOENT, Path: path}
		}
		return f, nil
	}
}

const (
	passwd = `root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
app:x:1000:1001:an app:/home/app:/bin/sh
homeless:x:1002:1002:::
twice:x:1003:1003::/first:
twice:x:1004:1004::/second:
# Each of these is root to a parser that ignores errors.
minus:x:-1:-1::/:
huge:x:4294967296:0::/:
words:x:zero:0::/:
empty:x:::::
plus:x:+0:+0::/:
hex:x:0x10:0::/:
space:x: 0: 0::/:
badgid:x:1005:none::/:
short:x:1006
high:x:70000:70000::/:
`
	group = `root:x:0:
daemon:x:1:
app:x:1001:
audio:x:29:app,other
video:x:44:app
wheel:x:bad:app
minus:x:-5:app
highgroup:x:70000:
`
)

func TestResolveUser(t *testing.T) {
	open := database(t, passwd, group)
	for name, tc := range map[string]struct {
		spec string
		want identity
	}{
		"nobody named":            {"", identity{home: "/root"}},
		"root":                    {"root", identity{home: "/root"}},
		"zero":                    {"0", identity{home: "/root"}},
		"name":                    {"app", identity{uid: 1000, gid: 1001, groups: []uint32{29, 44}, home: "/home/app"}},
		"name and group":          {"app:video", identity{uid: 1000, gid: 44, home: "/home/app"}},
		"name and gid":            {"app:7", identity{uid: 1000, gid: 7, home: "/home/app"}},
		"uid with an entry":       {"1000", identity{uid: 1000, gid: 1001, groups: []uint32{29, 44}, home: "/home/app"}},
		"uid without an entry":    {"4242", identity{uid: 4242, home: "/"}},
		"uid and gid":             {"4242:4243", identity{uid: 4242, gid: 4243, home: "/"}},
		"uid and group":           {"4242:audio", identity{uid: 4242, gid: 29, home: "/"}},
		"no home":                 {"homeless", identity{uid: 1002, gid: 1002, home: "/"}},
		"two entries":             {"twice", identity{uid: 1003, gid: 1003, home: "/first"}},
		"root with another gid":   {"0:29", identity{uid: 0, gid: 29, home: "/root"}},
		"highest id of a sandbox": {"65535:65535", identity{uid: 65535, gid: 65535, home: "/"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := resolveUser(t.Context(), tc.spec, open)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(identity{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// CVE-2026-30892: a field that is not a number must never become 0.
func TestBadUsersAreRefused(t *testing.T) {
	open := database(t, passwd, group)
	for _, spec := range []string{
		"stranger", "app:strangers", "minus", "huge", "words", "empty", "plus", "hex", "space", "badgid", "short", "high",
		"-1", "+0", "0x0", " 0", "0 ", "1000:", ":1000", ":", "a:b:c", "app:", "app:wheel", "app:minus", "app:highgroup",
		"65536", "4294967295", "4294967296", "99999999999999999999999", "0:65536", "root:-1", "../etc", "a\x00b", "a\nb",
		strings.Repeat("a", 65),
	} {
		if got, err := resolveUser(t.Context(), spec, open); !errors.Is(err, class.ErrInvalid) {
			t.Errorf("%q: %+v, %v", spec, got, err)
		}
	}
}

// The default user under a profile that runs nothing as root, and under one that permits it.
func TestUserOfAProfile(t *testing.T) {
	either, nobody := &runtime.Profile{Name: "any"}, &runtime.Profile{Name: "nobody", NonRoot: true, User: "65534:65534"}
	for _, tc := range []struct {
		profile            *runtime.Profile
		asked, image, want string // want "!": refused
	}{
		{either, "", "", ""},
		{either, "", "root", "root"},
		{either, "00", "app", "00"},
		{nobody, "", "", "65534:65534"},
		{nobody, "", "root", "65534:65534"},
		{nobody, "", "00:7", "65534:65534"},
		{nobody, "", "app", "app"},
		{nobody, "1000", "root", "1000"},
		{nobody, "root", "app", "!"},
		{nobody, "0:7", "app", "!"},
		{nobody, "000", "", "!"},
		{nobody, "root:app", "", "!"},
	} {
		got, err := programUser(tc.profile, tc.asked, tc.image)
		if tc.want == "!" != errors.Is(err, class.ErrInvalid) || tc.want != "!" && got != tc.want {
			t.Errorf("profile %s, %q asked for, %q by the image: %q, %v", tc.profile.Name, tc.asked, tc.image, got, err)
		}
	}
}

// The last word is the numbers': whatever name leads to root, and whoever said it, it is refused
// where nothing runs as root.
func TestNamesOfRootAreRefusedWhereNothingRunsAsRoot(t *testing.T) {
	open := database(t, passwd+"toor:x:0:0::/:/bin/sh\nzero:x:00:1000::/:\n", group)
	for _, asked := range []string{"", "root", "0", "0:1000", "toor", "toor:app", "zero"} {
		for _, own := range []string{"", "toor"} {
			rec := new(runtime.Record)
			rec.Profile, rec.User = "hardened", own
			if id, err := userOf(t.Context(), rec, asked, open); err != nil || id.uid != 0 {
				t.Errorf("control: %q of %q: %+v, %v", asked, own, id, err)
			}
			rec.Enforced.NonRoot = true
			if id, err := userOf(t.Context(), rec, asked, open); !errors.Is(err, class.ErrInvalid) || !strings.Contains(err.Error(), "runs nothing as root") {
				t.Errorf("%q of %q: %+v, %v", asked, own, id, err)
			}
		}
	}
	rec := new(runtime.Record)
	rec.User, rec.Enforced.NonRoot = "toor", true
	if id, err := userOf(t.Context(), rec, "app", open); err != nil || id.uid != 1000 {
		t.Errorf("another than the sandbox's: %+v, %v", id, err)
	}
}

func TestUserWithoutDatabases(t *testing.T) {
	open := database(t, "", "")
	if got, err := resolveUser(t.Context(), "12:34", open); err != nil || got.uid != 12 || got.gid != 34 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := resolveUser(t.Context(), "app", open); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func TestHugeDatabaseIsRefused(t *testing.T) {
	open := database(t, strings.Repeat("x:x:1:1:::\n", maxDatabase/8), "")
	if _, err := resolveUser(t.Context(), "x", open); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func TestManyGroupsAreRefused(t *testing.T) {
	open := database(t, "a:x:5:5:::\n", strings.Repeat("g:x:6:a\n", maxGroups+1))
	if _, err := resolveUser(t.Context(), "a", open); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func FuzzResolveUser(f *testing.F) {
	f.Add("app:video", passwd, group)
	f.Add("1000", "a:b:c:d:e", ":::")
	f.Fuzz(func(t *testing.T, spec, passwd, group string) {
		id, err := resolveUser(t.Context(), spec, database(t, passwd, group))
		if err != nil {
			return
		}
		if id.uid > maxID || id.gid > maxID || !strings.HasPrefix(id.home, "/") && id.home == "" {
			t.Errorf("%q: %+v", spec, id)
		}
	})
}

func TestEnvironment(t *testing.T) {
	got := execEnv(
		[]string{"PATH=/image", "LANG=C", "HOME=/image", "PATH", "GONE=1", "BACK=2", "=x", "NUL=\x00"},
		[]string{"LANG=sandbox", "A=1", "GONE", "BACK", "GONE2=x"},
		[]string{"A=2", "B=", "A=3", "BACK=y", "GONE2", "NEVER"},
		"/home/app", true)
	want := []string{"PATH=/image", "TERM=xterm", "LANG=sandbox", "HOME=/home/app", "BACK=y", "A=3", "B="}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	got = execEnv(nil, nil, nil, "/", false)
	if diff := cmp.Diff([]string{"PATH=" + defaultPath, "HOME=/"}, got); diff != "" {
		t.Error(diff)
	}
}
