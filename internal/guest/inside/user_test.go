package inside

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
)

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
	indented:x:1007:1007::/in:
`
	group = `root:x:0:
daemon:x:1:
#app:x:5:app
app:x:1001:
audio:x:29:app,other
video:x:44:app
wheel:x:bad:app
minus:x:-5:app
highgroup:x:70000:
`
)

// lookUp finds a user in these databases.
func lookUp(user, passwd, group string) (guest.AccountAnswer, string, error) {
	a := accounts{}
	a.name, a.group, _ = strings.Cut(user, ":")
	if err := errors.Join(a.passwd(strings.NewReader(passwd)), a.groups(strings.NewReader(group))); err != nil {
		return guest.AccountAnswer{}, "", err
	}
	return a.account()
}

func TestAccounts(t *testing.T) {
	for name, tc := range map[string]struct {
		user string
		want guest.AccountAnswer
		home string
	}{
		"name":                    {"app", guest.AccountAnswer{UID: 1000, GID: 1001, Groups: []uint32{29, 44}}, "/home/app"},
		"name and group":          {"app:video", guest.AccountAnswer{UID: 1000, GID: 44}, "/home/app"},
		"name and gid":            {"app:7", guest.AccountAnswer{UID: 1000, GID: 7}, "/home/app"},
		"uid with an entry":       {"1000", guest.AccountAnswer{UID: 1000, GID: 1001, Groups: []uint32{29, 44}}, "/home/app"},
		"uid without an entry":    {"4242", guest.AccountAnswer{UID: 4242}, "/"},
		"uid and gid":             {"4242:4243", guest.AccountAnswer{UID: 4242, GID: 4243}, "/"},
		"uid and group":           {"4242:audio", guest.AccountAnswer{UID: 4242, GID: 29}, "/"},
		"no home":                 {"homeless", guest.AccountAnswer{UID: 1002, GID: 1002}, "/"},
		"two entries":             {"twice", guest.AccountAnswer{UID: 1003, GID: 1003}, "/first"},
		"root with another gid":   {"0:29", guest.AccountAnswer{GID: 29}, "/root"},
		"highest id of a sandbox": {"65535:65535", guest.AccountAnswer{UID: 65535, GID: 65535}, "/"},
		"space before an entry":   {"indented", guest.AccountAnswer{UID: 1007, GID: 1007}, "/in"},
	} {
		t.Run(name, func(t *testing.T) {
			got, home, err := lookUp(tc.user, passwd, group)
			if err != nil || home != tc.home {
				t.Errorf("home %q, %v", home, err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// CVE-2026-30892: a field that is not a number must never become 0.
func TestBadAccountsAreRefused(t *testing.T) {
	for user, want := range map[string]error{
		"stranger": unix.ESRCH, "app:strangers": unix.ENOENT, "minus": unix.ESRCH, "huge": unix.ESRCH, "words": unix.ESRCH,
		"empty": unix.ESRCH, "plus": unix.ESRCH, "hex": unix.ESRCH, "space": unix.ESRCH, "badgid": unix.ESRCH, "short": unix.ESRCH,
		"high": unix.ERANGE, "-1": unix.ESRCH, "+0": unix.ESRCH, "0x0": unix.ESRCH, " 0": unix.ESRCH, "0 ": unix.ESRCH,
		"app:wheel": unix.ENOENT, "app:minus": unix.ENOENT, "app:highgroup": unix.ERANGE, "65536": unix.ERANGE,
		"4294967295": unix.ESRCH, "0:65536": unix.ERANGE, "root:-1": unix.ENOENT, "#app": unix.ESRCH, "app:#app": unix.ENOENT,
	} {
		if a, home, err := lookUp(user, passwd, group); !errors.Is(err, want) {
			t.Errorf("%q: %+v, %q, %v, want %v", user, a, home, err, want)
		}
	}
	var many strings.Builder
	for i := range guest.MaxGroups + 1 {
		fmt.Fprintf(&many, "g%d:x:%d:app\n", i, i)
	}
	if _, _, err := lookUp("app", passwd, many.String()); !errors.Is(err, unix.E2BIG) {
		t.Errorf("too many groups: %v", err)
	}
	if _, _, err := lookUp("app", passwd, "g:x:70000:app\n"); !errors.Is(err, unix.ERANGE) {
		t.Errorf("a group beyond the ids: %v", err)
	}
	if _, _, err := lookUp("app", strings.Repeat("#", maxDatabase+1), ""); !errors.Is(err, unix.EFBIG) {
		t.Errorf("too large: %v", err)
	}
	if _, _, err := lookUp("app", passwd+strings.Repeat("\n", maxDatabase-len(passwd)), ""); err != nil {
		t.Errorf("the largest: %v", err)
	}
	if _, _, err := lookUp("app", passwd+"x:x:7:7:"+strings.Repeat("x", maxEntry)+":/:\n", ""); !errors.Is(err, unix.EINVAL) {
		t.Errorf("too long a line: %v", err)
	}
}

func procServer(t *testing.T) *server {
	t.Helper()
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(proc) })
	return &server{proc: proc}
}

// Whatever stands in the place of a database, init neither blocks nor reads anything else.
func TestHostileDatabases(t *testing.T) {
	s := procServer(t)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.WriteFile(file("plain"), []byte("content"), 0o600), os.Symlink("plain", file("link")),
		unix.Mkfifo(file("fifo"), 0o600), os.Mkdir(file("dir"), 0o700), os.Symlink("loop", file("loop"))); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{
		file("plain"): nil, file("link"): nil, file("missing"): nil,
		file("fifo"): unix.EINVAL, file("dir"): unix.EISDIR, file("loop"): unix.ELOOP, "/dev/zero": unix.EINVAL,
		"/proc/self/status": unix.EINVAL, "/proc/self/fd/0": unix.ELOOP,
	} {
		var read string
		err := s.database(name, func(r io.Reader) error {
			data, err := io.ReadAll(r)
			read = string(data)
			return err
		})
		if want == nil {
			if exists := name != file("missing"); err != nil || (read == "content") != exists {
				t.Errorf("%s: %q, %v", name, read, err)
			}
			continue
		}
		var e *guest.Error
		if !errors.As(err, &e) || e.Stage != guest.StageUser || e.Path != name || !errors.Is(err, want) || read != "" {
			t.Errorf("%s: %q, %v, want %v", name, read, err, want)
		}
	}
}

// Root needs no database, and no name of root's gets past a profile that runs nothing as root.
func TestRootAccount(t *testing.T) {
	s := &server{proc: -1}
	for _, user := range []string{"0", "root", "0:0", "root:root"} {
		if a, home, err := s.account(user, false); err != nil || a.UID != 0 || a.GID != 0 || home != "/root" {
			t.Errorf("%s: %+v, %q, %v", user, a, home, err)
		}
		if _, _, err := s.account(user, true); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s, where root is refused: %v", user, err)
		}
	}
	real := procServer(t)
	for _, user := range []string{"00", "0:7", "000:root"} { // by way of the databases of this host
		if _, _, err := real.account(user, true); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s, where root is refused: %v", user, err)
		}
	}
	for _, user := range []string{"", ":", ":0", "0:", strings.Repeat("a", 65), "a:" + strings.Repeat("a", 65)} {
		if _, _, err := s.account(user, false); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%q: %v", user, err)
		}
	}
}
