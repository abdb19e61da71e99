package engine

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// mutant returns the id of a sandbox that the launcher of these tests, which is built for them
// alone, starts without some layers (runtime/libct/mutant.go).
func mutant(unique string, without ...string) string {
	id := "mut"
	for _, name := range without {
		id += name + "0"
	}
	return id + unique
}

// An attack that a layer of libcontainer's prevents works without that layer, and fails with it: a
// launcher built for this leaves out one layer after another. If another one stands behind a layer,
// that is left out too, and each is then seen to hold alone.
func TestAttacksWorkWithoutTheMountsAndNamespaces(t *testing.T) {
	testenv.RequireUserNS(t)
	o := options(t)
	o.Launcher = harness.Helper(t, "mutant-launcher")
	f := fixture(t, o)
	program := harness.Helper(t, "neighbour")
	hostname, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	serial := 0
	next := func() string { // no digit: see mutant
		serial++
		return string([]rune{rune('a' + serial/26), rune('a' + serial%26)})
	}
	start := func(t *testing.T, off []string, change func(*runtime.Spec)) *host.Client {
		t.Helper()
		// Landlock is the profile's, and not left out but made to have no effect.
		profile := slices.DeleteFunc(slices.Clone(off), func(layer string) bool { return layer != landlock })
		spec := f.NewSpec(t, mutant(next(), slices.DeleteFunc(slices.Clone(off), func(layer string) bool { return layer == landlock })...))
		without(&spec.Profile, profile)
		spec.Hostname = "sandbox"
		if change != nil {
			change(spec)
		}
		client := begin(t, f, spec)
		put(t, client, program)
		return client
	}
	for _, tc := range []struct {
		layers []string // each alone is enough
		attack []string
		victim bool // another sandbox, without the layer too, is the target
	}{
		{layers: []string{"noipc"}, attack: []string{"reach-queue"}, victim: true},
		{layers: []string{"nonet", landlock}, attack: []string{"reach-abstract-socket"}, victim: true},
		{layers: []string{"nouts"}, attack: []string{"see-host-name", hostname}},
		{layers: []string{"nocgroup"}, attack: []string{"see-cgroup"}},
		{layers: []string{"noreadonlysys"}, attack: []string{"write-interface"}},
		{layers: []string{"nosuid", "noprivileges"}, attack: []string{"set-user-id"}},
		{layers: []string{"nolimits"}, attack: []string{"many-descriptors"}},
		{layers: []string{"nolimits"}, attack: []string{"many-processes"}},
		{layers: []string{"nolimits"}, attack: []string{"huge-file"}},
		{layers: []string{"nolimits"}, attack: []string{"core-limit"}},
	} {
		t.Run(strings.Join(tc.layers, " and ")+" "+tc.attack[0], func(t *testing.T) {
			if slices.Contains(tc.layers, landlock) {
				testenv.RequireLandlock(t, 6) // its scopes
			}
			try := func(without []string) string {
				t.Helper()
				name := next() // of its own: victims go on to the end
				if tc.victim {
					plant(t, start(t, without, nil), name)
				}
				said, exit := says(t, start(t, without, nil), append(tc.attack, name)...)
				t.Logf("without %v: %q, %+v", without, said, exit)
				return said
			}
			if said := try(tc.layers); said != "worked" {
				t.Errorf("without %v it does not work: %s", tc.layers, said)
			}
			for i := range tc.layers {
				others := slices.Delete(slices.Clone(tc.layers), i, i+1)
				if said := try(others); said == "worked" {
					t.Errorf("it works in spite of %s", tc.layers[i])
				}
			}
		})
	}
	// A root that is to be read-only is data of the profile.
	t.Run("read-only root", func(t *testing.T) {
		for _, readOnly := range []bool{true, false} {
			client := start(t, nil, func(s *runtime.Spec) {
				s.Profile.ReadOnlyRoot = readOnly
				s.Profile.Mounts = []api.Scratch{{Path: "/tmp", Size: 64 << 20, Mode: 0o1777}}
			})
			if said, _ := says(t, client, "write-root"); (said == "worked") == readOnly {
				t.Errorf("read-only %v: %s", readOnly, said)
			}
		}
	})
	// Without these nothing starts. Init refuses a /proc that is not of its own PID namespace, and a
	// pid other than 1. A device that the launcher's own /dev lacks can be given to no sandbox.
	for _, name := range []string{"nomount", "nopid", "nofreshproc", "moredevices"} {
		t.Run(name, func(t *testing.T) {
			if _, err := tryBegin(t, f, f.NewSpec(t, mutant(next(), name))); err == nil {
				t.Error("a sandbox is started all the same")
			} else {
				t.Log(err)
			}
		})
	}
	// The owner of a sandbox's processes is read from outside. This comes last: namespaces closed in a
	// sandbox's user namespace are closed in the launcher's when they are one.
	t.Run("id map", func(t *testing.T) {
		if !o.IDs.Subordinate() {
			t.Skip("a single id: there is nothing to tell apart")
		}
		daemons := o.IDs.UID[0].Outside
		for _, without := range [][]string{nil, {"noidmap"}, {"nouser"}} {
			spec := f.NewSpec(t, mutant(next(), without...))
			uid := uidOf(t, f, spec)
			if (uid == daemons) != (len(without) > 0) {
				t.Errorf("without %v root of a sandbox is uid %d, and the launcher %d", without, uid, daemons)
			}
		}
	})
}

