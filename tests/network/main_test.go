package network

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// common is the world of all tests, with a daemon of each user in it. The tests run one after
// another, so that what comes to the world's servers is of one test.
var common struct {
	make    sync.Once
	world   *world
	err     error
	daemons map[string]*harness.Shared
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, s := range common.daemons {
		code = s.Stop(code)
	}
	if common.world != nil {
		common.world.close()
	}
	os.Exit(code)
}

// internet returns the world. It needs root, which makes namespaces.
func internet(t *testing.T) *world {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.RequireUserNS(t)
	common.make.Do(func() { common.world, common.err = newWorld() })
	if common.err != nil {
		t.Fatalf("make the Internet: %v", common.err)
	}
	return common.world
}

// both are the users whose daemons the tests have.
var both = []string{"root", "ordinary"}

// each runs a test with a daemon of each user.
func each(t *testing.T, test func(t *testing.T, w *world, d *harness.Daemon)) {
	t.Helper()
	with(t, both, test)
}

// alike returns the users with whose daemons a test runs that does not depend on how the gateway is
// confined: an ordinary one alone where [testenv.SameForAll] would skip the test for root.
func alike() []string {
	if os.Getenv(testenv.SecondVariable) == "" {
		return both
	}
	return []string{"ordinary"}
}

// with runs a test with the daemon of each of these users.
func with(t *testing.T, users []string, test func(t *testing.T, w *world, d *harness.Daemon)) {
	t.Helper()
	w := internet(t)
	for _, who := range users {
		t.Run(who, func(t *testing.T) {
			test(t, w, shared(t, w, who))
		})
	}
}

// options returns the options of a daemon in the world.
func options(t *testing.T, w *world, who string) harness.Options {
	t.Helper()
	o := harness.Options{Within: w.enter}
	if who != "root" {
		o.User = testenv.RequireAccount(t)
	}
	return o
}

// shared returns the daemon of a user that the tests share. Tests that end a daemon start one of
// their own.
func shared(t *testing.T, w *world, who string) *harness.Daemon {
	t.Helper()
	if common.daemons == nil {
		common.daemons = make(map[string]*harness.Shared)
	}
	if common.daemons[who] == nil {
		common.daemons[who] = &harness.Shared{Options: options(t, w, who)}
	}
	return common.daemons[who].Daemon(t)
}

// profiles returns the profiles that the host can apply.
func profiles(t *testing.T, d *harness.Daemon) []string {
	t.Helper()
	if d.System(t).Enforced.IDs == "single" {
		return []string{"default"}
	}
	return []string{"default", "hardened"}
}

// connected makes a sandbox with a policy, and the prober in it.
func connected(t *testing.T, d *harness.Daemon, profile, policy string) *harness.Sandbox {
	t.Helper()
	s := d.Create(t, api.CreateSandbox{Profile: profile, Network: api.Network{Mode: api.NetworkEgress, Policy: policy}})
	plant(t, s)
	return s
}

const proberAt = "/tmp/prober"

// plant puts the prober into a sandbox.
func plant(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	data, err := os.ReadFile(harness.Helper(t, "prober"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), proberAt, data); err != nil {
		t.Fatalf("put the prober: %v", err)
	}
	s.Sh(t, "chmod 755 "+proberAt)
}

// probe does operations inside a sandbox.
func probe(t *testing.T, s *harness.Sandbox, ops []op.Op) []op.Result {
	t.Helper()
	input, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	got := s.Exec(t, api.ExecRequest{Argv: []string{proberAt}, Stdin: input, OutputLimit: 16 << 20, Timeout: testenv.HungAfter.Seconds()})
	all, err := readResults([]byte(got.Stdout))
	if got.Exit.Code != 0 || err != nil || len(all) != len(ops) {
		at := "the end"
		if len(all) < len(ops) {
			at = fmt.Sprintf("%+v", ops[len(all)])
		}
		t.Fatalf("the prober ended with %+v, %v, at %.300s: %s", got.Exit, err, at, got.Stderr)
	}
	return all
}

func readResults(output []byte) (all []op.Result, err error) {
	for dec := json.NewDecoder(bytes.NewReader(output)); ; {
		var r op.Result
		if err := dec.Decode(&r); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return all, fmt.Errorf("read the prober's results: %w", err)
		}
		all = append(all, r)
	}
}

func results(t *testing.T, ops []op.Op, output []byte) []op.Result {
	t.Helper()
	all, err := readResults(output)
	if err != nil || len(all) != len(ops) {
		t.Fatalf("the prober has %d results of %d operations: %v", len(all), len(ops), err)
	}
	return all
}

// probeOutside does operations without a sandbox: in the world, or where within leads.
func probeOutside(t *testing.T, within func(func() error) error, ops []op.Op) []op.Result {
	t.Helper()
	input, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	out, err := runWithin(within, exec.CommandContext(t.Context(), harness.Helper(t, "prober")), input)
	if err != nil {
		t.Fatal(err)
	}
	return results(t, ops, out)
}
