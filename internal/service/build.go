package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/build"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	defaultBuildTimeout = time.Hour
	maxContext          = 16 << 30 // bytes of a context, uncompressed
	maxBuildOutput      = 64 << 20 // bytes that the programs of one build may write before they are not shown any more
	eventSize           = 64       // bytes that a piece of output counts besides its own: one of a byte is an event, too
	maxTags             = 32
	maxBuilds           = 2 // of one tenant at the same time; others wait

	epochArg = "SOURCE_DATE_EPOCH"
	// buildHost is the host name in sandboxes of builds: the real one would make builds differ.
	buildHost = "build"
)

// buildSlots holds the semaphores of the builds under way, one for each tenant: a tenant whose
// builds take hours keeps no other one waiting.
type buildSlots struct {
	mu       sync.Mutex
	byTenant map[string]chan struct{}
}

func (b *buildSlots) of(tenant string) chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	slots := b.byTenant[tenant]
	if slots == nil {
		if b.byTenant == nil {
			b.byTenant = make(map[string]chan struct{})
		}
		slots = make(chan struct{}, maxBuilds)
		b.byTenant[tenant] = slots
	}
	return slots
}

// Build makes an image of the context that body streams. Emit is called from one goroutine at a
// time.
func (s *API) Build(ctx context.Context, body io.Reader, opts api.Build, emit func(api.BuildEvent)) (img api.Image, err error) {
	defer func() { s.publishBuild(&img, err) }()
	b := &builder{s: s.inBuild(), opts: &opts, emit: emit, stages: make(map[*build.Stage]*built), images: make(map[string]*built)}
	if err := b.validate(); err != nil {
		return api.Image{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.Image{}, err
	}
	// Several clients could ask for the memory of a build at once. A waiting client has sent nothing
	// yet.
	slots := s.builds.of(s.caller.Tenant)
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
	case <-ctx.Done():
		return api.Image{}, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.timeout, class.Mark(class.ErrBuild, fmt.Errorf("the build took longer than %v", b.timeout)))
	defer cancel()
	defer func() {
		// The user should see the timeout, whichever operation it made fail.
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, class.ErrBuild) {
			err = cause
		}
	}()
	if b.draft, err = s.images.Draft(opts.Platform, opts.Tags); err != nil {
		return api.Image{}, err
	}
	defer func() { err = errors.Join(err, b.draft.Close(context.WithoutCancel(ctx))) }()
	files := make([]io.Closer, 0, 2)
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	received, err := b.draft.TempFile()
	if err != nil {
		return api.Image{}, err
	}
	files = append(files, received)
	fetched, err := b.draft.TempFile()
	if err != nil {
		return api.Image{}, err
	}
	files = append(files, fetched)
	b.spool = build.NewSpool(fetched, maxContext)
	size, err := receive(ctx, received, body)
	if err != nil {
		return api.Image{}, err
	}
	plan, err := b.plan(ctx, &build.Archive{At: received, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(io.NewSectionReader(received, 0, size)), nil
	}})
	if err != nil {
		return api.Image{}, err
	}
	for _, stage := range plan.Stages {
		b.steps += stage.Steps() + 1
	}
	for i, stage := range plan.Stages {
		if err := b.stage(ctx, stage); err != nil {
			return api.Image{}, err
		}
		b.forget(plan.Stages[i+1:])
	}
	return b.commit(ctx, plan.Target())
}

// receive stores a context, without its compression.
func receive(ctx context.Context, to io.Writer, body io.Reader) (int64, error) {
	plain, err := layer.Uncompress(&endsWith{body, ctx}, "", layer.Limits{Bytes: maxContext})
	if err != nil {
		return 0, class.Invalidf("context: %w", err)
	}
	defer plain.Close()
	n, err := io.Copy(to, plain)
	if errors.Is(err, layer.ErrInvalid) {
		return 0, class.Invalidf("context: %w", err)
	}
	return n, err
}

