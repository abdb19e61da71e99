package docker

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"

	"github.com/sandboxd/sandboxd/api"
)

// annotationRequest is the annotation that has the request which created a container.
const annotationRequest = "docker.request"

// reserved begins the labels that are the daemon's own.
const reserved = "sandboxd."

// A fieldRule says what becomes of a field of HostConfig.
type fieldRule string

// The rules: the field is done, cannot make a difference here, or is refused unless it asks for
// nothing.
const (
	honoured fieldRule = "honoured"
	ignored  fieldRule = "ignored"
	refused  fieldRule = "refused"
)

// HostField is a row of the table of HostConfig's fields.
type HostField struct {
	Name string
	Rule fieldRule
	Note string
}

// Sentences that several fields share.
const (
	noDevices    = "devices of the host are not passed in; /dev has null, zero, full, random, urandom, tty and terminals"
	noNamespaces = "a container never shares a namespace of the host"
	noDrivers    = "volumes are directories of the daemon's, and have no drivers"
	noDNS        = "names are resolved by the sandbox's gateway, by the host's resolver and the policy; ExtraHosts adds names"
	noRates      = "rates of single devices cannot be set"
)

// HostFields is the table of HostConfig's fields, in the order of their names. A test compares it
// with Docker's type.
var HostFields = []HostField{
	{"Annotations", ignored, "shown by inspect"},
	{"AutoRemove", honoured, ""},
	{"Binds", honoured, "named volumes, and directories below a root of `serve --mount-root`"},
	{"BlkioDeviceReadBps", refused, noRates},
	{"BlkioDeviceReadIOps", refused, noRates},
	{"BlkioDeviceWriteBps", refused, noRates},
	{"BlkioDeviceWriteIOps", refused, noRates},
	{"BlkioWeight", honoured, "10 to 1000, as a weight of 100 to 10000"},
	{"BlkioWeightDevice", refused, noRates},
	{"CapAdd", honoured, "capabilities that the profile has; others are refused"},
	{"CapDrop", honoured, ""},
	{"Cgroup", refused, noNamespaces},
	{"CgroupParent", refused, "containers have cgroups below the daemon's own"},
	{"CgroupnsMode", refused, noNamespaces + "; `private` is accepted"},
	{"ConsoleSize", ignored, "the client's resize sets the size"},
	{"ContainerIDFile", ignored, "the client writes it"},
	{"CpuCount", ignored, "for Windows"},
	{"CpuPercent", ignored, "for Windows"},
	{"CpuPeriod", honoured, "with CpuQuota"},
	{"CpuQuota", honoured, ""},
	{"CpuRealtimePeriod", refused, "no program has real-time priority"},
	{"CpuRealtimeRuntime", refused, "no program has real-time priority"},
	{"CpuShares", honoured, "1024 is a weight of 100"},
	{"CpusetCpus", honoured, ""},
	{"CpusetMems", refused, "memory nodes cannot be chosen"},
	{"DeviceCgroupRules", refused, noDevices},
	{"DeviceRequests", refused, noDevices},
	{"Devices", refused, noDevices},
	{"Dns", refused, noDNS},
	{"DnsOptions", refused, noDNS},
	{"DnsSearch", refused, noDNS},
	{"ExtraHosts", honoured, "addresses; `host-gateway` is refused"},
	{"GroupAdd", refused, "a program has the groups that /etc/group of its image gives its user"},
	{"IOMaximumBandwidth", ignored, "for Windows"},
	{"IOMaximumIOps", ignored, "for Windows"},
	{"Init", ignored, "every container has an init"},
	{"IpcMode", refused, noNamespaces + "; `private`, `shareable` and `none` are accepted"},
	{"Isolation", refused, "that is for Windows; `default` is accepted"},
	{"Links", refused, "containers in one network reach each other by name"},
	{"LogConfig", refused, "output is kept in the container's log; `json-file` and `local` are accepted"},
	{"MaskedPaths", refused, "the profile masks paths"},
	{"Memory", honoured, ""},
	{"MemoryReservation", ignored, "a wish, as in Docker"},
	{"MemorySwap", honoured, "the sum of memory and swap; no swap without it"},
	{"MemorySwappiness", refused, "the host decides what it swaps"},
	{"Mounts", honoured, "of the types bind, volume and tmpfs; a volume has no driver's options and no Subpath"},
	{"NanoCpus", honoured, ""},
	{"NetworkMode", honoured, "`none`, `bridge`, `container:NAME` and names of networks; `host` is refused"},
	{"OomKillDisable", refused, "a container that is out of memory cannot be left standing"},
	{"OomScoreAdj", refused, "which process the kernel ends is its decision"},
	{"PidMode", refused, noNamespaces},
	{"PidsLimit", honoured, ""},
	{"PortBindings", honoured, "at 127.0.0.1 unless an address is given"},
	{"Privileged", refused, "no container has power over the host; what a program needs may work in the container's own user namespace"},
	{"PublishAllPorts", refused, "name the ports, as in -p 8080:80; -p 80 takes a free port"},
	{"ReadonlyPaths", refused, "the profile protects paths"},
	{"ReadonlyRootfs", honoured, ""},
	{"RestartPolicy", honoured, ""},
	{"Runtime", refused, "sandboxd is the runtime; `runc` is accepted"},
	{"SecurityOpt", refused, "the filter of system calls and the other restrictions are the profile's; `no-new-privileges` always holds, and options of AppArmor and SELinux change nothing"},
	{"ShmSize", honoured, ""},
	{"StorageOpt", honoured, "`size` alone, the limit on the disk"},
	{"Sysctls", refused, "sysctls are the kernel's defaults in the container's own namespaces and cannot be changed"},
	{"Tmpfs", honoured, "size, mode, uid, gid and noexec"},
	{"UTSMode", refused, noNamespaces},
	{"Ulimits", honoured, ""},
	{"Umask", refused, "programs set their own umask"},
	{"UsernsMode", refused, noNamespaces + "; every container has a user namespace"},
	{"VolumeDriver", refused, noDrivers + "; `local` is accepted"},
	{"VolumesFrom", refused, "name the volumes of the other container, as in -v NAME:PATH"},
}

