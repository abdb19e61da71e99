// Package layer turns one layer of an image, a compressed tar stream, into a directory that overlayfs can stack, and what
// an overlay has changed into a layer.
//
// # Theory of operation
//
// A layer is the most hostile input that we read: its author chooses every name, link, mode and length in it. Four
// rules keep it where it belongs.
//
//   - Everything happens below one descriptor. Names are cut into components, each is opened relative to the directory
//     before it and never through a symbolic link; or a directory is opened in one call that the kernel refuses where a
//     link, a ".." or a mount is on the way. No other system call gets a name with a slash in it. There is no path to
//     confuse and nothing to race for. The layers below are only looked at; they are complete and do not change.
//   - Symbolic links are stored as they are. Where an entry lies below one that the same layer made, the link is
//     followed by us, component by component, as if the layer's root were "/": absolute targets start there, ".."
//     stops there. umoci and containerd do the same.
//   - What would make the kernel, or another program, do something that the layer's author chose is left out: device
//     nodes, file capabilities, ACLs and every other xattr outside user.*, and user.overlay.* because those are
//     overlayfs' own orders. What was left out is listed in the [Result].
//   - Numbers are bounded: entries, bytes, how much the stream may grow, lengths and depth.
//
// Whiteouts become what overlayfs reads: character devices 0:0, which need no privilege since Linux 5.8, and the xattr
// user.overlay.opaque on directories, which the mount option userxattr makes it look at. Both mean something in
// directories that are merged, so the layers below are looked at.
//
// The package has few dependencies, because the launcher links it and is executed anew at every start of a sandbox.
// It does not sync: whoever moves the finished directory into place does, once, for the whole file system.
package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
)

// ErrInvalid is the class of errors that the layer itself is to blame for: it is damaged, not what it should be, or asks
// for something that it must not have. Trying again cannot help. Errors of any other class are this host's: disk
// full, permission, a read error.
var ErrInvalid = errors.New("layer is invalid")

// invalid is an error of the class [ErrInvalid] without the class's words in its message.
type invalid struct{ err error }

func (e *invalid) Error() string   { return e.err.Error() }
func (e *invalid) Unwrap() []error { return []error{ErrInvalid, e.err} }

func invalidf(format string, args ...any) error {
	return &invalid{fmt.Errorf(format, args...)}
}

// Exceeded is the class of errors about a limit that can be set, within [ErrInvalid]. Its value is the limit's name.
type Exceeded string

// The limits that can be set.
const (
	ExceededEntries Exceeded = "entries"
	ExceededBytes   Exceeded = "bytes"
	ExceededRatio   Exceeded = "ratio"
	ExceededDepth   Exceeded = "depth"
)

func (e Exceeded) Error() string { return "the limit of " + string(e) + " is exceeded" }

// Is makes it one of the class [ErrInvalid].
func (e Exceeded) Is(target error) bool { return target == ErrInvalid }

// exceeded is an error of the class of that limit without the class's words in its message.
type exceeded struct {
	limit Exceeded
	err   error
}

func (e *exceeded) Error() string   { return e.err.Error() }
func (e *exceeded) Unwrap() []error { return []error{e.limit, e.err} }

// Errorf is an error of the class.
func (e Exceeded) Errorf(format string, args ...any) error {
	return &exceeded{e, fmt.Errorf(format, args...)}
}

// Usage is what layers have of the limits that all layers of an image share.
type Usage struct {
	Entries int64 `json:"entries,omitempty"` // as [Limits] counts them
	Bytes   int64 `json:"bytes,omitempty"`   // of file contents
}

// with says that the layers below count, where there are any.
func (u Usage) with() string {
	if u == (Usage{}) {
		return ""
	}
	return ", together with the layers below it"
}

// Add is the usage of both.
func (u Usage) Add(o Usage) Usage { return Usage{u.Entries + o.Entries, u.Bytes + o.Bytes} }

// Limits bound what an image may ask for. A zero field means the one of [DefaultLimits].
type Limits struct {
	// Entries are headers in the streams, and directories that none of them describes; of all layers together.
	Entries int64 `json:"entries,omitempty"`
	// Bytes are those of all file contents (sparse files count in full, but for what a snapshot leaves out of them), of all layers together; and no uncompressed stream has
	// more.
	Bytes int64 `json:"bytes,omitempty"`
	// Below is what the layers below one have of these two.
	Below Usage `json:"below,omitzero"`
	// Ratio is how many bytes may come out for each compressed byte that went in. It counts once RatioFloor bytes
	// have come out, as small layers may be mostly padding.
	Ratio      int64 `json:"ratio,omitempty"`
	RatioFloor int64 `json:"ratio_floor,omitempty"`
	Depth      int   `json:"depth,omitempty"` // components of a path, after following links
	Name       int   `json:"name,omitempty"`  // bytes of one component
}

