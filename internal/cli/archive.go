package cli

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// pack writes a local file or tree as a tar stream whose top entry is called top. It leaves out
// entries that are neither files, directories nor symbolic links, with a note.
func pack(w io.Writer, name string, fi fs.FileInfo, top string, notes io.Writer) error {
	t := tar.NewWriter(w)
	if fi.IsDir() {
		root, err := os.OpenRoot(name)
		if err != nil {
			return err
		}
		defer root.Close()
		err = fs.WalkDir(root.FS(), ".", func(p string, e fs.DirEntry, err error) error {
			if err != nil {
				return fmt.Errorf("read %s: %w", filepath.Join(name, p), err)
			}
			fi, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				return nil // deleted since the directory was listed
			}
			if err != nil {
				return err
			}
			return packOne(t, root, p, fi, path.Join(top, p), notes)
		})
		if err != nil {
			return err
		}
	} else {
		root, err := os.OpenRoot(filepath.Dir(name))
		if err != nil {
			return err
		}
		defer root.Close()
		if err := packOne(t, root, filepath.Base(name), fi, top, notes); err != nil {
			return err
		}
	}
	return t.Close()
}

// packOne writes the entry for p, a name in root, as name.
func packOne(t *tar.Writer, root *os.Root, p string, fi fs.FileInfo, name string, notes io.Writer) error {
	// Leave out owner and group: ids of this host mean nothing in the sandbox.
	hdr := &tar.Header{Name: name, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime(), Format: tar.FormatPAX}
	switch {
	case fi.IsDir():
		if name == "." {
			return nil // the target's own directory keeps its mode
		}
		hdr.Typeflag, hdr.Name = tar.TypeDir, name+"/"
		return t.WriteHeader(hdr)
	case fi.Mode().Type() == fs.ModeSymlink:
		link, err := root.Readlink(p)
		if err != nil {
			return err
		}
		hdr.Typeflag, hdr.Linkname = tar.TypeSymlink, link
		return t.WriteHeader(hdr)
	case !fi.Mode().IsRegular():
		fmt.Fprintf(notes, "sandboxd: left out %s: neither a file, a directory nor a symbolic link\n", cmdline.Printable(p))
		return nil
	}
	// The file may have become a pipe meanwhile, and opening one must not wait for a writer.
	f, err := root.OpenFile(p, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if fi, err = f.Stat(); err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("%s was replaced while it was read", p)
	}
	hdr.Typeflag, hdr.Size = tar.TypeReg, fi.Size()
	if err := t.WriteHeader(hdr); err != nil {
		return err
	}
	n, err := io.Copy(t, io.LimitReader(f, hdr.Size))
	if err != nil {
		return err
	}
	if n < hdr.Size {
		return fmt.Errorf("%s shrank while it was read", p)
	}
	return nil
}

const (
	maxEntries = 1_000_000
	maxName    = 4096 // PATH_MAX
)

// unpacker extracts an archive that a sandbox made, perhaps to do harm. It works below root through
// os.Root, which no name and no link leaves. Owners, setuid bits and devices are not extracted.
type unpacker struct {
	root     *os.Root
	maxBytes int64
	notes    io.Writer

	bytes   int64
	entries int
}

// tree extracts the archive of a directory under the name top, or into root itself if that is ".".
func (u *unpacker) tree(r io.Reader, top string) error {
	root := u.root
	if top != "." {
		if err := u.root.Mkdir(top, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		// OpenRoot fails if top is a link that leads out of root, or no directory.
		sub, err := u.root.OpenRoot(top)
		if err != nil {
			return err
		}
		defer sub.Close()
		root = sub
	}
	t := tar.NewReader(r)
	for {
		hdr, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := u.entry(root, t, hdr); err != nil {
			return err
		}
	}
}

// file extracts an archive that holds one file, under the name top.
func (u *unpacker) file(r io.Reader, top string) error {
	if top == "." {
		return errors.New("it is not a directory")
	}
	t := tar.NewReader(r)
	hdr, err := t.Next()
	if err != nil {
		return errors.Join(errors.New("the archive of a file does not hold it"), err)
	}
	if hdr.Typeflag != tar.TypeReg {
		return errors.New("the archive of a file holds something else")
	}
	hdr.Name = top
	if err := u.entry(u.root, t, hdr); err != nil {
		return err
	}
	switch _, err := t.Next(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	return errors.New("the archive of a file holds more than that file")
}

// entry extracts one entry below root.
func (u *unpacker) entry(root *os.Root, r io.Reader, hdr *tar.Header) error {
	if u.entries++; u.entries > maxEntries {
		return fmt.Errorf("more than %d entries", maxEntries)
	}
	name, err := localName(hdr.Name)
	if err != nil {
		return err
	}
	if hdr.Typeflag == tar.TypeDir {
		if name == "." {
			return nil
		}
		// The owner must be able to enter and delete it, whatever its mode in the sandbox.
		return root.MkdirAll(name, permissions(hdr)|0o700)
	}
	if name == "." {
		return errors.New("an entry would replace the destination itself")
	}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
	default:
		fmt.Fprintf(u.notes, "sandboxd: left out %s: neither a file, a directory nor a link\n", cmdline.Printable(name))
		return nil
	}
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o777); err != nil {
			return err
		}
	}
	// Replace an existing entry, and never write through it: it may be a link to anywhere.
	fi, err := root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case fi.IsDir():
		return fmt.Errorf("%s is a directory here and not there", name)
	default:
		if hdr.Typeflag == tar.TypeLink {
			if target, err := localName(hdr.Linkname); err != nil || target == name {
				return fmt.Errorf("%s is a hard link to itself", name)
			}
		}
		if err := root.Remove(name); err != nil {
			return err
		}
	}
	switch hdr.Typeflag {
	case tar.TypeSymlink:
		return root.Symlink(hdr.Linkname, name)
	case tar.TypeLink:
		target, err := localName(hdr.Linkname)
		if err != nil {
			return err
		}
		return root.Link(target, name)
	}
	return u.regular(root, r, name, hdr)
}

// regular extracts a file under an unused name.
func (u *unpacker) regular(root *os.Root, r io.Reader, name string, hdr *tar.Header) (err error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, permissions(hdr))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, root.Remove(name)) // do not leave half a file
		}
	}()
	left := u.maxBytes - u.bytes
	n, err := io.Copy(f, io.LimitReader(r, left+1))
	u.bytes += n
	if err == nil && n > left {
		err = fmt.Errorf("more than %d bytes; see --max", u.maxBytes)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	// Skip times outside the range of both the kernel's and Go's clocks.
	if y := hdr.ModTime.Year(); y >= 1970 && y < 2200 {
		return root.Chtimes(name, hdr.ModTime, hdr.ModTime)
	}
	return nil
}

// permissions returns the part of a mode that is extracted: no setuid and no sticky bit.
func permissions(hdr *tar.Header) fs.FileMode { return fs.FileMode(hdr.Mode & 0o777) }

// localName checks a name from the archive.
func localName(name string) (string, error) {
	if len(name) > maxName {
		return "", fmt.Errorf("a name of %d bytes", len(name))
	}
	// Check before cleaning: no honest archive has a name such as "a/../b".
	if name == "" || strings.HasPrefix(name, "/") || !filepath.IsLocal(name) || strings.Contains("/"+name+"/", "/../") || strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("the name %q does not stay in the archive", name)
	}
	return path.Clean(name), nil
}
