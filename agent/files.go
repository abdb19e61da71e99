package agent

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/patternmatcher"

	"github.com/sandboxd/sandboxd/api"
)

// CollectLimits bounds the files that may leave a sandbox in one run.
type CollectLimits struct {
	Entries int   `json:"entries,omitempty"`
	Bytes   int64 `json:"bytes,omitempty"` // of all files
	File    int64 `json:"file,omitempty"`  // of one file; 0 means no limit but Bytes
	// Deny holds patterns of files that stay in the sandbox, in the syntax of .dockerignore:
	// "**/*.so", "cache", "!keep.so". They match names below the output directory; a matched
	// directory stays with its content.
	Deny []string `json:"deny,omitempty"`
	// Links keeps symbolic links that lead out of the collected directory. By default they stay in the
	// sandbox: on the host they would lead to files of the host.
	Links bool `json:"links,omitempty"`
	// Paths holds files and directories of the sandbox that are collected beside the output directory.
	// Relative ones begin at the working directory.
	Paths []string `json:"paths,omitempty"`
}

// DefaultCollectLimits replace zero limits.
var DefaultCollectLimits = CollectLimits{Entries: 100_000, Bytes: 4 << 30}

func (l CollectLimits) check() error {
	if l.Entries < 0 || l.Bytes < 0 || l.File < 0 {
		return errors.New("a limit of the output is negative")
	}
	_, err := l.newFilter()
	return err
}

// filter decides on single entries.
type filter struct {
	limits CollectLimits
	deny   *patternmatcher.PatternMatcher
}

func (l CollectLimits) newFilter() (*filter, error) {
	setDefault(&l.Entries, DefaultCollectLimits.Entries)
	setDefault(&l.Bytes, DefaultCollectLimits.Bytes)
	deny, err := patternmatcher.New(l.Deny)
	if err != nil {
		return nil, fmt.Errorf("patterns of the output: %w", err)
	}
	return &filter{l, deny}, nil
}

// reject returns the reason why an entry must stay in the sandbox, or "" if it may leave.
func (f *filter) reject(name string, size int64) string {
	if denied, err := f.deny.MatchesOrParentMatches(name); err != nil || denied {
		return "a pattern says that it stays"
	}
	if f.limits.File > 0 && size > f.limits.File {
		return fmt.Sprintf("it has %d bytes, more than the limit of %d", size, f.limits.File)
	}
	return ""
}

// link returns the target of a link as it is made on the host, or a reason why it must stay in the
// sandbox. name is the link's, below source in the sandbox. An absolute target below source becomes
// a relative one.
//
// A kept relative target is clean: "..", if any, stand at its beginning. They climb from the link's
// own directory, which is a real one ([throughLink]), and no further than the top. So no chain of
// such links leads out.
func (f *filter) link(source, name, target string) (made, reason string) {
	if f.limits.Links || target == "" {
		return target, ""
	}
	inside := path.Join(path.Dir(name), target)
	if path.IsAbs(target) {
		below, err := filepath.Rel(source, path.Clean(target))
		if err != nil {
			below = ".."
		}
		inside = below
		if target, err = filepath.Rel(path.Dir(name), below); err != nil {
			inside = ".."
		}
	}
	if !filepath.IsLocal(inside) {
		return "", "link that leads out"
	}
	return path.Clean(target), ""
}

const (
	// maxSkipped bounds the recorded names of omitted entries.
	maxSkipped = 100
	// maxListedOutputs bounds the entries that are recorded one by one.
	maxListedOutputs = 1000
	// maxDepth bounds the elements of an entry's path, like the daemon's bound for images. A name in
	// an archive may have a megabyte, and each of its parents costs a walk from the root.
	maxDepth = 128
)

// Outputs is the sandbox's own list of the output directory at the run's end, before the
// collection.
type Outputs struct {
	Files   []Output `json:"files"` // the first thousand, sorted by name
	Entries int      `json:"entries"`
	Bytes   int64    `json:"bytes"`          // of all files
	More    bool     `json:"more,omitempty"` // the list is incomplete
	// Elsewhere holds the first hundred files that the run has made or changed outside of the output
	// directory, with absolute paths. Caches, and changes to the system's directories, are left out.
	Elsewhere        []Output `json:"elsewhere,omitempty"`
	ElsewhereEntries int      `json:"elsewhere_entries,omitempty"`
}

// Output is one entry of the output directory.
type Output struct {
	Path  string       `json:"path"` // below the output directory
	Type  api.FileType `json:"type"`
	Size  int64        `json:"size"`
	Stays string       `json:"stays,omitempty"` // reason why it does not leave the sandbox
}

