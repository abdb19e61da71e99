package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/storage"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// find returns the sandbox of a container by its ID, a unique beginning of it, or its name.
func (f *Face) find(ctx context.Context, ref string) (*api.Sandbox, error) {
	name := strings.TrimPrefix(ref, "/")
	missing := statusf(http.StatusNotFound, "No such container: %s", clip(ref))
	if id, ok := sandboxID(name); ok {
		name = id
	}
	if !validName(name) {
		return nil, missing
	}
	sb, err := f.api.GetSandbox(ctx, name)
	if err == nil || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return sb, err
	}
	if !isHex(name) {
		return nil, missing
	}
	all, err := f.api.ListSandboxes(ctx, client.ListOptions{})
	if err != nil {
		return nil, err
	}
	var found *api.Sandbox
	for i := range all {
		if !strings.HasPrefix(containerID(all[i].ID), name) {
			continue
		}
		if found != nil {
			return nil, badf("multiple IDs found with provided prefix: %s", name)
		}
		found = &all[i]
	}
	if found == nil {
		return nil, missing
	}
	return found, nil
}

// container returns the sandbox that the request's path names.
func (c *call) container() (*api.Sandbox, error) { return c.f.find(c.ctx(), c.args[0]) }

// stateOf returns the state of a container.
func stateOf(sb *api.Sandbox) container.ContainerState {
	switch sb.State {
	case api.StateRunning:
		return container.StateRunning
	case api.StatePaused:
		return container.StatePaused
	case api.StateCreating:
		return container.StateCreated
	case api.StateStopped, api.StateLost:
	}
	switch {
	case strings.HasPrefix(sb.Reason, notStarted):
		return container.StateCreated
	case sb.StartedAt.IsZero() && sb.Exit == nil && sb.Annotations[annotationRequest] != "":
		return container.StateCreated
	case isRestarting(sb):
		return container.StateRestarting
	}
	return container.StateExited
}

// lives reports whether a container has processes.
func lives(sb *api.Sandbox) bool { return sb.State == api.StateRunning || sb.State == api.StatePaused }

// notStarted begins the reason of a sandbox whose program could not be started.
const notStarted = "its main process could not be started"

// isRestarting reports whether the policy of an ended container is about to start it again.
func isRestarting(sb *api.Sandbox) bool {
	itself := strings.HasPrefix(sb.Reason, "its main process exited") || strings.HasPrefix(sb.Reason, "its main process was ended")
	switch name, most, counted := strings.Cut(sb.Restart, ":"); name {
	case "always", "unless-stopped":
		return itself
	case "on-failure":
		n, _ := strconv.Atoi(most) // the daemon has checked it
		return itself && exitCode(sb) != 0 && (!counted || sb.Restarts < n)
	}
	return false
}

func exitCode(sb *api.Sandbox) int {
	switch {
	case sb.Exit != nil:
		return sb.Exit.Code
	case sb.State == api.StateLost:
		return 137
	case strings.HasPrefix(sb.Reason, notStarted):
		return 127
	}
	return 0
}

