package service_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/codehook"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/interpreter/codepolicy"
)

// A hook that gives no clear answer refuses the code, in bounded time and memory.
func TestHostileCodeHook(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	var answer atomic.Pointer[http.HandlerFunc] // a request that its client has left may come late
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*answer.Load())(w, r) }))
	defer hook.Close()
	bench := func(timeout time.Duration) (*daemontest.Running, api.Sandbox) {
		b := daemontest.New(t, servicetest.RealInit(t))
		b.Options.CodeHook = codehook.New(hook.URL, http.DefaultTransport, timeout)
		d := b.Start()
		return d, d.Create(api.CreateSandbox{})
	}
	patient, patients := bench(testenv.HungAfter)
	hasty, hastys := bench(time.Millisecond)
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(s)) }
	}
	leave := make(chan struct{})
	defer close(leave)
	for _, c := range []struct {
		name   string
		answer http.HandlerFunc
		hangs  bool
		want   string // the reason; empty: the code runs
	}{
		{"allows", text(`{"decision": "allow"}`), false, ""},
		{"hangs", func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-leave:
			}
		}, true, "Client.Timeout"},
		{"floods", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(`{"decision": "allow", "reason": "`))
			for range 8 << 10 {
				if _, err := w.Write(make([]byte, 1<<10)); err != nil {
					return
				}
			}
		}, false, "the answer is longer than"},
		{"redirects", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/", http.StatusFound) }, false, "HTTP 302"},
		{"fails", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, false, "HTTP 500"},
		{"drops", func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }, false, "gave no decision"},
		{"says nothing", text(""), false, "not one JSON object"},
		{"says something else", text(`{"decision": "maybe"}`), false, `decision "maybe": neither allow nor deny`},
		{"says two things", text(`{"decision": "allow"}{"decision": "deny"}`), false, "not one JSON object"},
		{"says more", text(`{"decision": "allow", "also": 1}`), false, "not one JSON object"},
		{"denies with code", text(`{"decision": "deny", "code": "print(2)"}`), false, "denies it: it gives no reason"},
		{"gives no code", text(`{"decision": "allow", "code": ""}`), false, "the code is empty"},
		{"gives much code", text(`{"decision": "allow", "code": "` + strings.Repeat("#", 1<<20+1) + `"}`), false, "the code is empty, or longer"},
		{"gives many reasons", text(`{"decision": "deny", "reason": "` + strings.Repeat("x", 1001) + `"}`), false, "the reason is longer"},
	} {
		answer.Store(&c.answer)
		d, sb := patient, patients
		if c.hangs {
			d, sb = hasty, hastys
		}
		resp := d.Do("POST", "/v1/sandboxes/"+sb.ID+"/code", api.CodeRequest{Code: "print(1)"})
		if c.want == "" {
			if res := daemontest.Decode[api.CodeResult](t, resp, http.StatusOK); res.Logs.Stdout != "1\n" {
				t.Errorf("%s: %+v", c.name, res)
			}
		} else if p := daemontest.Decode[api.Problem](t, resp, http.StatusForbidden); p.Code != api.CodeRefused || !strings.Contains(p.Detail, c.want) {
			t.Errorf("%s: %+v, want %s", c.name, p, c.want)
		}
	}
}

// Modules that a context imports before it takes code are judged like code.
func TestPreloadIsJudged(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q codehook.Question
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
			t.Error(err)
		}
		answer := map[string]string{"decision": "allow"}
		switch q.Code {
		case "import json, decimal":
			answer["decision"] = "deny"
		case "import calendar":
			answer["code"] = "import json"
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer hook.Close()
	b := daemontest.New(t, servicetest.RealInit(t))
	policy, err := codepolicy.Parse([]byte("version: 1\nrefuse: high\nmodules:\n- {module: subprocess, severity: high}\n- {module: json, severity: low}"))
	if err != nil {
		t.Fatal(err)
	}
	b.Options.CodePolicy = policy
	b.Options.CodeHook = codehook.New(hook.URL, http.DefaultTransport, testenv.HungAfter)
	d := b.Start()
	sb := d.Create(api.CreateSandbox{})
	for _, c := range []struct {
		preload []string
		want    string
	}{
		{[]string{"json", "subprocess"}, "preload: code is refused: line 1: module subprocess, high; line 1: module json, low"},
		{[]string{"json", "decimal"}, "preload: code is refused: the operator's hook denies it"},
		{[]string{"calendar"}, "preload: code is refused: the operator's hook gives other code"},
	} {
		resp := d.Do("POST", "/v1/sandboxes/"+sb.ID+"/contexts", api.CreateContext{Preload: c.preload})
		if p := daemontest.Decode[api.Problem](t, resp, http.StatusForbidden); p.Code != api.CodeRefused || !strings.Contains(p.Detail, c.want) {
			t.Errorf("%v: %+v, want %s", c.preload, p, c.want)
		}
	}
	type list struct{ Contexts []api.Context }
	if all := daemontest.Decode[list](t, d.Do("GET", "/v1/sandboxes/"+sb.ID+"/contexts", nil), http.StatusOK); len(all.Contexts) != 0 {
		t.Errorf("contexts %+v after refusals", all.Contexts)
	}
	newContext(d, sb.ID, api.CreateContext{Preload: []string{"json"}})
}
