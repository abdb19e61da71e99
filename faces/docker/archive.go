package docker

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/moby/moby/api/types/container"

	"github.com/sandboxd/sandboxd/api"
)

// withFiles calls do while the files of a container can be reached: a stopped one runs meanwhile
// without its main process.
func (f *Face) withFiles(ctx context.Context, sb *api.Sandbox, do func() error) (err error) {
	switch sb.State {
	case api.StateRunning:
		return do()
	case api.StatePaused:
		return statusf(http.StatusConflict, "container %s is paused, unpause the container before its files are used", containerID(sb.ID))
	case api.StateCreating, api.StateStopped, api.StateLost:
	}
	defer f.turnOf(sb.ID)()
	now, err := f.api.GetSandbox(ctx, sb.ID)
	if err != nil {
		return err
	}
	if now.State == api.StateRunning { // started while this request waited
		return do()
	}
	if _, err := f.api.StartSandbox(ctx, sb.ID, api.StartSandbox{Idle: true}); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		zero := 0.0
		if _, serr := f.api.StopSandbox(ctx, sb.ID, api.StopSandbox{Grace: &zero}); serr != nil {
			err = errors.Join(err, serr)
		}
	}()
	// Docker makes the working directory with the container, and clients copy files into it before
	// the start. The first start of ours makes it, and reports why it cannot.
	if now.Cwd != "" && stateOf(now) == container.StateCreated {
		_ = f.api.MakeDirectory(ctx, sb.ID, api.MakeDirectory{Path: now.Cwd, Parents: true, User: "0"})
	}
	return do()
}

// pathStat is the description of a file in a header of the answer.
type pathStat struct {
	Name       string      `json:"name"`
	Size       int64       `json:"size"`
	Mode       fs.FileMode `json:"mode"`
	Mtime      time.Time   `json:"mtime"`
	LinkTarget string      `json:"linkTarget"`
}

// modeOf returns the mode in the bits of Go, which Docker sends.
func modeOf(e *api.FileEntry) fs.FileMode {
	n, _ := strconv.ParseUint(e.Mode, 8, 16) // the daemon's
	mode := fs.FileMode(n & 0o777)
	for _, bit := range []struct {
		octal uint64
		mode  fs.FileMode
	}{{0o4000, fs.ModeSetuid}, {0o2000, fs.ModeSetgid}, {0o1000, fs.ModeSticky}} {
		if n&bit.octal != 0 {
			mode |= bit.mode
		}
	}
	switch e.Type {
	case api.TypeDirectory:
		mode |= fs.ModeDir
	case api.TypeSymlink:
		mode |= fs.ModeSymlink
	case api.TypeFIFO:
		mode |= fs.ModeNamedPipe
	case api.TypeSocket:
		mode |= fs.ModeSocket
	case api.TypeBlock:
		mode |= fs.ModeDevice
	case api.TypeChar:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	case api.TypeFile:
	}
	return mode
}

// archivePath returns the path that a request means, in its shortest form, and whether it ends with
// "/." or "/", which means the content of a directory.
func archivePath(text string) (clean string, content bool, err error) {
	if text == "" {
		return "", false, badf("bad parameter: path cannot be empty")
	}
	if strings.IndexByte(text, 0) >= 0 || len(text) > 4095 {
		return "", false, badf("bad parameter: path %q", clip(text))
	}
	return path.Clean("/" + text), strings.HasSuffix(text, "/.") || strings.HasSuffix(text, "/"), nil
}

func (c *call) noFile(err error, name string, sb *api.Sandbox) error {
	if p, ok := errors.AsType[*api.Problem](err); ok && p.Code == api.CodeNotFound {
		return statusf(http.StatusNotFound, "Could not find the file %s in container %s", clip(name), c.args[0])
	}
	_ = sb
	return err
}

// describe sets the header with the description of a file.
func (c *call) describe(sb *api.Sandbox, clean string, follow bool) (*api.FileEntry, error) {
	e, err := c.f.api.StatFile(c.ctx(), sb.ID, clean, follow)
	if err != nil {
		return nil, c.noFile(err, c.q.Get("path"), sb)
	}
	if name := c.q.Get("path"); e.Type != api.TypeDirectory && (strings.HasSuffix(name, "/") || strings.HasSuffix(name, "/.")) {
		return nil, badf("lstat %s: not a directory", clip(name))
	}
	st := pathStat{Name: path.Base(clean), Size: e.Size, Mode: modeOf(e), Mtime: e.MTime, LinkTarget: e.Target}
	if strings.HasSuffix(c.q.Get("path"), "/.") {
		st.Name = "."
	}
	if e.Type == api.TypeDirectory && st.Size == 0 {
		st.Size = 4096 // some clients take a directory of no size for a missing one
	}
	if e.Type == api.TypeSymlink {
		st.LinkTarget = path.Clean(e.Target)
		if !path.IsAbs(e.Target) {
			st.LinkTarget = path.Join(path.Dir(clean), e.Target)
		}
	}
	text, err := json.Marshal(st)
	if err != nil {
		return nil, err
	}
	c.w.Header().Set("X-Docker-Container-Path-Stat", base64.StdEncoding.EncodeToString(text))
	return e, nil
}