// times of Docker's documents.
func timeText(t time.Time) string {
	if t.IsZero() {
		return "0001-01-01T00:00:00Z"
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// networkSettings has the fields that clients of earlier versions read, too.
type networkSettings struct {
	Bridge                 string
	SandboxID              string
	SandboxKey             string
	HairpinMode            bool
	LinkLocalIPv6Address   string
	LinkLocalIPv6PrefixLen int
	Ports                  map[string][]portBinding
	SecondaryIPAddresses   []string
	SecondaryIPv6Addresses []string
	EndpointID             string
	Gateway                string
	GlobalIPv6Address      string
	GlobalIPv6PrefixLen    int
	IPAddress              string
	IPPrefixLen            int
	IPv6Gateway            string
	MacAddress             string
	Networks               map[string]*network.EndpointSettings
}

type portBinding struct {
	HostIP   string `json:"HostIp"`
	HostPort string
}

// inspect is container.InspectResponse with those fields.
type inspect struct {
	container.InspectResponse

	NetworkSettings *networkSettings
}

func portMap(sb *api.Sandbox, req *container.CreateRequest) map[string][]portBinding {
	out := make(map[string][]portBinding)
	if sb.State != api.StateRunning && sb.State != api.StatePaused || len(sb.Ports) == 0 && (req.HostConfig.NetworkMode == "none" || req.NetworkDisabled) {
		return out
	}
	for p := range req.ExposedPorts {
		out[p.String()] = nil
	}
	for i := range sb.Ports {
		p := &sb.Ports[i]
		if p.Socket == "" {
			key := fmt.Sprintf("%d/%s", p.Port, cmp.Or(p.Protocol, "tcp"))
			out[key] = append(out[key], portBinding{p.Address, strconv.Itoa(int(p.HostPort))})
		}
	}
	return out
}

// imageIDOf returns the ID of the image of a sandbox.
func imageIDOf(sb *api.Sandbox) string { return sb.ImageDigest }

func mountPoints(sb *api.Sandbox) []container.MountPoint {
	out := []container.MountPoint{}
	for i := range sb.Mounts {
		m := &sb.Mounts[i]
		mode := ""
		if m.ReadOnly {
			mode = "ro"
		}
		point := container.MountPoint{Type: mount.TypeBind, Source: m.Source, Destination: m.Target, Mode: mode, RW: !m.ReadOnly, Propagation: mount.PropagationRPrivate}
		if m.Type == api.MountVolume { // where its files are is the daemon's to know
			point.Type, point.Name, point.Source, point.Driver, point.Propagation = mount.TypeVolume, m.Source, "", localDriver, ""
		}
		out = append(out, point)
	}
	return out
}

func (c *call) getContainer() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	doc, err := c.f.inspect(c.ctx(), sb)
	if err != nil {
		return err
	}
	if c.bool("size") {
		sizes, err := c.f.sizes(c.ctx())
		if err != nil {
			return err
		}
		rw, root := sizes.of(sb)
		doc.SizeRw, doc.SizeRootFs = &rw, &root
	}
	return c.json(http.StatusOK, doc)
}

// containerSizes holds bytes of files: those of containers by sandbox, and of images by digest.
type containerSizes struct{ files, images map[string]int64 }

func (f *Face) sizes(ctx context.Context) (containerSizes, error) {
	s := containerSizes{map[string]int64{}, map[string]int64{}}
	du, err := f.api.DiskUsage(ctx)
	if err != nil {
		return s, err
	}
	for i := range du.Files {
		s.files[du.Files[i].ID] = du.Files[i].Bytes
	}
	images, err := f.images(ctx)
	if err != nil {
		return s, err
	}
	for i := range images {
		s.images[images[i].id] = images[i].image.SharedSize + images[i].image.UniqueSize
	}
	return s, nil
}

// of returns the bytes of a container's own files, and of all that it sees.
func (s containerSizes) of(sb *api.Sandbox) (own, all int64) {
	own = s.files[sb.ID]
	return own, own + s.images[sb.ImageDigest]
}

func (f *Face) inspect(ctx context.Context, sb *api.Sandbox) (*inspect, error) {
	req := requestOf(sb)
	cfg := *req.Config
	if sb.Restart != "" { // it may have been updated
		req.HostConfig.RestartPolicy = policyOf(sb.Restart)
	}
	if len(cfg.Env) == 0 {
		cfg.Env = sb.Env
	}
	cfg.WorkingDir, cfg.User = sb.Cwd, req.User
	if len(cfg.Entrypoint) == 0 {
		cfg.Entrypoint = sb.Entrypoint
	}
	if len(cfg.Cmd) == 0 && len(req.Entrypoint) == 0 {
		cfg.Cmd = sb.Cmd
	}
	if cfg.Labels == nil {
		cfg.Labels = map[string]string{}
	}
	if sb.HealthCheck != nil {
		cfg.Healthcheck = healthConfig(sb.HealthCheck)
	}
	state := stateOf(sb)
	running := state == container.StateRunning || state == container.StatePaused
	d := &inspect{InspectResponse: container.InspectResponse{
		ID: containerID(sb.ID), Created: timeText(sb.CreatedAt), Image: imageIDOf(sb), Name: "/" + sb.Name, RestartCount: sb.Restarts,
		Driver: "overlay2", Platform: "linux", HostConfig: req.HostConfig, Config: &cfg, Mounts: mountPoints(sb),
		GraphDriver: &storage.DriverData{Name: "overlay2", Data: map[string]string{}},
		State: &container.State{
			Status: state, Running: running || state == container.StateRestarting, Paused: state == container.StatePaused, Restarting: state == container.StateRestarting,
			Pid: sb.PID, StartedAt: timeText(sb.StartedAt), FinishedAt: timeText(time.Time{}), Health: health(sb),
		},
	}}
	if state == container.StateCreated {
		d.State.StartedAt = timeText(time.Time{})
	}
	if len(sb.Command) > 0 {
		d.Path, d.Args = sb.Command[0], sb.Command[1:]
	}
	if d.Args == nil {
		d.Args = []string{}
	}
	if strings.HasPrefix(sb.Reason, notStarted) {
		d.State.ExitCode, d.State.Error = exitCode(sb), sb.Reason
	}
	if state == container.StateExited || state == container.StateRestarting {
		d.State.ExitCode, d.State.FinishedAt = exitCode(sb), timeText(sb.EndedAt)
		d.State.OOMKilled = sb.Exit != nil && sb.Exit.OOM
		if sb.Exit == nil && sb.State == api.StateStopped {
			d.State.Error = sb.Reason
		}
	}
	if running {
		execs, err := f.api.ListExecs(ctx, sb.ID)
		if err != nil && !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return nil, err
		}
		for i := range execs {
			if !execs[i].Main && execs[i].State == api.ExecRunning {
				d.ExecIDs = append(d.ExecIDs, execID(sb.ID, execs[i].ID))
			}
		}
	}
	var address netip.Addr
	if running && len(sb.Network.Join) > 0 {
		address = f.addressOf(ctx, sb)
	}
	showDefaults(d.HostConfig)
	d.NetworkSettings = &networkSettings{Ports: portMap(sb, req), Networks: networksOf(sb, address)}
	if e := d.NetworkSettings.Networks["bridge"]; e != nil && address.IsValid() {
		d.NetworkSettings.IPAddress, d.NetworkSettings.IPPrefixLen = address.String(), 15
	}
	return d, nil
}