// refuse returns the error for a field whose request has no equivalent here.
func refuse(field, value string) error {
	i := slices.IndexFunc(HostFields, func(row HostField) bool { return row.Name == field })
	why := strings.ReplaceAll(HostFields[i].Note, "`", "")
	if value != "" {
		field += " " + strconv.Quote(clip(value))
	}
	return statusf(http.StatusForbidden, "HostConfig.%s: %s", field, why)
}

// postCreate makes a container.
func (c *call) postCreate() error {
	var req container.CreateRequest
	if err := c.read(&req, false); err != nil {
		return err
	}
	if req.Config == nil {
		return badf("Config cannot be empty in order to create a container")
	}
	if p := c.q.Get("platform"); p != "" && p != "linux" && !strings.HasPrefix(p, "linux/"+architecture()) {
		return statusf(http.StatusNotFound, "image with reference %s was found but does not match the specified platform: wanted %s, actual: linux/%s",
			clip(req.Image), clip(p), architecture())
	}
	if req.HostConfig == nil {
		req.HostConfig = new(container.HostConfig)
	}
	sb, warnings, err := c.f.translate(c.ctx(), &req)
	if err != nil {
		return err
	}
	sb.Name = strings.TrimPrefix(c.q.Get("name"), "/")
	if sb.Name != "" && !validName(sb.Name) {
		return badf("Invalid container name (%s), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed, and at most 63 characters", clip(sb.Name))
	}
	warnings = append(warnings, nameWarnings(&sb)...)
	if err := c.f.makeLabelled(c.ctx(), req.HostConfig); err != nil {
		return err
	}
	made, err := c.f.api.CreateSandbox(c.ctx(), sb)
	if errors.Is(err, &api.Problem{Code: api.CodeExists}) {
		return c.f.nameTaken(c.ctx(), sb.Name, err)
	}
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) && sb.Network.Mode != api.NetworkSandbox {
		return noImage(req.Image)
	}
	if p, ok := errors.AsType[*api.Problem](err); ok {
		if strings.Contains(p.Detail, "says no command") {
			return badf("no command specified")
		}
		for i := range sb.Mounts {
			if at := sb.Mounts[i].Source; strings.HasSuffix(p.Detail, "mount "+at+": no such file or directory") {
				return badf("invalid mount config for type \"bind\": bind source path does not exist: %s", clip(at))
			}
		}
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, container.CreateResponse{ID: containerID(made.ID), Warnings: warnings})
}

