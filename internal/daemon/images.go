package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/runtime"
)

// holders are the sandboxes of any state by the digest of the image that each was made of, and by the layers of snapshots that
// each stands on.
func (s *Service) holders() map[string][]string {
	held := make(map[string][]string)
	for _, rec := range s.supervisor.List(runtime.Filter{AllTenants: true}) {
		for _, id := range slices.Concat(rec.Rootfs.Taken(), []string{rec.ImageDigest}) {
			held[id] = append(held[id], rec.Name)
		}
	}
	return held
}

// Pull fetches an image.
func (s *Service) Pull(ctx context.Context, req api.PullImage, progress func(api.PullEvent)) (api.Image, error) {
	if req.Reference == "" || len(req.Reference) > 1024 || hasControl(req.Reference) {
		return api.Image{}, invalidf("reference %q: not a reference", clip(req.Reference))
	}
	if err := validPlatform(req.Platform); err != nil {
		return api.Image{}, err
	}
	img, err := s.images.Pull(ctx, req.Reference, image.PullOptions{Platform: req.Platform, Insecure: req.Insecure, Progress: progress})
	if err != nil {
		return api.Image{}, fmt.Errorf("pull %q: %w", req.Reference, err)
	}
	s.pools.changed()
	return img.Image, nil
}

func validPlatform(p string) error {
	if len(p) > 64 || hasControl(p) {
		return invalidf("platform %q: must be like linux/amd64", clip(p))
	}
	return nil
}

// Push sends an image to the registry of its name.
func (s *Service) Push(ctx context.Context, req api.PushImage, progress func(api.PullEvent)) (api.Image, error) {
	if err := validReference("reference", req.Reference); err != nil {
		return api.Image{}, err
	}
	if err := validPlatform(req.Platform); err != nil {
		return api.Image{}, err
	}
	img, err := s.images.Push(ctx, req.Reference, image.PushOptions{Platform: req.Platform, Insecure: req.Insecure, Progress: progress})
	if err != nil {
		return api.Image{}, fmt.Errorf("push %q: %w", req.Reference, err)
	}
	return img.Image, nil
}

// Images lists what is stored.
func (s *Service) Images(ctx context.Context) (api.ImageList, error) {
	list, err := s.images.List(ctx)
	if err != nil {
		return api.ImageList{}, fmt.Errorf("list images: %w", err)
	}
	if list == nil {
		list = []api.Image{}
	}
	return api.ImageList{Images: list}, nil
}

// validReference checks what is going to be shown and logged, before anyone parses it.
func validReference(what, ref string) error {
	if ref == "" || len(ref) > 1024 || hasControl(ref) {
		return invalidf("%s %q: not a reference", what, clip(ref))
	}
	return nil
}

// InspectImage returns everything that is known of a stored image.
func (s *Service) InspectImage(ctx context.Context, ref string) (api.ImageDetail, error) {
	if err := validReference("reference", ref); err != nil {
		return api.ImageDetail{}, err
	}
	return s.images.Inspect(ctx, ref)
}

// RemoveImage takes away a name, and the image where it has no other and no sandbox holds it.
func (s *Service) RemoveImage(ctx context.Context, ref string, force bool) (api.ImagesRemoved, error) {
	if err := validReference("reference", ref); err != nil {
		return api.ImagesRemoved{}, err
	}
	defer s.pools.removing()()
	return s.images.Remove(ctx, ref, force)
}

// PruneImages removes images that no sandbox holds.
func (s *Service) PruneImages(ctx context.Context, req api.PruneImages) (api.ImagesRemoved, error) {
	defer s.pools.removing()()
	return s.images.Prune(ctx, req.All)
}

// TagImage gives a stored image one more name.
func (s *Service) TagImage(ctx context.Context, req api.TagImage) (api.Image, error) {
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
	s.pools.changed()
	return img.Image, nil
}

// VerifyImages reads everything that is stored and says what is damaged.
func (s *Service) VerifyImages(ctx context.Context) (api.ImagesVerified, error) {
	out, err := s.images.Verify(ctx)
	if err != nil {
		return out, err
	}
	return out, s.verifySnapshots(ctx, &out)
}

// ImportImages stores the images of an archive.
func (s *Service) ImportImages(ctx context.Context, r io.Reader, opts image.ImportOptions) (api.ImagesImported, error) {
	if opts.Reference != "" {
		if err := validReference("reference", opts.Reference); err != nil {
			return api.ImagesImported{}, err
		}
	}
	c := opts.Config
	if !opts.Rootfs && (len(c.Entrypoint) > 0 || len(c.Cmd) > 0 || len(c.Env) > 0 || len(c.Labels) > 0 || c.WorkingDir != "" || c.User != "") {
		return api.ImagesImported{}, invalidf("config: an image brings its own; it is for root file systems (rootfs=true)")
	}
	if err := validateImageConfig(&c); err != nil {
		return api.ImagesImported{}, err
	}
	images, err := s.images.Import(ctx, r, opts)
	if err != nil {
		return api.ImagesImported{}, fmt.Errorf("import: %w", err)
	}
	out := api.ImagesImported{Images: []api.Image{}}
	for _, img := range images {
		out.Images = append(out.Images, img.Image)
	}
	return out, nil
}

