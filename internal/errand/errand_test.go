package errand

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// The test's own program is the runner.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "run-errands" {
		// It soon gives up waiting, so that one who waits for its end is not kept until his own patience is over.
		if err := serve(context.Background(), errands(), 100*time.Millisecond); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type words struct {
	Words []string `json:"words"`
}

func errands() map[string]Handler {
	return map[string]Handler{
		"join": Handle(func(_ context.Context, w words) (string, error) { return strings.Join(w.Words, " "), nil }),
		"fail": Handle(func(context.Context, struct{}) (struct{}, error) {
			return struct{}{}, errors.New("it is not to be had")
		}),
		"hang": Handle(func(ctx context.Context, _ struct{}) (struct{}, error) { <-ctx.Done(); return struct{}{}, ctx.Err() }),
		"deaf": Handle(func(context.Context, struct{}) (struct{}, error) { select {} }),
		"write": func(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
			if len(files) != 1 {
				return nil, errors.New("want a file")
			}
			_, err := files[0].WriteString("written")
			return nil, err
		},
		"pid": Handle(func(context.Context, struct{}) (int, error) { return os.Getpid(), nil }),
		"die": Handle(func(context.Context, struct{}) (int, error) { return 0, unix.Kill(os.Getpid(), unix.SIGKILL) }),
	}
}

