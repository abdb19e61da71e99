package libct

import (
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox whose policy inspects TLS trusts an authority of its own ([runtime.Spec.Trust]). Init
// puts a file over the image's bundle of certificates: the authority's certificate, then the
// image's. It lies beside the sandbox's upper directory, so that no commit, snapshot or diff
// contains it. Java has stores of its own; each gets another file, with its own certificates and
// the authority's.

// bundles are the places of certificate bundles in images. The first is made where an image has
// none of them; it is [runtime.TrustFile].
var bundles = []string{
	runtime.TrustFile[1:],
	"etc/pki/tls/certs/ca-bundle.crt",
	"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"etc/ssl/ca-bundle.pem",
	"etc/ssl/cert.pem",
}

// stores are the places of Java's stores of certificates in images. Installations in javaDirs have
// further ones.
var stores = []string{
	"etc/ssl/certs/java/cacerts",
	"etc/pki/java/cacerts",
	"etc/pki/ca-trust/extracted/java/cacerts",
	"var/lib/ca-certificates/java-cacerts",
}

// javaDirs are directories with installations of Java.
var javaDirs = []string{"usr/lib/jvm", "usr/java", "usr/local", "opt/java", "opt"}

const (
	maxBundle = 4 << 20 // bytes of the image's bundle
	// Bounds of the image's stores. A store that is larger or beyond the count is left as it is.
	maxStore    = 1 << 20 // bytes
	maxStores   = 16
	maxJavaDirs = 256 // installations in a directory
)

func trustFile(dir string) string { return filepath.Join(dir, "trust.crt") }

// storeFile is the file over one of Java's stores.
func storeFile(dir string, i int) string {
	return filepath.Join(dir, "trust."+strconv.Itoa(i)+".java")
}

// attachTrust puts the file over the bundles of the image, in Init.
func attachTrust(root int, plan *rootPlan) error {
	if err := trustAll(root, plan); err != nil {
		return fmt.Errorf("trust the sandbox's authority: %w", err)
	}
	return nil
}

func trustAll(root int, plan *rootPlan) error {
	type place struct{ dev, ino uint64 }
	var found []int // bundles of the image, each once
	defer func() {
		for _, fd := range found {
			_ = unix.Close(fd)
		}
	}()
	seen, copied := make(map[place]bool), false
	for i, name := range bundles {
		at, err := openInRoot(root, name, unix.O_PATH)
		switch {
		case err != nil && i > 0:
			continue // the image has none there
		case err != nil:
			if at, err = makeBundle(root); err != nil {
				return err
			}
		}
		found = append(found, at)
		var st unix.Stat_t
		if err := unix.Fstat(at, &st); err != nil {
			return fmt.Errorf("examine /%s: %w", name, err)
		}
		regular, link := st.Mode&unix.S_IFMT == unix.S_IFREG, st.Mode&unix.S_IFMT == unix.S_IFLNK
		switch {
		case i == 0 && !regular && !link:
			return fmt.Errorf("/%s of the image is no file: %w", name, runtime.ErrRootfs)
		case !regular && !link || seen[place{st.Dev, st.Ino}]:
			found = found[:len(found)-1]
			_ = unix.Close(at)
			continue
		}
		seen[place{st.Dev, st.Ino}] = true
		if regular && st.Size > 0 && !copied {
			if err := appendBundle(root, name, plan.Trust); err != nil {
				return err
			}
			copied = true
		}
	}
	for _, at := range found {
		if err := mountFile(plan.Trust, at, plan.ReadOnly); err != nil {
			return err
		}
	}
	return trustStores(root, plan)
}

// makeBundle makes an empty file in the first place, or opens the link that is there.
func makeBundle(root int) (int, error) {
	dir, err := rootDir(root, "etc")
	if err != nil {
		return -1, err
	}
	path := "etc"
	for _, name := range []string{"ssl", "certs"} {
		err := unix.Mkdirat(dir, name, 0o755)
		_ = unix.Close(dir)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, fmt.Errorf("make /%s/%s: %w", path, name, err)
		}
		path += "/" + name
		dir, err = openInRoot(root, path, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return -1, fmt.Errorf("open /%s of the image: %w: %w", path, err, runtime.ErrRootfs)
		}
	}
	defer unix.Close(dir)
	name := filepath.Base(runtime.TrustFile)
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err == nil {
		err = unix.Close(fd)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("make %s: %w", runtime.TrustFile, err)
	}
	at, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", runtime.TrustFile, err)
	}
	return at, nil
}

