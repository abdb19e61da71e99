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

// CollectLimits bound what may leave a sandbox in one run.
type CollectLimits struct {
	Entries int   `json:"entries,omitempty"`
	Bytes   int64 `json:"bytes,omitempty"` // of all files
	File    int64 `json:"file,omitempty"`  // of one file; 0: no limit but that of all
	// Deny are patterns of what stays, in the manner of .dockerignore: "**/*.so", "cache", "!keep.so". They are about names below
	// the output directory; what is in a directory that stays does too.
	Deny []string `json:"deny,omitempty"`
}

// DefaultCollectLimits is used where a limit is zero.
var DefaultCollectLimits = CollectLimits{Entries: 100_000, Bytes: 4 << 30}

func (l CollectLimits) check() error {
	if l.Entries < 0 || l.Bytes < 0 || l.File < 0 {
		return errors.New("a limit of the output is negative")
	}
	_, err := l.filter()
	return err
}

// gate decides about single entries.
type gate struct {
	limits CollectLimits
	deny   *patternmatcher.PatternMatcher
}

func (l CollectLimits) filter() (*gate, error) {
	setDefault(&l.Entries, DefaultCollectLimits.Entries)
	setDefault(&l.Bytes, DefaultCollectLimits.Bytes)
	deny, err := patternmatcher.New(l.Deny)
	if err != nil {
		return nil, fmt.Errorf("patterns of the output: %w", err)
	}
	return &gate{l, deny}, nil
}

// stays says why an entry stays in the sandbox; "" if it may leave.
func (g *gate) stays(name string, size int64) string {
	if denied, err := g.deny.MatchesOrParentMatches(name); err != nil || denied {
		return "a pattern says that it stays"
	}
	if g.limits.File > 0 && size > g.limits.File {
		return fmt.Sprintf("it has %d bytes, more than the limit of %d", size, g.limits.File)
	}
	return ""
}

const (
	// maxSkipped bounds how many names of left-out entries are recorded.
	maxSkipped = 100
	// maxListedOutputs bounds how many entries are recorded one by one.
	maxListedOutputs = 1000
	// maxDepth bounds how many names an entry's path has, as the daemon bounds those of images. A name in an archive may have a
	// megabyte, and for each of its parents the tree is gone through from its root.
	maxDepth = 128
)

// Outputs is what was in the output directory when the run ended, as the sandbox listed it, before any of it left.
type Outputs struct {
	Files   []Output `json:"files"` // the first thousand, by name
	Entries int      `json:"entries"`
	Bytes   int64    `json:"bytes"`          // of all files
	More    bool     `json:"more,omitempty"` // there is more than could be listed
}

// Output is one entry of the output directory.
type Output struct {
	Path  string       `json:"path"` // below the output directory
	Type  api.FileType `json:"type"`
	Size  int64        `json:"size"`
	Stays string       `json:"stays,omitempty"` // why it does not leave
}

// listOutputs asks the sandbox what is below dir. Its word is not relied on: what then comes out is held to the same rules.
func listOutputs(ctx context.Context, sandbox Sandbox, dir string, limits CollectLimits) (*Outputs, error) {
	g, err := limits.filter()
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
			o.Stays = g.stays(o.Path, o.Size)
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
		// It is not there, or no directory: collect says which.
	case err != nil:
		return nil, fmt.Errorf("list the output: %w", err)
	}
	slices.SortFunc(out.Files, func(a, b Output) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

var errEnough = errors.New("enough")

// Collected says what came out of the sandbox.
type Collected struct {
	Entries int   `json:"entries"` // files, directories and links
	Bytes   int64 `json:"bytes"`   // of the files
	// Files are those that came out, with what they are; the first thousand.
	Files []CollectedFile `json:"files,omitempty"`
	// Skipped names what was left out, each with the reason; at most 100 of them, and a last line with how many more.
	Skipped []string `json:"skipped,omitempty"`
	dropped int
}

// CollectedFile is one file that came out.
type CollectedFile struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	Media  string `json:"media"` // by its first bytes, as browsers guess
	Digest string `json:"digest"`
}

func (c *Collected) skip(name, reason string) {
	if len(c.Skipped) >= maxSkipped {
		c.dropped++
		return
	}
	c.Skipped = append(c.Skipped, fmt.Sprintf("%s: %s", clipMiddle(visible(name), 300), reason))
}

