package inside

import (
	"encoding/binary"
	"testing"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/google/go-cmp/cmp"
)

// FuzzInitDecode feeds init packets of a faulty daemon, and checks that an accepted packet
// survives the way back.
func FuzzInitDecode(f *testing.F) {
	for _, s := range []string{
		"ping {}", "exec {\"args\":1,\"uid\":0,\"gid\":0}\x00/\x00true\x00A=b", "open {}\x00/x", "create {\"mode\":420,\"uid\":0,\"gid\":0}\x00/x",
		"append {\"mode\":420,\"uid\":0,\"gid\":0}\x00/x", "stat {\"follow\":true}\x00/x", "list {\"depth\":3}\x00/x", "mkdir {\"mode\":493,\"uid\":0,\"gid\":0,\"parents\":true}\x00/x/",
		"move {\"overwrite\":true}\x00/x\x00/y", "remove {\"recursive\":true}\x00//", "watch {\"recursive\":true}\x00/x",
		"tar-in {\"uid\":0,\"gid\":0}\x00/x", `commit {"new":true}`,
		"tar-in {\"uid\":0,\"gid\":0}\x00/x", `signal {"signal":9}`, `signal {"signal":9,"all":true}`, "kill {}", "processes {}", `holder {"socket":7}`, "user {\"non_root\":true}\x00app:video",
		"exec {\"args\":1,\"uid\":0,\"gid\":0,\"make_cwd\":true,\"limits\":[{\"resource\":7,\"value\":64}]}\x00/\x00true", "exec {\"args\":1,\"uid\":0,\"gid\":0,\"whole\":true}\x00/\x00true", "exec {}\x00\x00\x00",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pkt, err := guest.Decode(b)
		if err != nil {
			return
		}
		var msg any
		switch pkt.Kind {
		case guest.KindExec:
			msg = &guest.ExecRequest{}
		case guest.KindCreate, guest.KindAppend:
			msg = &guest.CreateRequest{}
		case guest.KindCommit:
			msg = &guest.CommitRequest{}
		case guest.KindStat:
			msg = &guest.StatRequest{}
		case guest.KindList:
			msg = &guest.ListRequest{}
		case guest.KindMkdir:
			msg = &guest.MkdirRequest{}
		case guest.KindMove:
			msg = &guest.MoveRequest{}
		case guest.KindRemove:
			msg = &guest.RemoveRequest{}
		case guest.KindWatch:
			msg = &guest.WatchRequest{}
		case guest.KindTarIn:
			msg = &guest.TarInRequest{}
		case guest.KindUser:
			msg = &guest.UserRequest{}
		case guest.KindHolder:
			msg = &guest.HolderRequest{}
		case guest.KindSignal:
			msg = &guest.SignalRequest{}
		default:
			msg = &guest.None{}
		}
		if pkt.Into(msg, -1) != nil {
			return
		}
		again, err := guest.Encode(pkt.Kind, msg, pkt.Strs...)
		if err != nil {
			t.Fatal(err)
		}
		pkt2, err := guest.Decode(again)
		if err != nil {
			t.Fatal(err)
		}
		if pkt2.Kind != pkt.Kind || !cmp.Equal(pkt.Strs, pkt2.Strs) {
			t.Errorf("%q became %q", b, again)
		}
		for _, s := range pkt.Strs {
			_, _ = local(s)
			_, _ = splitPath(s)
			_, _ = splitPath(trimSlashes(s))
		}
	})
}

// FuzzInitEvents feeds init events that no kernel sends; names in real ones are the sandbox's.
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

// FuzzAccounts feeds init databases of a hostile sandbox: a user is refused, or has ids of a
// sandbox.
func FuzzAccounts(f *testing.F) {
	f.Add("app", passwd, group)
	f.Add("app:video", passwd, group)
	f.Add("4242", "x:x:4242:0", "g:x:1:x")
	f.Fuzz(func(t *testing.T, user, passwd, group string) {
		a, home, err := lookUp(user, passwd, group)
		if err == nil && (a.UID > maxID || a.GID > maxID || len(a.Groups) > guest.MaxGroups || home == "" || len(home) >= guest.MaxPath) {
			t.Errorf("%q: %+v, %q", user, a, home)
		}
	})
}
