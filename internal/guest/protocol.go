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

// The bounds of the protocol. Both sides hold them, and the host holds init to them.
const (
	// maxPacket is the largest packet either side sends or accepts. It stays well below the default send buffer of a
	// socket (net.core.wmem_default, 208 KiB), above which a packet could not be sent at all.
	MaxPacket = 64 << 10
	// maxArgs is how many bytes argv and env may have together, each string with its NUL: what the kernel's execve takes
	// with the usual stack limit (ARG_MAX). What does not fit into a packet travels in a memfd.
	MaxArgs = 2 << 20
	// maxArg is the longest single string that execve takes (MAX_ARG_STRLEN).
	MaxArg = 128 << 10
	// maxPath is PATH_MAX with its NUL.
	MaxPath = 4096
	// maxLimits bounds the limits of an exec: RLIM_NLIMITS.
	MaxLimits = 16
	// maxGroups bounds the supplementary groups. The kernel takes 65536, which would not fit into a packet.
	MaxGroups = 1024
	// maxFDs is how many descriptors one packet carries at most: the three of an exec and its memfd.
	MaxFDs = 4
	// maxProcesses is how many processes one answer tells of, maxProcessArgs how many bytes of a process's arguments, and
	// maxListedArgs how many of all: what comes after has none.
	MaxProcesses   = 4096
	MaxProcessArgs = 4096
	MaxListedArgs  = 1 << 20
	// maxConns is how many connections init serves at a time. Later ones are refused (EMFILE).
	MaxConns = 1024
	// maxListDepth is how deep a list goes: a descriptor of init is open for every level.
	MaxListDepth = 200
	// maxBatch is how many entries or events one packet has at most, and maxBatchBytes how many bytes their strings may have
	// had before the last one was added: with those and the JSON a packet is full to three quarters.
	MaxBatch      = 128
	MaxBatchBytes = 20 << 10
	// maxWatched is how many directories init watches, and maxWatches how many watches it keeps at a time.
	MaxWatched = 8192
	MaxWatches = 16
)

// A kind is the first word of a packet and says which struct follows.
type Kind = string

// The daemon's kinds; all but the last four open a request, those come on a running one.
const (
	KindPing   Kind = "ping"
	KindExec   Kind = "exec"    // execRequest + cwd, argv…, env… + stdin, stdout, stderr (none with TTY) [+ memfd]
	KindOpen   Kind = "open"    // + path
	KindCreate Kind = "create"  // createRequest + path
	KindAppend Kind = "append"  // createRequest + path
	KindStat   Kind = "stat"    // statRequest + path
	KindList   Kind = "list"    // listRequest + path
	KindMkdir  Kind = "mkdir"   // mkdirRequest + path
	KindMove   Kind = "move"    // moveRequest + old path, new path
	KindRemove Kind = "remove"  // removeRequest + path
	KindWatch  Kind = "watch"   // watchRequest + path
	KindTarOut Kind = "tar-out" // + path + pipe to write
	KindTarIn  Kind = "tar-in"  // tarInRequest + path + pipe to read

	KindProcesses Kind = "processes"

	KindSignal Kind = "signal" // signalRequest; exec only
	KindKill   Kind = "kill"   // exec only
	KindCommit Kind = "commit" // create only
	KindAbort  Kind = "abort"  // create only
)

// Init's kinds.
const (
	KindError    Kind = "error"    // errorAnswer + path; always the last packet
	KindPong     Kind = "pong"     // answers ping
	KindStarted  Kind = "started"  // startedAnswer [+ terminal]; answers exec
	KindExited   Kind = "exited"   // exitedAnswer; the last packet of an exec
	KindOpened   Kind = "opened"   // + file; answers open and append
	KindCreated  Kind = "created"  // + file; answers create
	KindInfo     Kind = "info"     // infoAnswer + link target; answers stat
	KindEntries  Kind = "entries"  // entriesAnswer + name and link target of each; answers list, any number of times
	KindListed   Kind = "listed"   // listedAnswer; the last packet of a list
	KindWatching Kind = "watching" // answers watch
	KindEvents   Kind = "events"   // eventsAnswer + path and new path of each; any number of times after watching
	KindDone     Kind = "done"     // answers commit, abort, mkdir, move, remove, tar-out and tar-in; the last packet of a watch and of a listing
	KindListing  Kind = "listing"  // answers processes; any number of process follow, and then done
	KindProcess  Kind = "process"  // processAnswer + argv…
)