// plant has a sandbox hold what others are to reach.
func plant(t *testing.T, client *host.Client, name string) {
	t.Helper()
	x, err := client.Exec(t.Context(), host.ExecRequest{Argv: []string{inside, "plant", name}, NoStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	planted := make(chan string, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = x.Stream(t.Context(), func(_ string, p []byte) error {
			select {
			case planted <- string(p):
			default:
			}
			return nil
		})
	}()
	t.Cleanup(func() { _ = x.Close(); <-ended })
	select {
	case said := <-planted:
		if said != "planted\n" {
			t.Fatalf("the victim says %q", said)
		}
	case <-ended:
		t.Fatal("the victim has ended")
	case <-time.After(testenv.HungAfter):
		t.Fatal("the victim plants nothing")
	}
}

// uidOf starts a sandbox and returns the uid of its init, as the host counts.
func uidOf(t *testing.T, f runtimetest.Fixture, spec *runtime.Spec) int {
	t.Helper()
	begin(t, f, spec)
	list, err := f.Engine.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	uid := -1
	for _, st := range list {
		if st.ID == spec.ID {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", runtime.PIDOf(st.Pidfd)))
			if err != nil {
				t.Fatal(err)
			}
			_, after, _ := strings.Cut(string(status), "\nUid:\t")
			if uid, err = strconv.Atoi(strings.Fields(after)[1]); err != nil { // effective; the real one is init's own
				t.Fatal(err)
			}
		}
		_ = st.Pidfd.Close()
	}
	return uid
}

// The launcher's own filter holds sandboxes too, should a profile's let everything through. The
// control is a launcher without it.
func TestLaunchersFilterHoldsSandboxes(t *testing.T) {
	testenv.RequireUserNS(t)
	program := harness.Helper(t, "attacker")
	attacks := []string{
		"acct", "add-key", "bpf", "bpf-program-load", "delete-module", "fanotify-init", "finit-module", "init-module", "io-uring-enter", "io-uring-register",
		"io-uring-setup", "kexec-file-load", "keyctl", "name-to-handle", "open-by-handle", "perf-event-open", "pidfd-getfd-init", "quotactl", "reboot", "request-key",
		"socket-alg", "socket-packet", "socket-vsock", "swapon", "syslog", "userfaultfd",
	}
	o := options(t)
	o.Launcher = harness.Helper(t, "mutant-launcher")
	control := attacked(t, fixture(t, o), "lcontrol", program, attacks, []string{attack.Filter})
	t.Logf("without it work: %v", control)
	for _, name := range []string{"keyctl", "add-key"} {
		if !slices.Contains(control, name) {
			t.Errorf("control: %s does not work without it", name)
		}
	}
	if still := attacked(t, newFixture(t), "lfilter", program, attacks, []string{attack.Filter}); len(still) != 0 {
		t.Errorf("with it still work: %v", still)
	}
}
