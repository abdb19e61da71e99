package httpapi_test

import (
	"net/http"
	"testing"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// A client that waits for a start and hangs up makes room for the next one, whatever it has sent
// before. What one that stays has sent is the program's stdin.
func TestClientsThatWaitForAStart(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Engine = servicetest.WithDescriptorStore(b.Options.Engine, servicetest.NewDescriptorStore(t))
	r := b.Start()
	sb := r.Create(api.CreateSandbox{})
	x := daemontest.Decode[api.Exec](t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs", api.ExecRequest{Argv: []string{"cat"}, StdinOpen: true}), http.StatusCreated)
	path := "/v1/sandboxes/" + sb.ID + "/execs/" + x.ID
	daemontest.Problem(t, r.Do("GET", path+"/attach?from=next", nil), api.CodeInvalid)
	dial := func() (*websocket.Conn, int) {
		t.Helper()
		c, resp, err := websocket.Dial(t.Context(), "ws://sandboxd"+path+"/attach?from=next&hold=true", &websocket.DialOptions{HTTPClient: r.HTTP})
		if err == nil {
			return c, http.StatusSwitchingProtocols
		}
		if resp == nil {
			t.Fatal(err)
		}
		return nil, resp.StatusCode
	}
	const most = 64
	var waiting []*websocket.Conn
	for range most {
		c, status := dial()
		if c == nil {
			t.Fatalf("client %d: %d", len(waiting)+1, status)
		}
		waiting = append(waiting, c)
	}
	if c, status := dial(); c != nil || status != http.StatusConflict {
		t.Errorf("one more: %d", status)
	}
	for i, c := range waiting {
		if i%2 == 0 {
			if err := c.Write(t.Context(), websocket.MessageBinary, []byte{api.ChannelStdin, 'x'}); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.CloseNow() // as a client that is killed
	}
	var stays []*websocket.Conn
	for len(stays) < most {
		c, _ := dial()
		if t.Context().Err() != nil {
			t.Fatalf("there is room for %d", len(stays))
		}
		if c != nil {
			stays = append(stays, c)
		}
	}
	for _, c := range stays[1:] {
		_ = c.CloseNow() // as above
	}
	if err := stays[0].Write(t.Context(), websocket.MessageBinary, append([]byte{api.ChannelStdin}, "early\n"...)); err != nil {
		t.Fatal(err)
	}
	daemontest.Decode[api.Exec](t, r.Do("POST", path+"/start", nil), http.StatusOK)
	r.Send(stays[0], api.ExecControl{StdinClose: true})
	if out, last := r.Converse(stays[0], nil); out[api.ChannelStdout] != "early\n" || last.Exit == nil || last.Exit.Code != 0 {
		t.Errorf("%q, %+v", out, last)
	}
	// The sandbox takes those that wait along.
	x = daemontest.Decode[api.Exec](t, r.Do("POST", "/v1/sandboxes/"+sb.ID+"/execs", api.ExecRequest{Argv: []string{"cat"}}), http.StatusCreated)
	path = "/v1/sandboxes/" + sb.ID + "/execs/" + x.ID
	c, _ := dial()
	if rep := r.Do("DELETE", "/v1/sandboxes/"+sb.ID, nil); rep.Status != http.StatusNoContent {
		t.Fatalf("%s", rep.Body)
	}
	if _, last := r.Converse(c, nil); last.Error == nil || last.Error.Code != api.CodeGone {
		t.Errorf("%+v", last)
	}
}
