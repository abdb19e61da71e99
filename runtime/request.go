package runtime

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Request describes the sandbox that [Supervisor.Create] makes. References and names in it have
// been resolved, and values validated. Only limits, times and a missing name are filled in here.
type Request struct {
	Tenant      string // empty: the daemon's own
	Name        string // unique within the tenant; made up when empty
	Image       string // as asked for
	ImageDigest string
	Snapshot    string // id of the one that it is made of
	ImageEnv    []string
	Rootfs      rootfs.Source
	Env         []string
	Cwd         string
	User        string
	Labels      map[string]string
	Profile     Profile
	Defaults    api.Limits // of the profile: wishes, left out where the host cannot enforce them
	Limits      api.Limits // asked for: enforced or an error
	Network     api.Network
	Trust       []byte // see [Spec.Trust]
	Timeout     time.Duration
	IdleTimeout time.Duration
	Ports       []api.PortMapping // published by the caller
	// Prepare is called with the id of the sandbox, which is being created, before the engine makes it.
	// An error ends the creation. What Prepare did is the caller's to undo where Create fails.
	Prepare func(id string) error
	// Command, TTY and StdinOpen are of the main process, which is the caller's to start.
	Command   []string
	TTY       bool
	StdinOpen bool
	// Entrypoint and Cmd are kept for clients.
	Entrypoint, Cmd []string
	api.Settings
	// Stopped makes the record alone: the first start makes the rest.
	Stopped bool
	// Ephemeral means that the sandbox serves one request: a daemon that comes after a crash deletes
	// it.
	Ephemeral bool
}

// spec is the pure part of Create: everything the engine is told.
func (r *Request) spec(id, name string, deadline time.Time) *Spec {
	spec := &Spec{
		ID:       id,
		Rootfs:   r.Rootfs,
		Hostname: name,
		Profile:  r.Profile,
		Limits:   r.Limits.WithDefaults(r.Defaults),
		Explicit: r.Limits,
		Deadline: deadline,
		Network:  r.Network.HasGateway(),
		Trust:    r.Trust,
	}
	spec.set(&r.Settings)
	return spec
}

// record returns the record of a sandbox of the request that is being created now.
func (r *Request) record(id, name string, now time.Time, defaults *Defaults) Record {
	return Record{
		Sandbox: api.Sandbox{
			ID:          id,
			Name:        name,
			Image:       r.Image,
			ImageDigest: r.ImageDigest,
			Snapshot:    r.Snapshot,
			State:       api.StateCreating,
			Profile:     r.Profile.Name,
			Labels:      maps.Clone(r.Labels),
			Limits:      r.Limits.WithDefaults(r.Defaults),
			Network:     r.Network,
			Env:         slices.Clone(r.Env),
			Cwd:         r.Cwd,
			User:        r.User,
			CreatedAt:   now,
			Deadline:    now.Add(cmp.Or(r.Timeout, defaults.Timeout)),
			IdleTimeout: cmp.Or(r.IdleTimeout, defaults.IdleTimeout).Seconds(),
			Ports:       slices.Clone(r.Ports),
			Command:     slices.Clone(r.Command),
			TTY:         r.TTY,
			StdinOpen:   r.StdinOpen,
			Entrypoint:  slices.Clone(r.Entrypoint),
			Cmd:         slices.Clone(r.Cmd),
			Settings:    r.Settings,
			Health:      freshHealth(&r.Settings, false, now),
		},
		Tenant:    r.Tenant,
		Timeout:   cmp.Or(r.Timeout, defaults.Timeout),
		Explicit:  r.Limits,
		ImageEnv:  slices.Clone(r.ImageEnv),
		Rootfs:    r.Rootfs,
		Ephemeral: r.Ephemeral,
	}
}

// idAlphabet leaves out what people mistake for one another; 32 letters make five bits each.
const idAlphabet = "abcdefghjkmnpqrstuvwxyz023456789"

// newID returns twelve random characters, 60 bits: a collision is looked for all the same.
func newID() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // since Go 1.24 it never fails
	for i := range b {
		b[i] = idAlphabet[b[i]%32]
	}
	return string(b[:])
}

// newName makes up a name that a person can say.
func newName() string {
	first := [...]string{"amber", "brave", "brisk", "calm", "clear", "crisp", "early", "fair", "fleet", "fresh", "glad", "keen", "light", "lucid", "mild", "neat"}
	second := [...]string{"ash", "bay", "brook", "cliff", "cove", "dune", "elm", "fern", "finch", "heron", "linden", "marsh", "otter", "reed", "tern", "wren"}
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails either
	return fmt.Sprintf("%s-%s-%03d", first[b[0]%16], second[b[1]%16], binary.LittleEndian.Uint16(b[2:])%1000)
}