func start(t *testing.T) *Runner {
	t.Helper()
	r, err := Start("run-errands")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestErrands(t *testing.T) {
	r := start(t)
	var said string
	if err := r.Run(t.Context(), "join", words{[]string{"a", "b"}}, &said); err != nil || said != "a b" {
		t.Errorf("join: %q, %v", said, err)
	}
	if err := r.Run(t.Context(), "fail", struct{}{}, nil); err == nil || err.Error() != "it is not to be had" {
		t.Errorf("fail: %v", err)
	}
	for errand, args := range map[string]any{"nothing": struct{}{}, "join": map[string]int{"other": 1}} {
		if err := r.Run(t.Context(), errand, args, nil); err == nil {
			t.Errorf("%s with %v is run", errand, args)
		}
	}
	// A file goes along. Those that nobody asked for are refused.
	f, err := os.CreateTemp(t.TempDir(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := r.Run(t.Context(), "write", struct{}{}, nil, f); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(f.Name()); err != nil || string(data) != "written" {
		t.Errorf("%q, %v", data, err)
	}
	if err := r.Run(t.Context(), "join", words{}, nil, f); err == nil {
		t.Error("a file that nobody asked for is taken")
	}
	if err := r.Run(t.Context(), "join", words{[]string{strings.Repeat("x", maxRequest)}}, nil); err == nil {
		t.Error("a request without bounds is sent")
	}
	// One that hangs keeps no other, and is given up with its context.
	ctx, cancel := context.WithCancel(t.Context())
	hung := make(chan error)
	go func() { hung <- r.Run(ctx, "hang", struct{}{}, nil) }()
	if err := r.Run(t.Context(), "join", words{}, &said); err != nil {
		t.Errorf("beside one that hangs: %v", err)
	}
	cancel()
	if err := <-hung; !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
}

// What a confined process sends that is no request does the runner no harm.
func TestHostileRequests(t *testing.T) {
	r := start(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, packet := range []string{"{", `{"errand":"join"}`, `{"errand":"join","more":1}`, strings.Repeat("x", maxRequest+1), "\x00"} {
		for _, oob := range [][]byte{nil, unix.UnixRights(int(null.Fd())), unix.UnixRights(0, 0, 0, 0, 0, 0)} {
			if _, _, err := r.conn.WriteMsgUnix([]byte(packet), oob, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	var said string
	if err := r.Run(t.Context(), "join", words{[]string{"still", "there"}}, &said); err != nil || said != "still there" {
		t.Errorf("%q, %v", said, err)
	}
}

// A runner ends with the one who started it, whatever it is doing, and one that has died is told of.
func TestRunnerEnds(t *testing.T) {
	r := start(t)
	var pid int
	if err := r.Run(t.Context(), "pid", struct{}{}, &pid); err != nil {
		t.Fatal(err)
	}
	hung := make(chan error)
	go func() { hung <- r.Run(t.Context(), "hang", struct{}{}, nil) }()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := <-hung; err == nil {
		t.Error("what hung has succeeded")
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the runner is still there: %v", err)
	}
	r = start(t)
	if err := r.Run(t.Context(), "pid", struct{}{}, &pid); err != nil {
		t.Fatal(err)
	}
	go func() { hung <- r.Run(t.Context(), "deaf", struct{}{}, nil) }()
	if err := r.Run(t.Context(), "join", words{}, nil); err != nil { // it is being run by then, or will be
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Errorf("with an errand that does not end: %v", err)
	}
	if err := <-hung; err == nil {
		t.Error("what does not end has succeeded")
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the runner of what does not end is still there: %v", err)
	}
	r = start(t)
	for i := range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		if err := r.Run(ctx, "die", struct{}{}, nil); !errors.Is(err, ErrGone) {
			t.Errorf("try %d of a runner that dies: %v", i, err)
		}
		cancel()
		<-r.Gone()
	}
}

// One errand too many is refused, whether who asked listens or not, and those that are run are not disturbed.
func TestTooManyErrands(t *testing.T) {
	r := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	hung := make(chan error)
	for range maxErrands {
		go func() {
			for {
				err := r.Run(ctx, "hang", struct{}{}, nil)
				if err == nil || !strings.Contains(err.Error(), "being run already") { // as it is when the probe below has the last place
					hung <- err
					return
				}
			}
		}()
	}
	var err error
	for deadline := time.Now().Add(testenv.HungAfter); time.Now().Before(deadline); {
		if err = r.Run(t.Context(), "join", words{}, nil); err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "being run already") {
		t.Errorf("beside %d others: %v", maxErrands, err)
	}
	// One whose answer finds no room.
	ours, theirs, err := socketpair(unix.SOCK_STREAM)
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if err := unix.SetNonblock(int(theirs.Fd()), true); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = unix.Write(int(theirs.Fd()), make([]byte, 4096))
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	if _, _, err := r.conn.WriteMsgUnix([]byte(`{"errand":"join","args":{"words":[]}}`), unix.UnixRights(int(theirs.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	cancel()
	for range maxErrands {
		if err := <-hung; !errors.Is(err, context.Canceled) {
			t.Errorf("given up: %v", err)
		}
	}
	ctx, cancel = context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	for {
		if err = r.Run(ctx, "join", words{}, nil); err == nil || !strings.Contains(err.Error(), "being run already") {
			break
		}
	}
	if err != nil {
		t.Errorf("after them: %v", err)
	}
}

// FuzzRequest: what the runner reads comes from who may be taken over.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{`{"errand":"join","args":{"words":["a"]}}`, `{"errand":"hang"}`, `{}`, `[`, `{"errand":1}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var req request
		if strictly(data, &req) != nil {
			return
		}
		var w words
		_ = strictly(req.Args, &w)
	})
}

// What could not be asked for is no reason to start the daemon anew.
func TestRunnerThatIsNotGone(t *testing.T) {
	r := start(t)
	if err := r.conn.SetWriteBuffer(1); err != nil { // the kernel makes it as small as it goes
		t.Fatal(err)
	}
	long := words{[]string{strings.Repeat("x", maxRequest/2)}}
	if err := r.Run(t.Context(), "join", long, nil); !errors.Is(err, unix.EMSGSIZE) || errors.Is(err, ErrGone) {
		t.Errorf("more than the socket takes: %v", err)
	}
	if err := r.Run(t.Context(), "join", words{[]string{"a"}}, nil); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
