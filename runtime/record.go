package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// Record is the state of one sandbox on disk: the part that the API shows, and the part that the
// daemon needs after a restart.
type Record struct {
	api.Sandbox
	// Tenant is the tenant on whose behalf the sandbox runs; empty for the daemon's own, as in records
	// without the field. A name is unique within its tenant.
	Tenant string `json:"tenant,omitempty"`
	// ImageEnv is the environment that the image asked for when the sandbox was created. It is kept
	// because the image may be pulled anew, or removed, while the sandbox runs.
	ImageEnv []string `json:"image_env,omitempty"`
	// Rootfs is the read-only part of its root, below its own files.
	Rootfs rootfs.Source `json:"rootfs,omitzero"`
	// Timeout is the time that it was given when it was created.
	Timeout time.Duration `json:"timeout,omitempty"`
	// Explicit are the limits that were asked for explicitly, some of which a later change
	// may have replaced.
	Explicit api.Limits `json:"explicit,omitzero"`
	// Fresh marks its own files as obsolete: it was rolled back, and has not run since.
	Fresh bool `json:"fresh,omitempty"`
	// Unstarted means that it was created stopped, and its main process has not been started since.
	Unstarted bool `json:"unstarted,omitempty"`
	// FilesGone means that its own files were removed by DropFiles; it cannot be started again.
	FilesGone bool `json:"files_gone,omitempty"`
	// Ephemeral is [Request.Ephemeral].
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Life counts how often it was started again: what one life has left behind is told from what
	// another one has.
	Life int `json:"life,omitempty"`
	// Unjoined is Life+1 of the life in which it left the last of its named networks while it ran. It
	// keeps the gateway of that life.
	Unjoined int `json:"unjoined,omitempty"`
	// Idle means that it was started without its main process.
	Idle bool `json:"idle,omitempty"`
	// ExitBefore is the exit of the last run before an idle one, at whose end it is the exit again.
	ExitBefore *api.SandboxExit `json:"exit_before,omitempty"`
	// Settled means that a client has stopped it after its end: its restart policy starts it no more.
	Settled bool `json:"settled,omitempty"`
	// ShortLives is the number of lives in a row after which the policy had to wait longer.
	ShortLives int `json:"short_lives,omitempty"`
}

// EndedItself reports whether the sandbox has ended without anything that ends it for good: a stop,
// its deadline, its idle timeout or a full disk. A lost one has.
func (r *Record) EndedItself() bool {
	return !lives(r.State) && r.State != api.StateCreating && !r.Settled && !strings.HasPrefix(r.Reason, ReasonStopped) &&
		!strings.HasPrefix(r.Reason, reasonDeadline) && !strings.HasPrefix(r.Reason, ReasonIdle) &&
		!strings.HasPrefix(r.Reason, ReasonDisk) && !strings.HasPrefix(r.Reason, ReasonMemory)
}

// HasGateway is [api.Network.HasGateway], also of a sandbox that has left its named networks since
// it was started. It is true from then until the next start.
func (r *Record) HasGateway() bool {
	return r.Network.HasGateway() || r.Network.Mode != api.NetworkSandbox && r.Unjoined == r.Life+1
}

// HeldLimits returns the limits that hold the sandbox, and not those that its host could not
// enforce. A sandbox that is made like it must be held by them too.
func (r *Record) HeldLimits() api.Limits {
	by := map[string]string{"memory": r.Enforced.Memory, "cpu": r.Enforced.CPU, "cpuset": r.Enforced.CPUSet, "io": r.Enforced.IO}
	var held api.Limits
	for _, row := range api.LimitTable() {
		switch {
		case row.Controller == "": // each process has its own, or the launcher counts
			row.Copy(&held, &r.Explicit)
		case row.Rlimit != "" || by[row.Controller] == "cgroup" || by[row.Controller] == "direct":
			row.Copy(&held, &r.Limits)
		}
	}
	return held
}

