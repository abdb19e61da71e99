package image

import (
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

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/archive"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

// CommitOptions describe an image made of a stored one and further layers.
type CommitOptions struct {
	Base      string          // digest of the manifest of a stored image
	Reference string          // of the new image
	Config    api.ImageConfig // changes, as in [api.CommitSandbox]
	Comment   string
	Author    string
	Created   time.Time
	// Layer writes the new layer as an uncompressed tar stream and returns the result of [layer.Diff],
	// with the DiffID. Without entries the new image has the layers of the old one.
	Layer func(ctx context.Context, w io.Writer) (layer.Result, error)
	// Below are layers before Layer, lowest first: of the snapshots below a sandbox.
	Below []CommitLayer
}

// CommitLayer is a layer of a snapshot.
type CommitLayer struct {
	DiffID string // required digest, from when it was made
	Write  func(ctx context.Context, w io.Writer) (layer.Result, error)
}

// Commit stores a new image: a stored one with further layers. Errors of Layer are returned
// unchanged.
func (s *Service) Commit(ctx context.Context, opts CommitOptions) (_ *Image, _ layer.Result, err error) {
	target, err := reference.ParseTag(opts.Reference)
	if err != nil {
		return nil, layer.Result{}, err
	}
	base, release, err := s.byDigest(ctx, opts.Base)
	if err != nil {
		return nil, layer.Result{}, err
	}
	defer release()
	want, err := reference.ParsePlatform(base.Platform)
	if err != nil {
		return nil, layer.Result{}, err
	}
	a := s.staging()
	defer func() {
		if rerr := s.release(ctx, a.Pinned, nil, true); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	var result layer.Result
	var made []committed
	var diffIDs []string
	for _, l := range append(slices.Clone(opts.Below), CommitLayer{Write: opts.Layer}) {
		b, err := a.Pack(ctx, func(ctx context.Context, w io.Writer) (err error) {
			result, err = l.Write(ctx, w)
			return err
		})
		if err != nil {
			return nil, layer.Result{}, err
		}
		if l.DiffID != "" && result.DiffID != l.DiffID {
			return nil, layer.Result{}, errdefs.Classf(ErrInvalid, "a snapshot that the sandbox stands on is damaged: its layer reads as %s, and was %s when it was taken",
				result.DiffID, l.DiffID)
		}
		if result.Entries > 0 {
			made, diffIDs = append(made, committed{b, result.DiffID}), append(diffIDs, result.DiffID)
		}
	}
	manifest, err := s.commitManifest(ctx, a, base, made, &opts)
	if err != nil {
		return nil, layer.Result{}, err
	}
	p := &pull{service: s, ref: target, want: want, explicit: true, staging: a, made: diffIDs, origin: s.archived(a, manifest)}
	ready, err := p.run(ctx)
	if err != nil {
		return nil, layer.Result{}, err
	}
	images, err := s.record(ctx, []*prepared{ready})
	if err != nil {
		return nil, layer.Result{}, err
	}
	return images[0], result, nil
}

// byDigest finds a stored image by its manifest and keeps it until release is called.
func (s *Service) byDigest(ctx context.Context, digest string) (*store.Record, func(), error) {
	records, err := s.records()
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
		case err == nil: // the name belongs to another image by now
			release()
		case !errors.Is(err, ErrNotFound):
			return nil, nil, err
		}
	}
	return nil, nil, errdefs.Classf(ErrNotFound, "the image %s, which the sandbox was made of, is not stored any more", digest)
}

// committed is a stored layer of a new image.
type committed struct {
	blob   store.Blob
	diffID string
}

// commitManifest makes the configuration and manifest of the new image, and returns the manifest's
// digest.
func (s *Service) commitManifest(ctx context.Context, a *archive.Staging, base *store.Record, made []committed, opts *CommitOptions) (string, error) {
	read := func(what, digest string, into any) ([]byte, error) {
		data, err := s.store.ReadBlob(digest, store.MaxDocument)
		if err == nil {
			err = json.Unmarshal(data, into)
		}
		if err != nil {
			return nil, errdefs.Classf(ErrInvalid, "image %s: its stored %s cannot be read: %w; pull it anew", base.Name, what, err)
		}
		return data, nil
	}
	var below v1.Manifest // whose descriptors may have more fields than the store's records
	if _, err := read("manifest", base.Manifest.Digest, &below); err != nil {
		return "", err
	}
	var file v1.ConfigFile
	raw, err := read("configuration", base.Config.Digest, &file)
	if err != nil {
		return "", err
	}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: slices.Clone(below.Layers)}
	configType, layerType := types.OCIConfigJSON, types.OCILayer
	// One family of media types: some tools refuse a mixture.
	if types.MediaType(base.Manifest.MediaType) == types.DockerManifestSchema2 {
		m.MediaType, configType, layerType = types.DockerManifestSchema2, types.DockerConfigJSON, types.DockerLayer
	}
	var diffIDs []v1.Hash
	for _, l := range made {
		digest, err := v1.NewHash(l.diffID)
		if err != nil {
			return "", fmt.Errorf("diff id of the layer: %w", err)
		}
		diffIDs = append(diffIDs, digest)
		l.blob.MediaType = string(layerType)
		d, err := archive.Descriptor(l.blob)
		if err != nil {
			return "", err
		}
		m.Layers = append(m.Layers, d)
	}
	data, err := configured(raw, &file, diffIDs, opts)
	if err != nil {
		return "", err
	}
	config, err := a.AddDocument(ctx, data)
	if err != nil {
		return "", err
	}
	config.MediaType = string(configType)
	if m.Config, err = archive.Descriptor(config); err != nil {
		return "", err
	}
	return a.AddJSON(ctx, m)
}