// listOutputs asks the sandbox for the content of dir. The list is untrusted: the collection
// applies the same rules again.
func listOutputs(ctx context.Context, sandbox *Sandbox, dir string, limits CollectLimits) (*Outputs, error) {
	g, err := limits.newFilter()
	if err != nil {
		return nil, err
	}
	out := &Outputs{Files: []Output{}}
	out.More, err = sandbox.List(ctx, dir, func(e api.FileEntry) error {
		out.Entries++
		o := Output{Path: strings.TrimPrefix(strings.TrimPrefix(e.Path, dir), "/"), Type: e.Type}
		if e.Type == api.TypeFile && e.Size > 0 {
			o.Size = e.Size
			out.Bytes += e.Size
		}
		if len(out.Files) < maxListedOutputs {
			o.Path = clipMiddle(o.Path, 1000)
			o.Stays = g.reject(o.Path, o.Size)
			out.Files = append(out.Files, o)
		}
		if out.Entries >= 2*g.limits.Entries {
			return errEnough
		}
		return nil
	})
	switch {
	case errors.Is(err, errEnough):
		out.More = true
	case hasCode(err, api.CodeNotFound), hasCode(err, api.CodeInvalid), hasCode(err, api.CodeConflict):
		// The directory is missing or no directory: collect reports which.
	case err != nil:
		return nil, fmt.Errorf("list the output: %w", err)
	}
	slices.SortFunc(out.Files, func(a, b Output) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

var errEnough = errors.New("enough")

// Collected describes the files that left the sandbox.
type Collected struct {
	Entries int   `json:"entries"` // files, directories and links
	Bytes   int64 `json:"bytes"`   // of the files
	// Files describes the first thousand collected files.
	Files []CollectedFile `json:"files,omitempty"`
	// Skipped names the omitted entries with the reasons, at most 100; a last line counts the
	// others.
	Skipped []string `json:"skipped,omitempty"`
	// Elsewhere describes what was collected beside the output directory, by its path in the sandbox.
	Elsewhere map[string]*Collected `json:"elsewhere,omitempty"`
	dropped   int
}

// CollectedFile is one file that left the sandbox.
type CollectedFile struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	Media  string `json:"media"` // derived from its first bytes, as browsers do
	Digest string `json:"digest"`
}

func (c *Collected) skip(name, reason string) {
	if len(c.Skipped) >= maxSkipped {
		c.dropped++
		return
	}
	c.Skipped = append(c.Skipped, fmt.Sprintf("%s: %s", clipMiddle(visible(name), 300), reason))
}

// SendDir copies the children of the host directory dir to target in the sandbox. Links are copied
// as links, so that nothing outside dir is read. Sockets, pipes and devices are omitted and
// returned.
func SendDir(ctx context.Context, sandbox *Sandbox, dir, target string) (skipped []string, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open the input directory: %w", err)
	}
	defer root.Close()
	pr, pw := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		var err error
		skipped, err = packDir(root, pw)
		_ = pw.CloseWithError(err) // always nil
		packed <- err
	}()
	sendErr := sandbox.ArchiveIn(ctx, target, pr)
	_ = pr.CloseWithError(errors.New("the sandbox stopped reading")) // always nil
	packErr := <-packed
	if sendErr != nil && !errors.Is(sendErr, packErr) {
		return nil, fmt.Errorf("copy %s into the sandbox: %w", dir, sendErr)
	}
	if packErr != nil {
		return nil, fmt.Errorf("copy %s into the sandbox: %w", dir, packErr)
	}
	return skipped, nil
}

// packDir writes the tree below root as a tar without owners: in the sandbox the files belong to
// its user.
func packDir(root *os.Root, w io.Writer) (skipped []string, err error) {
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		h := &tar.Header{Name: name, Mode: int64(info.Mode().Perm()), ModTime: info.ModTime(), Format: tar.FormatPAX}
		switch {
		case d.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
		case info.Mode()&fs.ModeSymlink != 0:
			h.Typeflag = tar.TypeSymlink
			if h.Linkname, err = root.Readlink(name); err != nil {
				return err
			}
		case info.Mode().IsRegular():
			return packFile(tw, root, name, h)
		default:
			skipped = append(skipped, fmt.Sprintf("%s: not a file, directory or link", visible(name)))
			return nil
		}
		return tw.WriteHeader(h)
	})
	return skipped, errors.Join(err, tw.Close())
}

func packFile(tw *tar.Writer, root *os.Root, name string, h *tar.Header) (err error) {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat() // of the open file; the name may be replaced
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s was exchanged while it was copied", name)
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyN(tw, f, h.Size)
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%s became shorter while it was copied (%d of %d bytes)", name, n, h.Size)
	}
	return err
}

