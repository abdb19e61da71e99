package docker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/moby/moby/api/types/container"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

func (c *call) ping() error {
	h := c.w.Header()
	h.Set("Builder-Version", "1") // the classic builder
	h.Set("Swarm", "inactive")
	h.Set("Cache-Control", "no-cache, no-store, must-revalidate")
	h.Set("Pragma", "no-cache")
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Length", "2")
	c.w.WriteHeader(http.StatusOK)
	if c.r.Method != http.MethodHead {
		_, _ = c.w.Write([]byte("OK")) // a client that is gone needs no answer
	}
	return nil
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

func (c *call) getVersion() error {
	return c.json(http.StatusOK, map[string]any{
		"Platform": map[string]string{"Name": "sandboxd"}, "Version": engineVersion, "ApiVersion": maxVersion, "MinAPIVersion": minVersion,
		"GitCommit": c.f.opts.Version, "GoVersion": goruntime.Version(), "Os": "linux", "Arch": architecture(), "KernelVersion": kernelRelease(), "Experimental": false, "BuildTime": "",
		"Components": []map[string]any{{
			"Name": "Engine", "Version": engineVersion,
			"Details": map[string]string{
				"ApiVersion": maxVersion, "MinAPIVersion": minVersion, "Arch": architecture(), "Os": "linux", "GoVersion": goruntime.Version(),
				"GitCommit": c.f.opts.Version, "KernelVersion": kernelRelease(), "Experimental": "false", "BuildTime": "",
			},
		}, {"Name": "sandboxd", "Version": c.f.opts.Version, "Details": map[string]string{}}},
	})
}

func (c *call) getInfo() error {
	all, err := c.f.api.ListSandboxes(c.ctx(), client.ListOptions{})
	if err != nil {
		return err
	}
	images, err := c.f.images(c.ctx())
	if err != nil {
		return err
	}
	sys, err := c.f.api.System(c.ctx())
	if err != nil {
		return err
	}
	var running, paused int
	for i := range all {
		switch all[i].State {
		case api.StateRunning:
			running++
		case api.StatePaused:
			paused++
		case api.StateCreating, api.StateStopped, api.StateLost:
		}
	}
	name, _ := os.Hostname()
	var mem unix.Sysinfo_t
	_ = unix.Sysinfo(&mem) // no memory is shown then
	options := []string{"name=seccomp,profile=" + sys.Enforced.Seccomp, "name=userns", "name=rootless", "name=cgroupns"}
	cgroup := "none"
	if sys.Enforced.Memory == "cgroup" {
		cgroup = "cgroupfs"
	}
	sum := sha256.Sum256([]byte(sys.DataDir))
	return c.json(http.StatusOK, map[string]any{
		"ID": hex.EncodeToString(sum[:16]), "Containers": len(all), "ContainersRunning": running, "ContainersPaused": paused, "ContainersStopped": len(all) - running - paused,
		"Images": len(images), "Driver": "overlay2", "DriverStatus": [][2]string{}, "Plugins": map[string]any{"Volume": []string{"local"}, "Network": []string{"bridge", "none"}, "Authorization": nil, "Log": []string{"json-file"}},
		"MemoryLimit": sys.Enforced.Memory == "cgroup", "SwapLimit": sys.Enforced.Memory == "cgroup", "CpuCfsPeriod": sys.Enforced.CPU == "cgroup", "CpuCfsQuota": sys.Enforced.CPU == "cgroup",
		"CPUShares": sys.Enforced.CPU == "cgroup", "CPUSet": sys.Enforced.CPUSet == "cgroup", "PidsLimit": true, "IPv4Forwarding": true, "BridgeNfIptables": false, "BridgeNfIp6tables": false, "Debug": false, "NFd": 0, "OomKillDisable": false,
		"NGoroutines": sys.Goroutines, "SystemTime": time.Now().Format(time.RFC3339Nano), "LoggingDriver": "json-file", "CgroupDriver": cgroup, "CgroupVersion": "2", "NEventsListener": 0,
		"KernelVersion": kernelRelease(), "OperatingSystem": "sandboxd " + sys.Version, "OSVersion": "", "OSType": "linux", "Architecture": machine(), "IndexServerAddress": "https://index.docker.io/v1/",
		"RegistryConfig": map[string]any{"InsecureRegistryCIDRs": []string{"127.0.0.0/8"}, "IndexConfigs": map[string]any{"docker.io": map[string]any{"Name": "docker.io", "Mirrors": []string{}, "Secure": true, "Official": true}}, "Mirrors": []string{}},
		"NCPU":           goruntime.NumCPU(), "MemTotal": int64(mem.Totalram) * int64(mem.Unit), "GenericResources": nil, "DockerRootDir": sys.DataDir, "HttpProxy": "", "HttpsProxy": "", "NoProxy": "", //nolint:gosec // bytes of memory
		"Name": name, "Labels": []string{}, "ExperimentalBuild": false, "ServerVersion": engineVersion, "Runtimes": map[string]any{"runc": map[string]string{"path": "sandboxd-launcher"}}, "DefaultRuntime": "runc",
		"Swarm": map[string]any{"NodeID": "", "NodeAddr": "", "LocalNodeState": "inactive", "ControlAvailable": false, "Error": "", "RemoteManagers": nil}, "LiveRestoreEnabled": true, "Isolation": "",
		"InitBinary": "sandboxd-init", "ContainerdCommit": map[string]string{"ID": "", "Expected": ""}, "RuncCommit": map[string]string{"ID": "", "Expected": ""}, "InitCommit": map[string]string{"ID": "", "Expected": ""},
		"SecurityOptions": options, "Warnings": sys.Enforced.Missing, "CDISpecDirs": nil,
	})
}

// machine is the architecture as uname(1) has it.
func machine() string {
	return cmp.Or(map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[architecture()], architecture())
}

func (c *call) getDiskUsage() error {
	du, err := c.f.api.DiskUsage(c.ctx())
	if err != nil {
		return err
	}
	all, err := c.f.api.ListSandboxes(c.ctx(), client.ListOptions{})
	if err != nil {
		return err
	}
	images, err := c.f.images(c.ctx())
	if err != nil {
		return err
	}
	sizes := map[string]int64{}
	for i := range du.Files {
		sizes[du.Files[i].ID] = du.Files[i].Bytes
	}
	containers := []summary{}
	used := map[string]int{}
	for i := range all {
		row := c.f.summary(&all[i], stateOf(&all[i]))
		row.SizeRw = sizes[all[i].ID]
		containers = append(containers, row)
		used[all[i].ImageDigest]++
	}
	shown := []map[string]any{}
	for i := range images {
		img := &images[i]
		tags, digests := img.tags()
		shown = append(shown, map[string]any{
			"Id": img.id, "ParentId": "", "RepoTags": tags, "RepoDigests": digests, "Created": img.image.PulledAt.Unix(),
			"Size": img.image.SharedSize + img.image.UniqueSize, "VirtualSize": img.image.SharedSize + img.image.UniqueSize, "SharedSize": img.image.SharedSize, "Labels": map[string]string{}, "Containers": used[img.id],
		})
	}
	volumes, err := c.f.volumeUsage(c.ctx(), du.VolumeFiles)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, map[string]any{"LayersSize": du.Images.Bytes, "Images": shown, "Containers": containers, "Volumes": volumes, "BuildCache": nil, "BuilderSize": du.BuildCache.Bytes})
}