// appendBundle appends the image's bundle to the file.
func appendBundle(root int, name, file string) error {
	fd, err := openInRoot(root, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return fmt.Errorf("open /%s of the image: %w", name, err)
	}
	from := os.NewFile(uintptr(fd), name)
	defer from.Close() // only read
	to, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("open the bundle: %w", err)
	}
	n, err := io.Copy(to, io.LimitReader(from, maxBundle+1))
	if err = errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("copy /%s of the image: %w", name, err)
	}
	if n > maxBundle {
		return fmt.Errorf("/%s of the image is larger than %d bytes: %w", name, maxBundle, runtime.ErrRootfs)
	}
	return nil
}

// trustStores puts a file over each of Java's stores in the image that can be read: the store with
// the authority. Where there is none, Java trusts what the image says.
func trustStores(root int, plan *rootPlan) error {
	data, err := os.ReadFile(plan.Trust)
	if err != nil {
		return fmt.Errorf("read the authority: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return errors.New("read the authority: it is no certificate in PEM")
	}
	// All are found before the first is covered: a link to that one would lead to our file.
	found, err := findStores(root)
	defer func() {
		for _, fd := range found {
			_ = unix.Close(fd)
		}
	}()
	if err != nil {
		return err
	}
	for i, at := range found {
		store, err := readStore(at)
		if err != nil {
			return err
		}
		if store = withTrusted(store, block.Bytes); store == nil {
			continue // it is left as it is
		}
		file := storeFile(filepath.Dir(plan.Trust), i)
		if err := os.WriteFile(file, store, 0o644); err != nil { //nolint:gosec // G306: every user of the sandbox reads it
			return fmt.Errorf("write the store: %w", err)
		}
		if err := mountFile(file, at, plan.ReadOnly); err != nil {
			return err
		}
	}
	return nil
}

// readStore reads a file of the image.
func readStore(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("examine a store of the image: %w", err)
	}
	data := make([]byte, min(st.Size, maxStore))
	n, err := unix.Pread(fd, data, 0)
	if err != nil {
		return nil, fmt.Errorf("read a store of the image: %w", err)
	}
	return data[:n], nil
}

// findStores returns the files at the places of Java's stores, each once.
func findStores(root int) (found []int, err error) {
	type place struct{ dev, ino uint64 }
	seen := make(map[place]bool)
	for _, name := range storeNames(root) {
		fd, err := openInRoot(root, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
		if err != nil {
			continue // the image has none there
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return found, errors.Join(fmt.Errorf("examine /%s: %w", name, err), unix.Close(fd))
		}
		at := place{st.Dev, st.Ino}
		if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxStore || seen[at] || len(found) == maxStores {
			_ = unix.Close(fd)
			continue
		}
		seen[at] = true
		found = append(found, fd)
	}
	return found, nil
}

// storeNames are the names that findStores looks at.
func storeNames(root int) []string {
	names := slices.Clone(stores)
	for _, dir := range javaDirs {
		fd, err := openInRoot(root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			continue // the image has no such directory
		}
		f := os.NewFile(uintptr(fd), dir)
		entries, _ := f.ReadDir(maxJavaDirs) // an error leaves the readable ones
		_ = f.Close()                        // only read
		for _, e := range entries {
			for _, below := range []string{"lib/security/cacerts", "jre/lib/security/cacerts"} {
				names = append(names, filepath.Join(dir, e.Name(), below))
			}
		}
	}
	return names
}

// writeTrust writes the authority's certificate into a new file that Init appends to, and makes
// those for Java, which Init fills.
func (e *Engine) writeTrust(dir string, certificate []byte) error {
	root := e.host.IDs[0].Outside
	files := map[string][]byte{trustFile(dir): append(certificate, '\n')}
	for i := range maxStores {
		files[storeFile(dir, i)] = nil
	}
	for file, data := range files {
		err := os.WriteFile(file, data, 0o644)                                                      //nolint:gosec // G306: every user of the sandbox reads it
		if err = errors.Join(err, os.Lchown(file, root, root), os.Chmod(file, 0o644)); err != nil { //nolint:gosec // G302: every user of the sandbox reads it
			return fmt.Errorf("write the sandbox's authority: %w", err)
		}
	}
	return nil
}

// trustOf returns the place of the file for Init.
func trustOf(spec *runtime.Spec) string {
	if len(spec.Trust) == 0 {
		return ""
	}
	return trustFile(filepath.Join(launcher.SandboxesDir, spec.ID))
}