// Shown returns the sandbox for clients: its limits are those that this host enforces. The record
// keeps the profile's other defaults, for a start on a host that can.
func (r *Record) Shown() api.Sandbox {
	shown := r.Sandbox
	if r.Enforced.Memory == "" {
		return shown // the host has not answered yet
	}
	shown.Limits = r.HeldLimits()
	explicit := r.Explicit.Matching(&r.Limits) // refused where they do not hold
	for _, row := range api.LimitTable() {
		if row.Controller == "" || row.IsSet(&explicit) {
			row.Copy(&shown.Limits, &r.Limits)
		}
	}
	return shown
}

// clone returns a copy whose maps and slices may be kept by a caller.
func (r *Record) clone() Record {
	c := *r
	c.Labels = make(map[string]string, len(r.Labels))
	maps.Copy(c.Labels, r.Labels)
	c.Env = append([]string(nil), r.Env...)
	c.Command = append([]string(nil), r.Command...)
	c.ImageEnv = append([]string(nil), r.ImageEnv...)
	c.Rootfs = r.Rootfs.Clone()
	c.Enforced.Namespaces = append([]string{}, r.Enforced.Namespaces...) // a list in JSON, too, while it is created
	c.Enforced.Missing = append([]string(nil), r.Enforced.Missing...)
	return c
}

var bucketSandboxes = []byte("sandboxes")

// records are the durable part of the supervisor: one JSON value a sandbox, in a bbolt file. Each
// put and remove returns when the kernel says that the data is on disk.
type records struct {
	db *bolt.DB
	// runtimeDir holds the Unix sockets of published ports. It may be another one for the next daemon,
	// so that the values have paths relative to it.
	runtimeDir string
}

func openRecords(dir, runtimeDir string) (*records, error) {
	path := filepath.Join(dir, "state.db")
	// bbolt holds a lock on the file for as long as it is open. A second supervisor is told so rather
	// than left waiting.
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second, FreelistType: bolt.FreelistMapType})
	if err != nil {
		if errors.Is(err, bolterrors.ErrTimeout) {
			return nil, fmt.Errorf("open records %s: another daemon has it open", path)
		}
		return nil, fmt.Errorf("open records %s: %w", path, err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucketSandboxes)
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open records %s: %w", path, err), db.Close())
	}
	return &records{db, runtimeDir}, nil
}

func (r *records) put(rec *Record) error {
	moved := *rec
	moved.Ports = slices.Clone(rec.Ports)
	for i := range moved.Ports {
		if rel, err := filepath.Rel(r.runtimeDir, moved.Ports[i].Socket); err == nil && filepath.IsLocal(rel) {
			moved.Ports[i].Socket = rel
		}
	}
	data, err := json.Marshal(&moved)
	if err != nil {
		return fmt.Errorf("encode record %s: %w", rec.ID, err)
	}
	err = r.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketSandboxes).Put([]byte(rec.ID), data) })
	if err != nil {
		return fmt.Errorf("write record %s: %w", rec.ID, err)
	}
	return nil
}

// remove forgets id; an unknown id is no error.
func (r *records) remove(id string) error {
	err := r.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketSandboxes).Delete([]byte(id)) })
	if err != nil {
		return fmt.Errorf("remove record %s: %w", id, err)
	}
	return nil
}

func (r *records) all() ([]*Record, error) {
	var all []*Record
	err := r.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketSandboxes).ForEach(func(k, v []byte) error {
			rec := new(Record)
			if err := json.Unmarshal(v, rec); err != nil {
				return fmt.Errorf("record %q: %w", k, err)
			}
			if rec.ID != string(k) {
				return fmt.Errorf("record %q: its id says %q", k, rec.ID)
			}
			for i := range rec.Ports {
				r.place(&rec.Ports[i].Socket)
			}
			all = append(all, rec)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read records: %w", err)
	}
	return all, nil
}

// place makes the path of a socket that of the present directory. Records of daemons before this
// one may have the absolute path in the directory that they had: its last two elements stay.
func (r *records) place(socket *string) {
	rel := *socket
	if filepath.IsAbs(rel) {
		rel = filepath.Join(filepath.Base(filepath.Dir(rel)), filepath.Base(rel))
	}
	if rel != "" {
		*socket = filepath.Join(r.runtimeDir, rel)
	}
}

func (r *records) close() error { return r.db.Close() }