// showDefaults completes a request as Docker shows it.
func showDefaults(h *container.HostConfig) {
	h.LogConfig.Type = cmp.Or(h.LogConfig.Type, "json-file")
	if h.LogConfig.Config == nil {
		h.LogConfig.Config = map[string]string{}
	}
	if h.NetworkMode == "" || h.NetworkMode == "default" {
		h.NetworkMode = "bridge"
	}
	h.CgroupnsMode = cmp.Or(h.CgroupnsMode, "private")
	h.IpcMode = cmp.Or(h.IpcMode, "private")
	h.Runtime = cmp.Or(h.Runtime, "runc")
	h.ShmSize = cmp.Or(h.ShmSize, 64<<20)
}

// addressOf returns the address of a sandbox for the others in its networks.
func (f *Face) addressOf(ctx context.Context, sb *api.Sandbox) netip.Addr {
	all, err := f.api.NamedNetworks(ctx)
	if err != nil {
		return netip.Addr{}
	}
	for i := range all {
		for j := range all[i].Sandboxes {
			if m := &all[i].Sandboxes[j]; m.ID == sb.ID {
				at, _ := netip.ParseAddr(m.Address) // none: the zero address
				return at
			}
		}
	}
	return netip.Addr{}
}

// summary is a row of the list of containers.
type summary struct {
	ID              string `json:"Id"`
	Names           []string
	Image           string
	ImageID         string
	Command         string
	Created         int64
	Ports           []portSummary
	SizeRw          int64 `json:",omitempty"`
	SizeRootFs      int64 `json:",omitempty"`
	Labels          map[string]string
	State           container.ContainerState
	Status          string
	HostConfig      struct{ NetworkMode string }
	NetworkSettings struct {
		Networks map[string]*network.EndpointSettings
	}
	Mounts []container.MountPoint
}

type portSummary struct {
	IP          string `json:",omitempty"`
	PrivatePort uint16
	PublicPort  uint16 `json:",omitempty"`
	Type        string
}

