package daemontest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// Events reads the lines of a streaming answer.
func Events[T any](t testing.TB, rep Reply) []T {
	t.Helper()
	if rep.Status != http.StatusOK || rep.Header.Get("Content-Type") != api.TypeNDJSON {
		t.Fatalf("status %d, %s: %s", rep.Status, rep.Header.Get("Content-Type"), rep.Body)
	}
	var all []T
	for line := range bytes.Lines(rep.Body) {
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		all = append(all, v)
	}
	return all
}

// Stream starts an exec and returns when its first output is there.
func (r *Running) Stream(ctx context.Context, id string, argv ...string) (*bufio.Scanner, io.Closer) {
	r.T.Helper()
	data, err := json.Marshal(api.ExecRequest{Argv: argv})
	if err != nil {
		r.T.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://sandboxd/v1/sandboxes/"+id+"/exec", bytes.NewReader(data))
	if err != nil {
		r.T.Fatal(err)
	}
	req.Header.Set("Accept", api.TypeNDJSON)
	resp, err := r.HTTP.Do(req)
	if err != nil {
		r.T.Fatal(err)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "stdout") {
			return lines, resp.Body
		}
	}
	r.T.Fatalf("no output: %v", lines.Err())
	return nil, nil
}

// DialExec opens the WebSocket of an exec.
func (r *Running) DialExec(id string, req any) *websocket.Conn {
	r.T.Helper()
	c, resp, err := websocket.Dial(r.T.Context(), "ws://sandboxd/v1/sandboxes/"+id+"/exec", &websocket.DialOptions{HTTPClient: r.HTTP})
	if err != nil {
		r.T.Fatalf("dial: %v (%v)", err, resp)
	}
	c.SetReadLimit(1 << 20)
	r.T.Cleanup(func() { _ = c.CloseNow() }) // most tests have read the end
	r.Send(c, req)
	return c
}

// Send sends a text frame.
func (r *Running) Send(c *websocket.Conn, v any) {
	r.T.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		r.T.Fatal(err)
	}
	if err := c.Write(r.T.Context(), websocket.MessageText, data); err != nil {
		r.T.Fatal(err)
	}
}

// Converse reads until the last event and calls on with all output so far, by channel, after each
// frame.
func (r *Running) Converse(c *websocket.Conn, on func(out [3]string)) ([3]string, api.ExecEvent) {
	r.T.Helper()
	var out [3]string
	ctx, cancel := context.WithTimeout(r.T.Context(), servicetest.Patience)
	defer cancel()
	for {
		kind, data, err := c.Read(ctx)
		if err != nil {
			r.T.Fatalf("read: %v (so far %q)", err, out)
		}
		if kind == websocket.MessageBinary {
			out[data[0]] += string(data[1:])
			if on != nil {
				on(out)
			}
			continue
		}
		var e api.ExecEvent
		if err := json.Unmarshal(data, &e); err != nil {
			r.T.Fatal(err)
		}
		if e.Exit != nil || e.Error != nil {
			if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				r.T.Errorf("after the last event: %v", err)
			}
			return out, e
		}
	}
}

// IdlesAfter gives a sandbox its idle time when something already keeps it from idling: from its
// creation on that might be over before the test has come to its first use of it.
func (r *Running) IdlesAfter(id string, seconds float64) {
	r.T.Helper()
	Decode[api.Sandbox](r.T, r.Do("PATCH", "/v1/sandboxes/"+id, api.UpdateSandbox{IdleTimeout: seconds}), http.StatusOK)
}

// Detach starts a detached exec.
func (r *Running) Detach(id string, req api.ExecRequest) api.Exec {
	r.T.Helper()
	req.Detach = true
	return Decode[api.Exec](r.T, r.Do("POST", "/v1/sandboxes/"+id+"/exec", req), http.StatusCreated)
}

// Await polls a condition until it holds; said tells what holds instead.
func (r *Running) Await(said func() string, ok func() bool) {
	r.T.Helper()
	deadline := time.After(servicetest.Patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			r.T.Fatal(said())
		}
	}
}

// Until asks for an exec until its record is as wanted.
func (r *Running) Until(x api.Exec, ok func(api.Exec) bool) (now api.Exec) {
	r.T.Helper()
	r.Await(func() string { return fmt.Sprintf("it stays %+v", now) }, func() bool {
		now = Decode[api.Exec](r.T, r.Do("GET", "/v1/sandboxes/"+x.Sandbox+"/execs/"+x.ID, nil), http.StatusOK)
		return ok(now)
	})
	return now
}

// Exited reports whether an exec has ended.
func Exited(x api.Exec) bool { return x.State == api.ExecExited }

// WaitEnded waits for the end of a sandbox.
func (r *Running) WaitEnded(id string) api.Sandbox {
	r.T.Helper()
	return Decode[api.Sandbox](r.T, r.Do("GET", "/v1/sandboxes/"+id+"/wait", nil), http.StatusOK)
}

// Logs is the text of a log, what came from stderr in brackets.
func (r *Running) Logs(id, query string) string {
	r.T.Helper()
	rep := r.Do("GET", "/v1/sandboxes/"+id+"/logs"+query, nil)
	if rep.Status != http.StatusOK || rep.Header.Get("Content-Type") != api.TypeNDJSON {
		r.T.Fatalf("logs: %d %s", rep.Status, rep.Body)
	}
	var b strings.Builder
	for _, e := range Events[api.LogEntry](r.T, rep) {
		if e.Error != nil || e.Time.IsZero() {
			r.T.Errorf("%+v", e)
		}
		if e.Dropped > 0 {
			fmt.Fprintf(&b, "<%d>", e.Dropped)
		}
		if e.Stream == "stderr" {
			fmt.Fprintf(&b, "[%s%s]", e.Text, e.Data)
		} else {
			fmt.Fprintf(&b, "%s%s", e.Text, e.Data)
		}
	}
	return b.String()
}

// UntilLog follows a log until it has as much as want, which it must be.
func (r *Running) UntilLog(id, want string) {
	r.T.Helper()
	var text string
	r.Await(func() string { return fmt.Sprintf("the log is %q", text) }, func() bool {
		text = r.Logs(id, "")
		return text == want
	})
}
