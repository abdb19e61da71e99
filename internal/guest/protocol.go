package guest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Bounds of the protocol. Both sides hold them, and the host holds init to them.
const (
	// MaxPacket is the size of the largest packet. It stays well below the default send buffer of a
	// socket (net.core.wmem_default, 208 KiB), above which a packet could not be sent at all.
	MaxPacket = 64 << 10
	// MaxArgs bounds argv and env together, in bytes with the NUL of each string: the limit of execve
	// with the usual stack size (ARG_MAX). Strings that exceed a packet travel in a memfd.
	MaxArgs = 2 << 20
	// MaxArg bounds a single string (MAX_ARG_STRLEN of execve).
	MaxArg = 128 << 10
	// MaxPath is PATH_MAX with its NUL.
	MaxPath = 4096
	// MaxLimits bounds the limits of an exec: RLIM_NLIMITS.
	MaxLimits = 16
	// MaxGroups bounds the supplementary groups. The kernel's 65536 would exceed a packet.
	MaxGroups = 1024
	// MaxFDs bounds the descriptors of a packet: the three of an exec and its memfd.
	MaxFDs = 4
	// MaxProcesses bounds the processes of one listing, MaxProcessArgs the bytes of one process's
	// arguments, and MaxListedArgs those of all; later processes have none.
	MaxProcesses   = 4096
	MaxProcessArgs = 4096
	MaxListedArgs  = 1 << 20
	// MaxHeld bounds the descriptors that init looks at for the holder of a socket.
	MaxHeld = 16 << 10
	// MaxConns bounds init's connections. Later ones are refused (EMFILE).
	MaxConns = 1024
	// MaxListDepth bounds the depth of a list: init keeps a descriptor open for every level.
	MaxListDepth = 200
	// MaxBatch bounds the entries or events of one packet, and MaxBatchBytes the bytes of their
	// strings before the last one is added. With both limits and the JSON a packet is three quarters
	// full.
	MaxBatch      = 128
	MaxBatchBytes = 20 << 10
	// MaxWatched bounds the directories that init watches, and MaxWatches its watches at a time.
	MaxWatched = 8192
	MaxWatches = 16
)

// A Kind is the first word of a packet. It determines the struct that follows.
type Kind = string

// Kinds of the daemon. The last four come on a running request, the others open one.
const (
	KindPing   Kind = "ping"
	KindExec   Kind = "exec"    // ExecRequest + cwd, argv…, env… + stdin, stdout, stderr (none with TTY) [+ memfd]
	KindOpen   Kind = "open"    // + path
	KindCreate Kind = "create"  // CreateRequest + path
	KindAppend Kind = "append"  // CreateRequest + path
	KindStat   Kind = "stat"    // StatRequest + path
	KindList   Kind = "list"    // ListRequest + path
	KindMkdir  Kind = "mkdir"   // MkdirRequest + path
	KindMove   Kind = "move"    // MoveRequest + old path, new path
	KindRemove Kind = "remove"  // RemoveRequest + path
	KindWatch  Kind = "watch"   // WatchRequest + path
	KindTarOut Kind = "tar-out" // + path + pipe to write
	KindTarIn  Kind = "tar-in"  // TarInRequest + path + pipe to read

	KindProcesses Kind = "processes"
	KindHolder    Kind = "holder" // HolderRequest
	KindUser      Kind = "user"   // UserRequest + user

	KindSignal Kind = "signal" // SignalRequest; exec only
	KindKill   Kind = "kill"   // exec only
	KindCommit Kind = "commit" // create only
	KindAbort  Kind = "abort"  // create only
)

