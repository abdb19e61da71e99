// Command lister tells all that a layer can carry of a tree: names, types, permissions, owners,
// links, extended attributes, times and bytes. The same program looks at a sandbox from inside and
// at what other engines have unpacked.
//
//	lister DIR                      a line for each entry, sorted, but of /dev, /proc and /sys
//	lister set FILE NAME VALUE      sets an extended attribute
package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

func main() {
	var err error
	if len(os.Args) == 5 && os.Args[1] == "set" {
		err = unix.Lsetxattr(os.Args[2], os.Args[3], []byte(os.Args[4]), 0)
	} else {
		err = list(os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func list(top string) error {
	links := make(map[uint64]string) // the first name of each file that has several
	return filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(strings.TrimPrefix(path, top), "/")
		if slices.Contains([]string{"dev", "proc", "sys"}, name) {
			return filepath.SkipDir
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("%q has no state", name)
		}
		line := fmt.Sprintf("%q %s %o %d:%d", name, fi.Mode().Type(), st.Mode&0o7777, st.Uid, st.Gid)
		if name != "" { // which a sandbox and every engine makes anew
			line += fmt.Sprint(" ", st.Mtim.Sec)
		}
		if !fi.IsDir() && st.Nlink > 1 {
			if first := links[st.Ino]; first != "" {
				line += fmt.Sprintf(" is %q", first)
			} else {
				links[st.Ino] = name
			}
			line += fmt.Sprint(" links ", st.Nlink)
		}
		switch {
		case fi.Mode().Type() == fs.ModeSymlink:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", to)
		case fi.Mode().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			hash := sha256.New()
			_, err = io.Copy(hash, f)
			if cerr := f.Close(); err != nil || cerr != nil {
				return fmt.Errorf("read %q: %w, %w", name, err, cerr)
			}
			line += fmt.Sprintf(" %d %x", fi.Size(), hash.Sum(nil))
		}
		attrs, err := xattrs(path)
		if err != nil {
			return fmt.Errorf("xattrs of %q: %w", name, err)
		}
		fmt.Println(line + attrs)
		return nil
	})
}

// xattrs are those that users set. Others are the engine's and the kernel's own.
func xattrs(path string) (line string, err error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return "", err
	}
	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	for _, name := range names {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		n, err := unix.Lgetxattr(path, name, buf)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" %s=%q", name, buf[:n])
	}
	return line, nil
}
