package docker

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/volume"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// localDriver is the driver of all volumes.
const localDriver = "local"

// labelAnonymous is the label by which clients tell volumes whose name was made up.
const labelAnonymous = "com.docker.volume.anonymous"

func checkVolumeName(name string) error {
	for i, r := range name {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if len(name) > 128 || !alnum && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return badf("create %s: %q includes invalid characters for a local volume name, only \"[a-zA-Z0-9][a-zA-Z0-9_.-]\" are allowed, and at most 128 of them. "+
				"If you intended to pass a host directory, use absolute path", clip(name), clip(name))
		}
	}
	return nil
}

func checkDriver(field, name string) error {
	if name != "" && name != localDriver {
		return statusf(http.StatusForbidden, "%s %q: %s", field, clip(name), noDrivers)
	}
	return nil
}

// bindOf translates a line of Binds.
func bindOf(bind string) (api.Mount, error) {
	parts := strings.Split(bind, ":")
	if len(parts) == 1 && path.IsAbs(bind) { // a volume without a name, as docker-py asks for it
		return api.Mount{Type: api.MountVolume, Target: path.Clean(bind)}, nil
	}
	if len(parts) == 1 || len(parts) < 4 && !path.IsAbs(parts[1]) {
		return api.Mount{}, badf("invalid volume specification: '%s': invalid mount config for type \"volume\": invalid mount path: '%s' mount path must be absolute",
			clip(bind), clip(parts[min(1, len(parts)-1)]))
	}
	if path.Clean(parts[1]) == "/" {
		return api.Mount{}, badf("invalid volume specification: '%s': invalid mount config for type \"volume\": invalid specification: destination can't be '/'", clip(bind))
	}
	if len(parts) > 3 || parts[0] == "" {
		return api.Mount{}, badf("invalid volume specification: '%s'", clip(bind))
	}
	m := api.Mount{Type: api.MountBind, Source: path.Clean(parts[0]), Target: path.Clean(parts[1]), Create: true}
	if !path.IsAbs(parts[0]) {
		if err := checkVolumeName(parts[0]); err != nil {
			return m, err
		}
		m.Type, m.Source, m.Create = api.MountVolume, parts[0], false
	}
	if len(parts) == 3 {
		for mode := range strings.SplitSeq(parts[2], ",") {
			switch mode {
			case "ro":
				m.ReadOnly = true
			case "nocopy":
				m.NoCopy = m.Type == api.MountVolume // nothing is copied to the host
			case "rw", "z", "Z", "", "cached", "delegated", "consistent", "private", "rprivate", "slave", "rslave":
			default:
				return m, badf("invalid mode: %s", clip(mode))
			}
		}
	}
	return m, nil
}

// volumeMount translates a mount of a volume.
func volumeMount(m *mount.Mount) (api.Mount, error) {
	out := api.Mount{Type: api.MountVolume, Source: m.Source, Target: path.Clean(m.Target), ReadOnly: m.ReadOnly}
	if err := checkVolumeName(m.Source); err != nil {
		return out, err
	}
	o := m.VolumeOptions
	if o == nil {
		return out, nil
	}
	out.NoCopy = o.NoCopy
	if o.Subpath != "" {
		return out, statusf(http.StatusForbidden, "HostConfig.Mounts: VolumeOptions.Subpath %q: a volume is mounted as a whole", clip(o.Subpath))
	}
	if d := o.DriverConfig; d != nil {
		if err := checkDriver("HostConfig.Mounts: VolumeOptions.DriverConfig", d.Name); err != nil {
			return out, err
		}
		if len(d.Options) > 0 {
			return out, statusf(http.StatusForbidden, "HostConfig.Mounts: VolumeOptions.DriverConfig: options: %s; POST /volumes/create takes a size", noDrivers)
		}
	}
	if len(o.Labels) > 0 && m.Source == "" {
		return out, badf("HostConfig.Mounts: VolumeOptions.Labels: a volume without a name is a part of its container, and has no labels; name it")
	}
	return out, checkLabels(o.Labels)
}

