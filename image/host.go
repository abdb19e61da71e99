package image

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// hostImage is the latest host image.
type hostImage struct {
	root string // "/" outside of tests

	mu    sync.Mutex
	image *Image
	stamp string // of the host at that time
}

// hostPlatform returns the platform of the host's own programs.
func hostPlatform() string { return "linux/" + goruntime.GOARCH }

func (h *hostImage) summary() api.Image {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.image == nil {
		return api.Image{Reference: api.HostImage, Platform: hostPlatform(), Layers: 1}
	}
	return h.image.Image
}

// current returns the image if the host has not changed since.
func (h *hostImage) current() *Image {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.image == nil || h.stamp != h.stat() {
		return nil
	}
	img := *h.image
	img.Rootfs.Layers = slices.Clone(img.Rootfs.Layers)
	img.Rootfs.HostDirs = slices.Clone(img.Rootfs.HostDirs)
	img.Config.Env = slices.Clone(img.Config.Env)
	return &img
}

// stat returns a fingerprint, in some microseconds, that changes when programs are installed or
// removed. Files are replaced by renaming, which changes their directory.
func (h *hostImage) stat() string {
	var b strings.Builder
	for _, name := range []string{
		"etc", "etc/ld.so.cache", "etc/alternatives", "etc/ssl/certs", "usr", "usr/bin", "usr/lib", "usr/local", "usr/local/bin", "usr/local/lib",
	} {
		var st unix.Stat_t
		if err := unix.Stat(h.root+"/"+name, &st); err == nil {
			fmt.Fprintf(&b, "%s %d %d.%d;", name, st.Ino, st.Ctim.Sec, st.Ctim.Nsec)
		}
	}
	return b.String()
}

// getHost returns the host image, making it on first use or after a change of the host.
func (s *Service) getHost(ctx context.Context) (*Image, error) {
	if img := s.host.current(); img != nil {
		return img, nil
	}
	if err := s.flights.do(ctx, "host image", s.makeHost); err != nil {
		return nil, fmt.Errorf("make the host image: %w", err)
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	img := *s.host.image
	return &img, nil
}

func (s *Service) makeHost(ctx context.Context) (err error) {
	if s.host.current() != nil { // an earlier flight has made it after our check
		return nil
	}
	stamp := s.host.stat()
	f, err := s.store.TempFile()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	hostDirs, err := s.opts.HostLayer(ctx, f)
	if err != nil {
		return err
	}
	size, err := f.Seek(0, io.SeekCurrent) // the writer shares our offset
	if err != nil {
		return fmt.Errorf("read the written layer: %w", err)
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, io.NewSectionReader(f, 0, size)); err != nil {
		return fmt.Errorf("read the written layer: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("rewind: %w", err)
	}
	id := "sha256:" + hex.EncodeToString(hash.Sum(nil))
	if err := s.pin(ctx, treeKeys([]string{id})); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.release(ctx, nil, []string{id}, err != nil)) }()
	if err := s.store.BeginLayers(id); err != nil {
		return err
	}
	res, err := s.applier.Apply(ctx, layer.ApplyRequest{Layers: []layer.Request{{
		ChainID: id, MediaType: "application/vnd.oci.image.layer.v1.tar", DiffID: id, Blob: f,
	}}})
	if err != nil {
		return fmt.Errorf("extract: %w", err)
	}
	if got := res[0].DiffID; got != "" && got != id {
		return fmt.Errorf("extract: the layer's content is %s, not %s", got, id)
	}
	if err := s.store.MarkLayer(id, store.Tree{Bytes: size, Entries: res[0].Entries}); err != nil {
		return err
	}
	img := &Image{
		Image: api.Image{Reference: api.HostImage, Digest: id, Platform: hostPlatform(), Size: size, Layers: 1, PulledAt: time.Now().UTC()},
		Config: Config{
			// C.UTF-8 is built into the C library; without it python decodes file names as ASCII.
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"},
			Cmd: []string{"/bin/sh"}, WorkingDir: "/",
		},
		Rootfs: rootfs.Source{Layers: []string{id}, HostDirs: hostDirs},
	}
	s.host.mu.Lock()
	defer s.host.mu.Unlock()
	s.host.image, s.host.stamp = img, stamp
	return nil
}

// WriteHostLayer writes the layer of the image of the host with this root, and returns those of
// [rootfs.HostDirs] that lie below it.
func WriteHostLayer(root string, to io.Writer) ([]string, error) {
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, fmt.Errorf("open the host's root: %w", err)
	}
	defer func() { _ = r.Close() }() // only read
	// Most entries are a header of 512 bytes.
	buffered := bufio.NewWriterSize(to, 1<<20)
	hostDirs, err := writeHostTar(buffered, r)
	if err != nil {
		return nil, err
	}
	if err := buffered.Flush(); err != nil {
		return nil, fmt.Errorf("write the layer: %w", err)
	}
	return hostDirs, nil
}
