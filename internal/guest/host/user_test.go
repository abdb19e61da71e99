package host

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/guesttest"
)

// Init finds the user of an exec, and its home.
func TestUserIsFoundInTheSandbox(t *testing.T) {
	guesttest.Leaks(t)
	s := startInit(t)
	who := []string{"sh", "-c", `echo "$(id -u):$(id -g) $HOME"`}
	for _, tc := range []struct {
		user    string
		nonRoot bool
		env     []string
		want    string
		errno   unix.Errno
	}{
		{"root", false, testEnv, "0:0 /root\n", 0},
		{"0:0", false, append([]string{"HOME=/mine"}, testEnv...), "0:0 /mine\n", 0},
		{"no-such-user", false, testEnv, "", unix.ESRCH},
		{"0:no-such-group", false, testEnv, "", unix.ENOENT},
		{"70000", false, testEnv, "", unix.ERANGE},
		{"root", true, testEnv, "", unix.EPERM},
		{"00", true, testEnv, "", unix.EPERM},
	} {
		out, _, _, err := s.run(t, ExecRequest{Argv: who, Env: tc.env, User: tc.user, NonRoot: tc.nonRoot})
		if tc.errno == 0 {
			if err != nil || out != tc.want {
				t.Errorf("%q: %q, %v", tc.user, out, err)
			}
			continue
		}
		if e := asError(t, err); e.Stage != guest.StageUser || e.Errno != tc.errno || e.Path != tc.user {
			t.Errorf("%q: %v", tc.user, err)
		}
	}
	if ids() > 1 {
		if out, _, _, err := s.run(t, ExecRequest{Argv: who, Env: testEnv, User: "4242:4243", NonRoot: true}); err != nil || out != "4242:4243 /\n" {
			t.Errorf("%q, %v", out, err)
		}
	}
	if a, err := s.Account(t.Context(), "4242:4243", true); err != nil || a.UID != 4242 || a.GID != 4243 || a.Home != "/" {
		t.Errorf("%+v, %v", a, err)
	}
	if _, err := s.Account(t.Context(), "00", true); !errors.Is(err, unix.EPERM) {
		t.Errorf("root: %v", err)
	}
	for _, user := range []string{"", strings.Repeat("a", 200)} {
		if _, err := s.Account(t.Context(), user, false); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%q: %v", user, err)
		}
	}
}

// An account that no sandbox can have loses the init that answers with it.
func TestHostileAccounts(t *testing.T) {
	for _, answer := range []string{
		"account {\"uid\":65536}\x00/", "account {\"gid\":65536}\x00/", "account {\"uid\":1,\"groups\":[65536]}\x00/",
		"account {\"uid\":1}\x00", "account {\"uid\":1}", "account {\"uid\":-1}\x00/", "account {\"uid\":0}\x00/root",
		"account {\"uid\":1,\"x\":1}\x00/", "account {\"uid\":1}\x00/" + strings.Repeat("x", guest.MaxPath),
	} {
		c := fakeInit(t, func(c *conn, _ guest.Packet, _ []int) {
			_ = c.Send([]byte(answer))
			c.await()
		})
		if a, err := c.Account(t.Context(), "app", true); !errors.Is(err, ErrLost) {
			t.Errorf("%q: %+v, %v", answer, a, err)
		}
	}
}