// builder is one build.
type builder struct {
	s       *API
	opts    *api.Build
	draft   *image.Draft
	context *build.Tree
	spool   *build.Spool
	stamp   build.Stamp
	epoch   string
	emit    func(api.BuildEvent)
	timeout time.Duration
	perRun  time.Duration
	profile runtime.Profile
	limits  api.Limits // of the profile

	stages map[*build.Stage]*built
	images map[string]*built // by reference
	step   int               // the one that is being done
	steps  int               // of all
	output int64             // that was shown
	anew   bool              // a step was not cached
}

// built is a stage, as far as it has come, or an image.
type built struct {
	image   *build.Image
	layers  []image.Layer
	history []ocispec.History
	from    *built      // start of the stage
	tree    *build.Tree // of the first applied layers; nil until it is needed
	applied int
}

func (s *built) chain() string {
	if len(s.layers) == 0 {
		return ""
	}
	return s.layers[len(s.layers)-1].ChainID
}

func (s *built) chains() []string {
	var ids []string
	for _, l := range s.layers {
		ids = append(ids, l.ChainID)
	}
	return ids
}

func (b *builder) validate() (err error) {
	o := b.opts
	if len(o.Tags) > maxTags {
		return class.Invalidf("tags: %d, at most %d are possible", len(o.Tags), maxTags)
	}
	for _, t := range o.Tags {
		if err := validReference("tag", t); err != nil {
			return err
		}
	}
	if len(o.Dockerfile) > maxPath || hasControl(o.Dockerfile) {
		return class.Invalidf("dockerfile %q: not the name of a file", class.Clip(o.Dockerfile))
	}
	if len(o.Platform) > 64 || hasControl(o.Platform) {
		return class.Invalidf("platform %q: must be like linux/amd64", class.Clip(o.Platform))
	}
	if err := validateLabels(o.Labels); err != nil {
		return err
	}
	for id := range o.Secrets {
		if id == "" || len(id) > 255 || hasControl(id) {
			return class.Invalidf("secret %q: not an id", class.Clip(id))
		}
	}
	if err := validateLimits(&o.Limits); err != nil {
		return err
	}
	if b.opts.Network, err = b.s.checkNetwork(o.Network); err != nil {
		return err
	}
	if b.timeout, err = seconds("timeout", o.Timeout); err != nil {
		return err
	}
	b.timeout = cmp.Or(b.timeout, defaultBuildTimeout)
	if b.perRun, err = seconds("run_timeout", o.RunTimeout); err != nil {
		return err
	}
	b.perRun = min(cmp.Or(b.perRun, b.timeout), b.timeout)
	b.stamp.Now = time.Now().UTC().Truncate(time.Second)
	if b.epoch = o.Args[epochArg]; b.epoch != "" {
		at, err := build.Epoch(b.epoch)
		if err != nil {
			return err
		}
		b.stamp = build.Stamp{Now: at, Latest: at}
	}
	if b.profile, b.limits, err = b.s.opts.Profile(buildProfile); err != nil {
		return fmt.Errorf("profile %q: %w", buildProfile, err)
	}
	return nil
}

func (b *builder) plan(ctx context.Context, a *build.Archive) (*build.Plan, error) {
	tree, dockerfile, err := build.Context(ctx, a, b.opts.Dockerfile, build.Limits{})
	if err != nil {
		return nil, err
	}
	b.context = tree
	name := cmp.Or(b.opts.Dockerfile, "Dockerfile")
	if name == build.HiddenDockerfile {
		name = "Dockerfile" // the user's name for it is unknown here
	}
	file, err := build.Parse(name, dockerfile)
	if err != nil {
		return nil, err
	}
	p := b.draft.Platform()
	return file.Plan(ctx, build.Options{
		Args: b.opts.Args, Target: b.opts.Target, Epoch: b.epoch,
		Platform: build.Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant},
	})
}