// anonymousVolumes adds volumes without a name at the paths of Config.Volumes, unless a path has a
// mount already.
func anonymousVolumes(set *api.Settings, paths map[string]struct{}) error {
	for _, target := range slices.Sorted(maps.Keys(paths)) {
		at := path.Clean(target)
		if !path.IsAbs(target) || strings.Contains(target, ":") {
			return badf("invalid volume specification: '%s'", clip(target))
		}
		taken := slices.ContainsFunc(set.Mounts, func(m api.Mount) bool { return m.Target == at }) ||
			slices.ContainsFunc(set.Tmpfs, func(t api.Scratch) bool { return t.Path == at })
		if !taken {
			set.Mounts = append(set.Mounts, api.Mount{Type: api.MountVolume, Target: at})
		}
	}
	return nil
}

// makeLabelled makes the volumes that a container wants with labels, which mounts of a sandbox do
// not have. As in Docker they stay if the container cannot be made: another may have one by now.
func (f *Face) makeLabelled(ctx context.Context, h *container.HostConfig) error {
	for i := range h.Mounts {
		m := &h.Mounts[i]
		if m.Type != mount.TypeVolume || m.VolumeOptions == nil || len(m.VolumeOptions.Labels) == 0 {
			continue
		}
		_, err := f.api.CreateVolume(ctx, api.CreateVolume{Name: m.Source, Labels: m.VolumeOptions.Labels})
		if err != nil && !errors.Is(err, &api.Problem{Code: api.CodeExists}) { // one that exists keeps its labels
			return err
		}
	}
	return nil
}

// findVolume returns the volume of a name.
func (f *Face) findVolume(ctx context.Context, name string) (*api.Volume, error) {
	all, err := f.api.Volumes(ctx, nil) // the answer about a single one counts its files
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].Name == name {
			return &all[i], nil
		}
	}
	return nil, statusf(http.StatusNotFound, "get %s: no such volume", clip(name))
}

func volumeDoc(v *api.Volume) volume.Volume {
	out := volume.Volume{
		Name: v.Name, Driver: localDriver, Scope: "local", CreatedAt: timeText(v.CreatedAt),
	} // without labels and options they are null, as in Docker
	add := func(m *map[string]string, k, v string) {
		if *m == nil {
			*m = map[string]string{}
		}
		(*m)[k] = v
	}
	for k, val := range v.Labels {
		if !strings.HasPrefix(k, reserved) {
			add(&out.Labels, k, val)
		}
	}
	if v.Anonymous || v.Bound {
		add(&out.Labels, labelAnonymous, "")
	}
	if v.Size > 0 {
		add(&out.Options, "size", strconv.FormatInt(v.Size, 10))
	}
	return out
}

func (c *call) getVolumes() error {
	want, err := c.filters("dangling", "driver", "label", "label!", "name")
	if err != nil {
		return err
	}
	all, err := c.f.api.Volumes(c.ctx(), nil)
	if err != nil {
		return err
	}
	out := volume.ListResponse{Volumes: []volume.Volume{}}
	for i := range all {
		doc := volumeDoc(&all[i])
		if want.has("name", func(w string) bool { return matchName(w, doc.Name) }) && want.has("driver", func(w string) bool { return w == localDriver }) &&
			want.has("dangling", func(w string) bool { return truth(w) == (len(all[i].Sandboxes) == 0) }) && want.labels(doc.Labels) {
			out.Volumes = append(out.Volumes, doc)
		}
	}
	return c.json(http.StatusOK, out)
}

func (c *call) postVolume() error {
	var req volume.CreateRequest
	if err := c.read(&req, true); err != nil {
		return err
	}
	ask := api.CreateVolume{Name: req.Name, Labels: req.Labels}
	if err := errors.Join(checkVolumeName(req.Name), checkLabels(req.Labels), checkDriver("Driver", req.Driver)); err != nil {
		return err
	}
	if req.ClusterVolumeSpec != nil {
		return statusf(http.StatusServiceUnavailable, "%s", noSwarm)
	}
	for name, value := range req.DriverOpts {
		size, err := parseSize(value)
		if name != "size" || err != nil || size == 0 {
			return statusf(http.StatusForbidden, "DriverOpts %q: size alone can be set, in bytes or as 10g; %s", clip(name), noDrivers)
		}
		ask.Size = size
	}
	made, err := c.f.api.CreateVolume(c.ctx(), ask)
	if errors.Is(err, &api.Problem{Code: api.CodeExists}) {
		there, ferr := c.f.findVolume(c.ctx(), req.Name)
		if ferr != nil || ask.Size != 0 && ask.Size != there.Size {
			return err
		}
		made, err = there, nil // its labels stay as they are
	}
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, volumeDoc(made))
}

