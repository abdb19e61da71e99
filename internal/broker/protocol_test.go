package broker

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
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// TestMain makes the test binary a broker, an agent process or a broker that never answers, as its
// arguments say.
func TestMain(m *testing.M) {
	if standIn() || gatewayStandIn() {
		os.Exit(0)
	}
	if len(os.Args) == 2 && os.Args[1] == brokerArg {
		// A short drain, so that tests that wait for its end do not run into their own deadline.
		if err := serve(context.Background(), testHandlers(), 100*time.Millisecond); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type words struct {
	Words []string `json:"words"`
}

func testHandlers() map[string]handler {
	return map[string]handler{
		"join": handle(func(_ context.Context, w words) (string, error) { return strings.Join(w.Words, " "), nil }),
		"fail": handle(func(context.Context, struct{}) (struct{}, error) {
			return struct{}{}, errors.New("not available")
		}),
		"hang": handle(func(ctx context.Context, _ struct{}) (struct{}, error) { <-ctx.Done(); return struct{}{}, ctx.Err() }),
		"deaf": handle(func(context.Context, struct{}) (struct{}, error) { select {} }),
		"write": func(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
			if len(files) != 1 {
				return nil, errors.New("want a file")
			}
			_, err := files[0].WriteString("written")
			return nil, err
		},
		"pid": handle(func(context.Context, struct{}) (int, error) { return os.Getpid(), nil }),
		"die": handle(func(context.Context, struct{}) (int, error) { return 0, unix.Kill(os.Getpid(), unix.SIGKILL) }),
	}
}

func startBroker(t *testing.T) *Client {
	t.Helper()
	r, err := start(brokerArg)
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

func TestRequests(t *testing.T) {
	r := startBroker(t)
	var said string
	if err := r.send(t.Context(), "join", words{[]string{"a", "b"}}, &said); err != nil || said != "a b" {
		t.Errorf("join: %q, %v", said, err)
	}
	if err := r.send(t.Context(), "fail", struct{}{}, nil); err == nil || err.Error() != "not available" {
		t.Errorf("fail: %v", err)
	}
	for name, args := range map[string]any{"nothing": struct{}{}, "join": map[string]int{"other": 1}} {
		if err := r.send(t.Context(), name, args, nil); err == nil {
			t.Errorf("%s with %v is accepted", name, args)
		}
	}
	// A file is passed along; unexpected ones are refused.
	f, err := os.CreateTemp(t.TempDir(), "f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := r.send(t.Context(), "write", struct{}{}, nil, f); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(f.Name()); err != nil || string(data) != "written" {
		t.Errorf("%q, %v", data, err)
	}
	if err := r.send(t.Context(), "join", words{}, nil, f); err == nil {
		t.Error("an unexpected file is accepted")
	}
	if err := r.send(t.Context(), "join", words{[]string{strings.Repeat("x", maxRequest)}}, nil); err == nil {
		t.Error("a request over the limit is sent")
	}
	// A request that hangs delays no other, and ends with its context.
	ctx, cancel := context.WithCancel(t.Context())
	hung := make(chan error)
	go func() { hung <- r.send(ctx, "hang", struct{}{}, nil) }()
	if err := r.send(t.Context(), "join", words{}, &said); err != nil {
		t.Errorf("beside a request that hangs: %v", err)
	}
	cancel()
	if err := <-hung; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// A broker survives packets that are no request.
func TestHostileRequests(t *testing.T) {
	r := startBroker(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, packet := range []string{"{", `{"request":"join"}`, `{"request":"join","more":1}`, strings.Repeat("x", maxRequest+1), "\x00"} {
		for _, oob := range [][]byte{nil, unix.UnixRights(int(null.Fd())), unix.UnixRights(0, 0, 0, 0, 0, 0)} {
			if _, _, err := r.conn.WriteMsgUnix([]byte(packet), oob, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	var said string
	if err := r.send(t.Context(), "join", words{[]string{"still", "there"}}, &said); err != nil || said != "still there" {
		t.Errorf("%q, %v", said, err)
	}
}

// A broker ends with its client, whatever it is doing, and a dead one is reported.
func TestBrokerEnds(t *testing.T) {
	r := startBroker(t)
	var pid int
	if err := r.send(t.Context(), "pid", struct{}{}, &pid); err != nil {
		t.Fatal(err)
	}
	hung := make(chan error)
	go func() { hung <- r.send(t.Context(), "hang", struct{}{}, nil) }()
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if err := <-hung; err == nil {
		t.Error("the request that hung has succeeded")
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the broker is still there: %v", err)
	}
	r = startBroker(t)
	if err := r.send(t.Context(), "pid", struct{}{}, &pid); err != nil {
		t.Fatal(err)
	}
	go func() { hung <- r.send(t.Context(), "deaf", struct{}{}, nil) }()
	if err := r.send(t.Context(), "join", words{}, nil); err != nil { // the other request is in progress by then, or will be
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Errorf("with a request that does not end: %v", err)
	}
	if err := <-hung; err == nil {
		t.Error("the request that does not end has succeeded")
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the broker of a request that does not end is still there: %v", err)
	}
	r = startBroker(t)
	for i := range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		if err := r.send(ctx, "die", struct{}{}, nil); !errors.Is(err, ErrGone) {
			t.Errorf("try %d of a broker that dies: %v", i, err)
		}
		cancel()
		<-r.Gone()
	}
}

// A request over the limit is refused, whether its client listens or not, and those in progress go
// on.
func TestTooManyRequests(t *testing.T) {
	r := startBroker(t)
	ctx, cancel := context.WithCancel(t.Context())
	hung := make(chan error)
	for range maxRequests {
		go func() {
			for {
				err := r.send(ctx, "hang", struct{}{}, nil)
				if err == nil || !strings.Contains(err.Error(), "in progress already") { // the probe below may take the last slot
					hung <- err
					return
				}
			}
		}()
	}
	var err error
	for deadline := time.Now().Add(testenv.HungAfter); time.Now().Before(deadline); {
		if err = r.send(t.Context(), "join", words{}, nil); err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "in progress already") {
		t.Errorf("beside %d others: %v", maxRequests, err)
	}
	// A client whose socket buffer is full.
	ours, theirs, err := unixmsg.Pair(unix.SOCK_STREAM, "broker")
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
	if _, _, err := r.conn.WriteMsgUnix([]byte(`{"request":"join","args":{"words":[]}}`), unix.UnixRights(int(theirs.Fd())), nil); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	cancel()
	for range maxRequests {
		if err := <-hung; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
	ctx, cancel = context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	for {
		if err = r.send(ctx, "join", words{}, nil); err == nil || !strings.Contains(err.Error(), "in progress already") {
			break
		}
	}
	if err != nil {
		t.Errorf("after them: %v", err)
	}
}

// FuzzRequest decodes requests as a broker does, whose client may have been taken over.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{`{"request":"join","args":{"words":["a"]}}`, `{"request":"hang"}`, `{}`, `[`, `{"request":1}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var req request
		if decodeStrict(data, &req) != nil {
			return
		}
		var w words
		_ = decodeStrict(req.Args, &w)
	})
}

// A request that could not be sent does not mean that the broker is gone.
func TestBrokerIsNotGone(t *testing.T) {
	r := startBroker(t)
	if err := r.conn.SetWriteBuffer(1); err != nil { // the kernel rounds up to its minimum
		t.Fatal(err)
	}
	long := words{[]string{strings.Repeat("x", maxRequest/2)}}
	if err := r.send(t.Context(), "join", long, nil); !errors.Is(err, unix.EMSGSIZE) || errors.Is(err, ErrGone) {
		t.Errorf("a request larger than the socket buffer: %v", err)
	}
	if err := r.send(t.Context(), "join", words{[]string{"a"}}, nil); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