// report emits an event of the current step.
func (b *builder) report(stage *build.Stage, e api.BuildEvent) {
	e.Step, e.Steps, e.Stage = b.step, b.steps, cmp.Or(stage.Name, strconv.Itoa(stage.Index))
	b.emit(e)
}

// stage does all steps of one.
func (b *builder) stage(ctx context.Context, stage *build.Stage) error {
	b.step++
	from := api.BuildEvent{Line: stage.Line, Text: "FROM " + class.Clip(stage.From), Status: api.BuildStarted}
	b.report(stage, from)
	st, err := b.base(ctx, stage)
	if err != nil {
		return stage.Fault(stage.Line, fmt.Errorf("FROM %s: %w", class.Clip(stage.From), err))
	}
	from.Status = api.BuildDone
	b.report(stage, from)
	steps, img, err := stage.Evaluate(ctx, st.image)
	if err != nil {
		return err
	}
	st.image = img
	for i := range steps {
		step := &steps[i]
		b.step++
		began := time.Now()
		event := api.BuildEvent{Line: step.Line, Text: step.Text, Status: api.BuildStarted}
		b.report(stage, event)
		l, cached, err := b.do(ctx, stage, st, step)
		if err != nil {
			return stage.Fault(step.Line, err)
		}
		created := b.stamp.Now
		step.History.Created, step.History.EmptyLayer = &created, l == nil
		st.history = append(st.history, step.History)
		event.Status = api.BuildDone
		if cached {
			event.Status = api.BuildCached
		}
		if l != nil {
			st.layers = append(st.layers, *l)
			event.Layer = l.Blob.Digest
		}
		event.WallMS = math.Round(float64(time.Since(began).Microseconds()) / 1000)
		b.report(stage, event)
	}
	b.stages[stage] = st
	return nil
}

// base returns the start of a stage.
func (b *builder) base(ctx context.Context, stage *build.Stage) (*built, error) {
	from := &built{}
	var err error
	switch {
	case stage.Base != nil:
		from = b.stages[stage.Base]
	case stage.Image != "":
		from, err = b.image(ctx, stage, stage.Image)
	}
	if err != nil {
		return nil, err
	}
	return &built{image: from.image, layers: slices.Clone(from.layers), history: slices.Clone(from.history), from: from}, nil
}

// image is one that is stored or is pulled now.
func (b *builder) image(ctx context.Context, stage *build.Stage, ref string) (*built, error) {
	if img := b.images[ref]; img != nil {
		return img, nil
	}
	if err := validReference("image", ref); err != nil {
		return nil, err
	}
	base, err := b.draft.Base(ctx, ref, func(e api.PullEvent) { b.report(stage, api.BuildEvent{Pull: &e}) })
	if err != nil {
		return nil, err
	}
	img, err := build.ParseImage(base.Config)
	if err != nil {
		return nil, err
	}
	st := &built{image: img, layers: base.Layers, history: img.History}
	// A history that does not fit the layers would not with those that are added either, and makes
	// tools refuse the image.
	full := 0
	for _, h := range st.history {
		if !h.EmptyLayer {
			full++
		}
	}
	if full != len(st.layers) {
		st.history = nil
		for range st.layers {
			st.history = append(st.history, ocispec.History{CreatedBy: "FROM " + ref})
		}
	}
	b.images[ref] = st
	return st, nil
}

// tree is the root file system of a stage as far as it has come. What several stages begin with is
// read once.
func (b *builder) tree(ctx context.Context, st *built) (*build.Tree, error) {
	switch {
	case st.tree != nil:
	case st.from != nil:
		below, err := b.tree(ctx, st.from)
		if err != nil {
			return nil, err
		}
		if st.tree, err = below.Clone(); err != nil {
			return nil, err
		}
		st.applied = st.from.applied
	default:
		st.tree = b.context.New()
	}
	for ; st.applied < len(st.layers); st.applied++ {
		l := st.layers[st.applied]
		a := &build.Archive{Open: func() (io.ReadCloser, error) { return b.draft.Open(ctx, l) }}
		if err := st.tree.Apply(a); err != nil {
			return nil, fmt.Errorf("read layer %s: %w", l.Blob.Digest, err)
		}
	}
	return st.tree, nil
}