// DefaultLimits are far above what images in use have: the largest layers are models and toolchains of some ten GB
// with some hundred thousand files.
func DefaultLimits() Limits {
	return Limits{
		Entries:    2_000_000,
		Bytes:      64 << 30,
		Ratio:      200,
		RatioFloor: 256 << 20,
		Depth:      128,
		Name:       255, // NAME_MAX
	}
}

// AnyRatio are the same limits for streams that are not to be judged by how well they are compressed: layers that are our own
// work.
func (l Limits) AnyRatio() Limits {
	l.Ratio = math.MaxInt64
	return l.WithDefaults()
}

// NoLimits are for streams that have been unpacked before, within limits that may have been others.
func NoLimits() Limits {
	return Limits{Entries: math.MaxInt64, Bytes: math.MaxInt64, Ratio: math.MaxInt64, Depth: MaxDepth}.WithDefaults()
}

// MaxDepth is the largest [Limits.Depth] that means something: no more components fit into a path.
const MaxDepth = (maxPath + 1) / 2

// Check holds what all layers of an image have together against the limits.
func (l Limits) Check(all Usage) error {
	l = l.WithDefaults()
	if all.Entries > l.Entries {
		return ExceededEntries.Errorf("all layers together have %d entries, %d are allowed", all.Entries, l.Entries)
	}
	if all.Bytes > l.Bytes {
		return ExceededBytes.Errorf("all layers together have %d bytes, %d are allowed", all.Bytes, l.Bytes)
	}
	return nil
}

// WithDefaults has the default in the place of each limit that is not set.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits()
	if l.Entries <= 0 {
		l.Entries = d.Entries
	}
	if l.Bytes <= 0 {
		l.Bytes = d.Bytes
	}
	if l.Ratio <= 0 {
		l.Ratio = d.Ratio
	}
	if l.RatioFloor <= 0 {
		l.RatioFloor = d.RatioFloor
	}
	if l.Depth <= 0 {
		l.Depth = d.Depth
	}
	if l.Name <= 0 || l.Name > d.Name {
		l.Name = d.Name
	}
	return l
}

// Options are what [Apply] needs to know besides the stream.
type Options struct {
	// MediaType is what the manifest says the stream is. A stream that is compressed otherwise is refused. Empty: what
	// the first bytes say is believed.
	MediaType string
	// DiffID is what the digest of the uncompressed stream must be ("sha256:<hex>"); empty: not checked.
	DiffID string
	Limits Limits
	// SingleID leaves every file with the caller's own ids, for hosts that map only one.
	SingleID bool
	// Lower are the layers below, highest first; nil where they are not known, which is not the same as none. Directories
	// that the layer needs but does not describe take owner, mode and times from there, where a layer without an entry
	// for "tmp" would otherwise take away its sticky bit. Whiteouts that hide nothing there are not kept, and an opaque
	// mark on the root, which means nothing to overlayfs, becomes a whiteout of all that is there.
	Lower []*os.Root
	// FromDiff says that the stream is [Diff]'s. All its whiteouts are kept: none is in vain, and Lower need not be all that it
	// lies on. Zeros become holes again, which it has written out or, see [DiffOptions].Holes, left out.
	FromDiff bool
	// Settled returns when the layers below are complete, or with an error that ends it all; nil: they are. They are not looked
	// at before, which is when all of the stream has been read.
	Settled func() error
}

// Result is what [Apply] found. That of an [ApplyRequest] has no DiffID where the layer was there, and then Size and Entries where they
// are known.
type Result struct {
	DiffID  string `json:"diff_id"` // digest of the uncompressed stream to its very end
	Size    int64  `json:"size"`    // bytes of file contents
	Entries int64  `json:"entries"` // headers in the stream, and directories that were made and none of them describes
	// Skipped says what was left out and why, a line each, at most [MaxSkipped] of them. Names that are not plain text are quoted
	// as in Go.
	Skipped []string `json:"skipped,omitempty"`
	// SkippedMore is how many more there were.
	SkippedMore int64 `json:"skipped_more,omitempty"`
}

// Add adds what another reading has left out.
func (r *Result) Add(other Result) {
	for _, s := range other.Skipped {
		if len(r.Skipped) == MaxSkipped {
			r.SkippedMore++
		} else {
			r.Skipped = append(r.Skipped, s)
		}
	}
	r.SkippedMore += other.SkippedMore
}

// Usage is what the layer has of the limits that it shares with others.
func (r *Result) Usage() Usage { return Usage{Entries: r.Entries, Bytes: r.Size} }

// MaxSkipped bounds [Result.Skipped]. A line has two names cut to 200 bytes, of which JSON makes six times as many at worst: that
// fits into one message of the launcher's, 160 KiB.
const MaxSkipped = 50

// ApplyRequest is what the daemon asks of whoever keeps the layers: extract these blobs, each on top of the one before, and
// keep the directories under their chain ids, all or none of them. It is here because both sides know this package.
type ApplyRequest struct {
	// Parents are the chain ids of the layers below the first one, lowest first; they exist already. They serve
	// [Options.Lower].
	Parents []string  `json:"parents,omitempty"`
	Layers  []Request `json:"layers"` // 1 to [MaxApply], lowest first
}

