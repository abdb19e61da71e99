package mcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
)

// which is the argument of tools that work on one sandbox.
type which struct {
	Sandbox string `json:"sandbox,omitempty" jsonschema:"id or name of a sandbox of this session; default: the session's own"`
}

type createIn struct {
	Name     string            `json:"name,omitempty" jsonschema:"name of the new sandbox; default: generated"`
	Image    string            `json:"image,omitempty" jsonschema:"image, one of those that the operator allows; default: that of the session's own sandbox"`
	Snapshot string            `json:"snapshot,omitempty" jsonschema:"id or name of a snapshot to start from, instead of an image"`
	Env      map[string]string `json:"env,omitempty" jsonschema:"environment variables for every command"`
	Network  string            `json:"network,omitempty" jsonschema:"none: no network; default: what the operator allows"`
	MemoryMB int64             `json:"memory_mb,omitempty" jsonschema:"maximum memory in MiB, at most what the operator allows"`
	CPUs     float64           `json:"cpus,omitempty" jsonschema:"maximum processor time in cores, at most what the operator allows"`
}

// sandboxOut describes a sandbox. Paths and addresses of the host are left out.
type sandboxOut struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Default bool      `json:"default" jsonschema:"whether tools without a sandbox use it"`
	Image   string    `json:"image"`
	State   string    `json:"state" jsonschema:"running, paused, stopped or lost"`
	Reason  string    `json:"reason,omitempty" jsonschema:"why it does not run"`
	Network string    `json:"network" jsonschema:"none, full or egress (what a policy allows)"`
	Memory  int64     `json:"memory_limit,omitempty" jsonschema:"maximum memory in bytes; absent: the profile's"`
	Cwd     string    `json:"cwd" jsonschema:"directory at which relative paths begin"`
	Created time.Time `json:"created_at"`
}

func (se *session) describe(sb *api.Sandbox, b *box) sandboxOut {
	return sandboxOut{
		ID: sb.ID, Name: sb.Name, Default: se.isDefault(b), Image: sb.Image, State: string(sb.State), Reason: sb.Reason,
		Network: string(sb.Network.Mode), Memory: sb.Limits.Memory, Cwd: sb.Cwd, Created: sb.CreatedAt,
	}
}

// describeNow returns the present state of a sandbox.
func (c *call) describeNow(ctx context.Context, b *box) (sandboxOut, error) {
	sb, err := c.s.api.GetSandbox(ctx, b.id)
	if err != nil {
		return sandboxOut{}, err
	}
	return c.se.describe(sb, b), nil
}

// further returns the request for a sandbox beside the default one: its name is its own, and
// published ports get free ports of the host.
func further(req api.CreateSandbox, name string) api.CreateSandbox {
	req.Name = name
	req.Ports = slices.DeleteFunc(slices.Clone(req.Ports), func(p api.PortMapping) bool { return p.Socket != "" })
	for i := range req.Ports {
		req.Ports[i].HostPort = 0
	}
	return req
}

// defaultProfile is the profile of sandboxes whose request names none.
const defaultProfile = "default"

// lowered returns the operator's request, lowered as a tool asks. Asking for more is an error.
func (s *Server) lowered(ctx context.Context, in createIn) (api.CreateSandbox, error) {
	req := further(s.opts.Sandbox, in.Name)
	switch {
	case in.Image != "" && in.Snapshot != "":
		return req, errors.New("image and snapshot exclude each other")
	case in.Image != "" && in.Image != s.image():
		if !slices.Contains(s.opts.Images, in.Image) {
			return req, fmt.Errorf("image %q is not allowed here; allowed: %s", clip(in.Image), strings.Join(append([]string{s.image()}, s.opts.Images...), ", "))
		}
		if own := s.opts.Sandbox; own.Snapshot != "" && own.Profile == "" {
			return req, errors.New("image: the operator has not said with which profile (--profile)")
		}
		req.Image, req.Snapshot = in.Image, ""
	case in.Snapshot != "":
		snap, err := s.snapshot(ctx, in.Snapshot)
		if err != nil {
			return req, err
		}
		if own := s.opts.Sandbox; own.Snapshot != "" && (own.Profile == "" || own.Network.Mode == "") {
			return req, errors.New("snapshot: the operator has not said with which profile and network (--profile, --network)")
		}
		// A snapshot brings the profile of its sandbox, which another operator's flags may have chosen.
		req.Image, req.Snapshot, req.Profile = "", snap.ID, cmp.Or(req.Profile, defaultProfile)
	}
	switch in.Network {
	case "", defaultName:
	case string(api.NetworkNone):
		req.Network, req.Ports = api.Network{Mode: api.NetworkNone}, nil
	default:
		return req, fmt.Errorf("network %q: want none, or nothing; the operator chooses the network", clip(in.Network))
	}
	const mib = 1 << 20
	switch most := req.Limits.Memory; {
	case in.MemoryMB == 0:
	case in.MemoryMB < 0 || in.MemoryMB > 1<<40/mib:
		return req, fmt.Errorf("memory_mb %d: no size of memory", in.MemoryMB)
	case most == 0:
		return req, errors.New("memory_mb: the operator has not said how much there may be (--memory)")
	case in.MemoryMB*mib > most:
		return req, fmt.Errorf("memory_mb %d: at most %d are allowed", in.MemoryMB, most/mib)
	default:
		req.Limits.Memory = in.MemoryMB * mib
	}
	switch most := req.Limits.CPUs; {
	case in.CPUs == 0:
	case !(in.CPUs > 0): // NaN too
		return req, fmt.Errorf("cpus %v: no number of cores", in.CPUs)
	case most == 0:
		return req, errors.New("cpus: the operator has not said how many there may be (--cpus)")
	case in.CPUs > most:
		return req, fmt.Errorf("cpus %v: at most %v are allowed", in.CPUs, most)
	default:
		req.Limits.CPUs = in.CPUs
	}
	env, err := environment(in.Env)
	req.Env = slices.Concat(req.Env, env)
	return req, err
}