func (c *call) getContainers() error {
	want, err := c.filters("ancestor", "before", "expose", "exited", "health", "id", "isolation", "is-task", "label", "label!", "name", "network", "publish", "since", "status", "volume")
	if err != nil {
		return err
	}
	limit := -1
	if text := c.q.Get("limit"); text != "" {
		if limit, err = strconv.Atoi(text); err != nil {
			return badf("invalid limit %q: must be a number", clip(text))
		}
	}
	for _, s := range want["status"] {
		if container.ValidateContainerState(container.ContainerState(s)) != nil {
			return badf("invalid filter 'status=%s'", clip(s))
		}
	}
	for _, s := range want["health"] {
		if container.ValidateHealthStatus(container.HealthStatus(s)) != nil {
			return badf("invalid filter 'health=%s'", clip(s))
		}
	}
	for _, s := range want["exited"] {
		if _, err := strconv.Atoi(s); err != nil {
			return badf("invalid filter 'exited=%s'", clip(s))
		}
	}
	all, err := c.f.api.ListSandboxes(c.ctx(), client.ListOptions{})
	if err != nil {
		return err
	}
	slices.Reverse(all) // newest first
	fits, err := c.listFilter(want)
	if err != nil {
		return err
	}
	var sizes containerSizes
	if c.bool("size") {
		if sizes, err = c.f.sizes(c.ctx()); err != nil {
			return err
		}
	}
	everything := c.bool("all") || limit > 0 || len(want["status"]) > 0
	out := []summary{}
	for i := range all {
		sb := &all[i]
		state := stateOf(sb)
		if !everything && state != container.StateRunning && state != container.StatePaused && state != container.StateRestarting || !fits(sb, state) {
			continue
		}
		row := c.f.summary(sb, state)
		row.SizeRw, row.SizeRootFs = sizes.of(sb)
		if out = append(out, row); limit > 0 && len(out) == limit {
			break
		}
	}
	return c.json(http.StatusOK, out)
}

func (f *Face) summary(sb *api.Sandbox, state container.ContainerState) summary {
	req := requestOf(sb)
	row := summary{
		ID: containerID(sb.ID), Names: []string{"/" + sb.Name}, Image: req.Image, ImageID: imageIDOf(sb), Command: commandLine(sb.Command),
		Created: sb.CreatedAt.Unix(), Ports: []portSummary{}, Labels: req.Labels, State: state, Status: status(sb, state), Mounts: mountPoints(sb),
	}
	if row.Labels == nil {
		row.Labels = map[string]string{}
	}
	row.HostConfig.NetworkMode = cmp.Or(strings.Replace(string(req.HostConfig.NetworkMode), "default", "bridge", 1), "bridge")
	row.NetworkSettings.Networks = networksOf(sb, netip.Addr{})
	for port, at := range portMap(sb, req) {
		number, proto, _ := strings.Cut(port, "/")
		n, _ := strconv.ParseUint(number, 10, 16)
		for _, b := range at {
			public, _ := strconv.ParseUint(b.HostPort, 10, 16)
			row.Ports = append(row.Ports, portSummary{b.HostIP, uint16(n), uint16(public), proto})
		}
		if len(at) == 0 {
			row.Ports = append(row.Ports, portSummary{PrivatePort: uint16(n), Type: proto})
		}
	}
	slices.SortFunc(row.Ports, func(a, b portSummary) int {
		return cmp.Or(cmp.Compare(a.PrivatePort, b.PrivatePort), cmp.Compare(a.PublicPort, b.PublicPort))
	})
	return row
}

// commandLine returns a command in words: the arguments with blanks are quoted.
func commandLine(argv []string) string {
	words := slices.Clone(argv)
	for i, word := range words {
		if i > 0 && strings.Contains(word, " ") {
			words[i] = "'" + word + "'"
		}
	}
	return strings.Join(words, " ")
}

// status returns the state in words, as Docker has it.
func status(sb *api.Sandbox, state container.ContainerState) string {
	since := func(t time.Time) string { return units.HumanDuration(time.Since(t)) }
	switch state {
	case container.StateRunning:
		return "Up " + since(sb.StartedAt) + healthNote(sb)
	case container.StatePaused:
		return "Up " + since(sb.StartedAt) + " (Paused)"
	case container.StateRestarting:
		return fmt.Sprintf("Restarting (%d) %s ago", exitCode(sb), since(sb.EndedAt))
	case container.StateExited:
		return fmt.Sprintf("Exited (%d) %s ago", exitCode(sb), since(sb.EndedAt))
	case container.StateCreated, container.StateRemoving, container.StateDead:
	}
	return "Created"
}

