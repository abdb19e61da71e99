package api

import "time"

// FileType says what a path of a sandbox names.
type FileType string

// The types of files. Only regular files have content that can be read or written by a path.
const (
	TypeFile      FileType = "file"
	TypeDirectory FileType = "directory"
	TypeSymlink   FileType = "symlink"
	TypeFIFO      FileType = "fifo"
	TypeSocket    FileType = "socket"
	TypeBlock     FileType = "block"
	TypeChar      FileType = "char"
)

// FileEntry is one file of a sandbox: the answer to GET /v1/sandboxes/{id}/stat, and a part of a list. All of it is the
// sandbox's word, names above all: print them with care.
type FileEntry struct {
	Path string `json:"path"` // absolute; bytes that are no UTF-8 are replaced
	// PathBytes is set only where Path loses something. A query takes such a path percent-encoded, a body in its field of bytes.
	PathBytes   []byte    `json:"path_bytes,omitempty"`
	Type        FileType  `json:"type"`
	Size        int64     `json:"size"`
	Mode        string    `json:"mode"` // octal, four digits: "0644", with setuid, setgid and sticky in the first
	MTime       time.Time `json:"mtime"`
	UID         uint32    `json:"uid"` // in the sandbox's numbers
	GID         uint32    `json:"gid"`
	User        string    `json:"user,omitempty"` // by the sandbox's own /etc/passwd, where that has the uid
	Group       string    `json:"group,omitempty"`
	Target      string    `json:"target,omitempty"` // of a symlink, as it says
	TargetBytes []byte    `json:"target_bytes,omitempty"`
	// Error is why what is in this directory is missing from a list that should have it.
	Error string `json:"error,omitempty"`
}

// FileList is the buffered answer to GET /v1/sandboxes/{id}/list, by path. More says that something is missing: there were
// too many entries for one answer (what is left out is then arbitrary), too deep or too long a path.
type FileList struct {
	Entries []FileEntry `json:"entries"`
	More    bool        `json:"more,omitempty"`
}

// ListEvent is one line of the streaming answer, which comes in no order but that directories precede what is in them. The
// last line has Done or Error set.
type ListEvent struct {
	Entry *FileEntry `json:"entry,omitempty"`
	Done  bool       `json:"done,omitempty"`
	More  bool       `json:"more,omitempty"` // with done, as in [FileList]
	Error *Problem   `json:"error,omitempty"`
}

// MakeDirectory is the body of POST /v1/sandboxes/{id}/mkdir.
type MakeDirectory struct {
	Path      string `json:"path,omitempty"`       // absolute
	PathBytes []byte `json:"path_bytes,omitempty"` // instead of path
	// Parents makes missing parents too, with mode 0755 and the same owner, and it is no error then if the directory exists.
	Parents bool   `json:"parents,omitempty"`
	Mode    string `json:"mode,omitempty"` // octal; default 0755
	User    string `json:"user,omitempty"` // owner, as in [CreateSandbox]; default: the sandbox's user
}

// MoveFile is the body of POST /v1/sandboxes/{id}/move. Of either path each of two fields can be given.
type MoveFile struct {
	From      string `json:"from,omitempty"` // absolute; a link is moved itself
	FromBytes []byte `json:"from_bytes,omitempty"`
	To        string `json:"to,omitempty"` // the new path, not a directory to move into
	ToBytes   []byte `json:"to_bytes,omitempty"`
	// Overwrite replaces what is there, at once: a file by a file, an empty directory by a directory.
	Overwrite bool `json:"overwrite,omitempty"`
}

// FileChangeKind is what has happened to a file.
type FileChangeKind string

// The kinds of changes that a watch tells of.
const (
	WatchReady     FileChangeKind = "ready"      // the first line: changes are told from now on
	FileCreated    FileChangeKind = "created"    // also: moved here from outside of what is watched
	FileModified   FileChangeKind = "modified"   // written to, or cut; writing through a mapping is not told
	FileAttributes FileChangeKind = "attributes" // mode, owner or times
	FileDeleted    FileChangeKind = "deleted"    // also: moved out of what is watched
	FileMoved      FileChangeKind = "moved"      // within what is watched: from and to
	WatchOverflow  FileChangeKind = "overflow"   // something was missed at or below path: list it anew
)

// FileChange is one line of the answer to GET /v1/sandboxes/{id}/watch. After the deletion of the watched path itself the
// answer ends; otherwise it ends with Error, or with its client.
//
// A change may be told twice, and changes that follow each other quickly as one. Something that appears in a new directory is
// told at least once.
type FileChange struct {
	Kind      FileChangeKind `json:"kind,omitempty"`
	Path      string         `json:"path,omitempty"` // absolute, below the path that was asked for; not of a move
	PathBytes []byte         `json:"path_bytes,omitempty"`
	From      string         `json:"from,omitempty"` // of a move
	FromBytes []byte         `json:"from_bytes,omitempty"`
	To        string         `json:"to,omitempty"`
	ToBytes   []byte         `json:"to_bytes,omitempty"`
	Type      FileType       `json:"type,omitempty"` // directory, or nothing
	Error     *Problem       `json:"error,omitempty"`
}
