package httpapi_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A client on a terminal leaves its program in either form, and cannot leave one that does not end
// with it, nor make a second main process.
func TestClientsDetach(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{})
	shell := api.ExecRequest{Argv: []string{"sh", "-c", "echo ready; read x; exit $x"}, TTY: true}
	leave := func(form string) string {
		t.Helper()
		c := r.DialExec(sb.ID, shell)
		var last api.ExecEvent
		for asked := false; !last.Detached; {
			kind, data, err := c.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if kind == websocket.MessageText {
				if err := json.Unmarshal(data, &last); err != nil || last.Error != nil {
					t.Fatalf("%s, %v", data, err)
				}
			} else if !asked {
				asked = true
				r.Send(c, api.ExecControl{Detach: form})
			}
		}
		if _, _, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
			t.Errorf("after the last event: %v", err)
		}
		return last.Exec
	}
	attach := func(id string) *websocket.Conn {
		t.Helper()
		c, _, err := websocket.Dial(t.Context(), "ws://sandboxd/v1/sandboxes/"+sb.ID+"/execs/"+id+"/attach", &websocket.DialOptions{HTTPClient: r.HTTP})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.CloseNow() }) // the end was read
		return c
	}
	one := leave(api.DetachExec)
	c := attach(one)
	r.Send(c, api.ExecControl{Detach: api.DetachExec})
	if _, last := r.Converse(c, nil); last.Error == nil || last.Error.Code != api.CodeInvalid {
		t.Errorf("a client that attached: %+v", last)
	}
	main := leave(api.MainExec)
	c = r.DialExec(sb.ID, shell)
	r.Send(c, api.ExecControl{Detach: api.MainExec})
	if _, last := r.Converse(c, nil); last.Error == nil || last.Error.Code != api.CodeInvalid {
		t.Errorf("a second main process: %+v", last)
	}
	for _, id := range []string{one, main} { // the main process last, which ends the sandbox
		x := daemontest.Decode[api.Exec](t, r.Do("GET", "/v1/sandboxes/"+sb.ID+"/execs/"+id, nil), http.StatusOK)
		if x.State != api.ExecRunning || !x.Detached || x.Main != (id == main) {
			t.Errorf("%+v", x)
		}
		c := attach(id)
		if err := c.Write(t.Context(), websocket.MessageBinary, append([]byte{api.ChannelStdin}, "6\n"...)); err != nil {
			t.Fatal(err)
		}
		if _, last := r.Converse(c, nil); last.Exit == nil || last.Exit.Code != 6 {
			t.Errorf("%s: %+v", id, last)
		}
	}
	if end := r.WaitEnded(sb.ID); end.Exit == nil || end.Exit.Code != 6 || len(end.Command) != 3 {
		t.Errorf("%+v", end)
	}
}
