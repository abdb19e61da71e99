package daemon

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/runtime"
)

// poolImages is a store whose images can be given to another name, and removed.
type poolImages struct {
	*fakeImages

	mu      sync.Mutex
	digest  string // of example.org/app:1; "": it is not stored
	layer   string
	removal func(context.Context, []string)
}

func (p *poolImages) Acquire(_ context.Context, ref string) (*image.Image, func(), error) {
	img, err := p.get(ref)
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
func (b *bench) pooled() *running {
	b.t.Helper()
	b.prepare = func(d *Daemon) { d.service.pools.spare = func() error { return nil } }
	return b.start()
}

func (r *running) pool() api.Pool {
	r.t.Helper()
	return decode[api.SystemInfo](r.t, r.do("GET", "/v1/system", nil), http.StatusOK).Pools[0]
}

// waitPool waits until the pool is as check wants it.
func (r *running) waitPool(what string, check func(api.Pool) bool) {
	r.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		p := r.pool()
		if check(p) {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatalf("the pool is not %s: %+v", what, p)
		}
	}
}

func TestPoolIsFilledClaimedAndFollowsItsImage(t *testing.T) {
	b := newBench(t, realInit(t))
	images := &poolImages{fakeImages: b.images, digest: "sha256:11", layer: "sha256:01"}
	b.options.Images = images
	b.options.Pools = []Pool{{Image: "example.org/app:1", Size: 2}}
	r := b.pooled()
	full := func(p api.Pool) bool { return p.Ready == 2 && p.Error == "" }
	r.waitPool("full", full)
	parked := b.engine.IDs()
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", nil), http.StatusOK); len(list.Sandboxes) != 0 {
		t.Errorf("listed: %+v", list)
	}
	problem(t, r.do("GET", "/v1/sandboxes/"+parked[0], nil), api.CodeNotFound)
	problem(t, r.do("POST", "/v1/sandboxes/"+parked[0]+"/exec", api.ExecRequest{Argv: []string{"true"}}), api.CodeNotFound)

	sb := r.create(api.CreateSandbox{Image: "example.org/app:1", Name: "mine"})
	if !slices.Contains(parked, sb.ID) || sb.Cwd != "/tmp" || sb.ImageDigest != "sha256:11" {
		t.Errorf("created %+v, parked were %v", sb, parked)
	}
	r.waitPool("full again", func(p api.Pool) bool { return full(p) && p.Hits == 1 && p.Misses == 0 })
	if other := r.create(api.CreateSandbox{Image: "example.org/app:1", Profile: "hardened"}); other.Profile != "hardened" {
		t.Errorf("created %+v", other)
	}
	if p := r.pool(); p.Misses != 0 || p.Ready != 2 { // a pool is of one image and one profile
		t.Errorf("after a creation with another profile: %+v", p)
	}

	// The name moves on: what is parked is of the old image, and is never given to who asks for the new one.
	old := b.engine.IDs()
	if rep := r.do("POST", "/v1/images/pull", api.PullImage{Reference: "example.org/app:1"}); rep.status != http.StatusOK {
		t.Fatalf("pull: %s", rep.body)
	}
	sb = r.create(api.CreateSandbox{Image: "example.org/app:1"})
	if sb.ImageDigest != "sha256:22" || b.engine.Spec(sb.ID).Rootfs.Layers[0] != "sha256:02" {
		t.Errorf("created of the old image: %+v", sb)
	}
	r.waitPool("of the new image", func(p api.Pool) bool {
		fresh := 0
		for _, id := range b.engine.IDs() {
			if spec := b.engine.Spec(id); spec != nil && !slices.Contains(old, id) && id != sb.ID && spec.Rootfs.Layers[0] == "sha256:02" {
				fresh++
			}
		}
		return p.Ready == 2 && fresh == 2
	})

	// What is parked does not outlive its image.
	if rep := r.do("DELETE", "/v1/images?reference=example.org/app:1", nil); rep.status != http.StatusOK {
		t.Fatalf("remove: %d %s", rep.status, rep.body)
	}
	if p := r.pool(); p.Ready != 0 {
		t.Errorf("after the removal of its image: %+v", p)
	}
	r.waitPool("complaining", func(p api.Pool) bool { return p.Error != "" })
	if got := len(b.engine.IDs()); got != 3 {
		t.Errorf("%d sandboxes are left, want the three that were asked for", got)
	}
}