// Kinds of init.
const (
	KindError    Kind = "error"    // ErrorAnswer + path; always the last packet
	KindPong     Kind = "pong"     // answers ping
	KindStarted  Kind = "started"  // StartedAnswer [+ terminal]; answers exec
	KindExited   Kind = "exited"   // ExitedAnswer; the last packet of an exec
	KindOpened   Kind = "opened"   // + file; answers open and append
	KindCreated  Kind = "created"  // + file; answers create
	KindInfo     Kind = "info"     // InfoAnswer + link target; answers stat
	KindEntries  Kind = "entries"  // EntriesAnswer + name and link target of each; answers list, any number of times
	KindListed   Kind = "listed"   // ListedAnswer; the last packet of a list
	KindWatching Kind = "watching" // answers watch
	KindEvents   Kind = "events"   // EventsAnswer + path and new path of each; any number of times after watching
	KindDone     Kind = "done"     // answers commit, abort, mkdir, move, remove, tar-out and tar-in; the last packet of a watch and of a listing
	KindListing  Kind = "listing"  // answers processes; any number of process follow, and then done
	KindAccount  Kind = "account"  // AccountAnswer + home directory; answers user
	KindProcess  Kind = "process"  // ProcessAnswer + argv…; also answers holder
)

// None is the struct of kinds without fields.
type None struct{}

// ExecRequest asks init to start a process. The daemon sends it with cwd, argv and env. Stdin,
// stdout and stderr travel with it, unless TTY is set; with Memfd one more descriptor follows.
type ExecRequest struct {
	Args int `json:"args"` // number of strings after cwd that are argv; the others are env
	// User is a user for init to find in the sandbox, in the place of UID, GID and Groups: a name or a
	// uid, and perhaps a colon and a group or a gid. Env then gets HOME, unless it has one. NonRoot
	// refuses every user that turns out to be uid 0.
	User    string   `json:"user,omitempty"`
	NonRoot bool     `json:"non_root,omitempty"`
	UID     uint32   `json:"uid"`
	GID     uint32   `json:"gid"`
	Groups  []uint32 `json:"groups,omitempty"`
	TTY     bool     `json:"tty,omitempty"`
	Rows    uint16   `json:"rows,omitempty"`
	Cols    uint16   `json:"cols,omitempty"`
	// Timeout in nanoseconds from the start of the process; zero means none.
	Timeout int64 `json:"timeout,omitempty"`
	MakeCwd bool  `json:"make_cwd,omitempty"` // make missing directories of cwd, owned by the user
	// Resource limits of the program.
	Limits []Rlimit `json:"limits,omitempty"`
	// Whole asks init to report the start with the exit if that comes soon, and else a little later.
	Whole bool `json:"whole,omitempty"`
	// Memfd reports that the last descriptor holds the strings, instead of the packet.
	Memfd bool `json:"memfd,omitempty"`
}

// CreateRequest asks init for a new file, whose descriptor travels with the answer. The ids also
// own the parents that init makes. With append init opens an existing file and ignores the fields.
type CreateRequest struct {
	Mode uint32 `json:"mode"` // permission bits only
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
}

// CommitRequest asks init to rename the created file to its target. The daemon sends it on the
// connection of the create.
type CommitRequest struct {
	New bool `json:"new,omitempty"` // EEXIST if the name is taken by now
}

// UserRequest asks init to find a user in the sandbox's databases. One string travels with it, in
// the form of [ExecRequest.User].
type UserRequest struct {
	NonRoot bool `json:"non_root,omitempty"` // refuse every user that turns out to be uid 0
}

// StatRequest asks init for the attributes of a file of any type, whose path is the only string.
type StatRequest struct {
	Follow bool `json:"follow,omitempty"` // follow a link in the last place too
}

// ListRequest asks init for the entries of a directory, down to Depth levels, [MaxListDepth] at
// most.
type ListRequest struct {
	Depth int `json:"depth"` // 1: entries of the directory itself
}

// MkdirRequest asks init to make a directory with this mode and owner. With Parents init also makes
// the missing directories above it, and accepts a directory that exists.
type MkdirRequest struct {
	Mode    uint32 `json:"mode"` // permission bits only
	UID     uint32 `json:"uid"`
	GID     uint32 `json:"gid"`
	Parents bool   `json:"parents,omitempty"`
}