// image returns the image of the default sandbox.
func (s *Server) image() string {
	if s.opts.Sandbox.Image == "" && s.opts.Sandbox.Snapshot == "" {
		return api.HostImage
	}
	return s.opts.Sandbox.Image
}

const maxEnv = 64 << 10 // bytes of all variables of a request

// environment returns variables in the API's form, ordered by name.
func environment(vars map[string]string) ([]string, error) {
	env, size := make([]string, 0, len(vars)), 0
	for k, v := range vars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return nil, fmt.Errorf("env %q: a name has neither \"=\" nor NUL, and a value has no NUL", clip(k))
		}
		env, size = append(env, k+"="+v), size+len(k)+len(v)
	}
	if size > maxEnv {
		return nil, fmt.Errorf("env: more than %d bytes", maxEnv)
	}
	slices.Sort(env)
	return env, nil
}

func createSandbox(ctx context.Context, c *call, in createIn) (*mcp.CallToolResult, sandboxOut, error) {
	req, err := c.s.lowered(ctx, in)
	if err != nil {
		return nil, sandboxOut{}, err
	}
	b, err := c.se.create(ctx, c, req)
	if err != nil {
		return nil, sandboxOut{}, err
	}
	out, err := c.describeNow(ctx, b)
	return nil, out, err
}

type listOut struct {
	Sandboxes []sandboxOut `json:"sandboxes"`
	Images    []string     `json:"images" jsonschema:"images that sandbox_create may name"`
}

func listSandboxes(ctx context.Context, c *call, _ struct{}) (*mcp.CallToolResult, listOut, error) {
	out := listOut{Sandboxes: []sandboxOut{}, Images: append([]string{}, c.s.opts.Images...)}
	if image := c.s.image(); image != "" {
		out.Images = append([]string{image}, out.Images...)
	}
	for _, b := range c.se.list() {
		one, err := c.describeNow(ctx, b)
		if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) { // the user has removed it
			c.se.drop(b)
			continue
		}
		if err != nil {
			return nil, out, err
		}
		out.Sandboxes = append(out.Sandboxes, one)
	}
	return nil, out, nil
}

// existing returns a sandbox that is there already: the default one is not made to be removed.
func (c *call) existing(w which) (*box, error) {
	if w.Sandbox == "" || w.Sandbox == defaultName {
		c.se.mu.Lock()
		defer c.se.mu.Unlock()
		if c.se.main == nil {
			return nil, errors.New("the session has no sandbox yet; the first command or file makes it")
		}
		return c.se.main, nil
	}
	if b := c.se.find(w.Sandbox); b != nil {
		return b, nil
	}
	return nil, noSandbox(w.Sandbox)
}

func killSandbox(ctx context.Context, c *call, in which) (*mcp.CallToolResult, done, error) {
	b, err := c.existing(in)
	if err != nil {
		return nil, done{}, err
	}
	if err := c.s.remove(ctx, b); err != nil {
		return nil, done{}, err
	}
	c.se.drop(b)
	return nil, done{true}, nil
}

func pauseSandbox(ctx context.Context, c *call, in which) (*mcp.CallToolResult, sandboxOut, error) {
	return c.change(ctx, in, api.StatePaused, c.s.api.PauseSandbox)
}

func resumeSandbox(ctx context.Context, c *call, in which) (*mcp.CallToolResult, sandboxOut, error) {
	return c.change(ctx, in, api.StateRunning, c.s.api.ResumeSandbox)
}

// change brings a sandbox into a state. One that is in it already is left alone.
func (c *call) change(ctx context.Context, in which, want api.SandboxState, do func(context.Context, string) (*api.Sandbox, error)) (*mcp.CallToolResult, sandboxOut, error) {
	b, err := c.existing(in)
	if err != nil {
		return nil, sandboxOut{}, err
	}
	out, err := c.describeNow(ctx, b)
	if err != nil || out.State == string(want) {
		return nil, out, err
	}
	sb, err := do(ctx, b.id)
	if err != nil {
		return nil, out, err
	}
	return nil, c.se.describe(sb, b), nil
}