func (f *Face) nameTaken(ctx context.Context, name string, err error) error {
	other, gerr := f.api.GetSandbox(ctx, name)
	if gerr != nil {
		return err
	}
	return statusf(http.StatusConflict, "Conflict. The container name \"/%s\" is already in use by container \"%s\". You have to remove (or rename) that container to be able to reuse that name.",
		name, containerID(other.ID))
}

func validName(name string) bool {
	for i, r := range name {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return false
		}
	}
	return name != "" && len(name) <= 63
}

// translate returns the request for the sandbox of a container. It completes the container's
// request, which is kept.
func (f *Face) translate(ctx context.Context, req *container.CreateRequest) (sb api.CreateSandbox, warnings []string, err error) {
	warnings = []string{}
	cfg, host := req.Config, req.HostConfig
	if err := f.checkConfig(cfg); err != nil {
		return sb, nil, err
	}
	if err := checkHost(host); err != nil {
		return sb, nil, err
	}
	if host.ShmSize < 0 {
		return sb, nil, badf("SHM size can not be less than 0")
	}
	image, err := f.findImage(ctx, cfg.Image)
	if err != nil {
		return sb, nil, err
	}
	sb = api.CreateSandbox{
		Image: image, Env: cfg.Env, Cwd: cfg.WorkingDir, User: cfg.User, ImageCommand: true, Entrypoint: cfg.Entrypoint, Command: cfg.Cmd,
		TTY: cfg.Tty, StdinOpen: cfg.OpenStdin, Timeout: api.Never, Stopped: true, Labels: labelsOf(cfg.Labels),
	}
	sb.Settings = api.Settings{
		Hostname: cfg.Hostname, ReadOnly: host.ReadonlyRootfs, ShmSize: host.ShmSize, CapAdd: host.CapAdd, CapDrop: host.CapDrop,
		StopSignal: cfg.StopSignal, AutoRemove: host.AutoRemove, HealthCheck: healthOf(cfg.Healthcheck),
	}
	if cfg.Domainname != "" && cfg.Hostname != "" {
		sb.Hostname += "." + cfg.Domainname
	}
	if cfg.Hostname == "" {
		var b [6]byte
		_, _ = rand.Read(b[:]) // since Go 1.24 it never fails
		cfg.Hostname = hex.EncodeToString(b[:])
		sb.Hostname = cfg.Hostname
	}
	if sb.Restart, err = restartOf(host.RestartPolicy); err != nil {
		return sb, nil, err
	}
	if host.AutoRemove && sb.Restart != "" {
		return sb, nil, badf("can't create 'AutoRemove' container with restart policy")
	}
	if err := limitsOf(&sb.Limits, &host.Resources, host.StorageOpt); err != nil {
		return sb, nil, err
	}
	for _, u := range host.Ulimits {
		if u == nil {
			continue
		}
		if sb.Rlimits == nil {
			sb.Rlimits = make(map[string]api.Rlimit)
		}
		sb.Rlimits[u.Name] = api.Rlimit{Soft: uint64(u.Soft), Hard: uint64(u.Hard)} //nolint:gosec // -1 is none, in both
	}
	for _, line := range host.ExtraHosts {
		name, address, ok := strings.Cut(line, ":")
		if n, a, eq := strings.Cut(line, "="); eq {
			name, address, ok = n, a, true
		}
		if !ok {
			return sb, nil, badf("bad format for add-host: %q", clip(line))
		}
		if address == "host-gateway" {
			return sb, nil, badf("HostConfig.ExtraHosts %q: must be NAME:ADDRESS; host-gateway is none, because the host has no address in a sandbox", clip(line))
		}
		sb.Hosts = append(sb.Hosts, api.HostAddress{Name: name, Address: strings.Trim(address, "[]")})
	}
	if err := mountsOf(&sb.Settings, host); err != nil {
		return sb, nil, err
	}
	targets := map[string]bool{}
	for i := range sb.Mounts {
		if at := sb.Mounts[i].Target; targets[at] {
			return sb, nil, badf("Duplicate mount point: %s", clip(at))
		}
		targets[sb.Mounts[i].Target] = true
	}
	if err := anonymousVolumes(&sb.Settings, cfg.Volumes); err != nil {
		return sb, nil, err
	}
	if err := f.networkOf(ctx, &sb, req); err != nil {
		return sb, nil, err
	}
	d, err := f.api.Image(ctx, image)
	if err != nil {
		return sb, nil, err
	}
	addImage(cfg, &d.Config)
	sb.Labels = labelsOf(cfg.Labels)
	kept, err := json.Marshal(req)
	if err != nil {
		return sb, nil, err
	}
	sb.Annotations = map[string]string{annotationRequest: string(kept)}
	return sb, warnings, nil
}