func (c *call) getArchive() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	clean, content, err := archivePath(c.q.Get("path"))
	if err != nil {
		return err
	}
	return c.f.withFiles(c.ctx(), sb, func() error {
		e, err := c.describe(sb, clean, content)
		if err != nil {
			return err
		}
		if c.r.Method == http.MethodHead {
			return c.none(http.StatusOK)
		}
		base := path.Base(clean)
		if strings.HasSuffix(c.q.Get("path"), "/.") {
			base = "."
		}
		return c.sendArchive(sb, clean, base, e)
	})
}

// sendArchive sends a tar whose first entry is the file itself, with this name.
func (c *call) sendArchive(sb *api.Sandbox, clean, base string, e *api.FileEntry) error {
	root := &tar.Header{
		Name: base, Mode: int64(modeOf(e).Perm()), Uid: int(e.UID), Gid: int(e.GID), Uname: e.User, Gname: e.Group, ModTime: e.MTime, Format: tar.FormatPAX,
	}
	var in io.ReadCloser
	var err error
	switch e.Type {
	case api.TypeDirectory:
		root.Typeflag, root.Name = tar.TypeDir, base+"/"
		in, err = c.f.api.ArchiveOut(c.ctx(), sb.ID, clean)
	case api.TypeFile:
		root.Typeflag, root.Size = tar.TypeReg, e.Size
		in, err = c.f.api.ReadFile(c.ctx(), sb.ID, clean)
	case api.TypeSymlink:
		root.Typeflag, root.Linkname = tar.TypeSymlink, e.Target
	case api.TypeFIFO:
		root.Typeflag = tar.TypeFifo
	case api.TypeSocket, api.TypeBlock, api.TypeChar:
		return badf("%s is a %s, which is not copied", clip(clean), e.Type)
	}
	if err != nil {
		return c.noFile(err, c.q.Get("path"), sb)
	}
	if in != nil {
		defer in.Close()
	}
	c.w.Header().Set("Content-Type", "application/x-tar")
	c.w.WriteHeader(http.StatusOK)
	if err := copyArchive(c.w, root, in, base); err != nil {
		c.f.log.Info("archive broke off", "id", sb.ID, "path", clean, "error", err)
		panic(http.ErrAbortHandler) // half an archive must not look like a whole one
	}
	return errAnswered
}

// copyArchive writes root and then what in has: the bytes of a file, or a tar whose names get base
// before them.
func copyArchive(w io.Writer, root *tar.Header, in io.Reader, base string) error {
	out := tar.NewWriter(w)
	if err := out.WriteHeader(root); err != nil {
		return err
	}
	switch root.Typeflag {
	case tar.TypeReg:
		n, err := io.Copy(out, io.LimitReader(in, root.Size))
		if err != nil {
			return err
		}
		if _, err := io.CopyN(out, zeros{}, root.Size-n); err != nil { // it has become shorter meanwhile
			return err
		}
	case tar.TypeDir:
		for from := tar.NewReader(in); ; {
			h, err := from.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			h.Format = tar.FormatPAX
			h.Name = base + "/" + h.Name
			if h.Typeflag == tar.TypeLink {
				h.Linkname = base + "/" + h.Linkname
			}
			if err := out.WriteHeader(h); err != nil {
				return err
			}
			if _, err := io.Copy(out, from); err != nil { //nolint:gosec // it is passed on as it comes
				return err
			}
		}
	}
	return out.Close()
}

// zeros is a reader of zeros.
type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// decompressed returns the tar in a body, which may be compressed.
func decompressed(r io.Reader) (io.Reader, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	head, _ := in.Peek(6) // a shorter body has none of these
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return gzip.NewReader(in)
	case bytes.HasPrefix(head, []byte("BZh")):
		return bzip2.NewReader(in), nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return nil, badf("archives compressed with xz are not read; gzip and bzip2 are")
	}
	return in, nil
}

func (c *call) putArchive() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	clean, _, err := archivePath(c.q.Get("path"))
	if err != nil {
		return err
	}
	return c.f.withFiles(c.ctx(), sb, func() error {
		e, err := c.f.api.StatFile(c.ctx(), sb.ID, clean, true)
		if err != nil {
			return c.noFile(err, c.q.Get("path"), sb)
		}
		if e.Type != api.TypeDirectory {
			return badf("extraction point is not a directory")
		}
		in, err := decompressed(c.r.Body)
		if err != nil {
			return badf("read the archive: %v", err)
		}
		if err := c.f.api.ArchiveInOwned(c.ctx(), sb.ID, clean, in); err != nil {
			return err
		}
		return c.none(http.StatusOK)
	})
}

func (c *call) getExport() error {
	sb, err := c.container()
	if err != nil {
		return err
	}
	return c.f.withFiles(c.ctx(), sb, func() error {
		in, err := c.f.api.ArchiveOut(c.ctx(), sb.ID, "/")
		if err != nil {
			return err
		}
		defer in.Close()
		c.w.Header().Set("Content-Type", "application/octet-stream")
		c.w.WriteHeader(http.StatusOK)
		if _, err := io.Copy(c.w, in); err != nil {
			c.f.log.Info("export broke off", "id", sb.ID, "error", err)
			panic(http.ErrAbortHandler) // half an archive must not look like a whole one
		}
		return errAnswered
	})
}
