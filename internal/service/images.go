package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// holders returns the names of sandboxes of any state, by the digest of their image and by the
// layers below them.
func (s *core) holders() map[string][]string {
	held := make(map[string][]string)
	for _, rec := range s.supervisor.List(runtime.Filter{AllTenants: true}) {
		holder := image.Holder(rec.Tenant, rec.Name)
		held[rec.ImageDigest] = append(held[rec.ImageDigest], holder)
		for _, id := range rec.Rootfs.Layers {
			if id != rec.ImageDigest { // the host image's one layer is called like it
				held[id] = append(held[id], holder)
			}
		}
	}
	return held
}

// Pull fetches an image.
func (s *API) Pull(ctx context.Context, req api.PullImage, progress func(api.PullEvent)) (api.Image, error) {
	if req.Reference == "" || len(req.Reference) > 1024 || hasControl(req.Reference) {
		return api.Image{}, class.Invalidf("reference %q: not a reference", class.Clip(req.Reference))
	}
	if err := validPlatform(req.Platform); err != nil {
		return api.Image{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.Image{}, err
	}
	img, err := s.images.Pull(ctx, req.Reference, image.PullOptions{Platform: req.Platform, Insecure: req.Insecure, Auth: req.Auth, Progress: progress})
	if err != nil {
		return api.Image{}, fmt.Errorf("pull %q: %w", req.Reference, err)
	}
	s.pools.Changed()
	s.publishImages(api.ActionPulled, img.Reference)
	return img.Image, nil
}

func validPlatform(p string) error {
	if len(p) > 64 || hasControl(p) {
		return class.Invalidf("platform %q: must be like linux/amd64", class.Clip(p))
	}
	return nil
}

// Push sends an image to the registry of its name.
func (s *API) Push(ctx context.Context, req api.PushImage, progress func(api.PullEvent)) (api.Image, error) {
	if err := validReference("reference", req.Reference); err != nil {
		return api.Image{}, err
	}
	if err := validPlatform(req.Platform); err != nil {
		return api.Image{}, err
	}
	img, err := s.images.Push(ctx, req.Reference, image.PushOptions{Platform: req.Platform, Insecure: req.Insecure, Auth: req.Auth, Progress: progress})
	if err != nil {
		return api.Image{}, fmt.Errorf("push %q: %w", req.Reference, err)
	}
	s.publishImages(api.ActionPushed, img.Reference)
	return img.Image, nil
}

// CheckRegistry asks a registry whether it takes credentials.
func (s *API) CheckRegistry(ctx context.Context, req api.CheckRegistry) (api.RegistryChecked, error) {
	if req.Registry == "" {
		return api.RegistryChecked{}, class.Invalidf("registry is empty: give its address, like registry.example:5000")
	}
	refusal, err := s.images.CheckRegistry(ctx, req.Registry, req.Insecure, req.Auth)
	return api.RegistryChecked{Accepted: err == nil && refusal == "", Refusal: refusal}, err
}

// Images lists the stored images.
func (s *API) Images(ctx context.Context) (api.ImageList, error) {
	list, err := s.images.List(ctx)
	if err != nil {
		return api.ImageList{}, fmt.Errorf("list images: %w", err)
	}
	if list == nil {
		list = []api.Image{}
	}
	return api.ImageList{Images: list}, nil
}

// validReference checks a reference that is shown and logged before it is parsed.
func validReference(what, ref string) error {
	if ref == "" || len(ref) > 1024 || hasControl(ref) {
		return class.Invalidf("%s %q: not a reference", what, class.Clip(ref))
	}
	return nil
}

// InspectImage returns the details of a stored image.
func (s *API) InspectImage(ctx context.Context, ref string) (api.ImageDetail, error) {
	if err := validReference("reference", ref); err != nil {
		return api.ImageDetail{}, err
	}
	return s.images.Inspect(ctx, ref)
}

// RemoveImage removes a name, and the image if it has no other name and no sandbox holds it.
func (s *API) RemoveImage(ctx context.Context, ref string, force bool) (api.ImagesRemoved, error) {
	if err := validReference("reference", ref); err != nil {
		return api.ImagesRemoved{}, err
	}
	defer s.pools.Removing()()
	out, err := s.images.Remove(ctx, ref, force)
	s.publishImages(api.ActionRemoved, slices.Concat(out.Removed, out.Untagged)...)
	return out, err
}

// PruneImages removes images that no sandbox holds.
func (s *API) PruneImages(ctx context.Context, req api.PruneImages) (api.ImagesRemoved, error) {
	defer s.pools.Removing()()
	out, err := s.images.Prune(ctx, req.All)
	s.publishImages(api.ActionRemoved, slices.Concat(out.Removed, out.Untagged)...)
	n, bytes, cerr := s.caches.prune(s.caller.Tenant)
	out.Steps += n
	out.Bytes += bytes
	return out, errors.Join(err, cerr)
}

// TagImage gives a stored image one more name.
func (s *API) TagImage(ctx context.Context, req api.TagImage) (api.Image, error) {
	if err := validReference("source", req.Source); err != nil {
		return api.Image{}, err
	}
	if err := validReference("target", req.Target); err != nil {
		return api.Image{}, err
	}
	img, err := s.images.Tag(ctx, req.Source, req.Target)
	if err != nil {
		return api.Image{}, err
	}
	s.pools.Changed()
	s.publish(api.Event{Type: api.EventImage, Action: api.ActionTagged, Object: img.Reference, From: req.Source})
	return img.Image, nil
}

// VerifyImages reads all stored content and reports damage.
func (s *API) VerifyImages(ctx context.Context) (api.ImagesVerified, error) {
	if err := s.administers(); err != nil {
		return api.ImagesVerified{}, err
	}
	out, err := s.images.Verify(ctx)
	if err != nil {
		return out, err
	}
	return out, s.verifySnapshots(ctx, &out)
}

// ImportOptions say how an archive is imported.
type ImportOptions = image.ImportOptions

// ImportImages stores the images of an archive.
func (s *API) ImportImages(ctx context.Context, r io.Reader, opts image.ImportOptions) (api.ImagesImported, error) {
	if opts.Reference != "" {
		if err := validReference("reference", opts.Reference); err != nil {
			return api.ImagesImported{}, err
		}
	}
	c := opts.Config
	set := len(c.Entrypoint)+len(c.Cmd)+len(c.Env)+len(c.Labels)+len(c.Volumes)+len(c.Ports) > 0 || c.WorkingDir != "" || c.User != "" || c.StopSignal != "" || c.HealthCheck != nil
	if !opts.Rootfs && set {
		return api.ImagesImported{}, class.Invalidf("config: an image brings its own; it is for root file systems (rootfs=true)")
	}
	if err := validateImageConfig(&c); err != nil {
		return api.ImagesImported{}, err
	}
	if err := s.spareDisk(ctx); err != nil {
		return api.ImagesImported{}, err
	}
	images, err := s.images.Import(ctx, r, opts)
	if err != nil {
		return api.ImagesImported{}, fmt.Errorf("import: %w", err)
	}
	out := api.ImagesImported{Images: []api.Image{}}
	for _, img := range images {
		out.Images = append(out.Images, img.Image)
		s.publishImages(api.ActionImported, img.Reference)
	}
	return out, nil
}

func validateImageConfig(c *api.ImageConfig) error {
	if err := validateVariables(c.Env); err != nil {
		return err
	}
	if c.WorkingDir != "" {
		if err := validatePath("working_dir", c.WorkingDir); err != nil {
			return err
		}
	}
	if err := validateUser(c.User); err != nil {
		return err
	}
	if err := validateArgs("config.entrypoint", c.Entrypoint); err != nil {
		return err
	}
	if err := validateArgs("config.cmd", c.Cmd); err != nil {
		return err
	}
	for _, path := range c.Volumes {
		if err := validatePath("config.volumes", path); err != nil {
			return err
		}
	}
	for _, port := range c.Ports {
		number, proto, _ := strings.Cut(port, "/")
		if n, err := strconv.ParseUint(number, 10, 16); err != nil || n == 0 || proto != "tcp" && proto != "udp" && proto != "sctp" {
			return class.Invalidf("config.ports %q: must be a number from 1 to 65535 with a protocol, as 80/tcp", class.Clip(port))
		}
	}
	if len(c.Volumes) > maxImageVolumes || len(c.Ports) > maxImagePorts {
		return class.Invalidf("config: %d volumes and %d ports, at most %d and %d are possible", len(c.Volumes), len(c.Ports), maxImageVolumes, maxImagePorts)
	}
	if c.StopSignal != "" && runtime.SignalNumber(c.StopSignal) == 0 {
		return class.Invalidf("config.stop_signal %q: no such signal", class.Clip(c.StopSignal))
	}
	if err := validateHealth(c.HealthCheck); err != nil {
		return err
	}
	// Not as those of sandboxes: images have whole documents in theirs.
	total := 0
	for k, v := range c.Labels {
		if k == "" || strings.IndexByte(k, 0) >= 0 || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return class.Invalidf("config.labels %q: a key must not be empty, nor have a NUL byte, and all is UTF-8", class.Clip(k))
		}
		total += len(k) + len(v)
	}
	if len(c.Labels) > maxImageLabels || total > maxImageLabelBytes {
		return class.Invalidf("config.labels: %d with %d bytes, at most %d with %d are possible", len(c.Labels), total, maxImageLabels, maxImageLabelBytes)
	}
	return nil
}

const (
	maxImageVolumes    = 100
	maxImagePorts      = 1000
	maxImageLabels     = 1000
	maxImageLabelBytes = 256 << 10
)

// ExportImage writes a stored image as an archive.
func (s *API) ExportImage(ctx context.Context, ref, format string, w io.Writer) error {
	if err := validReference("reference", ref); err != nil {
		return err
	}
	return s.images.Export(ctx, ref, cmp.Or(format, archive.FormatOCI), w)
}