type snapshotIn struct {
	which

	Name    string `json:"name,omitempty" jsonschema:"name of the snapshot; default: none"`
	Comment string `json:"comment,omitempty" jsonschema:"note for later, at most 1024 bytes"`
}

type snapshotOut struct {
	ID         string    `json:"id"`
	Name       string    `json:"name,omitempty"`
	Comment    string    `json:"comment,omitempty"`
	Image      string    `json:"image"`
	Size       int64     `json:"size" jsonschema:"bytes of changed files"`
	Created    time.Time `json:"created_at"`
	Consistent bool      `json:"consistent" jsonschema:"whether all processes were frozen while the files were read"`
}

func describeSnapshot(s *api.Snapshot) snapshotOut {
	return snapshotOut{ID: s.ID, Name: s.Name, Comment: s.Comment, Image: s.Image, Size: s.Size, Created: s.CreatedAt, Consistent: s.Consistent}
}

func (s *Server) takeSnapshot(ctx context.Context, b *box, req api.TakeSnapshot, label string) (*api.Snapshot, error) {
	s.taking.Lock()
	all, err := s.api.Snapshots(ctx, "")
	n := s.pending
	for i := range all {
		if all[i].Labels[labelKey] != "" {
			n++
		}
	}
	if err == nil && n >= maxSnapshots {
		err = fmt.Errorf("there are %d snapshots, and %d at most; snapshot_delete removes one", n, maxSnapshots)
	}
	if err != nil {
		s.taking.Unlock()
		return nil, err
	}
	s.pending++
	s.taking.Unlock()
	defer func() {
		s.taking.Lock()
		defer s.taking.Unlock()
		s.pending--
	}()
	req.Labels = map[string]string{labelKey: label}
	return s.api.TakeSnapshot(ctx, b.id, req)
}

func snapshotSandbox(ctx context.Context, c *call, in snapshotIn) (*mcp.CallToolResult, snapshotOut, error) {
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, snapshotOut{}, err
	}
	snap, err := c.s.takeSnapshot(ctx, b, api.TakeSnapshot{Name: in.Name, Comment: in.Comment}, c.s.mark)
	if err != nil {
		return nil, snapshotOut{}, err
	}
	return nil, describeSnapshot(snap), nil
}

type forkIn struct {
	which

	Name string `json:"name,omitempty" jsonschema:"name of the new sandbox; default: generated"`
}

// forkSandbox makes the fork from a snapshot that lasts as long as the call. A creation can be tied
// to the session, and a fork request cannot.
func forkSandbox(ctx context.Context, c *call, in forkIn) (_ *mcp.CallToolResult, out sandboxOut, err error) {
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, out, err
	}
	snap, err := c.s.takeSnapshot(ctx, b, api.TakeSnapshot{Comment: "for a fork"}, labelFork)
	if err != nil {
		return nil, out, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
		defer cancel()
		_, rerr := c.s.api.RemoveSnapshot(ctx, snap.ID)
		err = errors.Join(err, rerr)
	}()
	req := further(b.request, in.Name)
	req.Image, req.Snapshot = "", snap.ID
	forked, err := c.se.create(ctx, c, req)
	if err != nil {
		return nil, out, err
	}
	out, err = c.describeNow(ctx, forked)
	return nil, out, err
}

// snapshots returns the snapshots that tools have made under the same flags of the operator.
func (s *Server) snapshots(ctx context.Context) ([]api.Snapshot, error) {
	all, err := s.api.Snapshots(ctx, "")
	return slices.DeleteFunc(all, func(snap api.Snapshot) bool { return snap.Labels[labelKey] != s.mark }), err
}

// snapshot returns a snapshot that a tool has made. Of others it does not tell whether they exist.
func (s *Server) snapshot(ctx context.Context, ref string) (*api.Snapshot, error) {
	all, err := s.snapshots(ctx)
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].ID == ref || all[i].Name == ref && ref != "" {
			return &all[i], nil
		}
	}
	return nil, fmt.Errorf("there is no snapshot %q; snapshot_list shows those that there are", clip(ref))
}

type snapshotsOut struct {
	Snapshots []snapshotOut `json:"snapshots"`
}

func listSnapshots(ctx context.Context, c *call, _ struct{}) (*mcp.CallToolResult, snapshotsOut, error) {
	all, err := c.s.snapshots(ctx)
	out := snapshotsOut{Snapshots: []snapshotOut{}}
	for i := range all {
		out.Snapshots = append(out.Snapshots, describeSnapshot(&all[i]))
	}
	return nil, out, err
}

type snapshotRef struct {
	Snapshot string `json:"snapshot" jsonschema:"id or name"`
}

func deleteSnapshot(ctx context.Context, c *call, in snapshotRef) (*mcp.CallToolResult, done, error) {
	snap, err := c.s.snapshot(ctx, in.Snapshot)
	if err != nil {
		return nil, done{}, err
	}
	if _, err := c.s.api.RemoveSnapshot(ctx, snap.ID); err != nil {
		return nil, done{}, err
	}
	return nil, done{true}, nil
}
