package service_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/runtime"
)

// An olderInit is an init from before users were its business: it refuses their field and their
// request. It says that programs end, and that directories are made.
type olderInit struct {
	files string // directory in the place of the root

	mu    sync.Mutex
	asked []string
	exec  guest.ExecRequest
	env   []string
	mkdir guest.MkdirRequest
}

func (o *olderInit) run(_ *runtime.Spec, control *os.File, stop <-chan struct{}) {
	fd := int(control.Fd())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			if err != nil {
				return
			}
			c, err := guest.NewConn(conn)
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				pkt, fds, err := c.Recv()
				unixmsg.CloseAll(fds)
				if err == nil {
					o.serve(c, pkt)
				}
			})
		}
	})
	<-stop
	_ = unix.Shutdown(fd, unix.SHUT_RDWR) // wakes accept
	wg.Wait()
	_ = control.Close() // a socket without data
}

func (o *olderInit) serve(c *guest.Conn, pkt guest.Packet) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asked = append(o.asked, pkt.Kind)
	reply := func(k guest.Kind, msg any, strs []string, fds ...int) {
		if p, err := guest.Encode(k, msg, strs...); err == nil {
			_ = c.Send(p, fds...)
		}
	}
	refuse := func(errno unix.Errno) {
		reply(guest.KindError, guest.ErrorAnswer{Stage: guest.StageRequest, Errno: int(errno)}, []string{pkt.Kind})
	}
	switch pkt.Kind {
	case guest.KindExec:
		o.exec = guest.ExecRequest{}
		if pkt.Into(&o.exec, -1) != nil || o.exec.User != "" || o.exec.NonRoot {
			refuse(unix.EINVAL) // an unknown field
			return
		}
		o.env = pkt.Strs[1+o.exec.Args:]
		if o.exec.Whole {
			reply(guest.KindExited, guest.ExitedAnswer{PID: 2, Code: 3}, nil)
			return
		}
		reply(guest.KindStarted, guest.StartedAnswer{PID: 2}, nil)
		reply(guest.KindExited, guest.ExitedAnswer{Code: 3}, nil)
	case guest.KindOpen:
		f, err := os.Open(filepath.Join(o.files, filepath.Base(pkt.Strs[0])))
		if err != nil {
			refuse(unix.ENOENT)
			return
		}
		defer f.Close()
		reply(guest.KindOpened, guest.None{}, nil, int(f.Fd()))
	case guest.KindMkdir:
		_ = pkt.Into(&o.mkdir, 1)
		reply(guest.KindDone, guest.None{}, nil)
	case guest.KindPing:
		reply(guest.KindPong, guest.None{}, nil)
	default:
		refuse(unix.ENOSYS)
	}
}

// A daemon finds users itself in a sandbox whose init is of an earlier version.
func TestUsersWithAnOlderInit(t *testing.T) {
	o := &olderInit{files: t.TempDir()}
	for name, content := range map[string]string{"passwd": "app:x:1000:1001::/home/app:/bin/sh\n", "group": "audio:x:29:app\n"} {
		if err := os.WriteFile(filepath.Join(o.files, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := daemontest.New(t, o.run).Start()
	s := r.Create(api.CreateSandbox{})
	if got := r.Exec(s.ID, api.ExecRequest{Argv: []string{"id"}, User: "app"}); got.Exit.Code != 3 {
		t.Errorf("it ended with %+v", got.Exit)
	}
	o.mu.Lock() // the daemon asks no more for now; the race detector does not see that
	if x := o.exec; x.UID != 1000 || x.GID != 1001 || len(x.Groups) != 1 || x.Groups[0] != 29 || !strings.Contains(strings.Join(o.env, " "), "HOME=/home/app") {
		t.Errorf("it ran as %+v, with %q", x, o.env)
	}
	o.mu.Unlock()
	if got, err := r.Try("POST", "/v1/sandboxes/"+s.ID+"/exec", api.ExecRequest{Argv: []string{"id"}, User: "stranger"}); err != nil || got.Status != api.CodeInvalid.Status() {
		t.Errorf("a stranger: %+v, %v", got, err)
	}
	err := r.API().Mkdir(t.Context(), s.ID, "/x", false, service.WriteOptions{User: "app"})
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil || o.mkdir.UID != 1000 || o.mkdir.GID != 1001 {
		t.Errorf("a directory: %+v, %v", o.mkdir, err)
	}
	if got := strings.Join(o.asked, " "); !strings.Contains(got, "exec open open exec") || !strings.Contains(got, "user open open mkdir") {
		t.Errorf("it was asked for %s", got)
	}
}

// What init says of a user is told as the daemon told it when it read the files itself.
func TestWhatInitSaysOfAUser(t *testing.T) {
	rec := &runtime.Record{}
	rec.Profile = "hardened"
	for _, tc := range []struct {
		errno unix.Errno
		path  string
		code  api.Code
		text  string
	}{
		{unix.ESRCH, "app", api.CodeInvalid, "no matching entries in passwd file"},
		{unix.ENOENT, "app:x", api.CodeInvalid, "no matching entries in group file"},
		{unix.ERANGE, "app", api.CodeInvalid, "end at 65535"},
		{unix.E2BIG, "app", api.CodeInvalid, "at most 1024"},
		{unix.EPERM, "toor", api.CodeInvalid, "runs nothing as root"},
		{unix.EINVAL, "a b", api.CodeInvalid, "must be name, uid"},
		{unix.EFBIG, "/etc/passwd", api.CodeInvalid, "larger than"},
		{unix.EINVAL, "/etc/group", api.CodeInvalid, "/etc/group"},
		{unix.EACCES, "/etc/group", api.CodeConflict, "/etc/group"},
		{unix.EIO, "/etc/passwd", api.CodeInternal, "/etc/passwd"},
	} {
		err := service.UserError(rec, tc.path, &guest.Error{Stage: guest.StageUser, Errno: tc.errno, Path: tc.path})
		got := httpapi.ProblemOf(err)
		if got.Code != tc.code || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%v about %s: %s, %v", tc.errno, tc.path, got.Code, err)
		}
	}
	other := errors.New("another")
	if err := service.UserError(rec, "app", other); !errors.Is(err, other) {
		t.Error(err)
	}
}