// MoveRequest asks init to rename a file or a directory. Without Overwrite, an existing target is
// EEXIST.
type MoveRequest struct {
	Overwrite bool `json:"overwrite,omitempty"`
}

// RemoveRequest asks init to remove a file or a directory. Without Recursive, a directory must be
// empty.
type RemoveRequest struct {
	Recursive bool `json:"recursive,omitempty"`
}

// WatchRequest asks init to report the changes of a file or of a directory's entries. With
// Recursive init watches all directories below too, [MaxWatched] at most.
type WatchRequest struct {
	Recursive bool `json:"recursive,omitempty"`
}

// TarInRequest asks init to extract a tar stream. The read end of a pipe travels with it. The ids
// own every file that init makes, whatever the stream says, unless Owners is set: then they own the
// missing parents of entries.
type TarInRequest struct {
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	Owners bool   `json:"owners,omitempty"`
}

// HolderRequest asks init for a process that has a socket.
type HolderRequest struct {
	Socket uint32 `json:"socket"` // inode
}

// SignalRequest asks init to send a signal, from 1 to 64, to a running exec. The daemon sends it on
// the connection of that exec, any number of times.
type SignalRequest struct {
	Signal int  `json:"signal"`
	All    bool `json:"all,omitempty"`  // not the main process's group alone, but everything that the exec has started
	Main   bool `json:"main,omitempty"` // the main process alone, without its group
}

// An Rlimit is a limit of setrlimit(2).
type Rlimit struct {
	Resource int     `json:"resource"`       // RLIMIT_*
	Value    uint64  `json:"value"`          // hard limit
	Soft     *uint64 `json:"soft,omitempty"` // nil: the hard one
}

// ProcessAnswer describes one process of the sandbox. Its arguments travel with it as strings,
// [MaxProcessArgs] bytes at most.
type ProcessAnswer struct {
	PID   int    `json:"pid"`
	PPID  int    `json:"ppid"` // 0: the parent is outside of the sandbox
	UID   uint32 `json:"uid"`
	State string `json:"state"`          // one letter, as in /proc/<pid>/stat
	Age   int64  `json:"age"`            // nanoseconds
	CPU   int64  `json:"cpu"`            // nanoseconds
	RSS   int64  `json:"rss"`            // bytes
	Name  string `json:"name"`           // kernel's name for it, the only one of a program without arguments
	Main  int    `json:"main,omitempty"` // pid of the main process of its exec, if that still runs
	Cut   bool   `json:"cut,omitempty"`  // there are more arguments than follow
}

// AccountAnswer holds the ids of the user that init has found, [MaxGroups] supplementary groups at
// most. They are ids of the sandbox.
type AccountAnswer struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
}

// ErrorAnswer refuses or ends a request: init sends it as the last packet, with the path of the
// failed stage as a string. The host makes an [Error] of it.
type ErrorAnswer struct {
	Stage Stage `json:"stage"`
	Errno int   `json:"errno"`
}

// StartedAnswer holds the pid of an exec's main process, as the sandbox numbers it. With a terminal
// the master's descriptor travels with it.
type StartedAnswer struct {
	PID int `json:"pid"`
}

// ExitedAnswer reports the end of an exec's main process and its use of resources. Either Code or
// Signal is set, or neither after a success.
type ExitedAnswer struct {
	PID     int   `json:"pid,omitempty"` // only if started was not sent
	Code    int   `json:"code,omitempty"`
	Signal  int   `json:"signal,omitempty"`
	Timeout bool  `json:"timeout,omitempty"`
	Wall    int64 `json:"wall"`   // nanoseconds
	CPU     int64 `json:"cpu"`    // nanoseconds, with waited-for children
	MaxRSS  int64 `json:"maxrss"` // bytes
}

// InfoAnswer holds the attributes of a file, with the owner's ids as the sandbox numbers them. The
// target of a link travels with it as a string, empty for all other files.
type InfoAnswer struct {
	Size  int64  `json:"size"`  // bytes
	Mode  uint32 `json:"mode"`  // st_mode
	MTime int64  `json:"mtime"` // seconds since 1970
	NSec  int64  `json:"nsec"`  // nanoseconds of MTime, below 1e9
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
}

