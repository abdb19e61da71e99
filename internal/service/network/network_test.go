package network

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/netns/policy"
)

func open(t *testing.T, ceiling *policy.Policy) *Networks {
	t.Helper()
	n, err := Open(Options{Dir: t.TempDir(), NamedDir: t.TempDir(), Ceiling: ceiling, PortDir: filepath.Join(t.TempDir(), "ports"), Store: secrets.NewStore(t.TempDir()), Sockets: []string{"models"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

const (
	onePublic  = "version: 1\nrules:\n- allow: example.com\n"
	onePrivate = "version: 1\nrules:\n- allow: 10.0.0.0/8\n"
	oneSocket  = "version: 1\nservices:\n- port: 8080\n  to: unix:models\n"
	oneService = "version: 1\nservices:\n- port: 8080\n  to: 127.0.0.1:11434\n"
)

// Other sandboxes add a bounded number of flows to a record, and the rest is counted.
func TestFlowsOfPeersAreBounded(t *testing.T) {
	l := newFlowLog(t.TempDir(), "box")
	at := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	const more = 50
	for range peerBurst + more {
		if err := l.appendPeer(api.Flow{Time: at, Kind: api.FlowPeer, Allow: true}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.append(api.Flow{Time: at, Kind: api.FlowConnection, Allow: true}); err != nil {
		t.Fatal(err)
	}
	if err := l.appendPeer(api.Flow{Time: at.Add(time.Second), Kind: api.FlowPeer, Allow: true}); err != nil {
		t.Fatal(err)
	}
	counts, lost := map[api.FlowKind]int{}, uint64(0)
	if err := l.read(t.Context(), -1, false, func(f api.Flow) error {
		counts[f.Kind]++
		lost += f.Lost
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if counts[api.FlowPeer] != peerBurst+1 || counts[api.FlowConnection] != 1 || lost != more {
		t.Errorf("%v, %d lost", counts, lost)
	}
	if s := l.stats(); s.Connections != 1 || s.Refused != 0 {
		t.Errorf("%+v", s)
	}
	if err := l.close(); err != nil {
		t.Error(err)
	}
}

func TestCheck(t *testing.T) {
	pypi, err := policy.Preset("pypi")
	if err != nil {
		t.Fatal(err)
	}
	bounded, err := policy.Parse([]byte("version: 1\nrules:\n- {name: few, allow: '*', ports: any, budget: {hosts: 2}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	with := func(document string) api.Network { return api.Network{Mode: api.NetworkEgress, Policy: document} }
	for _, tt := range []struct {
		name    string
		tenant  string
		ceiling *policy.Policy
		net     api.Network
		err     string // part of it; "": none
	}{
		{name: "nothing"},
		{name: "full", net: api.Network{Mode: api.NetworkFull}},
		{name: "egress", net: with(onePublic)},
		{name: "private addresses", net: with(onePrivate)},
		{name: "a service of the host", net: with(oneService)},
		{name: "a socket of the host", net: with(oneSocket)},
		{name: "a socket that the operator has not named", net: with(strings.ReplaceAll(oneSocket, "models", "other")), err: `named no socket "other"; name it with serve --service other=unix:PATH`},
		{name: "a path of a socket", net: with(strings.ReplaceAll(oneSocket, "models", "/run/docker.sock")), err: "is not the name of a socket"},
		{name: "a socket of the host, of a tenant", tenant: "1002", net: with(oneSocket), err: "operator's to give"},
		{name: "a budget", net: api.Network{Mode: api.NetworkFull, Budget: api.NetworkBudget{BytesOut: 1, QueryRate: 0.5}}},
		{name: "the host's network", net: api.Network{Mode: "host"}, err: `network mode "host"`},
		{name: "egress without a policy", net: with(""), err: "policy is missing"},
		{name: "a policy without egress", net: api.Network{Mode: api.NetworkFull, Policy: onePublic}, err: `mode "full" has none`},
		{name: "a policy of none", net: api.Network{Policy: onePublic}, err: `mode "none" has none`},
		{name: "a mistake", net: with("version: 1\nrules:\n- alow: example.com\n"), err: "3:3"},
		{name: "too large", net: with(strings.Repeat("#", egress.MaxPolicy+1)), err: "at most"},
		{name: "a budget of none", net: api.Network{Budget: api.NetworkBudget{BytesOut: 1}}, err: "needs none"},
		{name: "a negative budget", net: api.Network{Mode: api.NetworkFull, Budget: api.NetworkBudget{Hosts: -1}}, err: "negative"},
		{name: "no rate", net: api.Network{Mode: api.NetworkFull, Budget: api.NetworkBudget{QueryRate: -1}}, err: "negative"},

		{name: "below the ceiling", ceiling: pypi, net: with("version: 1\npresets: [pypi]\n")},
		{name: "above the ceiling", ceiling: pypi, net: with(onePublic), err: "more than the operator does, such as"},
		{name: "full above the ceiling", ceiling: pypi, net: api.Network{Mode: api.NetworkFull}, err: "more than the operator does"},
		{name: "with the ceiling's budget", ceiling: bounded, net: with("version: 1\nrules:\n- {name: x, allow: example.com, budget: {hosts: 2}}\n")},
		{name: "without the ceiling's budget", ceiling: bounded, net: with(onePublic), err: "more than the operator does, such as tcp example.com (1.1.1.1) port 80, beyond hosts: 2 of rule few"},
		{name: "no network at all", ceiling: new(policy.Policy), net: with(onePublic), err: "more than the operator does"},
		{name: "none below the least", ceiling: new(policy.Policy)},

		{name: "full, of a tenant", tenant: "1002", net: api.Network{Mode: api.NetworkFull}},
		{name: "private addresses, of a tenant", tenant: "1002", net: with(onePrivate), err: "more than the operator does"},
		{name: "a service of the host, of a tenant", tenant: "1002", net: with(oneService), err: "operator's to give"},
		{name: "a tenant's above the ceiling", tenant: "1002", ceiling: pypi, net: with(onePublic), err: "more than the operator does"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := open(t, tt.ceiling).Check(tt.tenant, tt.net)
			if tt.err != "" {
				if !errors.Is(err, class.ErrInvalid) || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want an invalid argument that mentions %q", err, tt.err)
				}
				return
			}
			want := tt.net
			if want.Mode == "" {
				want.Mode = api.NetworkNone
			}
			if err != nil || !cmp.Equal(got, want) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func some(from, to int) (flows []api.Flow) {
	for i := from; i < to; i++ {
		flows = append(flows, api.Flow{Kind: api.FlowConnection, Protocol: "tcp", Out: int64(i), Allow: i%2 == 0})
	}
	return flows
}

func readAll(t *testing.T, n *Networks, id string, tail int) (flows []api.Flow) {
	t.Helper()
	err := n.Flows(t.Context(), id, FlowOptions{Tail: tail}, func(f api.Flow) error {
		flows = append(flows, f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return flows
}

func TestFlowsAreKept(t *testing.T) {
	n := open(t, nil)
	log := n.logOf("a")
	for _, f := range some(0, 10) {
		if err := log.append(f); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(some(0, 10), readAll(t, n, "a", -1)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(some(7, 10), readAll(t, n, "a", 3)); diff != "" {
		t.Error(diff)
	}
	if got := readAll(t, n, "a", 0); got != nil {
		t.Errorf("of none: %v", got)
	}
	want := &api.NetworkStats{Connections: 10, Refused: 5, BytesOut: 45}
	if diff := cmp.Diff(want, n.Stats("a")); diff != "" {
		t.Error(diff)
	}
	if n.Stats("b") != nil || readAll(t, n, "b", -1) != nil {
		t.Error("a sandbox without flows has some")
	}
	// The next daemon goes on behind a line that was cut off.
	if err := log.close(); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(log.current(), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteString(`{"time":"20`); err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	next := open(t, nil)
	next.opts.Dir = n.opts.Dir
	if err := next.logOf("a").append(some(10, 11)[0]); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(some(0, 11), readAll(t, next, "a", -1)); diff != "" {
		t.Error(diff)
	}
	if err := next.Sweep(func(id string) bool { return id == "b" }); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, next, "a", -1); got != nil {
		t.Errorf("after a sweep: %v", got)
	}
}

// What a daemon before this one has kept of a sandbox goes with the sandbox.
func TestFilesOfAnEarlierDaemonAreForgotten(t *testing.T) {
	n := open(t, nil)
	for _, id := range []string{"flows", "inspected", "other"} {
		if err := n.logOf(id).append(some(0, 1)[0]); err != nil {
			t.Fatal(err)
		}
	}
	flows := n.logs["flows"]
	inspected := n.logs["inspected"]
	if err := os.Rename(inspected.current(), inspected.inspection()); err != nil {
		t.Fatal(err)
	}
	next := open(t, nil)
	next.opts.Dir = n.opts.Dir
	if err := next.Sweep(func(string) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if next.Stats("flows") != nil {
		t.Error("a sandbox that was not served has totals")
	}
	for _, id := range []string{"flows", "inspected", "never"} {
		if err := next.Forget(id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	for _, gone := range []string{flows.current(), inspected.inspection()} {
		if _, err := os.Stat(gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", gone, err)
		}
	}
	if got := readAll(t, next, "other", -1); len(got) != 1 {
		t.Errorf("of another sandbox: %v", got)
	}
}

func TestFlowFilesAreBounded(t *testing.T) {
	n := open(t, nil)
	log := n.logOf("a")
	f := api.Flow{Kind: api.FlowQuery, Name: strings.Repeat("n", 4096)}
	count := 3 * maxFlowFile / 4096
	for i := range count {
		f.Out = int64(i)
		if err := log.append(f); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{log.current(), log.before()} {
		if fi, err := os.Stat(name); err != nil || fi.Size() > maxFlowFile {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
	}
	got := readAll(t, n, "a", -1)
	if len(got) < maxFlowFile/4096/2 || got[len(got)-1].Out != int64(count-1) {
		t.Fatalf("%d flows, the last is %d of %d", len(got), got[len(got)-1].Out, count)
	}
	for i := range got[1:] {
		if got[i+1].Out != got[i].Out+1 {
			t.Fatalf("flow %d follows %d", got[i+1].Out, got[i].Out)
		}
	}
	if err := n.Forget("a"); err != nil {
		t.Fatal(err)
	}
	if err := log.append(f); err != nil { // one that was under way
		t.Error(err)
	}
	if left, err := os.ReadDir(n.opts.Dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestFollowEndsWithTheSandbox(t *testing.T) {
	n := open(t, nil)
	log := n.logOf("a")
	log.begin(0)
	if err := log.append(some(0, 1)[0]); err != nil {
		t.Fatal(err)
	}
	var got []api.Flow
	err := n.Flows(t.Context(), "a", FlowOptions{Tail: -1, Follow: true}, func(f api.Flow) error {
		got = append(got, f)
		if len(got) == 3 {
			return log.close()
		}
		return log.append(some(len(got), len(got)+1)[0])
	})
	if diff := cmp.Diff(some(0, 3), got); diff != "" || err != nil {
		t.Error(diff, err)
	}
	// It has ended, so that nothing is waited for.
	if err := n.Flows(t.Context(), "a", FlowOptions{Tail: 0, Follow: true}, func(api.Flow) error { return nil }); err != nil {
		t.Error(err)
	}
	log.begin(0)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if err := n.Flows(ctx, "a", FlowOptions{Tail: 0, Follow: true}, func(api.Flow) error { return nil }); !errors.Is(err, cause) {
		t.Error(err)
	}
}

func TestSlowFollowersLearnWhatTheyMissed(t *testing.T) {
	n := open(t, nil)
	log := n.logOf("a")
	log.begin(0)
	if err := log.append(some(0, 1)[0]); err != nil {
		t.Fatal(err)
	}
	const missed = 10
	var got []api.Flow
	err := n.Flows(t.Context(), "a", FlowOptions{Tail: -1, Follow: true}, func(f api.Flow) error {
		switch got = append(got, f); len(got) {
		case 1:
			for _, f := range some(1, 1+maxFollowed+missed) {
				if err := log.append(f); err != nil {
					return err
				}
			}
		case 1 + maxFollowed:
			return errors.Join(log.append(some(0, 1)[0]), log.close())
		}
		return nil
	})
	if err != nil || len(got) != maxFollowed+2 || got[len(got)-1].Lost != missed {
		t.Errorf("%d flows, the last after %d that were lost, %v", len(got), got[len(got)-1].Lost, err)
	}
}
