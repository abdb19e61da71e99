package host

import (
	"errors"
	"path"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/internal/guest"
)

// FuzzHostDecode feeds the host packets of an init, and checks that accepted ones are within
// bounds.
func FuzzHostDecode(f *testing.F) {
	for _, s := range []string{
		`started {"pid":7}`, `exited {"code":3,"wall":1,"cpu":1,"maxrss":1}`, `exited {"signal":9,"timeout":true,"wall":1,"cpu":1,"maxrss":1}`,
		"error {\"stage\":\"open\",\"errno\":2}\x00/x", "info {\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}\x00", "pong {}", "done {}", " {}", "x",
		"account {\"uid\":1000,\"gid\":1000,\"groups\":[29,44]}\x00/home/app", "account {\"uid\":70000}\x00/",
		"entries {}", "entries {\"list\":[{\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}]}\x00a/b\x00",
		"entries {\"list\":[{\"size\":1,\"mode\":41471,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0},{\"size\":1,\"mode\":16877,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0,\"errno\":13}]}\x00l\x00t\x00d\x00",
		`listed {"more":true}`, "watching {}", "events {\"list\":[{\"kind\":\"created\",\"dir\":true},{\"kind\":\"moved\"},{\"kind\":\"overflow\"}]}\x00a\x00\x00a/b\x00c\x00\x00",
		"error {\"stage\":\"open\",\"errno\":2}\x00/x", "info {\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}\x00", "pong {}", "done {}", " {}", "x", "listing {}",
		"process {\"pid\":7,\"ppid\":1,\"uid\":0,\"state\":\"S\",\"age\":1,\"cpu\":1,\"rss\":4096,\"name\":\"sh\",\"main\":7}\x00sh\x00-c",
	} {
		f.Add([]byte(s))
	}
	// A name of the sandbox's never leads out of the requested directory.
	inside := func(t *testing.T, p string) {
		t.Helper()
		if p == "" || len(p) >= guest.MaxPath || path.Join("/a/b", p) != "/a/b/"+p {
			t.Errorf("%q is below nothing", p)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pkt, err := guest.Decode(b)
		if err != nil {
			return
		}
		switch pkt.Kind {
		case guest.KindError:
			if e, ok := errors.AsType[*guest.Error](refusal(pkt)); ok && (!guest.ValidStage(e.Stage) || e.Errno < 1 || e.Errno > 4095 || len(e.Path) > guest.MaxPath || e.Error() == "") {
				t.Errorf("%+v", e)
			}
		case guest.KindExited:
			var a guest.ExitedAnswer
			if pkt.Into(&a, 0) != nil {
				return
			}
			x, ok := exitOf(&a, time.Second, time.Minute)
			if ok && (x.Code < 0 || x.Code > 255 || x.Signal < 0 || x.Signal > 64 || x.Wall < 0 || x.Wall > time.Minute || x.CPU < 0 || x.MaxRSS < 0) {
				t.Errorf("%+v", x)
			}
		case guest.KindInfo:
			var a guest.InfoAnswer
			if pkt.Into(&a, 1) != nil {
				return
			}
			if fi, ok := fileInfo(&a, "x", pkt.Strs[0]); ok {
				if _, err := fi.ModTime.MarshalJSON(); err != nil || fi.Size < 0 {
					t.Errorf("%+v, %v", fi, err)
				}
			}
		case guest.KindEntries:
			for _, first := range []bool{true, false} {
				entries, err := entriesOf(pkt, first)
				if err != nil {
					continue
				}
				for _, e := range entries {
					inside(t, e.Path)
					if e.Name != path.Base(e.Path) || e.Errno > 4095 {
						t.Errorf("%+v", e)
					}
				}
			}
		case guest.KindEvents:
			changes, err := changesOf(pkt)
			if err == nil && len(changes) == 0 {
				t.Error("no events")
			}
			for _, c := range changes {
				if c.Path != "" || c.Kind == guest.ChangeMoved {
					inside(t, c.Path)
				}
				if c.To != "" || c.Kind == guest.ChangeMoved {
					inside(t, c.To)
				}
			}
		case guest.KindListed:
			_ = pkt.Into(&guest.ListedAnswer{}, 0)
		case guest.KindProcess:
			if p, err := processOf(pkt); err == nil && (p.PID < 2 || p.PPID < 0 || p.Age < 0 || p.CPU < 0 || p.RSS < 0 || len(p.State) != 1 ||
				!utf8.ValidString(p.Name) || len(strings.Join(p.Argv, " ")) > guest.MaxProcessArgs+1) {
				t.Errorf("%+v", p)
			}
		case guest.KindAccount:
			if a, err := accountOf(pkt); err == nil && (a.UID > 65535 || a.GID > 65535 || a.Home == "" || len(a.Groups) > guest.MaxGroups) {
				t.Errorf("%+v", a)
			}
		case guest.KindStarted:
			_ = pkt.Into(&guest.StartedAnswer{}, 0)
		default:
			_ = pkt.Into(&guest.None{}, 0)
		}
	})
}
