package api

// ChangeKind is the way in which a file of a sandbox differs from its image's.
type ChangeKind string

// Kinds of changes.
const (
	Added   ChangeKind = "added"
	Changed ChangeKind = "changed" // content, owner, mode or times; a directory also for its entries
	Deleted ChangeKind = "deleted" // with everything below it, which is not listed
)

// Change is one difference between a sandbox's file system and its image.
type Change struct {
	Path string     `json:"path"` // absolute; invalid UTF-8 is replaced
	Kind ChangeKind `json:"kind"`
	Type string     `json:"type"`           // file, directory, symlink or fifo; of the current file, or of the deleted one
	Size int64      `json:"size,omitempty"` // bytes of a file's content
}

// SandboxDiff is the answer to GET /v1/sandboxes/{id}/diff.
type SandboxDiff struct {
	Changes []Change `json:"changes"`
	// More reports that the changes exceed one answer. Then Skipped is empty.
	More bool `json:"more,omitempty"`
	// Skipped holds the first fifty items that a commit would omit, with the reason: sockets, names
	// that no layer can hold, and extended attributes of directories. Those of files are not checked
	// here; a commit may omit some of them too.
	Skipped     []string `json:"skipped,omitempty"`
	SkippedMore int64    `json:"skipped_more,omitempty"` // number of further items
}

// CommitSandbox is the body of POST /v1/sandboxes/{id}/commit.
type CommitSandbox struct {
	Reference string `json:"reference"` // of the new image; an existing image loses the name
	// Config overrides how the new image is run; empty fields stay. Env and Labels are merged by
	// name, and Volumes and Ports are added. An Entrypoint without a Cmd removes the image's Cmd, as
	// in a Dockerfile.
	Config  ImageConfig `json:"config,omitzero"`
	Comment string      `json:"comment,omitempty"` // for the image's history
	Author  string      `json:"author,omitempty"`  // of the new image; default the image's
}

// SandboxCommitted is the answer to POST /v1/sandboxes/{id}/commit.
type SandboxCommitted struct {
	Image       Image    `json:"image"`
	Skipped     []string `json:"skipped,omitempty"` // omitted items as in [SandboxDiff], and extended attributes of files
	SkippedMore int64    `json:"skipped_more,omitempty"`
}
