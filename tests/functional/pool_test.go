package functional

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// pooled starts a daemon that keeps sandboxes of the host image ready.
func pooled(t *testing.T, size int) *harness.Daemon {
	t.Helper()
	d := startWith(t, harness.Options{Args: []string{"--pool", fmt.Sprintf("%s=%d", api.HostImage, size)}})
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == size })
	return d
}

func waitPool(t *testing.T, d *harness.Daemon, check func(api.Pool) bool) {
	t.Helper()
	harness.Eventually(t, func() error {
		pools := d.System(t).Pools
		if len(pools) != 1 || !check(pools[0]) {
			return fmt.Errorf("the pools are %+v", pools)
		}
		return nil
	})
}

// A sandbox that was parked is, to its user, one that has just been made.
func TestParkedSandboxIsLikeANewOne(t *testing.T) {
	d := pooled(t, 2)
	cold := start(t)
	if list := d.List(t); len(list) != 0 {
		t.Fatalf("parked sandboxes are listed: %+v", list)
	}
	if n := d.System(t).Sandboxes; n != 0 {
		t.Errorf("%d sandboxes are counted", n)
	}
	began := time.Now()
	request := api.CreateSandbox{
		Name: "mine", Env: []string{"COLOUR=green"}, Labels: map[string]string{"team": "a"}, Cwd: "/usr", User: "65534:65534",
		Timeout: 300, IdleTimeout: 120,
	}
	s, twin := d.Create(t, request), cold.Create(t, request)
	if p := d.System(t).Pools[0]; p.Hits != 1 || p.Misses != 0 {
		t.Fatalf("it was not claimed: %+v", p)
	}
	if s.Name != "mine" || s.Labels["team"] != "a" || s.CreatedAt.Before(began.Add(-time.Second)) ||
		s.Deadline.Sub(s.CreatedAt) != 300*time.Second || s.IdleTimeout != 120 {
		t.Errorf("the sandbox says %+v", s.Sandbox)
	}
	if got, want := fmt.Sprintf("%+v", s.Enforced), fmt.Sprintf("%+v", twin.Enforced); got != want {
		t.Errorf("it is held by %s\nand one that was made when it was asked for by %s", got, want)
	}
	// Whatever a program can see of its sandbox without looking at clocks.
	const look = `hostname; cat /proc/sys/kernel/hostname; uname -n; id; pwd; echo $COLOUR; ulimit -n; grep processes /proc/self/limits; ls -A /tmp /dev /dev/shm;
		cat /proc/self/status | grep -E "^(Cap|NoNewPrivs|Seccomp|Uid|Gid|Groups)"; set -- /proc/[0-9]*; echo $#; cut -d" " -f2- /proc/self/mountinfo | sed "s/[0-9a-f]\{8,\}//g; s/.*- //" | grep -o "^[a-z]*"`
	if got, want := s.Sh(t, look), twin.Sh(t, look); got != want {
		t.Errorf("a program sees\n%s\nand in a sandbox that was just made\n%s", got, want)
	}
	if got := s.Sh(t, "uname -n"); got != "mine\n" {
		t.Errorf("it calls itself %q", got)
	}
	// What runs for long has the name too, and a second exec.
	if got := s.Sh(t, "sh -c 'sh -c hostname'"); got != "mine\n" {
		t.Errorf("a grandchild calls it %q", got)
	}
	stats := new(api.Stats)
	if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/mine/stats", nil, stats); err != nil {
		t.Fatal(err)
	}
	if most := float64(time.Since(began).Milliseconds() + 1); stats.WallMS > most {
		t.Errorf("it has run for %v ms, and was created %v ms ago", stats.WallMS, most)
	}
	s.Delete(t)
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 2 })
}

// A pooled sandbox is claimed once, however many claims come at the same time, and no claimant
// finds another's leftovers.
func TestParkedSandboxIsNobodyElses(t *testing.T) {
	d := pooled(t, 4)
	const n = 24
	var mu sync.Mutex
	seen := map[string]string{}
	each(n, 8, func(i int) {
		name := fmt.Sprintf("s%d", i)
		s, err := d.TryCreate(t.Context(), api.CreateSandbox{Name: name})
		if err != nil {
			t.Errorf("create: %v", err)
			return
		}
		mu.Lock()
		if other := seen[s.ID]; other != "" {
			t.Errorf("%s and %s are both %s", name, other, s.ID)
		}
		seen[s.ID] = name
		mu.Unlock()
		result, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "ls -A /tmp /root; uname -n; echo used >/tmp/used"}})
		switch {
		case err != nil:
			t.Errorf("exec: %v", err)
		case !strings.HasSuffix(result.Stdout, name+"\n") || strings.Contains(result.Stdout, "used"):
			t.Errorf("%s finds %q", name, result.Stdout)
		}
		if err := s.TryDelete(t.Context()); err != nil {
			t.Errorf("delete: %v", err)
		}
	})
	if p := d.System(t).Pools[0]; p.Hits == 0 || p.Hits+p.Misses != n {
		t.Errorf("%d creations, and the pool counts %+v", n, p)
	}
}