// eventNames are Docker's names of what happens to objects.
var eventNames = map[api.EventType]map[api.EventAction][]string{
	api.EventSandbox: {
		api.ActionCreated: {"create"}, api.ActionStarted: {"start"}, api.ActionPaused: {"pause"}, api.ActionResumed: {"unpause"},
		api.ActionUpdated: {"update"}, api.ActionRenamed: {"rename"}, api.ActionStopped: {"die"}, api.ActionDeleted: {"destroy"}, api.ActionHealth: {"health_status"},
	},
	api.EventVolume:  {api.ActionCreated: {"create"}, api.ActionRemoved: {"destroy"}},
	api.EventNetwork: {api.ActionCreated: {"create"}, api.ActionRemoved: {"destroy"}, api.ActionConnected: {"connect"}, api.ActionDisconnected: {"disconnect"}},
	api.EventExec:    {api.ActionStarted: {"exec_start"}, api.ActionEnded: {"exec_die"}},
	api.EventImage:   {api.ActionPulled: {"pull"}, api.ActionPushed: {"push"}, api.ActionImported: {"load"}, api.ActionTagged: {"tag"}, api.ActionRemoved: {"untag"}},
}

func (c *call) getEvents() error {
	want, err := c.filters("config", "container", "daemon", "event", "image", "label", "label!", "network", "node", "plugin", "scope", "secret", "service", "type", "volume")
	if err != nil {
		return err
	}
	opts := client.EventOptions{Follow: true, Filters: []string{"type=sandbox", "type=exec", "type=image", "type=volume", "type=network"}}
	none := 0
	opts.Last = &none
	if s := c.q.Get("since"); s != "" {
		if opts.Since, err = parseTime(s); err != nil {
			return err
		}
		opts.Last = nil
	}
	if s := c.q.Get("until"); s != "" {
		if opts.Until, err = parseTime(s); err != nil {
			return err
		}
		opts.Follow = opts.Until.After(time.Now())
		if c.q.Get("since") == "" { // as in Docker
			opts.Last = new(keptEvents)
		}
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.w.WriteHeader(http.StatusOK)
	c.flush()
	seen := map[string]api.Event{} // the last one of a sandbox
	err = c.f.api.Events(c.ctx(), opts, func(e api.Event) error {
		if e.Idle { // its files are used
			return nil
		}
		switch e.Type { //nolint:exhaustive // the others are of no container
		case api.EventSandbox:
			seen[e.Object] = api.Event{Name: e.Name, Image: e.Image, Labels: e.Labels}
		case api.EventNetwork:
			if e.State == api.StateStopped || e.State == api.StateLost {
				return nil // it joins when it starts
			}
		case api.EventExec:
			if e.Main {
				return nil
			}
			of, ok := seen[e.Sandbox]
			if !ok {
				if sb, err := c.f.api.GetSandbox(c.ctx(), e.Sandbox); err == nil { // else it is gone
					of = api.Event{Name: sb.Name, Image: sb.Image, Labels: sb.Labels}
					seen[e.Sandbox] = of
				}
			}
			e.Name, e.Image, e.Labels = of.Name, of.Image, of.Labels
		}
		if e.Type == api.EventSandbox && e.Action == api.ActionStarted {
			if err := c.sendNetworks(want, &e, "connect"); err != nil {
				return err
			}
		}
		for _, name := range eventNames[e.Type][e.Action] {
			if err := c.sendEvent(want, &e, name); err != nil {
				return err
			}
		}
		if e.Type == api.EventSandbox && e.Action == api.ActionDeleted {
			delete(seen, e.Object)
		}
		switch {
		case e.Type == api.EventSandbox && e.Action == api.ActionCreated && e.State == api.StateRunning:
			if err := c.sendNetworks(want, &e, "connect"); err != nil {
				return err
			}
			return c.sendEvent(want, &e, "start")
		case e.Action == api.ActionStopped:
			return c.sendNetworks(want, &e, "disconnect")
		}
		return nil
	})
	if err != nil && c.ctx().Err() == nil {
		c.f.log.Info("events broke off", "error", err)
		panic(http.ErrAbortHandler) // the client connects again
	}
	return errAnswered
}

// exitWait bounds the wait for the exit of a container that has ended. It is short: one that was
// started again meanwhile would be waited for.
const exitWait = 5 * time.Second

// exitOf returns the exit code of a container that was killed, whose end is told before its exit is
// known. If the container has started again since, the exit is that of a killed program. Of an end
// before this request it is unknown then.
func (c *call) exitOf(e *api.Event) (code int, known bool) {
	const killed = 137
	past := e.Time.Before(c.began)
	again := func(sb *api.Sandbox) bool { return lives(sb) || sb.StartedAt.After(e.Time) }
	if sb, err := c.f.api.GetSandbox(c.ctx(), e.Object); err == nil && again(sb) {
		return killed, !past
	}
	ctx, cancel := context.WithTimeout(c.ctx(), exitWait)
	defer cancel()
	end, err := c.f.api.WaitSandbox(ctx, e.Object)
	if err != nil || again(end) {
		return killed, !past
	}
	return exitCode(end), true
}

// sendNetworks tells that a container has joined its networks, or left them: Docker's containers
// are in networks while they run.
func (c *call) sendNetworks(want filters, e *api.Event, action string) error {
	for _, name := range e.Networks {
		if err := c.sendEvent(want, &api.Event{Time: e.Time, Type: api.EventNetwork, Object: name, Sandbox: e.Object}, action); err != nil {
			return err
		}
	}
	return nil
}

func (c *call) sendEvent(want filters, e *api.Event, action string) error {
	typ, id, attributes := "container", containerID(e.Object), map[string]string{"image": shorter(e.Image), "name": e.Name}
	switch e.Type {
	case api.EventExec:
		id = containerID(e.Sandbox)
		attributes["execID"] = execID(e.Sandbox, e.Object)
		addLabels(attributes, e.Labels)
		if action == "exec_start" {
			action += ": " + e.Program
		}
	case api.EventImage:
		typ, id = "image", shorter(e.Object)
		attributes = map[string]string{"name": shorter(e.Object)}
	case api.EventVolume:
		typ, id = "volume", e.Object
		attributes = map[string]string{"driver": localDriver}
	case api.EventNetwork:
		typ, id = "network", networkID(e.Object)
		attributes = map[string]string{"name": e.Object, "type": "bridge"}
		if e.Sandbox != "" {
			attributes["container"] = containerID(e.Sandbox)
		}
	case api.EventSandbox, api.EventPort, api.EventBuild, api.EventSnapshot, api.EventSecret, api.EventCode:
		if e.Action == api.ActionHealth {
			action += ": " + string(e.Health)
		}
		addLabels(attributes, e.Labels)
	}
	if e.Code != nil {
		attributes["exitCode"] = strconv.Itoa(*e.Code)
	}
	if e.From != "" && action == "rename" {
		attributes["oldName"] = "/" + e.From
	}
	bare, _, _ := strings.Cut(action, ":")
	if !want.has("type", func(w string) bool { return w == typ }) || !want.has("event", func(w string) bool { return w == action || w == bare }) ||
		!want.has("container", func(w string) bool {
			return typ == "container" && (strings.HasPrefix(id, w) || strings.TrimPrefix(w, "/") == e.Name)
		}) ||
		!want.has("volume", func(w string) bool { return typ == "volume" && w == id }) ||
		!want.has("network", func(w string) bool { return typ == "network" && (w == e.Object || strings.HasPrefix(id, w)) }) ||
		!want.has("image", func(w string) bool {
			return typ != "volume" && typ != "network" && normalize(w) == normalize(cmp.Or(attributes["image"], attributes["name"]))
		}) ||
		!want.labels(attributes) {
		return nil
	}
	if e.Type == api.EventSandbox && e.Action == api.ActionStopped && e.Code == nil {
		if code, known := c.exitOf(e); known {
			attributes["exitCode"] = strconv.Itoa(code)
		}
	}
	doc := map[string]any{
		"Type": typ, "Action": action, "Actor": map[string]any{"ID": id, "Attributes": attributes}, "scope": "local", "time": e.Time.Unix(), "timeNano": e.Time.UnixNano(),
	}
	if typ == "container" || typ == "image" { // fields of before there were others
		doc["status"], doc["id"] = action, id
	}
	if typ == "container" {
		doc["from"] = attributes["image"]
	}
	if err := c.encode(doc); err != nil {
		return err
	}
	c.flush()
	return nil
}

// keptEvents is the number of past events that a client gets that asks for those until a time.
const keptEvents = 256

// addLabels adds a container's own labels to the attributes of an event.
func addLabels(attributes, labels map[string]string) {
	for k, v := range labels {
		if !strings.HasPrefix(k, reserved) {
			attributes[k] = v
		}
	}
}

// postAuth asks the registry whether it takes credentials. Clients keep them.
func (c *call) postAuth() error {
	var req struct{ Username, Password, IdentityToken, ServerAddress string }
	if err := c.read(&req, false); err != nil {
		return err
	}
	address := req.ServerAddress
	for _, scheme := range []string{"https://", "http://"} {
		address = strings.TrimPrefix(address, scheme)
	}
	address, _, _ = strings.Cut(address, "/") // https://index.docker.io/v1/
	if address == "" || address == "index.docker.io" || address == "registry-1.docker.io" {
		address = "docker.io"
	}
	got, err := c.f.api.CheckRegistry(c.ctx(), api.CheckRegistry{
		Registry: address, Auth: &api.RegistryAuth{Username: req.Username, Password: req.Password, IdentityToken: req.IdentityToken},
	})
	if err != nil {
		return err
	}
	if !got.Accepted {
		return statusf(http.StatusUnauthorized, "login attempt to https://%s/v2/ failed with status: %s", clip(address), got.Refusal)
	}
	return c.json(http.StatusOK, map[string]string{"Status": "Login Succeeded", "IdentityToken": ""})
}

// getStats sends the kernel's counters once, or every second.
func (c *call) getStats() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	stream := c.q.Get("stream") == "" || c.bool("stream")
	var before container.StatsResponse
	c.w.Header().Set("Content-Type", "application/json")
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	first := true
	for {
		now, err := c.f.stats(c.ctx(), sb)
		if err != nil {
			if first {
				return err
			}
			return errAnswered
		}
		if first && !stream && !c.bool("one-shot") { // the difference of two makes a rate
			before = now
			select {
			case <-tick.C:
			case <-c.ctx().Done():
				return errAnswered
			}
			if now, err = c.f.stats(c.ctx(), sb); err != nil {
				return err
			}
		}
		now.PreRead, now.PreCPUStats = before.Read, before.CPUStats
		if err := c.encode(now); err != nil || !stream {
			return errAnswered
		}
		c.flush()
		first, before = false, now
		select {
		case <-tick.C:
		case <-c.ctx().Done():
			return errAnswered
		}
	}
}