// forget drops trees that the remaining stages do not need. One that is needed all the same is read
// again.
func (b *builder) forget(coming []*build.Stage) {
	stages, images := make(map[*build.Stage]bool), make(map[string]bool)
	for _, stage := range coming {
		s, i := stage.Uses()
		for _, stage := range s {
			stages[stage] = true
		}
		for _, ref := range i {
			images[ref] = true
		}
	}
	drop := func(st *built) {
		if st.tree != nil {
			st.tree.Drop()
			st.tree, st.applied = nil, 0
		}
	}
	for stage, st := range b.stages {
		if !stages[stage] {
			drop(st)
		}
	}
	for ref, st := range b.images {
		if !images[ref] {
			drop(st)
		}
	}
}

// do does one step and returns the layer that it makes, nil where it changes no files.
func (b *builder) do(ctx context.Context, stage *build.Stage, st *built, step *build.Step) (*image.Layer, bool, error) {
	switch {
	case step.Run != nil:
		if !b.opts.Network.HasGateway() && b.opts.Network.Mode != api.NetworkSandbox {
			step.Run.Network = "none"
		}
		sources, err := b.sourceKeys(ctx, stage, step.Run)
		if err != nil {
			return nil, false, err
		}
		return b.once(ctx, st, step.Run.Key(st.chain(), b.epoch, sources), func() (*image.Layer, error) { return b.run(ctx, stage, st, step) })
	case step.Dir != nil:
		return b.once(ctx, st, step.Dir.Key(st.chain(), b.epoch), func() (*image.Layer, error) {
			tree, err := b.tree(ctx, st)
			if err != nil {
				return nil, err
			}
			return b.change(ctx, st, func() (*build.Change, error) { return tree.MakeDir(ctx, step.Dir, b.spool, b.stamp) })
		})
	case step.Copy != nil:
		return b.copy(ctx, stage, st, step.Copy)
	}
	return nil, false, nil
}

// once does a step whose outcome is not cached.
func (b *builder) once(ctx context.Context, st *built, key string, do func() (*image.Layer, error)) (*image.Layer, bool, error) {
	if !b.opts.NoCache {
		if l, known, err := b.draft.Step(ctx, key); known || err != nil {
			return l, true, err
		}
	}
	b.anew = true
	l, err := do()
	if err != nil {
		return nil, false, err
	}
	return l, false, b.draft.Remember(key, st.chain(), l)
}

// change makes a layer of the changes of a step to the tree of a stage.
func (b *builder) change(ctx context.Context, st *built, change func() (*build.Change, error)) (*image.Layer, error) {
	c, err := change()
	if err != nil || c == nil {
		return nil, err
	}
	l, err := b.draft.AddLayer(ctx, st.layers, c.Write)
	if err == nil {
		st.applied++ // the tree has it already
	}
	return l, err
}

// from returns the stage or image that files come from, nil for the context.
func (b *builder) from(ctx context.Context, stage *build.Stage, c *build.Copy) (*built, error) {
	switch {
	case c.Stage != nil:
		return b.stages[c.Stage], nil
	case c.Image != "":
		other, err := b.image(ctx, stage, c.Image)
		if err != nil {
			return nil, fmt.Errorf("--from=%s: %w", class.Clip(c.From), err)
		}
		return other, nil
	}
	return nil, nil //nolint:nilnil // no other layers
}

