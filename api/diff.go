package api

// ChangeKind says how a file of a sandbox differs from its image's.
type ChangeKind string

// The kinds of changes.
const (
	Added   ChangeKind = "added"
	Changed ChangeKind = "changed" // content, owner, mode, times, or what a directory has
	Deleted ChangeKind = "deleted" // with everything below it, which is not listed
)

// Change is one difference between a sandbox's file system and its image.
type Change struct {
	Path string     `json:"path"` // absolute; bytes that are no UTF-8 are replaced
	Kind ChangeKind `json:"kind"`
	Type string     `json:"type"`           // file, directory, symlink or fifo; of what is there now, or was
	Size int64      `json:"size,omitempty"` // bytes of a file's content
}

// SandboxDiff is the answer to GET /v1/sandboxes/{id}/diff.
type SandboxDiff struct {
	Changes []Change `json:"changes"`
	// More says that there are more changes than one answer holds. Then nothing is told of what is skipped.
	More bool `json:"more,omitempty"`
	// Skipped is what a commit would leave out, and why, the first fifty: sockets, names that no layer can have, extended
	// attributes of directories. Those of files are not looked at here, and a commit may leave out some of them too.
	Skipped     []string `json:"skipped,omitempty"`
	SkippedMore int64    `json:"skipped_more,omitempty"` // how many others there are
}

// CommitSandbox is the body of POST /v1/sandboxes/{id}/commit.
type CommitSandbox struct {
	Reference string `json:"reference"` // of the new image; an image that has this name loses it
	// Config changes how the new image is run; what is empty stays as it is. Env and Labels are added to what there is, one
	// name after the other. An Entrypoint without a Cmd takes away the Cmd that there was, as it does in a Dockerfile.
	Config  ImageConfig `json:"config,omitzero"`
	Comment string      `json:"comment,omitempty"` // for the image's history
}

// SandboxCommitted is the answer to it.
type SandboxCommitted struct {
	Image       Image    `json:"image"`
	Skipped     []string `json:"skipped,omitempty"` // what was left out, as in [SandboxDiff], and extended attributes of files
	SkippedMore int64    `json:"skipped_more,omitempty"`
}
