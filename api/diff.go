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