func (c *call) getVolume() error {
	v, err := c.f.findVolume(c.ctx(), c.args[0])
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, volumeDoc(v))
}

func (c *call) deleteVolume() error {
	name := c.args[0]
	if _, err := c.f.findVolume(c.ctx(), name); err != nil {
		if c.bool("force") && statusOf(err) == http.StatusNotFound {
			return c.none(http.StatusNoContent)
		}
		return err
	}
	err := c.f.api.RemoveVolume(c.ctx(), name)
	if errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		users, uerr := c.f.usersOf(c.ctx(), name)
		if uerr != nil {
			return uerr
		}
		return statusf(http.StatusConflict, "remove %s: volume is in use - %v", name, users)
	}
	if err != nil {
		return err
	}
	return c.none(http.StatusNoContent)
}

// usersOf returns the IDs of the containers that have a volume.
func (f *Face) usersOf(ctx context.Context, name string) ([]string, error) {
	all, err := f.api.ListSandboxes(ctx, client.ListOptions{})
	if err != nil {
		return nil, err
	}
	var ids []string
	for i := range all {
		if slices.ContainsFunc(all[i].Mounts, func(m api.Mount) bool { return m.Type == api.MountVolume && m.Source == name }) {
			ids = append(ids, containerID(all[i].ID))
		}
	}
	return ids, nil
}

// postVolumesPrune removes volumes that no container has: those whose name was made up, or all of
// them if the filter all says so, and for clients before version 1.42.
func (c *call) postVolumesPrune() error {
	want, err := c.filters("all", "label", "label!")
	if err != nil {
		return err
	}
	named := c.minor < 42
	if len(want["all"]) > 0 {
		named = want.has("all", truth)
	}
	all, err := c.f.api.Volumes(c.ctx(), nil)
	if err != nil {
		return err
	}
	out := volume.PruneReport{VolumesDeleted: []string{}}
	for i := range all {
		v := &all[i]
		anonymous := v.Anonymous || v.Bound
		if len(v.Sandboxes) > 0 || !named && !anonymous || api.Kept(v.Labels) || !want.labels(volumeDoc(v).Labels) {
			continue
		}
		var bytes int64
		if counted, err := c.f.api.Volume(c.ctx(), v.Name); err == nil && counted.Usage != nil {
			bytes = counted.Usage.Bytes
		}
		err := c.f.api.RemoveVolume(c.ctx(), v.Name)
		switch {
		case err == nil:
			out.VolumesDeleted = append(out.VolumesDeleted, v.Name)
			out.SpaceReclaimed += uint64(max(bytes, 0))
		case errors.Is(err, &api.Problem{Code: api.CodeConflict}), errors.Is(err, &api.Problem{Code: api.CodeNotFound}): // by now
		default:
			return err
		}
	}
	return c.json(http.StatusOK, out)
}

// volumeUsage returns all volumes with the sizes of their files.
func (f *Face) volumeUsage(ctx context.Context, files []api.VolumeFiles) ([]volume.Volume, error) {
	all, err := f.api.Volumes(ctx, nil)
	if err != nil {
		return nil, err
	}
	out := []volume.Volume{}
	for i := range all {
		doc := volumeDoc(&all[i])
		doc.UsageData = &volume.UsageData{RefCount: int64(len(all[i].Sandboxes)), Size: -1}
		for j := range files {
			if files[j].Name == doc.Name && files[j].Unknown == "" {
				doc.UsageData.Size = files[j].Bytes
			}
		}
		out = append(out, doc)
	}
	return out, nil
}
