package service_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/internal/service/servicetest"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

// poolImages is a store whose images can be given to another name, and removed.
type poolImages struct {
	*daemontest.Images

	mu      sync.Mutex
	digest  string // of example.org/app:1; "": it is not stored
	layer   string
	removal func(context.Context, []string)
}

func (p *poolImages) Acquire(_ context.Context, ref string) (*image.Image, func(), error) {
	img, err := p.Get(ref)
	if err != nil {
		return nil, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.digest == "" {
		return nil, nil, image.ErrNotFound
	}
	img.Digest, img.Rootfs.Layers = p.digest, []string{p.layer}
	return img, func() {}, nil
}

func (p *poolImages) OnRemoval(f func(context.Context, []string)) { p.removal = f }

func (p *poolImages) Remove(ctx context.Context, _ string, _ bool) (api.ImagesRemoved, error) {
	p.mu.Lock()
	layer := p.layer
	p.digest = ""
	p.mu.Unlock()
	p.removal(ctx, []string{layer})
	return api.ImagesRemoved{}, nil
}

func (p *poolImages) Pull(context.Context, string, image.PullOptions) (*image.Image, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.digest, p.layer = "sha256:22", "sha256:02"
	return &image.Image{}, nil
}

// pooled is a daemon with pools, which are filled whatever else takes the host's memory.
func pooled(b *daemontest.Bench) *daemontest.Running {
	b.Options.SpareMemory = func() error { return nil }
	return b.Start()
}

func poolOf(t *testing.T, r *daemontest.Running) api.Pool {
	t.Helper()
	return daemontest.Decode[api.SystemInfo](t, r.Do("GET", "/v1/system", nil), http.StatusOK).Pools[0]
}

// waitPool waits until the pool is as check wants it.
func waitPool(t *testing.T, r *daemontest.Running, what string, check func(api.Pool) bool) {
	t.Helper()
	var p api.Pool
	r.Await(func() string { return fmt.Sprintf("the pool is not %s: %+v", what, p) }, func() bool {
		p = poolOf(t, r)
		return check(p)
	})
}

func TestPoolIsFilledClaimedAndFollowsItsImage(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	images := &poolImages{Images: b.Images, digest: "sha256:11", layer: "sha256:01"}
	b.Options.Images = func(string) service.Images { return images }
	b.Options.Pools = []service.Pool{{Image: "example.org/app:1", Size: 2}}
	r := pooled(b)
	full := func(p api.Pool) bool { return p.Ready == 2 && p.Error == "" }
	waitPool(t, r, "full", full)
	parked := b.Engine.IDs()
	if list := daemontest.Decode[api.SandboxList](t, r.Do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 0 {
		t.Errorf("listed: %+v", list)
	}
	daemontest.Problem(t, r.Do("GET", "/v1/sandboxes/"+parked[0], nil), api.CodeNotFound)
	daemontest.Problem(t, r.Do("POST", "/v1/sandboxes/"+parked[0]+"/exec", api.ExecRequest{Argv: []string{"true"}}), api.CodeNotFound)

	sb := r.Create(api.CreateSandbox{Image: "example.org/app:1", Name: "mine"})
	if !slices.Contains(parked, sb.ID) || sb.Cwd != "/tmp" || sb.ImageDigest != "sha256:11" {
		t.Errorf("created %+v, parked were %v", sb, parked)
	}
	waitPool(t, r, "full again", func(p api.Pool) bool { return full(p) && p.Hits == 1 && p.Misses == 0 })
	if other := r.Create(api.CreateSandbox{Image: "example.org/app:1", Profile: "hardened"}); other.Profile != "hardened" {
		t.Errorf("created %+v", other)
	}
	if p := poolOf(t, r); p.Misses != 0 || p.Ready != 2 { // a pool is of one image and one profile
		t.Errorf("after a creation with another profile: %+v", p)
	}

	// The name moves on: parked sandboxes are of the old image, and no request for the new one gets
	// them.
	old := b.Engine.IDs()
	if rep := r.Do("POST", "/v1/images/pull", api.PullImage{Reference: "example.org/app:1"}); rep.Status != http.StatusOK {
		t.Fatalf("pull: %s", rep.Body)
	}
	sb = r.Create(api.CreateSandbox{Image: "example.org/app:1"})
	if sb.ImageDigest != "sha256:22" || b.Engine.Spec(sb.ID).Rootfs.Layers[0] != "sha256:02" {
		t.Errorf("created of the old image: %+v", sb)
	}
	waitPool(t, r, "of the new image", func(p api.Pool) bool {
		fresh := 0
		for _, id := range b.Engine.IDs() {
			if spec := b.Engine.Spec(id); spec != nil && !slices.Contains(old, id) && id != sb.ID && spec.Rootfs.Layers[0] == "sha256:02" {
				fresh++
			}
		}
		return p.Ready == 2 && fresh == 2
	})

	// Parked sandboxes do not outlive their image.
	if rep := r.Do("DELETE", "/v1/images?reference=example.org/app:1", nil); rep.Status != http.StatusOK {
		t.Fatalf("remove: %d %s", rep.Status, rep.Body)
	}
	if p := poolOf(t, r); p.Ready != 0 {
		t.Errorf("after the removal of its image: %+v", p)
	}
	waitPool(t, r, "complaining", func(p api.Pool) bool { return p.Error != "" })
	if got := len(b.Engine.IDs()); got != 3 {
		t.Errorf("%d sandboxes are left, want the three that were asked for", got)
	}
}

func TestPoolEndsWithItsDaemon(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Pools = []service.Pool{{Image: api.HostImage, Size: 3}}
	r := pooled(b)
	waitPool(t, r, "full", func(p api.Pool) bool { return p.Ready == 3 })
	r.D.Shutdown(api.Shutdown{KeepSandboxes: true})
	r.Wait()
	if ids := b.Engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
}

// Nothing is parked on a host whose memory is short, which is told.
func TestPoolOfAHostThatIsShortOfMemory(t *testing.T) {
	b := daemontest.New(t, nil)
	b.Options.Pools = []service.Pool{{Image: api.HostImage, Size: 1}}
	b.Options.SpareMemory = func() error { return errors.New("memory is short") }
	r := b.Start()
	waitPool(t, r, "complaining", func(p api.Pool) bool { return p.Error == "memory is short" })
	if ids := b.Engine.IDs(); len(ids) > 0 {
		t.Errorf("parked: %v", ids)
	}
}

// A pool of learned size is empty until a request comes, then follows the demand up to its maximum,
// and drops sandboxes that are not worth keeping.
func TestPoolOfLearnedSize(t *testing.T) {
	b := daemontest.New(t, servicetest.RealInit(t))
	b.Options.Pools = []service.Pool{{Image: api.HostImage, Size: 3, Learn: true}}
	r := pooled(b)
	if p := poolOf(t, r); p.Size != 0 || p.Most != 3 || p.Ready != 0 {
		t.Errorf("at first: %+v", p)
	}
	svc := r.D.Service()
	key := (&service.Pool{Image: api.HostImage, Profile: service.DefaultProfile}).Key()
	// Those that are asked for at once are so within seconds on any machine, however long each takes.
	createAtOnce := func(n int) {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				if rep, err := r.Try("POST", "/v1/sandboxes", api.CreateSandbox{}); err != nil || rep.Status != http.StatusCreated {
					t.Errorf("create: %d %s, %v", rep.Status, rep.Body, err)
				}
			})
		}
		wg.Wait()
	}
	waitPool(t, r, "learning", func(api.Pool) bool { // its image has been looked up
		createAtOnce(2)
		return svc.Supervisor().PoolState(key).Wanted >= 2
	})
	waitPool(t, r, "as large as it was asked for", func(p api.Pool) bool { return p.Size >= 2 && p.Ready == p.Size })
	waitPool(t, r, "asked for more", func(p api.Pool) bool {
		createAtOnce(4)
		return svc.Supervisor().PoolState(key).Wanted > 3
	})
	waitPool(t, r, "as large as it may be", func(p api.Pool) bool { return p.Size == 3 && p.Ready == 3 && p.Hits > 0 })

	profile, defaults, err := b.Options.Profile(service.DefaultProfile)
	if err != nil {
		t.Fatal(err)
	}
	img, release, err := b.Images.Acquire(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for range 2 {
		request := runtime.Request{Image: api.HostImage, ImageDigest: img.Digest, Rootfs: img.Rootfs, Profile: profile, Defaults: defaults}
		if err := svc.Supervisor().Park(t.Context(), key, request); err != nil {
			t.Fatal(err)
		}
	}
	svc.WakePools()
	waitPool(t, r, "smaller again", func(p api.Pool) bool { return p.Size == 3 && p.Ready == 3 })
}
