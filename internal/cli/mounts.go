package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/api"
)

// parseVolume reads [SOURCE:]TARGET[:OPTION,...] as Docker does. A source with a slash, or that
// begins with a dot, is a path of the host; another one is the name of a volume; without one the
// volume is anonymous.
func parseVolume(text string) (m api.Mount, err error) {
	source, rest, ok := strings.Cut(text, ":")
	if !ok {
		if !strings.HasPrefix(text, "/") {
			return m, errors.New("want [SOURCE:]TARGET[:ro], as in data:/data, ./src:/src:ro or /scratch")
		}
		return api.Mount{Type: api.MountVolume, Target: text}, nil
	}
	target, options, _ := strings.Cut(rest, ":")
	m = api.Mount{Type: api.MountBind, Target: target}
	if source != "" && !isPath(source) {
		m.Type, m.Source = api.MountVolume, source
	}
	if options != "" {
		for o := range strings.SplitSeq(options, ",") {
			if err := mountOption(&m, o); err != nil {
				return m, err
			}
		}
	}
	if m.NoCopy && m.Type == api.MountBind {
		return m, errors.New("option nocopy: nothing is copied to a directory of the host; leave the option out")
	}
	if m.Type == api.MountBind {
		m.Source, err = mountSource(source)
	}
	return m, err
}

// isPath tells a path of the host from the name of a volume.
func isPath(source string) bool {
	return strings.ContainsRune(source, '/') || strings.HasPrefix(source, ".")
}

// mountOption applies an option of the third part.
func mountOption(m *api.Mount, option string) error {
	switch option {
	case "ro":
		m.ReadOnly = true
	case "rw", "z", "Z", "private", "rprivate": // always; nothing is labelled
	case "nocopy":
		m.NoCopy = true
	case "shared", "rshared", "slave", "rslave":
		return fmt.Errorf("%s: mounts that the host makes later never appear in a sandbox; leave the option out", option)
	case "U":
		return errors.New("option U: the ids of a mount are mapped, and no file of the host changes its owner; leave the option out")
	default:
		return fmt.Errorf("option %q: there are ro, rw and nocopy", option)
	}
	return nil
}

// mountSource returns the absolute path of a source. Links are followed here, as the caller; the
// daemon follows none.
func mountSource(source string) (string, error) {
	if source == "" {
		return "", errors.New("the source is missing")
	}
	if !isPath(source) {
		return "", fmt.Errorf("%q is no path: write ./%s for a directory here, or type=volume for a volume", source, source)
	}
	abs, err := filepath.Abs(source)
	if err != nil {
		return "", err
	}
	if found, err := filepath.EvalSymlinks(abs); err == nil { // else the daemon says why not
		abs = found
	}
	return abs, nil
}

// parseMount reads the value of --mount: type=bind,source=DIR,target=PATH[,readonly],
// type=volume[,source=NAME],target=PATH or type=tmpfs,target=PATH[,tmpfs-size=SIZE]. One of the
// results is set. The default is volume, as in Docker.
func parseMount(text string) (*api.Mount, *api.Scratch, error) {
	m := api.Mount{}
	var size int64
	var mode uint64
	var err error
	for o := range strings.SplitSeq(text, ",") {
		name, value, given := strings.Cut(o, "=")
		switch strings.ToLower(name) {
		case "type":
			m.Type = value
		case "source", "src":
			m.Source = value
		case "target", "dst", "destination":
			m.Target = value
		case "readonly", "ro":
			if m.ReadOnly, err = strconv.ParseBool(value); !given {
				m.ReadOnly, err = true, nil
			}
		case "uid", "gid":
			var id uint64
			id, err = strconv.ParseUint(value, 10, 16)
			n := uint32(id)
			if name == "uid" {
				m.UID = &n
			} else {
				m.GID = &n
			}
		case "volume-nocopy":
			if m.NoCopy, err = strconv.ParseBool(value); !given {
				m.NoCopy, err = true, nil
			}
		case "volume-driver":
			if value != "local" {
				return nil, nil, errors.New("volume-driver: volumes are directories of the daemon's; leave the option out")
			}
		case "volume-opt", "volume-label", "volume-subpath":
			return nil, nil, fmt.Errorf("%s: make the volume first, with sandboxd volume create", name)
		case "tmpfs-size":
			if size, err = units.RAMInBytes(value); err == nil && size <= 0 {
				err = errors.New("less than a byte")
			}
		case "tmpfs-mode":
			mode, err = strconv.ParseUint(value, 8, 12)
		case "bind-propagation":
			if !strings.HasSuffix(value, "private") {
				return nil, nil, errors.New("bind-propagation: mounts that the host makes later never appear in a sandbox; leave the option out")
			}
		default:
			return nil, nil, fmt.Errorf("option %q: there are type, source, target, readonly, uid, gid, volume-nocopy, tmpfs-size and tmpfs-mode", o)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("option %q: not a valid %s", o, name)
		}
	}
	switch {
	case m.Target == "":
		return nil, nil, errors.New("the target is missing, as in type=bind,source=./src,target=/src")
	case m.Type == "tmpfs":
		switch {
		case m.Source != "":
			return nil, nil, errors.New("a tmpfs is empty and has no source")
		case m.ReadOnly:
			return nil, nil, errors.New("readonly: it would be empty for ever; leave the option out")
		}
		s := &api.Scratch{Path: m.Target, Size: size, Mode: uint32(mode), NoExec: true}
		if m.UID != nil {
			s.UID = *m.UID
		}
		if m.GID != nil {
			s.GID = *m.GID
		}
		return nil, s, nil
	case size != 0 || mode != 0:
		return nil, nil, errors.New("tmpfs-size and tmpfs-mode are for type=tmpfs")
	case m.Type == "" || m.Type == api.MountVolume:
		if m.Type = api.MountVolume; isPath(m.Source) {
			return nil, nil, fmt.Errorf("source %q is a path, not the name of a volume; a directory of the host has type=bind", m.Source)
		}
		return &m, nil, nil
	case m.Type != api.MountBind:
		return nil, nil, fmt.Errorf("type %q: there are bind, volume and tmpfs", m.Type)
	case m.NoCopy:
		return nil, nil, errors.New("volume-nocopy is for type=volume")
	}
	m.Source, err = mountSource(m.Source)
	return &m, nil, err
}