func validateImageConfig(c *api.ImageConfig) error {
	if err := validateEnv(c.Env); err != nil {
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
	// Not as those of sandboxes: images have whole documents in theirs.
	total := 0
	for k, v := range c.Labels {
		if k == "" || strings.IndexByte(k, 0) >= 0 || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return invalidf("config.labels %q: a key must not be empty, nor have a NUL byte, and all is UTF-8", clip(k))
		}
		total += len(k) + len(v)
	}
	if len(c.Labels) > maxImageLabels || total > maxImageLabelBytes {
		return invalidf("config.labels: %d with %d bytes, at most %d with %d are possible", len(c.Labels), total, maxImageLabels, maxImageLabelBytes)
	}
	return nil
}

const (
	maxImageLabels     = 1000
	maxImageLabelBytes = 256 << 10
)

// ExportImage writes a stored image as an archive.
func (s *Service) ExportImage(ctx context.Context, ref, format string, w io.Writer) error {
	if err := validReference("reference", ref); err != nil {
		return err
	}
	return s.images.Export(ctx, ref, format, w)
}

func (d *Daemon) getImages(w http.ResponseWriter, r *http.Request) error {
	list, err := d.service.Images(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *Daemon) postPull(w http.ResponseWriter, r *http.Request) error {
	var req api.PullImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	return tell(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
		img, err := d.service.Pull(r.Context(), req, progress)
		return api.PullEvent{Image: &img}, err
	})
}

func (d *Daemon) postPush(w http.ResponseWriter, r *http.Request) error {
	var req api.PushImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	return tell(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
		img, err := d.service.Push(r.Context(), req, progress)
		return api.PullEvent{Image: &img}, err
	})
}

// tell answers with the progress of work, a line for each event, the last one with what it returns or an error.
func tell(w http.ResponseWriter, work func(progress func(api.PullEvent)) (api.PullEvent, error)) error {
	emit := lines[api.PullEvent](w)
	began := false
	last, err := work(func(e api.PullEvent) {
		began = true
		_ = emit(e) // a client that goes away ends the request's context, and with it the work
	})
	switch {
	case err != nil && !began:
		return err
	case err != nil:
		_ = emit(api.PullEvent{Error: ProblemOf(err)}) // as above
	default:
		last.Status = "done"
		_ = emit(last) // as above
	}
	return nil
}

// flag reads a parameter that is true or false.
func flag(name, value string) (bool, error) {
	switch value {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, invalidf("%s %q: must be true or false", name, clip(value))
}

func (d *Daemon) deleteImage(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "force")
	if err != nil {
		return err
	}
	force, err := flag("force", q.Get("force"))
	if err != nil {
		return err
	}
	out, err := d.service.RemoveImage(r.Context(), q.Get("reference"), force)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

func (d *Daemon) postPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, d.service.PruneImages)
}

func (d *Daemon) postTag(w http.ResponseWriter, r *http.Request) error {
	var req api.TagImage
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	img, err := d.service.TagImage(r.Context(), req)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, img)
}

func (d *Daemon) getImage(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference")
	if err != nil {
		return err
	}
	detail, err := d.service.InspectImage(r.Context(), q.Get("reference"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, detail)
}

func (d *Daemon) getVerify(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	out, err := d.service.VerifyImages(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

func (d *Daemon) postImport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "platform", "rootfs", "config", "progress")
	if err != nil {
		return err
	}
	opts := image.ImportOptions{Reference: q.Get("reference"), Platform: q.Get("platform")}
	if opts.Rootfs, err = flag("rootfs", q.Get("rootfs")); err != nil {
		return err
	}
	if c := q.Get("config"); c != "" {
		if err := decodeJSON([]byte(c), &opts.Config); err != nil {
			return invalidf("config: %s", strings.TrimPrefix(err.Error(), "body: "))
		}
	}
	progress, err := flag("progress", q.Get("progress"))
	if err != nil {
		return err
	}
	body := &watchedBody{r: requestBody(w, r)}
	work := func() (api.ImagesImported, error) {
		out, err := d.service.ImportImages(r.Context(), body, opts)
		if body.err != nil {
			err = bodyError(body.err)
		}
		return out, err
	}
	if progress {
		return tell(w, func(progress func(api.PullEvent)) (api.PullEvent, error) {
			opts.Progress = progress
			out, err := work()
			return api.PullEvent{Images: out.Images}, err
		})
	}
	out, err := work()
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

// watchedBody remembers what ended it.
type watchedBody struct {
	r   io.Reader
	err error // but io.EOF
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

func (d *Daemon) getExport(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "reference", "format")
	if err != nil {
		return err
	}
	format := q.Get("format")
	if format == "" {
		format = archive.FormatOCI
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return d.service.ExportImage(r.Context(), q.Get("reference"), format, out)
}