// maxImageLabels limits the bytes of an image's labels that its containers are shown with.
const maxImageLabels = 64 << 10

// addImage completes the configuration of a container by its image's, as it is shown.
func addImage(cfg *container.Config, img *api.ImageConfig) {
	from := configOf(img)
	cfg.User = cmp.Or(cfg.User, from.User)
	cfg.StopSignal = cmp.Or(cfg.StopSignal, from.StopSignal)
	if len(cfg.Entrypoint) == 0 {
		if len(cfg.Cmd) == 0 {
			cfg.Cmd = from.Cmd
		}
		if cfg.Entrypoint == nil {
			cfg.Entrypoint = from.Entrypoint
		}
	}
	for _, e := range from.Env {
		name, _, _ := strings.Cut(e, "=")
		if !slices.ContainsFunc(cfg.Env, func(have string) bool { return have == name || strings.HasPrefix(have, name+"=") }) {
			cfg.Env = append(cfg.Env, e)
		}
	}
	total := 0
	for k, v := range from.Labels {
		total += len(k) + len(v)
	}
	if total <= maxImageLabels {
		cfg.Labels = with(cfg.Labels, from.Labels)
	}
	cfg.Volumes, cfg.ExposedPorts = with(cfg.Volumes, from.Volumes), with(cfg.ExposedPorts, from.ExposedPorts)
}

// with returns a map with the entries of another that it lacks.
func with[M ~map[K]V, K comparable, V any](m, more M) M {
	if len(more) == 0 {
		return m
	}
	all := maps.Clone(more)
	maps.Copy(all, m)
	return all
}

func (f *Face) checkConfig(cfg *container.Config) error {
	if cfg.Image == "" {
		return badf("no image specified: Config.Image is empty")
	}
	if err := checkLabels(cfg.Labels); err != nil {
		return err
	}
	if cfg.WorkingDir != "" && !path.IsAbs(cfg.WorkingDir) {
		return badf("the working directory '%s' is invalid, it needs to be an absolute path", clip(cfg.WorkingDir))
	}
	for _, e := range cfg.Env {
		if e == "" || e[0] == '=' {
			return badf("invalid environment variable: %s", clip(e))
		}
	}
	if _, ok := signalName(cfg.StopSignal); cfg.StopSignal != "" && !ok {
		return badf("Invalid signal: %s", clip(cfg.StopSignal))
	}
	if h := cfg.Healthcheck; h != nil {
		for _, v := range []struct {
			name string
			d    time.Duration
		}{{"Interval", h.Interval}, {"Timeout", h.Timeout}, {"StartPeriod", h.StartPeriod}, {"StartInterval", h.StartInterval}} {
			if v.d != 0 && v.d < time.Millisecond {
				return badf("%s in Healthcheck cannot be less than 1ms", v.name)
			}
		}
		if h.Retries < 0 {
			return badf("Retries in Healthcheck cannot be negative")
		}
	}
	if cfg.StopTimeout != nil && (*cfg.StopTimeout < -1 || *cfg.StopTimeout > 600) {
		return badf("Config.StopTimeout %d: must be at most 600 seconds", *cfg.StopTimeout)
	}
	return nil
}

// checkLabels keeps clients from setting labels that mean something to the daemon.
func checkLabels(all map[string]string) error {
	for k := range all {
		if strings.HasPrefix(k, reserved) {
			return statusf(http.StatusForbidden, "label %q: names that begin with %q are the daemon's", clip(k), reserved)
		}
	}
	return nil
}

