package api

import "time"

// FileType is the type of a file.
type FileType string

// Types of files. Only regular files have content that can be read or written by a path.
const (
	TypeFile      FileType = "file"
	TypeDirectory FileType = "directory"
	TypeSymlink   FileType = "symlink"
	TypeFIFO      FileType = "fifo"
	TypeSocket    FileType = "socket"
	TypeBlock     FileType = "block"
	TypeChar      FileType = "char"
)

// FileEntry describes one file of a sandbox: the answer to GET /v1/sandboxes/{id}/stat, and an
// element of lists. The sandbox controls all of it, names above all: sanitise it before printing.
type FileEntry struct {
	Path string `json:"path"` // absolute; invalid UTF-8 is replaced
	// PathBytes is set only if Path is not exact. A query takes such a path percent-encoded, a body
	// in its field of bytes.
	PathBytes   []byte    `json:"path_bytes,omitempty"`
	Type        FileType  `json:"type"`
	Size        int64     `json:"size"`
	Mode        string    `json:"mode"` // octal, four digits: "0644"; the first holds setuid, setgid and sticky
	MTime       time.Time `json:"mtime"`
	UID         uint32    `json:"uid"` // inside the sandbox
	GID         uint32    `json:"gid"`
	User        string    `json:"user,omitempty"` // from the sandbox's /etc/passwd, if listed there
	Group       string    `json:"group,omitempty"`
	Target      string    `json:"target,omitempty"` // of a symlink, unresolved
	TargetBytes []byte    `json:"target_bytes,omitempty"`
	// Error is the reason why a list lacks the content of this directory.
	Error string `json:"error,omitempty"`
}

// FileList is the buffered answer to GET /v1/sandboxes/{id}/list, sorted by path. More reports
// missing entries: the answer was full, and its selection is then arbitrary, or a path was too deep
// or too long.
type FileList struct {
	Entries []FileEntry `json:"entries"`
	More    bool        `json:"more,omitempty"`
}

// ListEvent is one line of the streaming answer. A directory precedes its entries; the order is
// otherwise arbitrary. The last line has Done or Error.
type ListEvent struct {
	Entry *FileEntry `json:"entry,omitempty"`
	Done  bool       `json:"done,omitempty"`
	More  bool       `json:"more,omitempty"` // with done, as in [FileList]
	Error *Problem   `json:"error,omitempty"`
}

// MakeDirectory is the body of POST /v1/sandboxes/{id}/mkdir.
type MakeDirectory struct {
	Path      string `json:"path,omitempty"`       // absolute
	PathBytes []byte `json:"path_bytes,omitempty"` // replaces path
	// Parents also creates missing parents, with mode 0755 and the same owner, and accepts an
	// existing directory.
	Parents bool   `json:"parents,omitempty"`
	Mode    string `json:"mode,omitempty"` // octal; default 0755
	User    string `json:"user,omitempty"` // owner, as in [CreateSandbox]; default: the sandbox's user
}

// MoveFile is the body of POST /v1/sandboxes/{id}/move. Each path is given as text or as bytes.
type MoveFile struct {
	From      string `json:"from,omitempty"` // absolute; a link itself is moved
	FromBytes []byte `json:"from_bytes,omitempty"`
	To        string `json:"to,omitempty"` // the new path, not a directory to move into
	ToBytes   []byte `json:"to_bytes,omitempty"`
	// Overwrite atomically replaces an existing target: a file by a file, an empty directory by a
	// directory.
	Overwrite bool `json:"overwrite,omitempty"`
}

// FileChangeKind is the kind of a change to a file.
type FileChangeKind string

// Kinds of events of a watch.
const (
	WatchReady     FileChangeKind = "ready"      // the first line: later changes are reported
	FileCreated    FileChangeKind = "created"    // also a move into the watched tree
	FileModified   FileChangeKind = "modified"   // written or truncated; writes through a memory mapping are not reported
	FileAttributes FileChangeKind = "attributes" // mode, owner or times
	FileDeleted    FileChangeKind = "deleted"    // also a move out of the watched tree
	FileMoved      FileChangeKind = "moved"      // within the watched tree: from and to
	WatchOverflow  FileChangeKind = "overflow"   // changes were missed at or below path: list it again
)

// FileChange is one line of the answer to GET /v1/sandboxes/{id}/watch. The answer ends when the
// watched path itself is deleted, with Error, or with its client.
//
// A change may be reported twice, and quick successive changes as one. A file that appears in a new
// directory is reported at least once.
type FileChange struct {
	Kind      FileChangeKind `json:"kind,omitempty"`
	Path      string         `json:"path,omitempty"` // absolute, below the watched path; absent for a move
	PathBytes []byte         `json:"path_bytes,omitempty"`
	From      string         `json:"from,omitempty"` // of a move
	FromBytes []byte         `json:"from_bytes,omitempty"`
	To        string         `json:"to,omitempty"`
	ToBytes   []byte         `json:"to_bytes,omitempty"`
	Type      FileType       `json:"type,omitempty"` // directory, or absent
	Error     *Problem       `json:"error,omitempty"`
}