// listFilter returns a function that reports whether a container is wanted.
func (c *call) listFilter(want filters) (func(*api.Sandbox, container.ContainerState) bool, error) {
	bound := func(key string) (time.Time, error) {
		var at time.Time
		for _, ref := range want[key] {
			sb, err := c.f.find(c.ctx(), ref)
			if err != nil {
				return at, err
			}
			if at.IsZero() || key == "since" == sb.CreatedAt.After(at) {
				at = sb.CreatedAt
			}
		}
		return at, nil
	}
	before, err := bound("before")
	if err != nil {
		return nil, err
	}
	since, err := bound("since")
	if err != nil {
		return nil, err
	}
	digests := map[string]bool{}
	if len(want["ancestor"]) > 0 {
		images, err := c.f.images(c.ctx())
		if err != nil {
			return nil, err
		}
		for _, ref := range want["ancestor"] {
			digests[normalize(ref)] = true
			if img := images.find(ref); img != nil {
				digests[img.id] = true
			}
		}
	}
	return func(sb *api.Sandbox, state container.ContainerState) bool {
		req := requestOf(sb)
		return (before.IsZero() || sb.CreatedAt.Before(before)) && (since.IsZero() || sb.CreatedAt.After(since)) &&
			(len(want["ancestor"]) == 0 || digests[sb.ImageDigest] || digests[normalize(req.Image)]) &&
			want.labels(req.Labels) &&
			want.has("id", func(w string) bool { return strings.HasPrefix(containerID(sb.ID), w) }) &&
			want.has("name", func(w string) bool { return matchName(w, sb.Name) }) &&
			want.has("status", func(w string) bool { return string(state) == w }) &&
			want.has("exited", func(w string) bool { return state == container.StateExited && strconv.Itoa(exitCode(sb)) == w }) &&
			want.has("health", func(w string) bool { return string(healthStatus(sb)) == w }) &&
			want.has("is-task", func(w string) bool { return !truth(w) }) &&
			want.has("isolation", func(w string) bool { return w == "default" }) &&
			want.has("network", func(w string) bool {
				for name := range networksOf(sb, netip.Addr{}) {
					if name == w || strings.HasPrefix(networkID(name), w) {
						return true
					}
				}
				return false
			}) &&
			want.has("volume", func(w string) bool {
				return slices.ContainsFunc(sb.Mounts, func(m api.Mount) bool { return m.Target == w || m.Source == w })
			}) &&
			want.has("publish", func(w string) bool { return hasPort(portMap(sb, req), w, true) }) &&
			want.has("expose", func(w string) bool { return hasPort(portMap(sb, req), w, false) })
	}, nil
}

func hasPort(ports map[string][]portBinding, want string, published bool) bool {
	if !strings.Contains(want, "/") {
		want += "/tcp"
	}
	at, ok := ports[want]
	return ok && (!published || len(at) > 0)
}

func (c *call) postStart() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	switch sb.State {
	case api.StateRunning:
		return statusf(http.StatusNotModified, "")
	case api.StatePaused:
		return statusf(http.StatusConflict, "cannot start a paused container, try unpause instead")
	case api.StateCreating, api.StateStopped, api.StateLost:
	}
	defer c.f.turnOf(sb.ID)()
	if err := c.f.start(c.ctx(), sb); err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (f *Face) start(ctx context.Context, sb *api.Sandbox) error {
	err := f.checkNetworks(ctx, sb)
	if err == nil {
		_, err = f.api.StartSandbox(ctx, sb.ID, api.StartSandbox{})
	}
	if errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		if now, gerr := f.api.GetSandbox(ctx, sb.ID); gerr == nil && now.State == api.StateRunning {
			return nil // another request, or its policy
		}
	}
	if err == nil {
		return nil
	}
	f.startFailed(sb.ID, exitOfFailure(err))
	if sb.AutoRemove && stateOf(sb) == container.StateCreated {
		if derr := f.api.DeleteSandbox(context.WithoutCancel(ctx), sb.ID); derr != nil && !errors.Is(derr, &api.Problem{Code: api.CodeNotFound}) {
			f.log.Warn("a container that could not be started is left", "id", sb.ID, "error", derr)
		}
	}
	return startError(err, "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "+
		"unable to start container process: error during container init: ", sb.Command)
}

// exitOfFailure returns the exit code that shells have for a program that could not be started.
func exitOfFailure(err error) int {
	p, ok := errors.AsType[*api.Problem](err)
	switch {
	case ok && p.Code == api.CodeProgramMissing:
		return 127
	case ok && p.Code == api.CodeProgramDenied:
		return 126
	}
	return 128
}

// startError puts the words into an error by which clients tell what was wrong with a program.
func startError(err error, prefix string, argv []string) error {
	p, ok := errors.AsType[*api.Problem](err)
	if !ok || len(argv) == 0 {
		return err
	}
	switch {
	case p.Code == api.CodeProgramMissing && strings.Contains(argv[0], "/"):
		return badf("%sexec: %q: stat %s: no such file or directory: unknown", prefix, argv[0], argv[0])
	case p.Code == api.CodeProgramMissing:
		return badf("%sexec: %q: executable file not found in $PATH: unknown", prefix, argv[0])
	case p.Code == api.CodeProgramDenied:
		return badf("%sexec: %q: permission denied: unknown", prefix, argv[0])
	}
	return err
}