// EntriesAnswer has at least one entry, except in the first packet. Two strings come with each: its
// path relative to the listed directory, and its target if it is a link.
type EntriesAnswer struct {
	List []EntryAnswer `json:"list,omitempty"`
}

// EntryAnswer holds the attributes of one entry of a list. Its path and the target of a link travel
// beside the JSON of [EntriesAnswer].
type EntryAnswer struct {
	InfoAnswer

	Errno int `json:"errno,omitempty"` // the reason why a directory could not be read
}

// ListedAnswer ends a list. Init sends it after all entries.
type ListedAnswer struct {
	More bool `json:"more,omitempty"` // too deep, or too long a path, was left out without an entry
}

// EventsAnswer has at least one event. Two strings come with each: its path relative to the watched
// one, empty for that itself, and the new path of a move.
type EventsAnswer struct {
	List []EventAnswer `json:"list"`
}

// EventAnswer describes one change that a watch has seen. Its paths travel beside the JSON of
// [EventsAnswer].
type EventAnswer struct {
	Kind ChangeKind `json:"kind"`
	Dir  bool       `json:"dir,omitempty"` // the path is a directory
}

// A ChangeKind is the kind of an event of a watch.
type ChangeKind string

// Kinds of changes.
const (
	ChangeCreated    ChangeKind = "created"    // also: moved here from outside of the watched directory
	ChangeModified   ChangeKind = "modified"   // the content
	ChangeAttributes ChangeKind = "attributes" // mode, owner, times
	ChangeDeleted    ChangeKind = "deleted"    // also: moved away
	ChangeMoved      ChangeKind = "moved"
	ChangeOverflow   ChangeKind = "overflow" // events at or below the path were missed
)

// ValidChange reports whether k is one of the kinds above. The host asks before it trusts init.
func ValidChange(k ChangeKind) bool {
	switch k {
	case ChangeCreated, ChangeModified, ChangeAttributes, ChangeDeleted, ChangeMoved, ChangeOverflow:
		return true
	}
	return false
}

// A Stage is the step of a request that failed inside the sandbox.
type Stage string

// Stages of an [Error].
const (
	StageRequest Stage = "request" // validating the request
	// StageUser is finding the user. The path is that of a database that cannot be read, and else the
	// user. Then the errno is ESRCH if there is no such user, ENOENT if there is no such group, ERANGE
	// if an id is beyond 65535, E2BIG if the user is in more than MaxGroups groups, EPERM if it is
	// root and must not be, and EINVAL if it is malformed.
	StageUser    Stage = "user"
	StageLookup  Stage = "lookup"  // finding the program
	StageCwd     Stage = "cwd"     // entering the working directory
	StageTTY     Stage = "tty"     // making the terminal
	StageLimit   Stage = "limit"   // setting the limits; the path is the resource's number
	StageStart   Stage = "start"   // becoming the user, executing the program
	StageOpen    Stage = "open"    // finding, opening or making a file
	StageType    Stage = "type"    // the file is a FIFO, device or socket, or lies in /proc
	StageStat    Stage = "stat"    // asking for a file's attributes
	StageRead    Stage = "read"    // reading a file or a directory
	StageWrite   Stage = "write"   // writing a file or making its parents
	StageCommit  Stage = "commit"  // putting a written file in its place
	StageMove    Stage = "move"    // renaming
	StageRemove  Stage = "remove"  // removing a file or a tree
	StageWatch   Stage = "watch"   // setting up a watch
	StageArchive Stage = "archive" // reading a malformed tar stream, or one with forbidden names
)

// An Error is init's refusal of a request. The sandbox itself is well.
type Error struct {
	Stage Stage
	Errno syscall.Errno
	Path  string // object of the stage, in the sandbox's terms; any bytes
}