// none is the struct of the kinds that have nothing to say.
type None struct{}

type ExecRequest struct {
	Args   int      `json:"args"` // how many of the strings after cwd are argv; the others are env
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
	TTY    bool     `json:"tty,omitempty"`
	Rows   uint16   `json:"rows,omitempty"`
	Cols   uint16   `json:"cols,omitempty"`
	// Timeout in nanoseconds from the start of the process; 0 is none.
	Timeout int64 `json:"timeout,omitempty"`
	MakeCwd bool  `json:"make_cwd,omitempty"` // what is missing of cwd is made, and belongs to the user
	// Limits are set before the program is executed.
	Limits []Rlimit `json:"limits,omitempty"`
	// Whole says that nobody waits for started: it may come a little later, and not at all before an exited that has the pid.
	Whole bool `json:"whole,omitempty"`
	// Memfd says that the strings do not follow: the last descriptor holds them.
	Memfd bool `json:"memfd,omitempty"`
}

type CreateRequest struct {
	Mode uint32 `json:"mode"` // permission bits only
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
}

type CommitRequest struct {
	New bool `json:"new,omitempty"` // EEXIST where something has the name by now
}

type StatRequest struct {
	Follow bool `json:"follow,omitempty"` // a link in the last place too
}

type ListRequest struct {
	Depth int `json:"depth"` // 1: what is in the directory itself
}

type MkdirRequest struct {
	Mode    uint32 `json:"mode"` // permission bits only
	UID     uint32 `json:"uid"`
	GID     uint32 `json:"gid"`
	Parents bool   `json:"parents,omitempty"`
}

type MoveRequest struct {
	Overwrite bool `json:"overwrite,omitempty"`
}

type RemoveRequest struct {
	Recursive bool `json:"recursive,omitempty"`
}

type WatchRequest struct {
	Recursive bool `json:"recursive,omitempty"`
}

type TarInRequest struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

type SignalRequest struct {
	Signal int  `json:"signal"`
	All    bool `json:"all,omitempty"` // not only the main process's group: all that the exec has started
}

// An Rlimit is a limit of setrlimit(2), soft and hard at once.
type Rlimit struct {
	Resource int    `json:"resource"` // RLIMIT_*
	Value    uint64 `json:"value"`
}

type ProcessAnswer struct {
	PID   int    `json:"pid"`
	PPID  int    `json:"ppid"` // 0: its parent is outside of the sandbox
	UID   uint32 `json:"uid"`
	State string `json:"state"`          // one letter, as in /proc/<pid>/stat
	Age   int64  `json:"age"`            // nanoseconds
	CPU   int64  `json:"cpu"`            // nanoseconds
	RSS   int64  `json:"rss"`            // bytes
	Name  string `json:"name"`           // what the kernel calls it: of a program without arguments all there is
	Main  int    `json:"main,omitempty"` // pid of the main process of the exec that it comes from, if that still runs
	Cut   bool   `json:"cut,omitempty"`  // it has more arguments than follow
}

type ErrorAnswer struct {
	Stage Stage `json:"stage"`
	Errno int   `json:"errno"`
}

type StartedAnswer struct {
	PID int `json:"pid"`
}

type ExitedAnswer struct {
	PID     int   `json:"pid,omitempty"` // where started was not sent, and only there
	Code    int   `json:"code,omitempty"`
	Signal  int   `json:"signal,omitempty"`
	Timeout bool  `json:"timeout,omitempty"`
	Wall    int64 `json:"wall"`   // nanoseconds
	CPU     int64 `json:"cpu"`    // nanoseconds, with waited-for children
	MaxRSS  int64 `json:"maxrss"` // bytes
}

type InfoAnswer struct {
	Size  int64  `json:"size"`
	Mode  uint32 `json:"mode"` // st_mode as it is
	MTime int64  `json:"mtime"`
	NSec  int64  `json:"nsec"`
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
}