func (f *Face) stats(ctx context.Context, sb *api.Sandbox) (container.StatsResponse, error) {
	out := container.StatsResponse{ID: containerID(sb.ID), Name: "/" + sb.Name, Read: time.Now().UTC()}
	st, err := f.api.Stats(ctx, sb.ID)
	if errors.Is(err, &api.Problem{Code: api.CodeConflict}) { // it does not run
		return out, nil
	}
	if err != nil {
		return out, err
	}
	count := func(n *int64) uint64 {
		if n == nil || *n < 0 {
			return 0
		}
		return uint64(*n)
	}
	nanos := func(ms *float64) uint64 {
		if ms == nil || *ms < 0 {
			return 0
		}
		return uint64(*ms * 1e6)
	}
	if m := st.Memory; m != nil {
		out.MemoryStats = container.MemoryStats{Usage: count(m.Current), MaxUsage: count(m.Peak), Limit: count(m.Limit), Stats: map[string]uint64{}}
	}
	if p := st.Pids; p != nil {
		out.PidsStats = container.PidsStats{Current: count(p.Current), Limit: count(p.Limit)}
	}
	if cpu := st.CPU; cpu != nil {
		out.CPUStats.CPUUsage = container.CPUUsage{TotalUsage: nanos(cpu.UsageMS), UsageInKernelmode: nanos(cpu.SystemMS), UsageInUsermode: nanos(cpu.UserMS)}
		out.CPUStats.ThrottlingData = container.ThrottlingData{ThrottledPeriods: count(cpu.Throttled), ThrottledTime: nanos(cpu.ThrottledMS)}
	}
	out.CPUStats.OnlineCPUs = uint32(goruntime.NumCPU()) //nolint:gosec // a few
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		out.CPUStats.SystemUsage = uint64(now.Nano()) * uint64(out.CPUStats.OnlineCPUs) //nolint:gosec // since the boot
	}
	for i := range st.IO {
		major, minor, _ := strings.Cut(st.IO[i].Device, ":")
		ma, _ := strconv.ParseUint(major, 10, 64)
		mi, _ := strconv.ParseUint(minor, 10, 64)
		out.BlkioStats.IoServiceBytesRecursive = append(out.BlkioStats.IoServiceBytesRecursive,
			container.BlkioStatEntry{Major: ma, Minor: mi, Op: "read", Value: count(&st.IO[i].ReadBytes)}, container.BlkioStatEntry{Major: ma, Minor: mi, Op: "write", Value: count(&st.IO[i].WriteBytes)})
	}
	if n := st.Network; n != nil {
		out.Networks = map[string]container.NetworkStats{"eth0": {RxBytes: count(&n.BytesIn), TxBytes: count(&n.BytesOut)}}
	}
	return out, nil
}