// Request is one layer of an [ApplyRequest].
type Request struct {
	ChainID   string `json:"chain_id"` // "sha256:<hex>": the name under which the extracted layer is kept
	MediaType string `json:"media_type"`
	DiffID    string `json:"diff_id"` // what the stream's digest must be: nothing is kept under ChainID otherwise
	// Limits are for it and those before it in the request together; their Below is what the parents have.
	Limits   Limits   `json:"limits,omitzero"`
	Known    Usage    `json:"known,omitzero"`      // what it has if it is there, as far as is known; see [Result]
	FromDiff bool     `json:"from_diff,omitempty"` // see [Options.FromDiff]
	Blob     *os.File `json:"-"`                   // the verified blob, at offset 0; it stays the caller's to close
}

// MaxApply bounds the layers of one [ApplyRequest]: their descriptors go with one message.
const MaxApply = 64

// Apply extracts the layer in r below root, which must be an empty directory, in the form overlayfs wants. On error the
// directory's content is of no use and the caller removes it. It reads r to its end.
//
// Modes do not depend on the process's umask. Owners are set as the layer says, between 0 and 65535, which needs the
// privilege to do so (be it in a user namespace); see [Options.SingleID].
func Apply(root *os.Root, r io.Reader, opts Options) (Result, error) {
	opts.Limits = opts.Limits.WithDefaults()
	s, err := newStream(r, opts.MediaType, opts.Limits)
	if err != nil {
		return Result{}, err
	}
	ahead := s.readAhead()
	defer ahead.close()
	x, err := newExtractor(root, opts)
	if err != nil {
		return Result{}, err
	}
	defer x.close()

	x.stream = ahead
	tr := tar.NewReader(ahead)
	for n := 1; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		// ErrInsecurePath comes, on request by GODEBUG, with a good header; the names are judged below in any case.
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return Result{}, fmt.Errorf("read entry %d: %w", n, ahead.blame(err))
		}
		if err := x.tree.count(); err != nil {
			return Result{}, err
		}
		if err := x.entry(hdr, tr); err != nil {
			return Result{}, fmt.Errorf("entry %q: %w", short(hdr.Name), err)
		}
	}
	// The diff id covers what follows the end of the archive too.
	if x.result.DiffID, err = ahead.finish(); err != nil {
		return Result{}, err
	}
	if opts.DiffID != "" && x.result.DiffID != opts.DiffID {
		return Result{}, invalidf("content is %s, the image's configuration promises %s", x.result.DiffID, opts.DiffID)
	}
	if opts.Settled != nil {
		if err := opts.Settled(); err != nil {
			return Result{}, err
		}
	}
	if err := x.finish(); err != nil {
		return Result{}, err
	}
	x.result.Entries = x.tree.entries
	return x.result, nil
}

// short keeps a name of a layer fit for a message.
func short(name string) string {
	const most = 200
	if len(name) <= most {
		return name
	}
	return name[:most] + "..."
}

// shown is a name of a layer for people: quoted where it has anything in it that does something to a terminal, or hides.
func shown(name string) string {
	name = short(name)
	if quoted := strconv.Quote(name); name == "" || quoted != `"`+name+`"` {
		return quoted
	}
	return name
}

// clean returns name as a path without empty, "." and ".." components, "." for the root itself. Leading slashes are
// dropped: in a layer, "/etc" is the layer's etc.
func clean(name string, limits Limits) (string, error) {
	if name == "" {
		return "", invalidf("the name is empty")
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", invalidf("the name has a NUL in it")
	}
	// A path of PATH_MAX could not be opened by anyone in the sandbox.
	if len(name) > maxPath {
		return "", invalidf("the name has %d bytes, %d are allowed", len(name), maxPath)
	}
	parts := make([]string, 0, 16)
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return "", invalidf(`the name has ".." in it`)
		case len(part) > limits.Name:
			return "", invalidf("a component of the name has %d bytes, %d are allowed", len(part), limits.Name)
		}
		parts = append(parts, part)
	}
	if len(parts) > limits.Depth {
		return "", ExceededDepth.Errorf("the name is %d directories deep, %d are allowed", len(parts), limits.Depth)
	}
	if len(parts) == 0 {
		return ".", nil
	}
	return strings.Join(parts, "/"), nil
}

const (
	maxPath = 4095           // PATH_MAX without its NUL
	maxID   = math.MaxUint16 // sandboxes map 0..65535
)

// split cuts a clean path into its directory and last component.
func split(name string) (dir, base string) {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i], name[i+1:]
	}
	return ".", name
}

// Whiteouts as the OCI image specification names them. Docker's aufs driver wrote further names with the opaque
// prefix; they mean nothing to anyone else.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// hasComponent reports whether a component of the clean path dir starts with prefix.
func hasComponent(dir, prefix string) bool {
	return strings.HasPrefix(dir, prefix) || strings.Contains(dir, "/"+prefix)
}
