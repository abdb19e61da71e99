// Package layer turns one layer of an image, a compressed tar stream, into a directory for
// overlayfs to stack, and the changes of an overlay into a layer.
//
// # Theory of operation
//
// A layer is the most hostile input that we read: its author chooses every name, link, mode and
// length in it. Four rules confine it.
//
//   - Everything happens below one descriptor. Names are cut into components, and each is opened
//     relative to the directory before it, never through a symbolic link. Alternatively a directory
//     is opened in one call that the kernel refuses if a link, a ".." or a mount is on the way.
//     No other system call gets a name with a slash in it. No path can be confused and no race
//     won. The layers below are only read; they are complete and do not change.
//   - Symbolic links are stored unchanged. If an entry lies below a link of its own layer, we
//     follow the link component by component as if the layer's root were "/": absolute targets
//     start there, ".." stops there. umoci and containerd do so too.
//   - Entries by which the layer's author could direct the kernel or another program are left out:
//     device nodes, file capabilities, ACLs and all other xattrs outside user.*, and
//     user.overlay.* because overlayfs acts on those. The [Result] lists the omissions.
//   - Numbers are limited: entries, bytes, the growth of the stream, lengths and depth.
//
// Whiteouts become the forms that overlayfs reads: character devices 0:0, which need no privilege
// since Linux 5.8, and the xattr user.overlay.opaque on directories, which overlayfs honours with
// the mount option userxattr. Both have a meaning only in merged directories, so the layers below
// are read.
//
// The package has few dependencies, because the launcher links it and is executed anew at every
// start of a sandbox. It does not sync: the caller that moves the finished directory into place
// syncs once, for the whole file system.
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

// ErrInvalid is the class of errors caused by the layer itself: it is damaged, differs from its
// description, or asks for something forbidden. A retry cannot help. Errors of any other class are
// this host's: disk full, permission, a read error.
var ErrInvalid = errors.New("layer is invalid")

// invalid is an error of the class [ErrInvalid] without the class's text in its message.
type invalid struct{ err error }

func (e *invalid) Error() string   { return e.err.Error() }
func (e *invalid) Unwrap() []error { return []error{ErrInvalid, e.err} }

func invalidf(format string, args ...any) error {
	return &invalid{fmt.Errorf(format, args...)}
}

// Exceeded is the class of errors about one settable limit, within [ErrInvalid]. Its value is the
// limit's name.
type Exceeded string

// The settable limits.
const (
	ExceededEntries Exceeded = "entries"
	ExceededBytes   Exceeded = "bytes"
	ExceededRatio   Exceeded = "ratio"
	ExceededDepth   Exceeded = "depth"
)

func (e Exceeded) Error() string { return "the limit of " + string(e) + " is exceeded" }

// Is puts every Exceeded into the class [ErrInvalid].
func (e Exceeded) Is(target error) bool { return target == ErrInvalid }

// exceeded is an error of the class of one limit without the class's text in its message.
type exceeded struct {
	limit Exceeded
	err   error
}

func (e *exceeded) Error() string   { return e.err.Error() }
func (e *exceeded) Unwrap() []error { return []error{e.limit, e.err} }

// Errorf returns an error of the class.
func (e Exceeded) Errorf(format string, args ...any) error {
	return &exceeded{e, fmt.Errorf(format, args...)}
}

// Usage is the share of layers in the limits that all layers of an image have in common.
type Usage struct {
	Entries int64 `json:"entries,omitempty"` // counted like [Limits].Entries
	Bytes   int64 `json:"bytes,omitempty"`   // of file contents
}

// with returns a remark that the layers below count, or "" if there are none.
func (u Usage) with() string {
	if u == (Usage{}) {
		return ""
	}
	return ", together with the layers below it"
}

// Add returns the usage of both.
func (u Usage) Add(o Usage) Usage { return Usage{u.Entries + o.Entries, u.Bytes + o.Bytes} }

