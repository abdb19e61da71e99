package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func TestEventsFlags(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, tc := range []struct {
		name string
		opts eventsOptions
		tail bool
		want client.EventOptions
		bad  string
	}{
		{name: "new ones", want: client.EventOptions{Follow: true, Last: new(0)}},
		{name: "the last", opts: eventsOptions{tail: 5}, tail: true, want: client.EventOptions{Follow: true, Last: new(5)}},
		{name: "kept ones", opts: eventsOptions{noFollow: true}, want: client.EventOptions{}},
		{name: "a span", opts: eventsOptions{since: "10m"}, want: client.EventOptions{Follow: true, Since: now.Add(-10 * time.Minute)}},
		{name: "until now", opts: eventsOptions{until: "0s", since: "0"}, want: client.EventOptions{Follow: true, Since: now, Until: now}},
		{name: "an unknown key", opts: eventsOptions{filters: []string{"color=red"}}, bad: "the key must be one of type, action,"},
		{name: "seconds", opts: eventsOptions{since: "90"}, want: client.EventOptions{Follow: true, Since: now.Add(-90 * time.Second)}},
		{name: "an id", opts: eventsOptions{since: "1795635487213904"}, want: client.EventOptions{Follow: true, After: 1795635487213904}},
		{
			name: "a period", opts: eventsOptions{until: "2026-01-01T00:00:00Z", filters: []string{"type=image"}},
			want: client.EventOptions{Follow: true, Until: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), Filters: []string{"type=image"}},
		},
		{name: "no filter", opts: eventsOptions{filters: []string{"image"}}, bad: "--filter \"image\" is not key=value"},
		{name: "no time", opts: eventsOptions{since: "noon"}, bad: "--since \"noon\" is neither"},
		{name: "no end", opts: eventsOptions{until: "noon"}, bad: "--until \"noon\" is neither"},
		{name: "a negative number", opts: eventsOptions{tail: -1}, tail: true, bad: "--tail -1"},
	} {
		got, err := tc.opts.choose(now, tc.tail)
		if tc.bad != "" {
			if _, ok := errors.AsType[*cmdline.UsageError](err); !ok || !strings.Contains(err.Error(), tc.bad) {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		if d := cmp.Diff(tc.want, got); d != "" || err != nil {
			t.Errorf("%s: %v\n%s", tc.name, err, d)
		}
	}
}

func TestFormat(t *testing.T) {
	list := []api.Sandbox{
		{ID: "sb1", Name: "one", Labels: map[string]string{"k": "<v>"}, Env: []string{"A=1", "B=2"}, Limits: api.Limits{Pids: 5}},
		{ID: "sandbox2", Name: "t\x1b[2Jwo"},
	}
	for _, tc := range []struct{ format, want string }{
		{"{{.ID}}", "sb1\nsandbox2\n"},
		{"{{.Name}}", "one\nt\\x1b[2Jwo\n"},
		{`table {{.ID}}\t{{.Limits.Pids}}\t{{upper .Name}}`, "ID         PIDS   NAME\nsb1        5      ONE\nsandbox2   0      T\\x1b[2JWO\n"},
		{"table {{.CreatedAt.Year}}", "YEAR\n1\n1\n"},
		{`{{json .Labels}}:{{join .Env "+"}}`, "{\"k\":\"<v>\"}:A=1+B=2\nnull:\n"},
		{`{{lower "ABC"}}{{truncate .ID 2}}`, "abcsb\nabcsa\n"},
		{`{{println .ID}}`, "sb1\n\nsandbox2\n\n"},
		{`{{range split "a,b" ","}}{{.}};{{end}}`, "a;b;\na;b;\n"},
	} {
		f, err := newFormat(tc.format)
		if err != nil {
			t.Fatalf("%s: %v", tc.format, err)
		}
		var b strings.Builder
		if err := printAll(&b, f, list); err != nil || b.String() != tc.want {
			t.Errorf("%s: %v\n%s", tc.format, err, cmp.Diff(tc.want, b.String()))
		}
	}
	if f, err := newFormat(""); f != nil || err != nil {
		t.Errorf("no format: %v, %v", f, err)
	}
	if _, err := newFormat("{{.ID"); err == nil {
		t.Error("half a template is one")
	}
	f, err := newFormat("{{.Nonsense}}")
	if err != nil {
		t.Fatal(err)
	}
	if err := printAll(&strings.Builder{}, f, list); err == nil || !strings.Contains(err.Error(), "Nonsense") {
		t.Errorf("a field that there is not: %v", err)
	}
}

func someImages(f *cmdtest.Daemon) {
	f.Images = []string{"docker.io/library/debian:12", "docker.io/library/alpine:3"}
}

// TestEnds: the list shows what ends a sandbox first.
func TestEnds(t *testing.T) {
	now := time.Now()
	soon, late := now.Add(10*time.Minute+time.Second), now.Add(time.Hour+time.Minute)
	for _, tc := range []struct {
		name string
		sb   api.Sandbox
		want string
	}{
		{"idle first", api.Sandbox{State: api.StateRunning, Deadline: late, IdleDeadline: soon}, "in 10 minutes (idle)"},
		{"lifetime first", api.Sandbox{State: api.StateRunning, Deadline: soon, IdleDeadline: late}, "in 10 minutes"},
		{"in use", api.Sandbox{State: api.StateRunning, Deadline: late}, "in About an hour"},
		{"ended", api.Sandbox{State: api.StateStopped, Deadline: late}, "-"},
	} {
		if got := (psRow{tc.sb}).Ends(); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
	r := psRow{api.Sandbox{State: api.StateLost, Reason: "why", Ports: []api.PortMapping{{Address: "127.0.0.1", HostPort: 80, Port: 8000}, {Socket: "/run/s", Port: 5}}}}
	if got, want := r.Status()+" "+r.Published(), "lost (why) 127.0.0.1:80->8000, /run/s->5"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestMatchImage(t *testing.T) {
	for _, want := range []string{"docker.io/library/debian:12", "library/debian:12", "debian:12", "debian", "deb*", "debian:*"} {
		if got := matchImage("docker.io/library/debian:12", want); got != (want != "library/debian:12") {
			t.Errorf("%q: %v", want, got)
		}
	}
	if matchImage("localhost:5000/tool", "localhost") || !matchImage("localhost:5000/tool:1", "localhost:5000/tool") {
		t.Error("the port of a registry is taken for a tag")
	}
}