// labelsOf returns those labels that a sandbox can have, for people who list sandboxes. Inspect has
// all of them from the request. A container is never removed for its age.
func labelsOf(all map[string]string) map[string]string {
	out := map[string]string{api.LabelKeep: "true"}
	for k, v := range all {
		fits := k != "" && !strings.HasPrefix(k, reserved) && len(k) <= 128 && len(v) <= 1024 && !strings.Contains(k, "=") && !strings.ContainsFunc(k+v, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' })
		if fits && len(out) < 64 {
			out[k] = v
		}
	}
	return out
}

// checkHost refuses fields that no sandbox can have.
func checkHost(h *container.HostConfig) error {
	empty := map[string]bool{
		"Privileged": !h.Privileged, "PublishAllPorts": !h.PublishAllPorts, "BlkioDeviceReadBps": len(h.BlkioDeviceReadBps) == 0,
		"BlkioDeviceReadIOps": len(h.BlkioDeviceReadIOps) == 0, "BlkioDeviceWriteBps": len(h.BlkioDeviceWriteBps) == 0,
		"BlkioDeviceWriteIOps": len(h.BlkioDeviceWriteIOps) == 0, "BlkioWeightDevice": len(h.BlkioWeightDevice) == 0,
		"CpuRealtimePeriod": h.CPURealtimePeriod == 0, "CpuRealtimeRuntime": h.CPURealtimeRuntime == 0,
		"DeviceCgroupRules": len(h.DeviceCgroupRules) == 0, "DeviceRequests": len(h.DeviceRequests) == 0, "Devices": len(h.Devices) == 0,
		"Dns": len(h.DNS) == 0, "DnsOptions": len(h.DNSOptions) == 0, "DnsSearch": len(h.DNSSearch) == 0, "GroupAdd": len(h.GroupAdd) == 0,
		"Links": len(h.Links) == 0, "MaskedPaths": h.MaskedPaths == nil, "ReadonlyPaths": h.ReadonlyPaths == nil,
		"MemorySwappiness": h.MemorySwappiness == nil || *h.MemorySwappiness == -1, "OomKillDisable": h.OomKillDisable == nil || !*h.OomKillDisable,
		"OomScoreAdj": h.OomScoreAdj == 0, "Sysctls": len(h.Sysctls) == 0, "Umask": h.Umask == nil, "VolumesFrom": len(h.VolumesFrom) == 0,
	}
	for _, row := range HostFields {
		if none, ok := empty[row.Name]; ok && !none {
			return refuse(row.Name, "")
		}
	}
	for _, word := range []struct {
		field, value string
		accepts      []string
	}{
		{"Cgroup", string(h.Cgroup), nil},
		{"CgroupParent", h.CgroupParent, nil},
		{"CgroupnsMode", string(h.CgroupnsMode), []string{"private"}},
		{"CpusetMems", h.CpusetMems, nil},
		{"IpcMode", string(h.IpcMode), []string{"private", "shareable", "none"}},
		{"Isolation", string(h.Isolation), []string{"default"}},
		{"LogConfig", h.LogConfig.Type, []string{"json-file", "local"}},
		{"PidMode", string(h.PidMode), nil},
		{"Runtime", h.Runtime, []string{"runc"}},
		{"UTSMode", string(h.UTSMode), nil},
		{"UsernsMode", string(h.UsernsMode), nil},
		{"VolumeDriver", h.VolumeDriver, []string{"local"}},
	} {
		if word.value != "" && !slices.Contains(word.accepts, word.value) {
			return refuse(word.field, word.value)
		}
	}
	if slices.ContainsFunc(h.CapAdd, func(name string) bool { return strings.EqualFold(name, "ALL") }) {
		return refuse("CapAdd", "ALL")
	}
	for _, opt := range h.SecurityOpt {
		name, value, _ := strings.Cut(strings.Replace(opt, ":", "=", 1), "=")
		switch {
		case name == "no-new-privileges" && (value == "" || value == "true"):
		case name == "apparmor", name == "label": // neither is there, as in Docker without root
		case name == "seccomp" && value == "builtin":
		default:
			return refuse("SecurityOpt", opt)
		}
	}
	return nil
}

func restartOf(p container.RestartPolicy) (string, error) {
	switch {
	case p.MaximumRetryCount < 0:
		return "", badf("invalid restart policy: maximum retry count cannot be negative")
	case p.MaximumRetryCount > 0 && p.Name != container.RestartPolicyOnFailure:
		return "", badf("invalid restart policy: maximum retry count can only be used with 'on-failure'")
	}
	switch p.Name {
	case "", container.RestartPolicyDisabled:
		return "", nil
	case container.RestartPolicyOnFailure:
		if p.MaximumRetryCount > 0 {
			return fmt.Sprintf("on-failure:%d", p.MaximumRetryCount), nil
		}
		return "on-failure", nil
	case container.RestartPolicyAlways, container.RestartPolicyUnlessStopped:
		return string(p.Name), nil
	}
	return "", badf("invalid restart policy: unknown policy '%s'; use one of 'no', 'always', 'on-failure', or 'unless-stopped'", clip(string(p.Name)))
}

// policyOf returns a restart policy of ours in Docker's form.
func policyOf(text string) container.RestartPolicy {
	name, number, _ := strings.Cut(text, ":")
	n, _ := strconv.Atoi(number) // empty: no ceiling
	return container.RestartPolicy{Name: container.RestartPolicyMode(name), MaximumRetryCount: n}
}

// limitsOf translates limits. One that the host cannot enforce is the daemon's to refuse.
func limitsOf(l *api.Limits, r *container.Resources, storage map[string]string) error {
	l.Memory, l.CPUSet = r.Memory, r.CpusetCpus
	switch {
	case r.Memory < 0 || r.NanoCPUs < 0 || r.CPUQuota < -1 || r.CPUPeriod < 0 || r.CPUShares < 0:
		return badf("HostConfig: a limit is negative")
	case r.NanoCPUs > 0 && r.CPUQuota > 0:
		return badf("Conflicting options: Nano CPUs and CPU Quota cannot both be set")
	case r.NanoCPUs > 0 && r.CPUPeriod > 0:
		return badf("Conflicting options: Nano CPUs and CPU Period cannot both be set")
	case r.NanoCPUs > 0:
		l.CPUs = float64(r.NanoCPUs) / 1e9
	case r.CPUQuota > 0:
		l.CPUs = float64(r.CPUQuota) / float64(cmp.Or(r.CPUPeriod, 100_000))
	}
	if r.CPUShares > 0 {
		l.CPUWeight = min(10_000, max(1, r.CPUShares*100/1024))
	}
	if r.MemorySwap > 0 {
		if r.Memory == 0 || r.MemorySwap < r.Memory {
			return badf("Minimum memoryswap limit should be larger than memory limit, see usage")
		}
		swap := r.MemorySwap - r.Memory
		l.Swap = &swap
	}
	if r.PidsLimit != nil && *r.PidsLimit > 0 {
		l.Pids = *r.PidsLimit
	}
	if r.BlkioWeight > 0 {
		l.IO.Weight = int64(r.BlkioWeight) * 10
	}
	for k, v := range storage {
		size, err := parseSize(v)
		if k != "size" || err != nil {
			return badf("HostConfig.StorageOpt %q: size alone can be set, in bytes or as 10G", clip(k))
		}
		l.Disk = size
	}
	return nil
}

// mountsOf translates binds, mounts and file systems in memory.
func mountsOf(set *api.Settings, h *container.HostConfig) error {
	for _, bind := range h.Binds {
		m, err := bindOf(bind)
		if err != nil {
			return err
		}
		set.Mounts = append(set.Mounts, m)
	}
	for target, options := range h.Tmpfs {
		t, err := tmpfsOf(target, options)
		if err != nil {
			return err
		}
		set.Tmpfs = append(set.Tmpfs, t)
	}
	for i := range h.Mounts {
		m := &h.Mounts[i]
		switch {
		case m.Type != mount.TypeBind && m.Type != mount.TypeVolume && m.Type != mount.TypeTmpfs:
		case m.Target == "":
			return badf("invalid mount config for type %q: field Target must not be empty", m.Type)
		case m.Type == mount.TypeBind && m.Source == "":
			return badf("invalid mount config for type %q: field Source must not be empty", m.Type)
		}
		switch m.Type {
		case mount.TypeBind:
			set.Mounts = append(set.Mounts, api.Mount{
				Type: api.MountBind, Source: path.Clean(m.Source), Target: path.Clean(m.Target), ReadOnly: m.ReadOnly,
				Create: m.BindOptions != nil && m.BindOptions.CreateMountpoint,
			})
		case mount.TypeTmpfs:
			t := api.Scratch{Path: path.Clean(m.Target)}
			if o := m.TmpfsOptions; o != nil {
				t.Size, t.Mode = o.SizeBytes, uint32(o.Mode.Perm())
			}
			set.Tmpfs = append(set.Tmpfs, t)
		case mount.TypeVolume:
			v, err := volumeMount(m)
			if err != nil {
				return err
			}
			set.Mounts = append(set.Mounts, v)
		case mount.TypeImage, mount.TypeNamedPipe, mount.TypeCluster:
			return badf("HostConfig.Mounts: type %s: bind, volume and tmpfs are mounted", m.Type)
		default:
			return badf("invalid mount config for type %q: mount type unknown", clip(string(m.Type)))
		}
	}
	return nil
}

func tmpfsOf(target, options string) (api.Scratch, error) {
	t := api.Scratch{Path: path.Clean(target)}
	for opt := range strings.SplitSeq(options, ",") {
		name, value, _ := strings.Cut(opt, "=")
		var err error
		switch name {
		case "", "rw", "nosuid", "nodev", "exec", "noatime", "mpol", "nr_inodes":
		case "noexec":
			t.NoExec = true
		case "size":
			t.Size, err = parseSize(value)
		case "mode":
			var n uint64
			n, err = strconv.ParseUint(value, 8, 12)
			t.Mode = uint32(n)
		case "uid", "gid":
			var n uint64
			n, err = strconv.ParseUint(value, 10, 32)
			if name == "uid" {
				t.UID = uint32(n)
			} else {
				t.GID = uint32(n)
			}
		default:
			err = errors.New("unknown")
		}
		if err != nil {
			return t, badf("HostConfig.Tmpfs %q: option %q: size, mode, uid, gid and noexec are understood", clip(target), clip(opt))
		}
	}
	return t, nil
}

// parseSize reads a number of bytes, with a unit of 1024 as Docker has it.
func parseSize(s string) (int64, error) {
	n, err := units.RAMInBytes(s)
	if err == nil && n < 0 { // too large
		err = errors.New("not a size")
	}
	return n, err
}

func portsOf(bindings network.PortMap) ([]api.PortMapping, error) {
	var all []api.PortMapping
	for port, at := range bindings {
		if proto := string(port.Proto()); proto != "tcp" && proto != "udp" {
			return nil, badf("HostConfig.PortBindings %s: tcp and udp can be published", port)
		}
		if len(at) == 0 {
			at = []network.PortBinding{{}}
		}
		for _, b := range at {
			m := api.PortMapping{Port: port.Num(), Protocol: string(port.Proto())}
			if b.HostIP.IsValid() {
				m.Address = b.HostIP.String()
			}
			if b.HostPort != "" {
				n, err := strconv.ParseUint(b.HostPort, 10, 16)
				if err != nil {
					return nil, badf("invalid port specification: %q", clip(b.HostPort))
				}
				m.HostPort = uint16(n)
			}
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b api.PortMapping) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.Address, b.Address))
	})
	return all, nil
}