// SendDir copies the children of the host directory dir to target in the sandbox. Links are copied as links, so nothing outside
// dir is read; sockets, pipes and devices are left out, and named in the result.
func SendDir(ctx context.Context, sandbox Sandbox, dir, target string) (skipped []string, err error) {
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

// packDir writes the tree below root as a tar. It carries no owners: in the sandbox the files belong to the sandbox's user.
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
	info, err := f.Stat() // of what was opened; it may have been exchanged since
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

// collect copies the tree at source in the sandbox into the new host directory at dest. A source that does not exist gives an empty
// directory.
func collect(ctx context.Context, sandbox Sandbox, source, dest string, limits CollectLimits) (c *Collected, err error) {
	if err := os.Mkdir(dest, 0o755); err != nil { //nolint:gosec // results are meant to be read by others, as the umask allows
		return nil, fmt.Errorf("make the output directory: %w", err)
	}
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
	c, err = extract(root, stream, limits)
	if err = errors.Join(err, stream.Close()); err != nil {
		return c, fmt.Errorf("collect %s: %w", source, err)
	}
	return c, nil
}

// extract writes a tar made by a sandbox below root. Everything in it may be a lie: names are local ones or left out,
// no entry is written through a link (not even one that stays inside), nothing is overwritten, modes lose their special bits, and
// what exceeds the limits, of which depth is one, ends the extraction. What was extracted before stays. An entry that cannot be written does
// not keep the others from being so.
func extract(root *os.Root, r io.Reader, limits CollectLimits) (*Collected, error) {
	c := &Collected{}
	g, err := limits.filter()
	if err != nil {
		return c, err
	}
	limits = g.limits
	defer func() {
		if c.dropped > 0 {
			c.Skipped = append(c.Skipped, fmt.Sprintf("and %d more", c.dropped))
		}
	}()
	var dirs []*tar.Header // their modes and times come last: a read-only one could not be filled
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
		if reason := g.stays(name, h.Size); reason != "" {
			c.skip(h.Name, reason)
			continue
		}
		if regular && h.Size > limits.Bytes-c.Bytes {
			return c, fmt.Errorf("the files exceed %d bytes in all; those before %s are kept", limits.Bytes, clipMiddle(visible(name), 300))
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
		if err := finish(root, h.Name, h, 0o700); err != nil {
			c.skip(h.Name, err.Error())
		}
	}
	return c, nil
}

// depth is how many names a clean path has.
func depth(name string) int { return strings.Count(name, "/") + 1 }

// sniffer sees a file's content go by.
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
	if room := 512 - len(s.first); room > 0 { // as much as DetectContentType looks at
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

// extractEntry makes one entry. A reason says why it was left out; an error ends the extraction.
func extractEntry(root *os.Root, r io.Reader, h *tar.Header, name string) (made bool, reason string, err error) {
	if reason := makeParents(root, path.Dir(name)); reason != "" {
		return false, reason, nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := root.Mkdir(name, 0o755); errors.Is(err, fs.ErrExist) {
			if fi, statErr := root.Lstat(name); statErr == nil && fi.IsDir() {
				return true, "", nil // made as a parent before
			}
			return false, "there is an entry of this name already", nil
		} else if err != nil {
			return false, brief(err), nil
		}
	case tar.TypeSymlink:
		// The target is text. Nothing here ever follows it.
		if err := root.Symlink(h.Linkname, name); err != nil {
			return false, brief(err), nil
		}
	case tar.TypeLink:
		target := path.Clean(h.Linkname)
		if !filepath.IsLocal(target) {
			return false, "hard link to a name outside", nil
		}
		if depth(target) > maxDepth {
			return false, "hard link to a name that is too deep", nil // nothing here has one
		}
		if reason := throughLink(root, path.Dir(target)); reason != "" {
			return false, "hard link " + reason, nil
		}
		fi, err := root.Lstat(target)
		if err != nil {
			return false, "hard link to what is not in this archive: " + brief(err), nil
		}
		if !fi.Mode().IsRegular() {
			return false, "hard link to what is not a file", nil
		}
		if err := root.Link(target, name); err != nil {
			return false, brief(err), nil
		}
	case tar.TypeReg, tar.TypeGNUSparse:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return false, brief(err), nil
		}
		_, err = io.Copy(f, r)
		if err = errors.Join(err, f.Close()); err != nil {
			// Disk full or a stream cut short: the next entry would fare no better.
			return false, "", errors.Join(fmt.Errorf("write %s: %w", clipMiddle(visible(name), 300), err), root.Remove(name))
		}
		if err := finish(root, name, h, 0o600); err != nil {
			return false, brief(err), nil
		}
	default:
		return false, "not a file, directory or link", nil
	}
	return true, "", nil
}

// finish sets mode and time. least are the bits without which the owner could not read and remove the result.
func finish(root *os.Root, name string, h *tar.Header, least fs.FileMode) error {
	if err := root.Chmod(name, fs.FileMode(h.Mode)&0o777|least); err != nil { //nolint:gosec // masked
		return err
	}
	when := h.ModTime
	if when.Year() < 1970 || when.Year() > 2200 { // beyond what file systems hold
		when = time.Unix(0, 0)
	}
	return root.Chtimes(name, when, when)
}

// makeParents makes dir and those above it, without passing through a link. It gives the reason if it cannot.
func makeParents(root *os.Root, dir string) (reason string) {
	if dir == "." {
		return ""
	}
	if reason := throughLink(root, dir); reason != "" {
		return reason
	}
	if err := root.MkdirAll(dir, 0o755); err != nil {
		return brief(err)
	}
	return ""
}

// throughLink reports a link among the components of dir. Nobody else writes below root, so what it saw stays true.
func throughLink(root *os.Root, dir string) (reason string) {
	for at := dir; at != "."; at = path.Dir(at) {
		if fi, err := root.Lstat(at); err == nil && fi.Mode()&fs.ModeSymlink != 0 {
			return fmt.Sprintf("leads through the link %s", clipMiddle(visible(at), 200))
		}
	}
	return ""
}

// brief is an error without the path, which stands beside it already.
func brief(err error) string {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err.Error()
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.Err.Error()
	}
	return err.Error()
}

// ReadAnswer reads answer.txt among the collected files: a regular file, not a link, and not more than limit bytes of it.
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