// Limits bound the demands of an image. A zero field means the one of [DefaultLimits].
type Limits struct {
	// Entries limits headers in the streams, plus directories without a header, of all layers
	// together.
	Entries int64 `json:"entries,omitempty"`
	// Bytes limits all file contents of all layers together, and each uncompressed stream. Sparse
	// files count in full, except for the holes that a snapshot leaves out.
	Bytes int64 `json:"bytes,omitempty"`
	// Below is the usage of these two by the layers below.
	Below Usage `json:"below,omitzero"`
	// Ratio limits the uncompressed bytes for each compressed byte. It applies after RatioFloor
	// uncompressed bytes, because small layers may be mostly padding.
	Ratio      int64 `json:"ratio,omitempty"`
	RatioFloor int64 `json:"ratio_floor,omitempty"`
	Depth      int   `json:"depth,omitempty"` // components of a path, after following links
	Name       int   `json:"name,omitempty"`  // bytes of one component
}

// DefaultLimits returns limits far above the needs of images in use. The largest layers are models
// and toolchains of some ten GB with some hundred thousand files.
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

// AnyRatio returns the limits without a ratio, for layers that we compressed ourselves.
func (l Limits) AnyRatio() Limits {
	l.Ratio = math.MaxInt64
	return l.WithDefaults()
}

// NoLimits returns limits for streams that were unpacked before, perhaps within other limits.
func NoLimits() Limits {
	return Limits{Entries: math.MaxInt64, Bytes: math.MaxInt64, Ratio: math.MaxInt64, Depth: MaxDepth}.WithDefaults()
}

// MaxDepth is the largest useful [Limits.Depth]: no more components fit into a path.
const MaxDepth = (maxPath + 1) / 2

// Check compares the usage of all layers of an image with the limits.
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

// WithDefaults returns the limits with defaults in place of zero fields.
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

// Options are the options of [Apply].
type Options struct {
	// MediaType is the type in the manifest. A stream with another compression is refused. Empty means
	// that the first bytes decide.
	MediaType string
	// DiffID is the required digest of the uncompressed stream ("sha256:<hex>"); empty means
	// unchecked.
	DiffID string
	Limits Limits
	// SingleID gives every file the caller's own ids, for hosts that map only one.
	SingleID bool
	// Lower are the layers below, highest first; nil means unknown, which differs from none.
	// Directories that the layer needs but does not describe inherit owner, mode and times from there:
	// otherwise a layer without an entry for "tmp" would remove its sticky bit. Whiteouts that hide
	// nothing there are dropped. An opaque mark on the root, which overlayfs ignores, becomes
	// whiteouts of everything there.
	Lower []*os.Root
	// FromDiff is true for a stream of [Diff]. All its whiteouts are kept: each hides something, and
	// Lower need not be complete. Zeros that Diff has written out or left out (see
	// [DiffOptions].Holes) become holes again.
	FromDiff bool
	// Plain is true for an archive that is no layer, such as that of a volume: names that would read as
	// whiteouts are names, and zeros become holes.
	Plain bool
	// LowerReady returns when the layers below are complete, or with an error that ends the extraction;
	// nil means that they are. The layers below are first read after that, when all of the stream has
	// been read.
	LowerReady func() error
}

// Result is the result of [Apply]. In an [ApplyRequest] it has no DiffID if the layer existed, and
// then Size and Entries only if known.
type Result struct {
	DiffID  string `json:"diff_id"` // digest of the uncompressed stream to its very end
	Size    int64  `json:"size"`    // bytes of file contents
	Entries int64  `json:"entries"` // headers in the stream, and directories made without one
	// Skipped lists omissions with their reasons, a line each, at most [MaxSkipped] of them. Names
	// that are not plain text are quoted as in Go.
	Skipped []string `json:"skipped,omitempty"`
	// SkippedMore is the number of further omissions.
	SkippedMore int64 `json:"skipped_more,omitempty"`
}

// Add adds the omissions of another reading.
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