// requestOf returns the request that created a container; for a sandbox that was made otherwise,
// one that would have.
func requestOf(sb *api.Sandbox) *container.CreateRequest {
	req := &container.CreateRequest{Config: new(container.Config), HostConfig: new(container.HostConfig)}
	if text, ok := sb.Annotations[annotationRequest]; ok {
		kept := new(container.CreateRequest)
		if json.Unmarshal([]byte(text), kept) == nil && kept.Config != nil && kept.HostConfig != nil {
			return kept
		}
	}
	req.Image, req.Cmd, req.Tty, req.OpenStdin = sb.Image, sb.Command, sb.TTY, sb.StdinOpen
	req.Env, req.Labels, req.Hostname = sb.Env, map[string]string{}, cmp.Or(sb.Hostname, sb.Name)
	for k, v := range sb.Labels {
		if !strings.HasPrefix(k, reserved) {
			req.Labels[k] = v
		}
	}
	req.HostConfig.NetworkMode = container.NetworkMode(cmp.Or(string(sb.Network.Mode), "none"))
	req.HostConfig.AutoRemove, req.HostConfig.ReadonlyRootfs, req.HostConfig.ShmSize = sb.AutoRemove, sb.ReadOnly, sb.ShmSize
	for i := range sb.Ports {
		p := &sb.Ports[i]
		if p.Socket != "" {
			continue
		}
		port, ok := network.PortFrom(p.Port, network.IPProtocol(p.Protocol))
		at, err := netip.ParseAddr(p.Address)
		if !ok || err != nil {
			continue
		}
		if req.HostConfig.PortBindings == nil {
			req.HostConfig.PortBindings = network.PortMap{}
		}
		number := ""
		if !p.Chosen {
			number = strconv.Itoa(int(p.HostPort))
		}
		req.HostConfig.PortBindings[port] = append(req.HostConfig.PortBindings[port], network.PortBinding{HostIP: at, HostPort: number})
	}
	return req
}