// startFailed tells requests that wait for the exit of a container that there will be no start.
func (f *Face) startFailed(sandbox string, code int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for ch := range f.failed[sandbox] {
		select {
		case ch <- code:
		default:
		}
	}
}

func (f *Face) onFailure(sandbox string) (told <-chan int, stop func()) {
	ch := make(chan int, 1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed[sandbox] == nil {
		f.failed[sandbox] = make(map[chan int]struct{})
	}
	f.failed[sandbox][ch] = struct{}{}
	return ch, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if delete(f.failed[sandbox], ch); len(f.failed[sandbox]) == 0 {
			delete(f.failed, sandbox)
		}
	}
}

// turnOf waits for the turn of a request that starts a container or works on the files of a stopped
// one, and returns the end of it.
func (f *Face) turnOf(sandbox string) (done func()) {
	f.mu.Lock()
	t := f.working[sandbox]
	if t == nil {
		t = new(turn)
		f.working[sandbox] = t
	}
	t.users++
	f.mu.Unlock()
	t.Lock()
	return func() {
		t.Unlock()
		f.mu.Lock()
		defer f.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(f.working, sandbox)
		}
	}
}

// grace returns the time that a container has to end: the request's, its own, or Docker's.
func (c *call) grace(sb *api.Sandbox) (float64, error) {
	seconds := 10
	if t := requestOf(sb).StopTimeout; t != nil {
		seconds = *t
	}
	if text := c.q.Get("t"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			return 0, badf("invalid timeout %q: must be a number of seconds", clip(text))
		}
		seconds = n
	}
	if seconds < 0 || seconds > 600 { // -1 waits without an end, and ours is ten minutes
		seconds = 600
	}
	return float64(seconds), nil
}

func (c *call) postStop() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	grace, err := c.grace(sb)
	if err != nil {
		return err
	}
	if state := stateOf(sb); state == container.StateExited || state == container.StateCreated {
		return statusf(http.StatusNotModified, "")
	}
	if err := c.f.stop(c.ctx(), sb, grace, c.q.Get("signal")); err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (f *Face) stop(ctx context.Context, sb *api.Sandbox, grace float64, signal string) error {
	req := api.StopSandbox{Grace: &grace, Main: true}
	if signal != "" {
		var ok bool
		if req.Signal, ok = signalName(signal); !ok {
			return badf("Invalid signal: %s", clip(signal))
		}
	}
	_, err := f.api.StopSandbox(ctx, sb.ID, req)
	if sb.AutoRemove && errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return nil // removed at its end
	}
	return err
}

func (c *call) postRestart() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	grace, err := c.grace(sb)
	if err != nil {
		return err
	}
	if sb.State == api.StateRunning || sb.State == api.StatePaused {
		if sb.AutoRemove {
			return statusf(http.StatusConflict, "container %s is removed when it ends, and cannot be restarted", sb.Name)
		}
		if err := c.f.stop(c.ctx(), sb, grace, c.q.Get("signal")); err != nil {
			return err
		}
	}
	defer c.f.turnOf(sb.ID)()
	if err := c.f.start(c.ctx(), sb); err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (c *call) postKill() error {
	sb, err := c.container()
	if statusOf(err) == http.StatusNotFound {
		return statusf(http.StatusNotFound, "cannot kill container: %s: %v", clip(c.args[0]), err)
	}
	if err != nil {
		return err
	}
	signal := cmp.Or(c.q.Get("signal"), "SIGKILL")
	name, ok := signalName(signal)
	switch {
	case !ok:
		return badf("Invalid signal: %s", clip(signal))
	case sb.State != api.StateRunning && sb.State != api.StatePaused:
		return statusf(http.StatusConflict, "cannot kill container: %s: container %s is not running", c.args[0], containerID(sb.ID))
	case name == "SIGKILL":
		zero := 0.0
		if _, err := c.f.api.StopSandbox(c.ctx(), sb.ID, api.StopSandbox{Grace: &zero}); err != nil && (!sb.AutoRemove || !errors.Is(err, &api.Problem{Code: api.CodeNotFound})) {
			return err
		}
	default:
		if err := c.f.api.SignalExec(c.ctx(), sb.ID, api.MainExec, api.ExecSignal{Signal: name, Main: true}); err != nil {
			return err
		}
	}
	return c.none(http.StatusNoContent)
}