func (b *builder) copy(ctx context.Context, stage *build.Stage, st *built, c *build.Copy) (*image.Layer, bool, error) {
	from := b.context
	var layers []string // that the files come from, where they do
	other, err := b.from(ctx, stage, c)
	if err != nil {
		return nil, false, err
	}
	quick := ""
	if other != nil {
		layers = other.chains()
		if len(c.Inline) == 0 {
			quick = c.Key(st.chain(), b.epoch, layers)
		}
		if quick != "" && !b.opts.NoCache {
			if l, known, err := b.draft.Step(ctx, quick); known || err != nil {
				return l, true, err
			}
		}
		if from, err = b.tree(ctx, other); err != nil {
			return nil, false, err
		}
	}
	files, err := from.Select(ctx, c, b.spool)
	if err != nil {
		return nil, false, err
	}
	l, cached, err := b.once(ctx, st, files.Key(st.chain(), b.epoch), func() (*image.Layer, error) {
		tree, err := b.tree(ctx, st)
		if err != nil {
			return nil, err
		}
		return b.change(ctx, st, func() (*build.Change, error) { return tree.Copy(ctx, files, b.spool, b.stamp) })
	})
	if err == nil && quick != "" {
		err = b.draft.Remember(quick, st.chain(), l)
	}
	return l, cached, err
}

// run runs a program in a sandbox of its own on the layers so far, and makes a layer of its
// changes.
func (b *builder) run(ctx context.Context, stage *build.Stage, st *built, step *build.Step) (_ *image.Layer, err error) {
	if len(st.layers) == 0 {
		return nil, class.Invalidf("RUN: there is nothing in the stage yet that could be run")
	}
	if b.s.differ == nil {
		return nil, class.Invalidf("RUN: this daemon runs no programs in builds")
	}
	root := rootfs.Source{Layers: st.chains()}
	run := step.Run
	if err := errors.Join(validatePath("WORKDIR", run.Cwd), validateUser(run.User)); err != nil {
		return nil, err
	}
	net := b.opts.Network
	if run.Network == "none" {
		net = api.Network{}
	}
	caches, release, err := b.leaseCaches(ctx, run)
	if err != nil {
		return nil, err
	}
	defer release()
	set := api.Settings{Tmpfs: scratchOf(run)}
	if err := validateSettings(&set); err != nil {
		return nil, fmt.Errorf("RUN --mount: %w", err)
	}
	const margin = time.Minute // so that the program's own time ends first
	r, err := b.s.request(&origin{image: "build", digest: st.chain(), rootfs: root, profile: b.profile, defaults: b.limits, cwd: "/"},
		&api.CreateSandbox{Limits: b.opts.Limits, Network: net, Labels: map[string]string{"build": fmt.Sprintf("line %d", step.Line)}, Settings: set})
	if err != nil {
		return nil, err
	}
	r.Hostname, r.Ephemeral = buildHost, true
	r.Timeout, r.IdleTimeout = b.perRun+margin, b.perRun+margin
	rec, err := b.s.create(ctx, r)
	if err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepDeleteTimeout)
		defer cancel()
		derr := b.s.supervisor.Delete(ctx, rec.ID)
		for errors.Is(derr, context.DeadlineExceeded) && ctx.Err() == nil { // it goes on with what is left
			derr = b.s.supervisor.Delete(ctx, rec.ID)
		}
		if !errors.Is(derr, runtime.ErrNotFound) {
			err = errors.Join(err, derr)
		}
		b.s.forgetSandbox(ctx, rec.ID)
	}()
	if run.Script != "" {
		err := b.s.WriteFile(ctx, rec.ID, run.Argv[0], WriteOptions{Mode: 0o755, User: "0:0"}, strings.NewReader(run.Script))
		if err != nil {
			return nil, fmt.Errorf("RUN: write the here-document: %w", err)
		}
	}
	var mounts *runMounts
	if len(run.Mounts) > 0 {
		if mounts, err = b.mount(ctx, stage, rec.ID, run, caches); err != nil {
			return nil, err
		}
	}
	err = b.exec(ctx, stage, rec.ID, step, mounts)
	if mounts != nil && (err == nil || errors.Is(err, class.ErrBuild)) {
		err = errors.Join(err, mounts.ended(ctx, err != nil))
	}
	if err != nil {
		return nil, err
	}
	// Processes that the program left behind must not write while the layer is read.
	if err := b.s.supervisor.Kill(ctx, rec.ID, "the build goes on"); err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return nil, err
	}
	return b.draft.AddLayer(ctx, st.layers, func(w io.Writer) error {
		if mounts == nil {
			return b.s.writeChanges(ctx, rec.ID, b.stamp.Latest, w)
		}
		pr, pw := io.Pipe()
		written := make(chan struct{})
		go func() {
			defer close(written)
			_ = pw.CloseWithError(b.s.writeChanges(ctx, rec.ID, b.stamp.Latest, pw))
		}()
		err := mounts.writeLayer(pr, w)
		_ = pr.CloseWithError(err) // ends the writer
		<-written
		return err
	})
}