func refusal(status int, message string) func(*call) error {
	return func(*call) error { return statusf(status, "%s", message) }
}

func document(v any) func(*call) error {
	return func(c *call) error { return c.json(http.StatusOK, v) }
}

const (
	noSwarm   = "This node is not a swarm manager. Use \"docker swarm init\" or \"docker swarm join\" to connect this node to swarm and try again."
	noSwarms  = "there are no swarms: containers run on this host"
	noPlugins = "there are no plugins"
	noSearch  = "registries are not searched: pull an image by its name"
)

// routes is the table of all requests.
func routes() []route {
	r := func(method, pattern string, handle func(*call) error) route {
		return route{method: method, pattern: pattern, handle: handle}
	}
	table := []route{
		r("GET", "/_ping", (*call).ping),
		r("GET", "/version", (*call).getVersion),
		r("GET", "/info", (*call).getInfo),
		r("GET", "/system/df", (*call).getDiskUsage),
		r("GET", "/events", (*call).getEvents),
		r("POST", "/auth", (*call).postAuth),

		r("GET", "/containers/json", (*call).getContainers),
		r("POST", "/containers/create", (*call).postCreate),
		r("POST", "/containers/prune", (*call).postContainersPrune),
		r("GET", "/containers/{id}/json", (*call).getContainer),
		r("GET", "/containers/{id}/top", (*call).getTop),
		r("GET", "/containers/{id}/logs", (*call).getLogs),
		r("GET", "/containers/{id}/changes", (*call).getChanges),
		r("GET", "/containers/{id}/export", (*call).getExport),
		r("GET", "/containers/{id}/stats", (*call).getStats),
		r("GET", "/containers/{id}/archive", (*call).getArchive),
		r("PUT", "/containers/{id}/archive", (*call).putArchive),
		r("POST", "/containers/{id}/start", (*call).postStart),
		r("POST", "/containers/{id}/stop", (*call).postStop),
		r("POST", "/containers/{id}/restart", (*call).postRestart),
		r("POST", "/containers/{id}/kill", (*call).postKill),
		r("POST", "/containers/{id}/pause", (*call).postPause),
		r("POST", "/containers/{id}/unpause", (*call).postUnpause),
		r("POST", "/containers/{id}/rename", (*call).postRename),
		r("POST", "/containers/{id}/update", (*call).postUpdate),
		r("POST", "/containers/{id}/resize", (*call).postResize),
		r("POST", "/containers/{id}/attach", (*call).postAttach),
		r("GET", "/containers/{id}/attach/ws", refusal(http.StatusNotImplemented, "attach over WebSocket is not offered: POST /containers/{id}/attach")),
		r("POST", "/containers/{id}/wait", (*call).postWait),
		r("POST", "/containers/{id}/exec", (*call).postExec),
		r("DELETE", "/containers/{id}", (*call).deleteContainer),
		r("POST", "/exec/{id}/start", (*call).postExecStart),
		r("POST", "/exec/{id}/resize", (*call).postExecResize),
		r("GET", "/exec/{id}/json", (*call).getExec),

		r("GET", "/images/json", (*call).getImages),
		r("POST", "/images/create", (*call).postImagesCreate),
		r("POST", "/images/load", (*call).postLoad),
		r("POST", "/images/prune", (*call).postImagesPrune),
		r("GET", "/images/search", refusal(http.StatusNotImplemented, noSearch)),
		r("GET", "/images/get", (*call).getSave),
		r("GET", "/images/{name}/get", (*call).getSave),
		r("GET", "/images/{name}/json", (*call).getImage),
		r("GET", "/images/{name}/history", (*call).getHistory),
		r("POST", "/images/{name}/push", (*call).postPush),
		r("POST", "/images/{name}/tag", (*call).postTag),
		r("DELETE", "/images/{name}", (*call).deleteImage),
		r("POST", "/commit", (*call).postCommit),
		r("POST", "/build", (*call).postBuild),
		r("POST", "/build/prune", document(map[string]any{"CachesDeleted": nil, "SpaceReclaimed": 0})),
		r("POST", "/session", refusal(http.StatusNotFound, "page not found")),
		r("POST", "/grpc", refusal(http.StatusNotFound, "page not found")),

		r("GET", "/networks", (*call).getNetworks),
		r("POST", "/networks/create", (*call).postNetwork),
		r("POST", "/networks/prune", (*call).postNetworksPrune),
		r("GET", "/networks/{id}", (*call).getNetwork),
		r("DELETE", "/networks/{id}", (*call).deleteNetwork),
		r("POST", "/networks/{id}/connect", (*call).postConnect),
		r("POST", "/networks/{id}/disconnect", (*call).postDisconnect),

		r("GET", "/volumes", (*call).getVolumes),
		r("POST", "/volumes/create", (*call).postVolume),
		r("POST", "/volumes/prune", (*call).postVolumesPrune),
		r("GET", "/volumes/{name}", (*call).getVolume),
		r("DELETE", "/volumes/{name}", (*call).deleteVolume),

		r("GET", "/plugins", document([]any{})),
		r("GET", "/plugins/{name}/json", func(c *call) error { return statusf(http.StatusNotFound, "plugin %q not found", clip(c.args[0])) }),
		r("GET", "/distribution/{name}/json", refusal(http.StatusNotImplemented, "registries are not asked for images that are not pulled")),
		r("POST", "/swarm/init", refusal(http.StatusNotImplemented, noSwarms)),
		r("POST", "/swarm/join", refusal(http.StatusNotImplemented, noSwarms)),
		r("POST", "/swarm/leave", refusal(http.StatusServiceUnavailable, "This node is not part of a swarm")),
		r("GET", "/swarm", refusal(http.StatusServiceUnavailable, noSwarm)),
	}
	for _, object := range []string{"nodes", "services", "tasks", "secrets", "configs"} {
		table = append(table, r("GET", "/"+object, refusal(http.StatusServiceUnavailable, noSwarm)), r("GET", "/"+object+"/{name}", refusal(http.StatusServiceUnavailable, noSwarm)),
			r("POST", "/"+object+"/create", refusal(http.StatusServiceUnavailable, noSwarm)), r("DELETE", "/"+object+"/{name}", refusal(http.StatusServiceUnavailable, noSwarm)))
	}
	for _, verb := range []string{"pull", "create"} {
		table = append(table, r("POST", "/plugins/"+verb, refusal(http.StatusNotImplemented, noPlugins)))
	}
	return table
}