func (c *call) postPause() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	switch sb.State {
	case api.StatePaused:
		return statusf(http.StatusConflict, "container %s is already paused", containerID(sb.ID))
	case api.StateRunning:
	case api.StateCreating, api.StateStopped, api.StateLost:
		return statusf(http.StatusConflict, "container %s is not running", containerID(sb.ID))
	}
	if _, err := c.f.api.PauseSandbox(c.ctx(), sb.ID); err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (c *call) postUnpause() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	if sb.State != api.StatePaused {
		return statusf(http.StatusConflict, "container %s is not paused", containerID(sb.ID))
	}
	if _, err := c.f.api.ResumeSandbox(c.ctx(), sb.ID); err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (c *call) postRename() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	name := strings.TrimPrefix(c.q.Get("name"), "/")
	if name == "" {
		return badf("Neither old nor new names may be empty")
	}
	if name == sb.Name {
		return badf("Renaming a container with the same name as its current name")
	}
	if !validName(name) {
		return badf("Error when allocating new name: Invalid container name (%s), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed, and at most 63 characters", clip(name))
	}
	_, err = c.f.api.RenameSandbox(c.ctx(), sb.ID, name)
	if errors.Is(err, &api.Problem{Code: api.CodeExists}) {
		return c.f.nameTaken(c.ctx(), name, err)
	}
	if err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (c *call) deleteContainer() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	if c.bool("link") {
		return badf("link: there are no links; containers in one network reach each other by name")
	}
	if !c.bool("force") {
		switch state := stateOf(sb); state {
		case container.StateRunning, container.StateRestarting:
			return statusf(http.StatusConflict, "cannot remove container \"/%s\": container is running: stop the container before removing or force remove", sb.Name)
		case container.StatePaused:
			return statusf(http.StatusConflict, "cannot remove container \"/%s\": container is paused and must be unpaused first", sb.Name)
		case container.StateCreated, container.StateExited, container.StateRemoving, container.StateDead:
		}
	}
	if sb.State == api.StateRunning || sb.State == api.StatePaused { // so that events tell of its end, too
		_, err = c.f.api.StopSandbox(c.ctx(), sb.ID, api.StopSandbox{Grace: new(0.0)})
	}
	if err == nil {
		err = c.f.api.DeleteSandbox(c.ctx(), sb.ID)
	}
	if err != nil && !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return err
	}
	return c.none(http.StatusNoContent)
}

func (c *call) postUpdate() error {
	var req container.UpdateConfig
	if err := c.read(&req, false); err != nil {
		return err
	}
	sb, err := c.container()
	if err != nil {
		return err
	}
	if err := checkHost(&container.HostConfig{Resources: req.Resources}); err != nil {
		return err
	}
	var policy *string
	if p := req.RestartPolicy; p.Name != "" {
		text, err := restartOf(p)
		if err != nil {
			return err
		}
		if sb.AutoRemove {
			return statusf(http.StatusConflict, "cannot update container %s: Restart policy cannot be updated because AutoRemove is enabled for the container", containerID(sb.ID))
		}
		text = cmp.Or(text, "no")
		policy = &text
	}
	var limits api.Limits
	if err := limitsOf(&limits, &req.Resources, nil); err != nil {
		return err
	}
	var up api.LimitsUpdate
	set := func(p **int64, v int64) {
		if v != 0 {
			*p = &v
		}
	}
	set(&up.Memory, limits.Memory)
	set(&up.CPUWeight, limits.CPUWeight)
	set(&up.Pids, limits.Pids)
	set(&up.IO.Weight, limits.IO.Weight)
	up.Swap = limits.Swap
	if limits.CPUs != 0 {
		up.CPUs = &limits.CPUs
	}
	if limits.CPUSet != "" {
		up.CPUSet = &limits.CPUSet
	}
	if up != (api.LimitsUpdate{}) || policy != nil {
		if _, err := c.f.api.UpdateSandbox(c.ctx(), sb.ID, api.UpdateSandbox{Limits: up, Restart: policy}); err != nil {
			return err
		}
	}
	return c.json(http.StatusOK, map[string][]string{"Warnings": nil})
}