// Usage returns the layer's share in the limits that all layers have in common.
func (r *Result) Usage() Usage { return Usage{Entries: r.Entries, Bytes: r.Size} }

// MaxSkipped limits [Result.Skipped]. A line has two names cut to 200 bytes, and JSON makes them up
// to six times as long. That fits into one message of the launcher's, 160 KiB.
const MaxSkipped = 50

// ApplyRequest asks the keeper of the layers to extract blobs, each on top of the one before, and
// to keep the directories under their chain ids, all or none of them. The type is here because both
// sides import this package.
type ApplyRequest struct {
	// Parents are the chain ids of the layers below the first one, lowest first; they exist. They
	// serve [Options.Lower].
	Parents []string  `json:"parents,omitempty"`
	Layers  []Request `json:"layers"` // 1 to [MaxApply], lowest first
}

// Request is one layer of an [ApplyRequest].
type Request struct {
	ChainID   string `json:"chain_id"` // "sha256:<hex>", the name of the extracted layer
	MediaType string `json:"media_type"`
	DiffID    string `json:"diff_id"` // required digest of the stream; otherwise nothing is kept under ChainID
	// Limits apply to this layer and those before it in the request together; their Below is the usage
	// of the parents.
	Limits   Limits   `json:"limits,omitzero"`
	Known    Usage    `json:"known,omitzero"`      // usage of the layer if it exists, as far as known; see [Result]
	FromDiff bool     `json:"from_diff,omitempty"` // see [Options.FromDiff]
	Blob     *os.File `json:"-"`                   // verified, at offset 0; the caller closes it
}

// MaxApply limits the layers of one [ApplyRequest]: their descriptors travel in one message.
const MaxApply = 64

// Apply extracts the layer in r below root, which must be an empty directory, in the form for
// overlayfs. After an error the directory is useless and the caller removes it. Apply reads r to
// its end.
//
// Modes do not depend on the process's umask. Owners are set to those of the layer, between 0 and
// 65535, which needs that privilege, at least in a user namespace; see [Options.SingleID].
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
		// ErrInsecurePath comes, if GODEBUG asks for it, with a good header; the names are checked below
		// in any case.
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
	// The diff id also covers bytes after the end of the archive.
	if x.result.DiffID, err = ahead.finish(); err != nil {
		return Result{}, err
	}
	if opts.DiffID != "" && x.result.DiffID != opts.DiffID {
		return Result{}, invalidf("content is %s, the image's configuration promises %s", x.result.DiffID, opts.DiffID)
	}
	if opts.LowerReady != nil {
		if err := opts.LowerReady(); err != nil {
			return Result{}, err
		}
	}
	if err := x.finish(); err != nil {
		return Result{}, err
	}
	x.result.Entries = x.tree.entries
	return x.result, nil
}

// short shortens a name of a layer for a message.
func short(name string) string {
	const most = 200
	if len(name) <= most {
		return name
	}
	return name[:most] + "..."
}

// shown returns a name of a layer for people, quoted if it has characters that control a terminal
// or are invisible.
func shown(name string) string {
	name = short(name)
	if quoted := strconv.Quote(name); name == "" || quoted != `"`+name+`"` {
		return quoted
	}
	return name
}

// clean returns name as a path without empty, "." and ".." components, "." for the root itself.
// Leading slashes are dropped: in a layer, "/etc" is the layer's etc.
func clean(name string, limits Limits) (string, error) {
	if name == "" {
		return "", invalidf("the name is empty")
	}
	if strings.IndexByte(name, 0) >= 0 {
		return "", invalidf("the name has a NUL in it")
	}
	// No program in the sandbox could open a path of PATH_MAX.
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

// Whiteouts as the OCI image specification names them. Docker's aufs driver wrote further names
// with the opaque prefix, which no other program uses.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// hasComponent reports whether a component of the clean path dir starts with prefix.
func hasComponent(dir, prefix string) bool {
	return strings.HasPrefix(dir, prefix) || strings.Contains(dir, "/"+prefix)
}