// Limits that the host cannot hold are refused as without a pool, and those that each process has
// since its start are not taken from a sandbox that was started without them.
func TestParkedSandboxKeepsItsLimits(t *testing.T) {
	d := pooled(t, 1)
	s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Nofile: 77}})
	if got := s.Sh(t, "ulimit -n"); got != "77\n" {
		t.Errorf("nofile is %q, not 77", got)
	}
	info := d.System(t)
	_, err := d.TryCreate(t.Context(), api.CreateSandbox{Name: "limited", Limits: api.Limits{Memory: 64 << 20}})
	problem := new(api.Problem)
	switch held := info.Enforced.Memory == "cgroup"; {
	case held && err != nil:
		t.Errorf("create with a limit of memory: %v", err)
	case !held && (!errors.As(err, &problem) || problem.Code != api.CodeUnenforceable):
		t.Errorf("a limit that cannot be held: %v, want %s", err, api.CodeUnenforceable)
	}
	if info.Enforced.Pids == "rlimit" {
		s := d.Create(t, api.CreateSandbox{Limits: api.Limits{Pids: 50}})
		if got := strings.Fields(s.Sh(t, "grep processes /proc/self/limits")); got[2] != "50" {
			t.Errorf("pids is %q, not 50", got)
		}
	}
}

// kill -9 of a daemon with a full warm pool, in the middle of claims: claimed sandboxes are
// adopted, pooled ones are gone.
func TestKilledDaemonLeavesNoParkedSandbox(t *testing.T) {
	d := pooled(t, 3)
	s := d.Create(t, api.CreateSandbox{Name: "mine"})
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 3 && p.Hits == 1 })
	d.Mark(t)
	for range 3 {
		var busy sync.WaitGroup
		for range 4 {
			busy.Go(func() { _, _ = d.TryCreate(t.Context(), api.CreateSandbox{}) }) // cut off on purpose
		}
		// No event tells that requests are half way; any moment will do.
		select {
		case <-time.After(3 * time.Millisecond):
		case <-t.Context().Done():
		}
		d.Kill9(t)
		busy.Wait()
		d.Launch(t)
		if got := s.Sh(t, "uname -n"); got != "mine\n" {
			t.Errorf("the claimed one calls itself %q", got)
		}
		for _, other := range d.List(t) {
			if other.Name == "mine" {
				continue
			}
			// One that was claimed at that moment is whole, or it is not there.
			h := new(api.ExecResult)
			if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+other.ID+"/exec", api.ExecRequest{Argv: []string{"uname", "-n"}}, h); err != nil {
				t.Errorf("%s (%s): %v", other.Name, other.State, err)
			} else if h.Stdout != other.Name+"\n" {
				t.Errorf("%s calls itself %q", other.Name, h.Stdout)
			}
			if err := d.Call(t.Context(), http.MethodDelete, "/v1/sandboxes/"+other.ID, nil, nil); err != nil {
				t.Error(err)
			}
		}
		waitPool(t, d, func(p api.Pool) bool { return p.Ready == 3 })
		d.Mark(t)
	}
	if n := len(d.List(t)); n != 1 {
		t.Errorf("%d sandboxes are listed", n)
	}
}

// A parked sandbox neither keeps its image from being removed, nor outlives it, and follows its
// name.
func TestPoolFollowsItsImage(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "pool/app:1", harness.Image(t, v1.Config{}, harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...))))
	d := harness.Start(t, harness.Options{Args: []string{"--pool", reference + "=2"}})
	if p := d.System(t).Pools[0]; p.Ready != 0 || p.Image != reference {
		t.Errorf("before the image is there: %+v", p)
	}
	d.MustPull(t, reference)
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 2 && p.Error == "" })
	s := d.Create(t, api.CreateSandbox{Image: reference})
	if p := d.System(t).Pools[0]; p.Hits != 1 {
		t.Errorf("after a creation: %+v", p)
	}
	first := s.ImageDigest
	s.Delete(t)
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 2 })

	registry.Push(t, "pool/app:1", twoLayers(t, "new"))
	d.MustPull(t, reference)
	// Whoever asks at once has one of the new image too. The pool has followed when it is a parked
	// one: those of the old image are gone by then, which would be ready as well.
	eventually(t, func() error {
		before := d.System(t).Pools[0]
		s := d.Create(t, api.CreateSandbox{Image: reference})
		defer s.Delete(t)
		if s.ImageDigest == first {
			t.Fatal("a sandbox of the image that had the name before was given")
		}
		if after := d.System(t).Pools[0]; after.Hits == before.Hits {
			return fmt.Errorf("it was not claimed: %+v", after)
		}
		return nil
	})
	waitPool(t, d, func(p api.Pool) bool { return p.Ready == 2 })
	if removed, err := remove(t, d, reference, false); err != nil || len(removed.Removed) != 1 {
		t.Fatalf("remove the image of a full pool: %+v, %v", removed, err)
	}
	if p := d.System(t).Pools[0]; p.Ready != 0 {
		t.Errorf("after the removal of its image: %+v", p)
	}
	waitPool(t, d, func(p api.Pool) bool { return p.Error != "" })
	verified(t, d)
}
