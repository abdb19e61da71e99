package client

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// event is the frame of an event.
func event(t testing.TB, e api.ExecEvent) []byte {
	t.Helper()
	data, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	return api.AppendFrame(nil, api.ChannelEvent, data)
}

// What a daemon writes is read as it was meant, however it is cut.
func TestFrames(t *testing.T) {
	all := event(t, api.ExecEvent{PID: 7, Exec: "x"})
	all = api.AppendFrame(all, api.ChannelStdout, []byte("a\xff\x00"))
	all = api.AppendFrame(all, api.ChannelStderr, []byte("b"))
	all = api.AppendFrame(all, api.ChannelStdout, nil)
	all = api.AppendFrame(all, api.ChannelStdout, bytes.Repeat([]byte("c"), api.MaxFrame))
	begin := len(all)
	all = append(all, event(t, api.ExecEvent{Exit: &api.Exit{Code: 3}, Usage: &api.Usage{WallMS: 5}})...)
	read := func(r io.Reader) (*End, string, string, error) {
		var stdout, stderr bytes.Buffer
		f := frames{r: r}
		end, err := f.follow(Streams{Stdout: &stdout, Stderr: &stderr})
		return end, stdout.String(), stderr.String(), err
	}
	for name, r := range map[string]io.Reader{"whole": bytes.NewReader(all), "halves": iotest.HalfReader(bytes.NewReader(all)), "data with the end": iotest.DataErrReader(bytes.NewReader(all))} {
		end, stdout, stderr, err := read(r)
		if err != nil || end.Exit.Code != 3 || end.Usage.WallMS != 5 || stdout != "a\xff\x00"+strings.Repeat("c", api.MaxFrame) || stderr != "b" {
			t.Errorf("%s: %+v, %d bytes, %q, %v", name, end, len(stdout), stderr, err)
		}
	}
	// A stream that is cut off is no end of the program, wherever it is cut.
	for _, n := range []int{0, 1, api.FrameHeader, api.FrameHeader + 1, begin - 1, begin, begin + 1, len(all) - 1} {
		if end, _, _, err := read(bytes.NewReader(all[:n])); end != nil || !errors.Is(err, errLost) {
			t.Errorf("%d of %d bytes: %+v, %v", n, len(all), end, err)
		}
	}
	for name, stream := range map[string][]byte{
		"too long":       {api.ChannelStdout, 0, 16, 0, 1},
		"stdin":          api.AppendFrame(nil, api.ChannelStdin, []byte("x")),
		"no channel":     api.AppendFrame(nil, 9, nil),
		"event, no JSON": api.AppendFrame(nil, api.ChannelEvent, []byte("{")),
	} {
		if end, _, _, err := read(bytes.NewReader(stream)); end != nil || err == nil {
			t.Errorf("%s: %+v, %v", name, end, err)
		}
	}
	if _, _, _, err := read(bytes.NewReader(event(t, api.ExecEvent{Error: &api.Problem{Code: api.CodeGone}}))); !errors.Is(err, &api.Problem{Code: api.CodeGone}) {
		t.Errorf("an error event: %v", err)
	}
}

// A failing write ends the program: it is returned, and nothing more is read.
func TestFramesWriteFails(t *testing.T) {
	enough := errors.New("enough")
	stream := api.AppendFrame(nil, api.ChannelStdout, []byte("x"))
	f := frames{r: bytes.NewReader(stream)}
	r, w := io.Pipe()
	_ = r.CloseWithError(enough)
	if _, err := f.follow(Streams{Stdout: w}); !errors.Is(err, enough) {
		t.Error(err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{})
	f.Add(append(event(f, api.ExecEvent{PID: 7}), event(f, api.ExecEvent{Exit: &api.Exit{}})...))
	f.Add(api.AppendFrame(api.AppendFrame(nil, api.ChannelStdout, []byte("out")), api.ChannelStderr, []byte("err")))
	f.Add([]byte{api.ChannelStdout, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{api.ChannelEvent, 0, 0, 0, 2, '{', '}'})
	f.Fuzz(func(t *testing.T, data []byte) {
		// What is read, written again, is what was there.
		var again []byte
		fr := frames{r: bytes.NewReader(data)}
		for {
			frame, err := fr.next()
			if err != nil {
				break
			}
			if len(frame)-1 > api.MaxFrame {
				t.Fatalf("a frame of %d bytes", len(frame))
			}
			again = api.AppendFrame(again, frame[0], frame[1:])
		}
		if !bytes.HasPrefix(data, again) {
			t.Fatalf("read %q of %q", again, data)
		}
		// The two halves of an answer cannot both be there.
		var out bytes.Buffer
		fr = frames{r: bytes.NewReader(data)}
		if end, err := fr.follow(Streams{Stdout: &out, Stderr: &out}); (end == nil) == (err == nil) {
			t.Fatalf("%+v, %v", end, err)
		}
		if out.Len() > len(data) {
			t.Fatalf("%d bytes of output out of %d", out.Len(), len(data))
		}
	})
}

// strangeDaemon answers the request for pipes on a new socket with these bytes and descriptors.
func strangeDaemon(t *testing.T, answer []byte, fds ...int) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		defer c.Close()
		buf := make([]byte, 64<<10)
		if _, err := c.Read(buf); err != nil {
			return
		}
		var rights []byte
		if len(fds) > 0 {
			rights = unix.UnixRights(fds...)
		}
		if _, _, err := c.WriteMsgUnix(answer, rights, nil); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return New(socket)
}

// The client takes pipes from a daemon that has the right number of them, and keeps none otherwise.
func TestPipesOfStrangeDaemons(t *testing.T) {
	const head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.UpgradePipes + "\r\n\r\n"
	first := append([]byte(head), event(t, api.ExecEvent{PID: 7, Exec: "x"})...)
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	r, w := p[0], p[1]
	defer unix.Close(w)
	many := make([]int, 250)
	for i := range many {
		many[i] = r
	}
	for _, tc := range []struct {
		name   string
		answer []byte
		fds    []int
		want   string
	}{
		{"none", first, nil, "0 descriptors, expected 2"},
		{"one", first, many[:1], "1 descriptors, expected 2"},
		{"three", first, many[:3], "3 descriptors, expected 2"},
		{"250", first, many, "descriptors"},
		{"output first", append([]byte(head), api.AppendFrame(nil, api.ChannelStdout, []byte("x"))...), many[:2], "began with a frame"},
		{"no frame", []byte(head), many[:2], "without the exit"},
		{"no answer", []byte("SSH-2.0"), many[:2], "ask for a program with pipes"},
		{"an error", append([]byte(head), event(t, api.ExecEvent{Error: &api.Problem{Code: api.CodeGone, Detail: "gone away"}})...), many[:2], "gone away"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := strangeDaemon(t, tc.answer, tc.fds...)
			p, err := c.ExecPipes(t.Context(), "a", api.ExecRequest{Argv: []string{"x"}})
			if p != nil || err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("%+v, %v; want %q", p, err, tc.want)
			}
			if errors.Is(err, ErrNoPipes) {
				t.Error("it is told as if no program had started")
			}
		})
	}
	// This one is the only reading end that is left: all that the client got is closed.
	if err := unix.Close(r); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(w, []byte("x")); !errors.Is(err, unix.EPIPE) {
		t.Errorf("the client has kept descriptors: %v", err)
	}
}
