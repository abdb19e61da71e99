package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// CommitOptions say what becomes of an image and one more layer.
type CommitOptions struct {
	Base      string          // digest of the manifest of a stored image
	Reference string          // of the new image
	Config    api.ImageConfig // changes, as [api.CommitSandbox] says
	Comment   string
	Created   time.Time
	// Layer writes the new layer as an uncompressed tar stream and returns what [layer.Diff] does, with the DiffID. Where it
	// has no entries the new image has the layers of the old one.
	Layer func(ctx context.Context, w io.Writer) (layer.Result, error)
}

// Commit stores a new image: all that a stored one has, and one layer more. Errors of Layer are returned as they are.
func (s *Service) Commit(ctx context.Context, opts CommitOptions) (_ *Image, _ layer.Result, err error) {
	target, err := importName(opts.Reference)
	if err != nil {
		return nil, layer.Result{}, err
	}
	base, release, err := s.byDigest(ctx, opts.Base)
	if err != nil {
		return nil, layer.Result{}, err
	}
	defer release()
	want, err := platform(base.Platform)
	if err != nil {
		return nil, layer.Result{}, err
	}
	a := &archive{service: s}
	defer func() {
		if rerr := s.release(ctx, a.pinned, nil, true); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	b, result, err := a.pack(ctx, opts.Layer)
	if err != nil {
		return nil, layer.Result{}, err
	}
	manifest, err := a.commit(ctx, base, b, result, &opts)
	if err != nil {
		return nil, layer.Result{}, err
	}
	p := &pull{service: s, ref: target, want: want, explicit: true, origin: &archiveOrigin{service: s, root: manifest}}
	ready, err := p.run(ctx)
	if err != nil {
		return nil, layer.Result{}, err
	}
	images, err := s.finish(ctx, []*prepared{ready})
	if err != nil {
		return nil, layer.Result{}, err
	}
	return images[0], result, nil
}

// byDigest finds a stored image by its manifest and keeps it until release is called.
func (s *Service) byDigest(ctx context.Context, digest string) (*store.Record, func(), error) {
	records, err := s.store.List()
	if err != nil {
		return nil, nil, err
	}
	for _, r := range records {
		if r.Manifest.Digest != digest {
			continue
		}
		_, now, release, err := s.acquireRecord(ctx, r.Name)
		switch {
		case err == nil && now.Manifest.Digest == digest:
			return now, release, nil
		case err == nil: // the name is another image's meanwhile
			release()
		case !errors.Is(err, ErrNotFound):
			return nil, nil, err
		}
	}
	return nil, nil, classf(ErrNotFound, "the image %s, which the sandbox was made of, is not stored any more", digest)
}

// pack stores a layer, compressed.
func (a *archive) pack(ctx context.Context, write func(context.Context, io.Writer) (layer.Result, error)) (store.Blob, layer.Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, w := io.Pipe()
	var result layer.Result
	var werr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		zip := gzip.NewWriter(w)
		if result, werr = write(ctx, zip); werr == nil {
			werr = zip.Close()
		}
		_ = w.CloseWithError(werr) // nil is io.EOF
	}()
	b, err := a.add(ctx, r, layer.DefaultLimits().Bytes)
	_ = r.CloseWithError(io.ErrClosedPipe) // a writer that is not done is to end
	if err != nil {
		cancel()
	}
	<-done
	if werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		return store.Blob{}, layer.Result{}, werr
	}
	if err != nil {
		return store.Blob{}, layer.Result{}, fmt.Errorf("store the layer: %w", err)
	}
	return b, result, nil
}

// commit makes the configuration and manifest of the new image, and returns the manifest's digest.
func (a *archive) commit(ctx context.Context, base *store.Record, b store.Blob, result layer.Result, opts *CommitOptions) (string, error) {
	file, err := a.service.configFile(base)
	if err != nil {
		return "", err
	}
	file.Created = v1.Time{Time: opts.Created.UTC()}
	file.History = append(file.History, v1.History{
		Created: file.Created, CreatedBy: "sandboxd commit", Comment: opts.Comment, EmptyLayer: result.Entries == 0,
	})
	configure(&file.Config, opts.Config)
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	configType, layerType := types.OCIConfigJSON, types.OCILayer
	// One family of media types: tools are particular about it.
	if types.MediaType(base.Manifest.MediaType) == types.DockerManifestSchema2 {
		m.MediaType, configType, layerType = types.DockerManifestSchema2, types.DockerConfigJSON, types.DockerLayer
	}
	layers := make([]store.Blob, 0, len(base.Layers)+1)
	for _, l := range base.Layers {
		layers = append(layers, l.Blob)
	}
	if result.Entries > 0 {
		digest, err := v1.NewHash(result.DiffID)
		if err != nil {
			return "", fmt.Errorf("diff id of the layer: %w", err)
		}
		file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, digest)
		b.MediaType = string(layerType)
		layers = append(layers, b)
	}
	data, err := json.Marshal(file)
	if err != nil {
		return "", fmt.Errorf("encode configuration: %w", err)
	}
	config, err := a.add(ctx, bytes.NewReader(data), maxDocument)
	if err != nil {
		return "", err
	}
	config.MediaType = string(configType)
	if m.Config, err = asDescriptor(config); err != nil {
		return "", err
	}
	for _, l := range layers {
		d, err := asDescriptor(l)
		if err != nil {
			return "", err
		}
		m.Layers = append(m.Layers, d)
	}
	return a.addJSON(ctx, m)
}

// configure changes how an image is run.
func configure(c *v1.Config, change api.ImageConfig) {
	if len(change.Entrypoint) > 0 {
		c.Entrypoint, c.Cmd = change.Entrypoint, nil
	}
	if len(change.Cmd) > 0 {
		c.Cmd = change.Cmd
	}
	for _, e := range change.Env {
		name, _, _ := strings.Cut(e, "=")
		c.Env = append(slices.DeleteFunc(slices.Clone(c.Env), func(was string) bool { return strings.HasPrefix(was, name+"=") }), e)
	}
	if change.WorkingDir != "" {
		c.WorkingDir = change.WorkingDir
	}
	if change.User != "" {
		c.User = change.User
	}
	if len(change.Labels) > 0 {
		if c.Labels == nil {
			c.Labels = make(map[string]string)
		}
		maps.Copy(c.Labels, change.Labels)
	}
}