func (c *call) postContainersPrune() error {
	want, err := c.filters("until", "label", "label!")
	if err != nil {
		return err
	}
	until, err := untilOf(want)
	if err != nil {
		return err
	}
	all, err := c.f.api.ListSandboxes(c.ctx(), client.ListOptions{})
	if err != nil {
		return err
	}
	deleted := []string{}
	for i := range all {
		sb := &all[i]
		state := stateOf(sb)
		if state != container.StateExited && state != container.StateCreated || sb.CreatedAt.After(until) || !want.labels(requestOf(sb).Labels) {
			continue
		}
		if err := c.f.api.DeleteSandbox(c.ctx(), sb.ID); err == nil {
			deleted = append(deleted, containerID(sb.ID))
		}
	}
	return c.json(http.StatusOK, map[string]any{"ContainersDeleted": deleted, "SpaceReclaimed": 0})
}

// untilOf returns the time before which objects to prune were made.
func untilOf(want filters) (time.Time, error) {
	at := time.Now()
	for _, text := range want["until"] {
		if d, err := time.ParseDuration(text); err == nil {
			at = time.Now().Add(-d)
			continue
		}
		t, err := parseTime(text)
		if err != nil {
			return at, err
		}
		at = t
	}
	return at, nil
}

// parseTime reads a time as Docker's clients send it: seconds with a fraction, or RFC 3339.
func parseTime(text string) (time.Time, error) {
	if seconds, fraction, _ := strings.Cut(text, "."); strings.Trim(seconds, "0123456789") == "" && seconds != "" {
		n, err := strconv.ParseInt(seconds, 10, 48)
		if err != nil {
			return time.Time{}, badf("invalid time %q", clip(text))
		}
		var nanos int64
		if fraction != "" {
			nanos, err = strconv.ParseInt((fraction + "000000000")[:9], 10, 64)
			if err != nil {
				return time.Time{}, badf("invalid time %q", clip(text))
			}
		}
		return time.Unix(n, nanos), nil
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return t, badf("invalid time %q: must be seconds or RFC 3339", clip(text))
	}
	return t, nil
}

func (c *call) getTop() error {
	sb, err := c.running()
	if err != nil {
		return err
	}
	list, err := c.f.api.Processes(c.ctx(), sb.ID)
	if err != nil {
		return err
	}
	titles := []string{"UID", "PID", "PPID", "C", "STIME", "TTY", "TIME", "CMD"}
	rows := [][]string{}
	for i := range list {
		p := &list[i]
		cpu := time.Duration(p.CPUMS * float64(time.Millisecond)).Truncate(time.Second)
		cmd := strings.Join(p.Argv, " ")
		if cmd == "" {
			cmd = "[" + p.Name + "]"
		}
		rows = append(rows, []string{
			strconv.Itoa(int(p.UID)), strconv.Itoa(p.PID), strconv.Itoa(p.PPID), "0", p.StartedAt.Format("15:04"), "?",
			fmt.Sprintf("%02d:%02d:%02d", int(cpu.Hours()), int(cpu.Minutes())%60, int(cpu.Seconds())%60), cmd,
		})
	}
	return c.json(http.StatusOK, map[string]any{"Titles": titles, "Processes": rows})
}

// running is container for what needs a running one.
func (c *call) running() (*api.Sandbox, error) {
	sb, err := c.container()
	if err != nil {
		return nil, err
	}
	if sb.State == api.StateRunning {
		return sb, nil
	}
	if sb.State == api.StatePaused {
		return nil, statusf(http.StatusConflict, "container %s is paused", containerID(sb.ID))
	}
	return nil, statusf(http.StatusConflict, "container %s is not running", containerID(sb.ID))
}

func (c *call) getChanges() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	type change struct {
		Path string
		Kind int
	}
	var out []change // null without any, as in Docker
	if stateOf(sb) != container.StateCreated {
		diff, err := c.f.api.Diff(c.ctx(), sb.ID)
		if err != nil {
			return err
		}
		for _, d := range diff.Changes {
			if d.Kind == api.Added && (d.Path == "/dev" || d.Path == "/proc" || d.Path == "/sys") {
				continue // mount points, which Docker makes below the container's own files
			}
			out = append(out, change{d.Path, map[api.ChangeKind]int{api.Changed: 0, api.Added: 1, api.Deleted: 2}[d.Kind]})
		}
	}
	return c.json(http.StatusOK, out)
}

// signals are the names of signals by number.
var signals = map[int]string{
	1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV",
	12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
	23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO", 30: "SIGPWR", 31: "SIGSYS",
}

func signalName(text string) (string, bool) {
	if n, err := strconv.Atoi(text); err == nil {
		name, ok := signals[n]
		return name, ok
	}
	name := strings.ToUpper(text)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	return name, slices.Contains(slices.Collect(maps.Values(signals)), name)
}