// entriesAnswer has at least one entry but in the first packet. Each comes with two strings: its path below the directory that
// is listed, and what it says if it is a link.
type EntriesAnswer struct {
	List []EntryAnswer `json:"list,omitempty"`
}

type EntryAnswer struct {
	InfoAnswer

	Errno int `json:"errno,omitempty"` // why a directory was to be read, and could not
}

type ListedAnswer struct {
	More bool `json:"more,omitempty"` // something was left out that no entry tells of: too deep, or too long a path
}

// eventsAnswer has at least one event. Each comes with two strings: a path below the one that is watched, empty for that one
// itself, and for a move the new one.
type EventsAnswer struct {
	List []EventAnswer `json:"list"`
}

type EventAnswer struct {
	Kind ChangeKind `json:"kind"`
	Dir  bool       `json:"dir,omitempty"`
}

// A ChangeKind is what a watch tells of.
type ChangeKind string

// The kinds of changes.
const (
	ChangeCreated    ChangeKind = "created"    // also: moved here from outside of what is watched
	ChangeModified   ChangeKind = "modified"   // the content
	ChangeAttributes ChangeKind = "attributes" // mode, owner, times
	ChangeDeleted    ChangeKind = "deleted"    // also: moved away
	ChangeMoved      ChangeKind = "moved"
	ChangeOverflow   ChangeKind = "overflow" // something was missed at or below the path
)

func ValidChange(k ChangeKind) bool {
	switch k {
	case ChangeCreated, ChangeModified, ChangeAttributes, ChangeDeleted, ChangeMoved, ChangeOverflow:
		return true
	}
	return false
}

// A Stage is the step of a request that went wrong inside the sandbox.
type Stage string

// The stages of an [Error].
const (
	StageRequest Stage = "request" // the request itself cannot be served as it stands
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
	StageArchive Stage = "archive" // the tar stream is malformed, or names what must not be
)

// An Error is init's refusal of a request: the request was understood, and the sandbox is well.
type Error struct {
	Stage Stage
	Errno syscall.Errno
	Path  string // what the stage was about, as the sandbox names it; may hold any byte
}

// ErrNotRegular is what errors.Is finds in the refusal of a FIFO, a device, a socket or a file of /proc.
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

// Unwrap gives the errno, so that errors.Is(err, fs.ErrNotExist) and the like work.
func (e *Error) Unwrap() error { return e.Errno }

// Is makes errors.Is(err, ErrNotRegular) work.
func (e *Error) Is(target error) bool { return target == ErrNotRegular && e.Stage == StageType }

func ValidStage(s Stage) bool {
	switch s {
	case StageRequest, StageLookup, StageCwd, StageTTY, StageLimit, StageStart, StageOpen, StageType, StageStat, StageRead,
		StageWrite, StageCommit, StageMove, StageRemove, StageWatch, StageArchive:
		return true
	}
	return false
}

var errNUL = errors.New("string with a NUL byte")

// encode makes a packet: the kind, a space, the message as JSON and then, each between a NUL and the next, the strings.
// They travel beside the JSON because paths, arguments and environments are bytes, and JSON would replace those that
// are not UTF-8. encoding/json never writes a NUL.
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

// A packet is a received message whose JSON has not been read yet. It does not refer to the receive buffer.
type Packet struct {
	Kind Kind
	body []byte
	Strs []string
}

// Decode splits a packet. Nothing of p is kept.
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

// into reads the packet's JSON, strictly, and checks that exactly n strings came with it (any number if n < 0).
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

// splitStrings reads what joinStrings wrote.
func SplitStrings(b []byte) []string { return strings.Split(string(b), "\x00") }

// joinStrings is the form of an exec's strings in a memfd: as in a packet, without the leading NUL.
func JoinStrings(strs []string) []byte { return []byte(strings.Join(strs, "\x00")) }

// wholeFor is how long init waits for the end of a process whose start nobody waits for, before it tells that all the same: more
// than small programs take, and less than whoever reads a large output notices.
const WholeWait = 3 * time.Millisecond