// exec runs the program of a step to its end.
func (b *builder) exec(ctx context.Context, stage *build.Stage, id string, step *build.Step, mounts *runMounts) error {
	run := step.Run
	var secrets []string
	if mounts != nil {
		secrets = mounts.env
	}
	x, err := b.s.StartExec(ctx, id, api.ExecRequest{
		Argv: run.Argv, Env: slices.Concat(run.Env, run.Proxy, secrets), Cwd: run.Cwd, User: run.User, Timeout: b.perRun.Seconds(),
	})
	if err != nil {
		return fmt.Errorf("RUN: %w", err)
	}
	defer x.Close()
	exit, _, err := x.Stream(ctx, func(stream string, p []byte) error {
		if b.output > maxBuildOutput {
			return nil
		}
		if b.output += int64(len(p)) + eventSize; b.output > maxBuildOutput {
			b.report(stage, api.BuildEvent{Stream: "stderr", Output: fmt.Sprintf("[more than %d bytes of output, the rest is not shown]\n", maxBuildOutput)})
			return nil
		}
		e := output.Event(stream, p)
		b.report(stage, api.BuildEvent{Stream: e.Stream, Output: e.Text, Data: e.Data})
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("RUN: %w", err)
	case exit.Timeout:
		return class.Mark(class.ErrBuild, fmt.Errorf("%s: it took longer than %v", step.Text, b.perRun))
	case exit.OOM && (exit.Code != 0 || exit.Signal != ""):
		return class.Mark(class.ErrBuild, fmt.Errorf("%s: out of memory; give it more with --memory", step.Text))
	case exit.Signal != "":
		return class.Mark(class.ErrBuild, fmt.Errorf("%s: ended by %s", step.Text, exit.Signal))
	case exit.Code != 0:
		return class.Mark(class.ErrBuild, fmt.Errorf("%s: exit code %d", step.Text, exit.Code))
	}
	return nil
}

// commit makes the image of a stage that is complete.
func (b *builder) commit(ctx context.Context, target *build.Stage) (api.Image, error) {
	st := b.stages[target]
	if len(st.layers) == 0 {
		return api.Image{}, target.Fault(target.Line, class.Invalidf("the stage has no files, so there is no image"))
	}
	img := st.image
	for k, v := range b.opts.Labels {
		if img.Config.Labels == nil {
			img.Config.Labels = make(map[string]string)
		}
		img.Config.Labels[k] = v
	}
	img.History = st.history
	for _, l := range st.layers {
		img.RootFS.DiffIDs = append(img.RootFS.DiffIDs, digest.Digest(l.DiffID))
	}
	created, err := b.created(st, img)
	if err != nil {
		return api.Image{}, err
	}
	img.Created, img.History = &created, b.dated(st.history, &created)
	out, err := b.draft.Commit(ctx, img, st.layers)
	if err != nil {
		return api.Image{}, err
	}
	return out.Image, nil
}
