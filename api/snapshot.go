package api

import "time"

// Snapshot is a sandbox's file system as it was at one time. It holds what the sandbox had written, not its processes, and
// needs the image that the sandbox was made of.
type Snapshot struct {
	ID          string            `json:"id"`
	Name        string            `json:"name,omitempty"`
	Comment     string            `json:"comment,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Sandbox     string            `json:"sandbox,omitempty"`      // id of the one that it was taken of, which may be gone; empty where it was imported
	SandboxName string            `json:"sandbox_name,omitempty"` // at that time
	Image       string            `json:"image"`                  // as the sandbox was asked for
	ImageDigest string            `json:"image_digest"`           // which is held as long as the snapshot is there
	Layers      int               `json:"layers"`                 // its own one, and those of the snapshots that the sandbox stood on
	CreatedAt   time.Time         `json:"created_at"`
	Size        int64             `json:"size"`                  // bytes of files in its own layer
	SharedSize  int64             `json:"shared_size,omitempty"` // bytes of files in the layers below, which are other snapshots'
	Entries     int64             `json:"entries"`               // files, directories and deletions in its own layer
	// Consistent says that nothing in the sandbox ran while it was read. Without a cgroup nobody can hold a sandbox: then what
	// was written meanwhile may be there in part, and a file that changed under the reader made the snapshot fail.
	Consistent bool `json:"consistent"`
	// Skipped is what no snapshot can have, as in [SandboxCommitted]; it is told only to who takes it.
	Skipped     []string `json:"skipped,omitempty"`
	SkippedMore int64    `json:"skipped_more,omitempty"`
}

// SnapshotList is the answer to GET /v1/snapshots, oldest first.
type SnapshotList struct {
	Snapshots []Snapshot `json:"snapshots"`
}

// TakeSnapshot is the body of POST /v1/sandboxes/{id}/snapshots; all of it may be left out.
type TakeSnapshot struct {
	Name    string            `json:"name,omitempty"`    // unique among snapshots; as a sandbox's; default: none
	Labels  map[string]string `json:"labels,omitempty"`  // as a sandbox's
	Comment string            `json:"comment,omitempty"` // at most 1024 bytes
}

// SnapshotRemoved is the answer to DELETE /v1/snapshots/{id}.
type SnapshotRemoved struct {
	// Bytes of files that are gone. What sandboxes and other snapshots stand on stays until the last of them has gone.
	Bytes int64 `json:"bytes"`
}

// PruneSnapshots is the body of POST /v1/snapshots/prune: it removes snapshots that no sandbox stands on. One of the two is needed.
type PruneSnapshots struct {
	OlderThan *float64          `json:"older_than,omitempty"` // seconds since they were taken, or imported
	Labels    map[string]string `json:"labels,omitempty"`     // that they must have; those with [LabelKeep] stay whatever is given
}

// SnapshotsRemoved is the answer to POST /v1/snapshots/prune.
type SnapshotsRemoved struct {
	Removed []string `json:"removed"` // names, or the ids of those that have none
	Bytes   int64    `json:"bytes"`   // of files that are gone
}

// ForkSandbox is the body of POST /v1/sandboxes/{id}/fork: new sandboxes with the files that one has now, and its image, limits,
// profile, environment, user, directory, labels and idle timeout. Its processes are not copied.
type ForkSandbox struct {
	Count int `json:"count,omitempty"` // how many, at most 100; default 1
	// Names are those of the new sandboxes, as many as Count; default: made up.
	Names  []string          `json:"names,omitempty"`
	Labels map[string]string `json:"labels,omitempty"` // added to the sandbox's
	Env    []string          `json:"env,omitempty"`    // added to the sandbox's
	// Timeout and IdleTimeout are as in [CreateSandbox]; 0 means the daemon's default lifetime, and the sandbox's idle timeout.
	Timeout     float64 `json:"timeout,omitempty"`
	IdleTimeout float64 `json:"idle_timeout,omitempty"`
}

// RollbackSandbox is the body of POST /v1/sandboxes/{id}/rollback: what the sandbox has written since, and all that runs in it, is
// lost. Id, name, labels and limits stay, and one that ran or was paused runs again, with a new deadline.
type RollbackSandbox struct {
	Snapshot string `json:"snapshot"` // id or name; of a sandbox of the same image, be it this one or another
}

// SandboxForked is the answer to it: all of them, or with an error none.
type SandboxForked struct {
	Sandboxes   []Sandbox `json:"sandboxes"`
	Consistent  bool      `json:"consistent"` // as in [Snapshot]
	Skipped     []string  `json:"skipped,omitempty"`
	SkippedMore int64     `json:"skipped_more,omitempty"`
}
