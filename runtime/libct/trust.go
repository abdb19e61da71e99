package libct

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
)

// A sandbox whose policy inspects TLS trusts an authority of its own ([runtime.Spec.Trust]). Init
// puts a file over the image's bundle of certificates that has those and the authority's. It lies
// beside the sandbox's upper directory, so that no commit, snapshot or diff contains it.

// bundles are the places of certificate bundles in images. The first is made where an image has
// none of them; it is [runtime.TrustFile].
var bundles = []string{
	runtime.TrustFile[1:],
	"etc/pki/tls/certs/ca-bundle.crt",
	"etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"etc/ssl/ca-bundle.pem",
	"etc/ssl/cert.pem",
}

// maxBundle bounds the image's bundle, in bytes.
const maxBundle = 4 << 20

func trustFile(dir string) string { return filepath.Join(dir, "trust.crt") }

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
		at, err := unix.Openat2(root, name, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
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
	return nil
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
		dir, err = unix.Openat2(root, path, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
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
	fd, err := unix.Openat2(root, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
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

// writeTrust writes the authority's certificate into a new file that Init appends to.
func (e *Engine) writeTrust(dir string, certificate []byte) error {
	file, root := trustFile(dir), e.host.IDs[0].Outside
	err := os.WriteFile(file, append(certificate, '\n'), 0o644)                                 //nolint:gosec // G306: every user of the sandbox reads it
	if err = errors.Join(err, os.Lchown(file, root, root), os.Chmod(file, 0o644)); err != nil { //nolint:gosec // G302: as above
		return fmt.Errorf("write the sandbox's authority: %w", err)
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