// collect copies the tree at source in the sandbox into the new host directory dest. A missing
// source gives an empty directory.
func collect(ctx context.Context, sandbox *Sandbox, source, dest string, limits CollectLimits) (c *Collected, err error) {
	if err := os.Mkdir(dest, 0o755); err != nil { //nolint:gosec // results are meant to be read by others, as the umask allows
		return nil, fmt.Errorf("make the output directory: %w", err)
	}
	return collectInto(ctx, sandbox, source, source, dest, limits)
}

// collectInto copies the file or the tree at source in the sandbox into dest. Absolute links below
// the sandbox's directory base become relative ones.
func collectInto(ctx context.Context, sandbox *Sandbox, source, base, dest string, limits CollectLimits) (c *Collected, err error) {
	root, err := os.OpenRoot(dest)
	if err != nil {
		return nil, fmt.Errorf("open the output directory: %w", err)
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	stream, err := sandbox.ArchiveOut(ctx, source)
	if hasCode(err, api.CodeNotFound) {
		c = &Collected{}
		c.skip(source, err.Error())
		return c, nil
	}
	if err != nil {
		return nil, fmt.Errorf("collect %s: %w", source, err)
	}
	c, err = extract(root, stream, base, limits)
	if err = errors.Join(err, stream.Close()); err != nil {
		return c, fmt.Errorf("collect %s: %w", source, err)
	}
	return c, nil
}

// extract writes a sandbox's tar of the directory source below root. The archive is hostile: names
// must be local, no entry is written through a link (not even one that stays inside), nothing is
// overwritten, and modes lose their special bits. An entry beyond a limit, depth included, ends the
// extraction; earlier ones stay. An entry that cannot be written is skipped.
func extract(root *os.Root, r io.Reader, source string, limits CollectLimits) (*Collected, error) {
	c := &Collected{}
	g, err := limits.newFilter()
	if err != nil {
		return c, err
	}
	limits = g.limits
	defer func() {
		if c.dropped > 0 {
			c.Skipped = append(c.Skipped, fmt.Sprintf("and %d more", c.dropped))
		}
	}()
	var dirs []*tar.Header // modes and times are set last: a read-only directory could not be filled
	tr := tar.NewReader(r)
	for seen := 0; ; seen++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return c, fmt.Errorf("read the archive: %w", err)
		}
		if seen >= limits.Entries {
			return c, fmt.Errorf("there are more than %d entries; the first %d are kept", limits.Entries, seen)
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		if !filepath.IsLocal(name) || strings.ContainsRune(name, 0) {
			c.skip(h.Name, "not a name below the output directory")
			continue
		}
		if n := depth(name); n > maxDepth {
			return c, fmt.Errorf("%s is %d directories deep, and %d are the most; what came before it is kept", clipMiddle(visible(name), 300), n, maxDepth)
		}
		regular := h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeGNUSparse // a sparse file's size is that of its content
		if reason := g.reject(name, h.Size); reason != "" {
			c.skip(h.Name, reason)
			continue
		}
		if regular && h.Size > limits.Bytes-c.Bytes {
			return c, fmt.Errorf("the files exceed %d bytes in all; those before %s are kept", limits.Bytes, clipMiddle(visible(name), 300))
		}
		if h.Typeflag == tar.TypeSymlink {
			target, reason := g.link(source, name, h.Linkname)
			if reason != "" {
				c.skip(h.Name, fmt.Sprintf("%s to %s", reason, clipMiddle(visible(h.Linkname), 300)))
				continue
			}
			h.Linkname = target
		}
		var content sniffer
		made, reason, err := extractEntry(root, io.TeeReader(tr, &content), h, name)
		switch {
		case err != nil:
			return c, err
		case reason != "":
			c.skip(h.Name, reason)
		case made:
			c.Entries++
			if regular {
				c.Bytes += h.Size
				if len(c.Files) < maxListedOutputs {
					c.Files = append(c.Files, content.file(name))
				}
			}
			if h.Typeflag == tar.TypeDir {
				h.Name = name
				dirs = append(dirs, h)
			}
		}
	}
	for _, h := range slices.Backward(dirs) {
		if err := setAttributes(root, h.Name, h, 0o700); err != nil {
			c.skip(h.Name, err.Error())
		}
	}
	return c, nil
}

// depth returns the number of elements of a clean path.
func depth(name string) int { return strings.Count(name, "/") + 1 }

// sniffer hashes a file's content and keeps its beginning.
type sniffer struct {
	first []byte
	size  int64
	sum   hash.Hash
}

// Write never fails.
func (s *sniffer) Write(p []byte) (int, error) {
	if s.sum == nil {
		s.sum = sha256.New()
	}
	s.sum.Write(p)
	s.size += int64(len(p))
	if room := 512 - len(s.first); room > 0 { // the part that DetectContentType uses
		s.first = append(s.first, p[:min(room, len(p))]...)
	}
	return len(p), nil
}