// configured returns the configuration of raw and file with further layers. It changes the JSON
// itself, so that unknown fields stay.
func configured(raw []byte, file *v1.ConfigFile, diffIDs []v1.Hash, opts *CommitOptions) ([]byte, error) {
	var doc, config object
	var history []json.RawMessage
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, fmt.Errorf("decode configuration: %w", err)
	}
	if err := errors.Join(doc.get("config", &config), doc.get("history", &history)); err != nil {
		return nil, err
	}
	// A history has an entry for every layer or is empty: tools refuse others.
	described := 0
	for _, h := range file.History {
		if !h.EmptyLayer {
			described++
		}
	}
	for range len(file.RootFS.DiffIDs) - described {
		history = append(history, json.RawMessage("{}"))
	}
	created := v1.Time{Time: opts.Created.UTC()}
	for i := range max(1, len(diffIDs)) {
		entry := v1.History{Created: created, CreatedBy: "sandboxd snapshot", EmptyLayer: len(diffIDs) == 0}
		if i >= len(diffIDs)-1 {
			entry.CreatedBy, entry.Comment, entry.Author = "sandboxd commit", opts.Comment, opts.Author
		}
		encoded, err := json.Marshal(entry)
		if err != nil {
			return nil, fmt.Errorf("encode history: %w", err)
		}
		history = append(history, encoded)
	}
	file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, diffIDs...)
	if config == nil {
		config = make(object)
	}
	if opts.Author != "" {
		if err := doc.set("author", opts.Author); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(config.configure(&file.Config, opts.Config), doc.set("config", config), doc.set("history", history),
		doc.set("created", created), doc.set("rootfs", file.RootFS)); err != nil {
		return nil, err
	}
	data, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("encode configuration: %w", err)
	}
	return data, nil
}

// object is a JSON object. Names of members match in any case, as in encoding/json.
type object map[string]json.RawMessage

func (o object) get(name string, into any) error {
	for key, value := range o {
		if strings.EqualFold(key, name) {
			if err := json.Unmarshal(value, into); err != nil {
				return fmt.Errorf("decode %s of the configuration: %w", name, err)
			}
		}
	}
	return nil
}

// set sets a member; nil removes it.
func (o object) set(name string, value any) error {
	maps.DeleteFunc(o, func(key string, _ json.RawMessage) bool { return strings.EqualFold(key, name) })
	if value == nil {
		return nil
	}
	data, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode %s of the configuration: %w", name, err)
	}
	o[name] = data
	return nil
}

// configure applies changes to c, the present configuration of how to run the image.
func (o object) configure(c *v1.Config, change api.ImageConfig) error {
	err := o.set("OnBuild", nil) // for builds based on the image; this is one
	if len(change.Entrypoint) > 0 {
		err = errors.Join(err, o.set("Entrypoint", change.Entrypoint), o.set("Cmd", nil))
	}
	if len(change.Cmd) > 0 {
		err = errors.Join(err, o.set("Cmd", change.Cmd))
	}
	if len(change.Env) > 0 {
		env := slices.Clone(c.Env)
		for _, e := range change.Env {
			name, _, _ := strings.Cut(e, "=")
			env = append(slices.DeleteFunc(env, func(was string) bool { return strings.HasPrefix(was, name+"=") }), e)
		}
		err = errors.Join(err, o.set("Env", env))
	}
	if change.WorkingDir != "" {
		err = errors.Join(err, o.set("WorkingDir", change.WorkingDir))
	}
	if change.User != "" {
		err = errors.Join(err, o.set("User", change.User))
	}
	for _, more := range []struct {
		name  string
		has   map[string]struct{}
		names []string
	}{{"Volumes", c.Volumes, change.Volumes}, {"ExposedPorts", c.ExposedPorts, change.Ports}} {
		if len(more.names) > 0 {
			all := archive.Set(more.names)
			maps.Copy(all, more.has)
			err = errors.Join(err, o.set(more.name, all))
		}
	}
	if change.StopSignal != "" {
		err = errors.Join(err, o.set("StopSignal", change.StopSignal))
	}
	if change.HealthCheck != nil {
		err = errors.Join(err, o.set("Healthcheck", archive.Healthcheck(change.HealthCheck)))
	}
	if len(change.Labels) > 0 {
		labels := maps.Clone(c.Labels)
		if labels == nil {
			labels = make(map[string]string)
		}
		maps.Copy(labels, change.Labels)
		err = errors.Join(err, o.set("Labels", labels))
	}
	return err
}
