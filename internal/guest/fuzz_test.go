package guest

import (
	"encoding/binary"
	"errors"
	"path"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// FuzzHostDecode feeds the host what an init could send, and checks that what it accepts is within bounds.
func FuzzHostDecode(f *testing.F) {
	for _, s := range []string{
		`started {"pid":7}`, `exited {"code":3,"wall":1,"cpu":1,"maxrss":1}`, `exited {"signal":9,"timeout":true,"wall":1,"cpu":1,"maxrss":1}`,
		"error {\"stage\":\"open\",\"errno\":2}\x00/x", "info {\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}\x00", "pong {}", "done {}", " {}", "x",
		"entries {}", "entries {\"list\":[{\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}]}\x00a/b\x00",
		"entries {\"list\":[{\"size\":1,\"mode\":41471,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0},{\"size\":1,\"mode\":16877,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0,\"errno\":13}]}\x00l\x00t\x00d\x00",
		`listed {"more":true}`, "watching {}", "events {\"list\":[{\"kind\":\"created\",\"dir\":true},{\"kind\":\"moved\"},{\"kind\":\"overflow\"}]}\x00a\x00\x00a/b\x00c\x00\x00",
		"error {\"stage\":\"open\",\"errno\":2}\x00/x", "info {\"size\":1,\"mode\":33188,\"mtime\":1,\"nsec\":1,\"uid\":0,\"gid\":0}\x00", "pong {}", "done {}", " {}", "x", "listing {}",
		"process {\"pid\":7,\"ppid\":1,\"uid\":0,\"state\":\"S\",\"age\":1,\"cpu\":1,\"rss\":4096,\"name\":\"sh\",\"main\":7}\x00sh\x00-c",
	} {
		f.Add([]byte(s))
	}
	// A name of the sandbox's never leads out of what was asked for.
	inside := func(t *testing.T, p string) {
		t.Helper()
		if p == "" || len(p) >= maxPath || path.Join("/a/b", p) != "/a/b/"+p {
			t.Errorf("%q is below nothing", p)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pkt, err := decode(b)
		if err != nil {
			return
		}
		switch pkt.kind {
		case kindError:
			if e, ok := errors.AsType[*Error](refusal(pkt)); ok && (!validStage(e.Stage) || e.Errno < 1 || e.Errno > 4095 || len(e.Path) > maxPath || e.Error() == "") {
				t.Errorf("%+v", e)
			}
		case kindExited:
			var a exitedAnswer
			if pkt.into(&a, 0) != nil {
				return
			}
			x, ok := a.exit(time.Second, time.Minute)
			if ok && (x.Code < 0 || x.Code > 255 || x.Signal < 0 || x.Signal > 64 || x.Wall < 0 || x.Wall > time.Minute || x.CPU < 0 || x.MaxRSS < 0) {
				t.Errorf("%+v", x)
			}
		case kindInfo:
			var a infoAnswer
			if pkt.into(&a, 1) != nil {
				return
			}
			if fi, ok := a.info("x", pkt.strs[0]); ok {
				if _, err := fi.ModTime.MarshalJSON(); err != nil || fi.Size < 0 {
					t.Errorf("%+v, %v", fi, err)
				}
			}
		case kindEntries:
			for _, first := range []bool{true, false} {
				entries, err := pkt.entries(first)
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
		case kindEvents:
			changes, err := pkt.changes()
			if err == nil && len(changes) == 0 {
				t.Error("no events")
			}
			for _, c := range changes {
				if c.Path != "" || c.Kind == ChangeMoved {
					inside(t, c.Path)
				}
				if c.To != "" || c.Kind == ChangeMoved {
					inside(t, c.To)
				}
			}
		case kindListed:
			_ = pkt.into(&listedAnswer{}, 0)
		case kindProcess:
			if p, err := pkt.process(); err == nil && (p.PID < 2 || p.PPID < 0 || p.Age < 0 || p.CPU < 0 || p.RSS < 0 || len(p.State) != 1 ||
				!utf8.ValidString(p.Name) || len(strings.Join(p.Argv, " ")) > maxProcessArgs+1) {
				t.Errorf("%+v", p)
			}
		case kindStarted:
			_ = pkt.into(&startedAnswer{}, 0)
		default:
			_ = pkt.into(&none{}, 0)
		}
	})
}

// FuzzInitDecode feeds init what a faulty daemon could send, and checks that an accepted packet survives the way back.
func FuzzInitDecode(f *testing.F) {
	for _, s := range []string{
		"ping {}", "exec {\"args\":1,\"uid\":0,\"gid\":0}\x00/\x00true\x00A=b", "open {}\x00/x", "create {\"mode\":420,\"uid\":0,\"gid\":0}\x00/x",
		"append {\"mode\":420,\"uid\":0,\"gid\":0}\x00/x", "stat {\"follow\":true}\x00/x", "list {\"depth\":3}\x00/x", "mkdir {\"mode\":493,\"uid\":0,\"gid\":0,\"parents\":true}\x00/x/",
		"move {\"overwrite\":true}\x00/x\x00/y", "remove {\"recursive\":true}\x00//", "watch {\"recursive\":true}\x00/x",
		"tar-in {\"uid\":0,\"gid\":0}\x00/x", `commit {"new":true}`,
		"tar-in {\"uid\":0,\"gid\":0}\x00/x", `signal {"signal":9}`, `signal {"signal":9,"all":true}`, "kill {}", "processes {}",
		"exec {\"args\":1,\"uid\":0,\"gid\":0,\"make_cwd\":true,\"limits\":[{\"resource\":7,\"value\":64}]}\x00/\x00true", "exec {\"args\":1,\"uid\":0,\"gid\":0,\"whole\":true}\x00/\x00true", "exec {}\x00\x00\x00",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pkt, err := decode(b)
		if err != nil {
			return
		}
		var msg any
		switch pkt.kind {
		case kindExec:
			msg = &execRequest{}
		case kindCreate, kindAppend:
			msg = &createRequest{}
		case kindCommit:
			msg = &commitRequest{}
		case kindStat:
			msg = &statRequest{}
		case kindList:
			msg = &listRequest{}
		case kindMkdir:
			msg = &mkdirRequest{}
		case kindMove:
			msg = &moveRequest{}
		case kindRemove:
			msg = &removeRequest{}
		case kindWatch:
			msg = &watchRequest{}
		case kindTarIn:
			msg = &tarInRequest{}
		case kindSignal:
			msg = &signalRequest{}
		default:
			msg = &none{}
		}
		if pkt.into(msg, -1) != nil {
			return
		}
		again, err := encode(pkt.kind, msg, pkt.strs...)
		if err != nil {
			t.Fatal(err)
		}
		pkt2, err := decode(again)
		if err != nil {
			t.Fatal(err)
		}
		if pkt2.kind != pkt.kind || !cmp.Equal(pkt.strs, pkt2.strs) {
			t.Errorf("%q became %q", b, again)
		}
		for _, s := range pkt.strs {
			_, _ = local(s)
			_, _ = splitPath(s)
			_, _ = splitPath(trimSlashes(s))
		}
	})
}

// FuzzInitEvents feeds init what a kernel never gives; names in it are the sandbox's.
func FuzzInitEvents(f *testing.F) {
	event := func(wd, mask, cookie uint32, name string) []byte {
		b := binary.NativeEndian.AppendUint32(nil, wd)
		b = binary.NativeEndian.AppendUint32(b, mask)
		b = binary.NativeEndian.AppendUint32(b, cookie)
		b = binary.NativeEndian.AppendUint32(b, uint32(len(name)))
		return append(b, name...)
	}
	f.Add(event(1, 0x100, 0, "name\x00\x00\x00\x00"))
	f.Add(append(event(1, 0x40, 7, "a\x00"), event(2, 0x80, 7, "b\x00")...))
	f.Add(event(0xffffffff, 0x4000, 0, ""))
	f.Add(event(1, 2, 0, "cut off")[:18])
	f.Fuzz(func(t *testing.T, b []byte) {
		events := parseEvents(b)
		size := 0
		for i, e := range events {
			size += 16 + len(e.name)
			if j := otherEnd(events, i); j >= 0 && (j <= i || events[j].cookie != e.cookie) {
				t.Errorf("%d and %d", i, j)
			}
		}
		if size > len(b) {
			t.Errorf("%d bytes of %d", size, len(b))
		}
		_ = halfMoved(events)
	})
}