func (s *sniffer) file(name string) CollectedFile {
	sum := sha256.Sum256(nil)
	digest := sum[:]
	if s.sum != nil {
		digest = s.sum.Sum(nil)
	}
	return CollectedFile{Path: clipMiddle(name, 1000), Size: s.size, Media: http.DetectContentType(s.first), Digest: "sha256:" + hex.EncodeToString(digest)}
}

// extractEntry makes one entry. It returns a reason if it skips the entry; an error ends the
// extraction.
func extractEntry(root *os.Root, r io.Reader, h *tar.Header, name string) (made bool, reason string, err error) {
	if reason := makeParents(root, path.Dir(name)); reason != "" {
		return false, reason, nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := root.Mkdir(name, 0o755); errors.Is(err, fs.ErrExist) {
			if fi, statErr := root.Lstat(name); statErr == nil && fi.IsDir() {
				return true, "", nil // created before as a parent
			}
			return false, "there is an entry of this name already", nil
		} else if err != nil {
			return false, cause(err), nil
		}
	case tar.TypeSymlink:
		// The target is only stored; it is never followed.
		if err := root.Symlink(h.Linkname, name); err != nil {
			return false, cause(err), nil
		}
	case tar.TypeLink:
		target := path.Clean(h.Linkname)
		if !filepath.IsLocal(target) {
			return false, "hard link to a name outside", nil
		}
		if depth(target) > maxDepth {
			return false, "hard link to a name that is too deep", nil // no collected entry has such a name
		}
		if reason := throughLink(root, path.Dir(target)); reason != "" {
			return false, "hard link " + reason, nil
		}
		fi, err := root.Lstat(target)
		if err != nil {
			return false, "hard link to what is not in this archive: " + cause(err), nil
		}
		if !fi.Mode().IsRegular() {
			return false, "hard link to what is not a file", nil
		}
		if err := root.Link(target, name); err != nil {
			return false, cause(err), nil
		}
	case tar.TypeReg, tar.TypeGNUSparse:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return false, cause(err), nil
		}
		_, err = io.Copy(f, r)
		if err = errors.Join(err, f.Close()); err != nil {
			// A full disk or a broken stream would fail for the next entry too.
			return false, "", errors.Join(fmt.Errorf("write %s: %w", clipMiddle(visible(name), 300), err), root.Remove(name))
		}
		if err := setAttributes(root, name, h, 0o600); err != nil {
			return false, cause(err), nil
		}
	default:
		return false, "not a file, directory or link", nil
	}
	return true, "", nil
}

// setAttributes sets mode and time. least holds the bits that the owner needs to read and remove
// the result.
func setAttributes(root *os.Root, name string, h *tar.Header, least fs.FileMode) error {
	if err := root.Chmod(name, fs.FileMode(h.Mode)&0o777|least); err != nil { //nolint:gosec // masked
		return err
	}
	when := h.ModTime
	if when.Year() < 1970 || when.Year() > 2200 { // outside the range of file systems
		when = time.Unix(0, 0)
	}
	return root.Chtimes(name, when, when)
}

// makeParents makes dir and its parents without passing through a link. It returns a reason if it
// cannot.
func makeParents(root *os.Root, dir string) (reason string) {
	if dir == "." {
		return ""
	}
	if reason := throughLink(root, dir); reason != "" {
		return reason
	}
	if err := root.MkdirAll(dir, 0o755); err != nil {
		return cause(err)
	}
	return ""
}

// throughLink returns a reason if an element of dir is a link. No other process writes below root,
// so the result stays true.
func throughLink(root *os.Root, dir string) (reason string) {
	for at := dir; at != "."; at = path.Dir(at) {
		if fi, err := root.Lstat(at); err == nil && fi.Mode()&fs.ModeSymlink != 0 {
			return fmt.Sprintf("leads through the link %s", clipMiddle(visible(at), 200))
		}
	}
	return ""
}

// cause returns the text of an error without the path, which the message already has.
func cause(err error) string {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err.Error()
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.Err.Error()
	}
	return err.Error()
}

// ReadAnswer reads at most limit bytes of answer.txt among the collected files. A link does not
// count.
func ReadAnswer(filesDir string, limit int64) (text string, found bool, err error) {
	root, err := os.OpenRoot(filesDir)
	if err != nil {
		return "", false, err
	}
	defer root.Close()
	fi, err := root.Lstat("answer.txt")
	if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular() {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	f, err := root.Open("answer.txt")
	if err != nil {
		return "", false, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	return string(b), err == nil, err
}