func TestPoolEndsWithItsDaemon(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Pools = []Pool{{Image: api.HostImage, Size: 3}}
	r := b.pooled()
	r.waitPool("full", func(p api.Pool) bool { return p.Ready == 3 })
	r.d.Shutdown(api.Shutdown{KeepSandboxes: true})
	r.wait()
	if ids := b.engine.IDs(); len(ids) != 0 {
		t.Errorf("left: %v", ids)
	}
}

// Nothing is parked on a host whose memory is short, which is told.
func TestPoolOfAHostThatIsShortOfMemory(t *testing.T) {
	b := newBench(t, nil)
	b.options.Pools = []Pool{{Image: api.HostImage, Size: 1}}
	b.prepare = func(d *Daemon) { d.service.pools.spare = func() error { return errors.New("memory is short") } }
	r := b.start()
	r.waitPool("complaining", func(p api.Pool) bool { return p.Error == "memory is short" })
	if ids := b.engine.IDs(); len(ids) > 0 {
		t.Errorf("parked: %v", ids)
	}
}

func TestMeminfo(t *testing.T) {
	data := []byte("MemTotal:        3809036 kB\nMemFree:          282012 kB\nMemAvailable:    2282012 kB\n")
	if got := meminfo(data, "MemAvailable:"); got != 2282012 {
		t.Errorf("available: %d", got)
	}
	if got := meminfo(data, "SwapTotal:"); got != 0 {
		t.Errorf("missing: %d", got)
	}
}

// A pool whose size is learned is empty until somebody asks, has then what is asked for but not more than it may, and gets rid
// of what is not worth it.
func TestPoolOfLearnedSize(t *testing.T) {
	b := newBench(t, realInit(t))
	b.options.Pools = []Pool{{Image: api.HostImage, Size: 3, Learn: true}}
	r := b.pooled()
	if p := r.pool(); p.Size != 0 || p.Most != 3 || p.Ready != 0 {
		t.Errorf("at first: %+v", p)
	}
	service := r.d.service
	key := service.pools.wanted[0].key()
	// Those that are asked for at once are so within seconds on any machine, however long each takes.
	createAtOnce := func(n int) {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				if rep, err := r.try("POST", "/v1/sandboxes", api.CreateSandbox{}); err != nil || rep.status != http.StatusCreated {
					t.Errorf("create: %d %s, %v", rep.status, rep.body, err)
				}
			})
		}
		wg.Wait()
	}
	r.waitPool("learning", func(api.Pool) bool { // its image has been looked up
		createAtOnce(2)
		return service.supervisor.PoolState(key).Wanted >= 2
	})
	r.waitPool("as large as it was asked for", func(p api.Pool) bool { return p.Size >= 2 && p.Ready == p.Size })
	r.waitPool("asked for more", func(p api.Pool) bool {
		createAtOnce(4)
		return service.supervisor.PoolState(key).Wanted > 3
	})
	r.waitPool("as large as it may be", func(p api.Pool) bool { return p.Size == 3 && p.Ready == 3 && p.Hits > 0 })

	profile, defaults, err := b.options.Profile(defaultProfile)
	if err != nil {
		t.Fatal(err)
	}
	img, release, err := b.images.Acquire(t.Context(), api.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	for range 2 {
		request := runtime.Request{Image: api.HostImage, ImageDigest: img.Digest, Rootfs: img.Rootfs, Profile: profile, Defaults: defaults}
		if err := service.supervisor.Park(t.Context(), key, request); err != nil {
			t.Fatal(err)
		}
	}
	service.pools.changed()
	r.waitPool("smaller again", func(p api.Pool) bool { return p.Size == 3 && p.Ready == 3 })
}