// ErrNotRegular matches the refusal of a FIFO, a device, a socket or a file of /proc.
var ErrNotRegular = errors.New("not a regular file")

func (e *Error) Error() string {
	what := e.Errno.Error()
	if e.Stage == StageType {
		what = ErrNotRegular.Error()
	}
	if e.Path == "" {
		return string(e.Stage) + ": " + what
	}
	return string(e.Stage) + " " + strconv.Quote(e.Path) + ": " + what
}

// Unwrap returns the errno, so that errors.Is(err, fs.ErrNotExist) and the like work.
func (e *Error) Unwrap() error { return e.Errno }

// Is makes errors.Is(err, ErrNotRegular) work.
func (e *Error) Is(target error) bool { return target == ErrNotRegular && e.Stage == StageType }

// ValidStage reports whether s is one of the stages above. The host asks before it trusts init.
func ValidStage(s Stage) bool {
	switch s {
	case StageRequest, StageUser, StageLookup, StageCwd, StageTTY, StageLimit, StageStart, StageOpen, StageType, StageStat, StageRead,
		StageWrite, StageCommit, StageMove, StageRemove, StageWatch, StageArchive:
		return true
	}
	return false
}

var errNUL = errors.New("string with a NUL byte")

// Encode makes a packet: the kind, a space, the message as JSON and then the strings, each after a
// NUL. They travel beside the JSON because paths, arguments and environments are bytes, and JSON
// would replace those that are not UTF-8. encoding/json never writes a NUL.
func Encode(k Kind, msg any, strs ...string) ([]byte, error) {
	body, err := json.Marshal(msg)
	if err != nil {
		return nil, err
	}
	size := len(k) + 1 + len(body)
	for _, s := range strs {
		size += 1 + len(s)
	}
	p := make([]byte, 0, size)
	p = append(p, k...)
	p = append(p, ' ')
	p = append(p, body...)
	for _, s := range strs {
		if strings.IndexByte(s, 0) >= 0 {
			return nil, errNUL
		}
		p = append(p, 0)
		p = append(p, s...)
	}
	return p, nil
}

// A Packet is a received message whose JSON is still to be read. It does not refer to the receive
// buffer.
type Packet struct {
	Kind Kind
	body []byte
	Strs []string
}

// Decode splits a packet. It keeps nothing of p.
func Decode(p []byte) (pkt Packet, err error) {
	err = pkt.decode(p)
	return pkt, err
}

func (p *Packet) decode(data []byte) error {
	head, tail, more := bytes.Cut(data, []byte{0})
	k, body, ok := bytes.Cut(head, []byte{' '})
	if !ok || len(k) == 0 || len(k) > 16 {
		return errors.New("packet without a kind")
	}
	*p = Packet{Kind: string(k), body: bytes.Clone(body)}
	if more {
		p.Strs = strings.Split(string(tail), "\x00")
	}
	return nil
}

// Into decodes the packet's JSON strictly, and checks that exactly n strings came with it; any
// number if n < 0.
func (p Packet) Into(msg any, n int) error {
	dec := json.NewDecoder(bytes.NewReader(p.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(msg); err != nil {
		return fmt.Errorf("read %s: %w", strconv.Quote(p.Kind), err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: something follows the message", strconv.Quote(p.Kind))
	}
	if n >= 0 && len(p.Strs) != n {
		return fmt.Errorf("read %s: %d strings, want %d", strconv.Quote(p.Kind), len(p.Strs), n)
	}
	return nil
}

// SplitStrings reverses [JoinStrings].
func SplitStrings(b []byte) []string { return strings.Split(string(b), "\x00") }

// JoinStrings encodes an exec's strings for a memfd: as in a packet, without the leading NUL.
func JoinStrings(strs []string) []byte { return []byte(strings.Join(strs, "\x00")) }

// WholeWait is the time for which init delays the report of a start, so as to send it with the
// exit. It exceeds the run time of small programs, and a reader of a large output does not notice
// it.
const WholeWait = 3 * time.Millisecond
