package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// Formats of exports.
const (
	FormatOCI    = "oci"    // an OCI layout in a tar, with the original blobs
	FormatDocker = "docker" // written by docker save, read by docker load
)

// CheckFormat returns an error if format is none of the formats of exports.
func CheckFormat(format string) error {
	if format != FormatOCI && format != FormatDocker {
		return errdefs.Classf(errdefs.ErrReference, "format %.40q: want %s or %s", format, FormatOCI, FormatDocker)
	}
	return nil
}

// Export writes a stored image to w as an archive. It checks the blobs on the way: if one is
// damaged, w has received a part of an archive and the error says so.
func Export(ctx context.Context, st *store.Store, r *store.Record, format string, w io.Writer) error {
	err := CheckFormat(format)
	if err != nil {
		return err
	}
	e := &export{store: st, tar: tar.NewWriter(w)}
	if format == FormatOCI {
		err = e.layout(ctx, r)
	} else {
		err = e.dockerSave(ctx, r)
	}
	if err == nil {
		err = e.tar.Close()
	}
	if err != nil {
		return fmt.Errorf("export %s: %w", r.Name, err)
	}
	return nil
}

type export struct {
	store *store.Store
	tar   *tar.Writer
}

// file writes one entry. Times and owners are omitted: one image always gives the same archive.
func (e *export) file(name string, size int64, r io.Reader) error {
	hdr := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, Format: tar.FormatPAX}
	if size < 8<<30 && len(name) < 100 {
		hdr.Format = tar.FormatUSTAR // for the oldest readers
	}
	if err := e.tar.WriteHeader(hdr); err != nil {
		return err
	}
	_, err := io.Copy(e.tar, r)
	return err
}

func (e *export) json(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	return e.file(name, int64(len(data)), bytes.NewReader(data))
}

// blob writes a stored blob and checks it on the way.
func (e *export) blob(ctx context.Context, name string, b store.Blob) (err error) {
	f, err := e.store.OpenBlob(b.Digest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	hash := sha256.New()
	if err := e.file(name, b.Size, io.TeeReader(store.WithContext(ctx, f), hash)); err != nil {
		return fmt.Errorf("blob %s: %w", b.Digest, err)
	}
	if got := "sha256:" + hex.EncodeToString(hash.Sum(nil)); got != b.Digest {
		return errdefs.Classf(errdefs.ErrInvalid, "the stored blob %s is damaged: its digest is %s; remove the image and pull it anew", b.Digest, got)
	}
	return nil
}

// layout writes an OCI layout. The index comes first, so that a reader of the stream knows its
// content.
func (e *export) layout(ctx context.Context, r *store.Record) error {
	d, err := Descriptor(r.Manifest)
	if err != nil {
		return err
	}
	d.Annotations = map[string]string{annotationName: r.Name}
	if tag, ok := strings.CutPrefix(r.Name, store.Repository(r.Name)+":"); ok {
		d.Annotations[annotationRefName] = tag
	}
	if p, err := v1.ParsePlatform(r.Platform); err == nil {
		d.Platform = p
	}
	err = errors.Join(
		e.json(layoutFile, map[string]string{"imageLayoutVersion": "1.0.0"}),
		e.json(indexFile, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{d}}),
	)
	// Directories too: a reader that makes missing ones may try to give them to root, as skopeo does.
	for _, dir := range []string{"blobs/", "blobs/sha256/"} {
		if err == nil {
			err = e.tar.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatUSTAR})
		}
	}
	if err != nil {
		return err
	}
	for _, b := range r.Blobs() {
		if err := e.blob(ctx, "blobs/sha256/"+strings.TrimPrefix(b.Digest, "sha256:"), b); err != nil {
			return err
		}
	}
	return nil
}

// dockerSave writes docker save's format: layers without compression, each under its diff id.
func (e *export) dockerSave(ctx context.Context, r *store.Record) error {
	type item struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	it := item{Config: strings.TrimPrefix(r.Config.Digest, "sha256:") + ".json", RepoTags: []string{}}
	if !strings.Contains(r.Name, "@") {
		it.RepoTags = append(it.RepoTags, r.Name)
	}
	if err := e.blob(ctx, it.Config, r.Config); err != nil {
		return err
	}
	written := make(map[string]bool)
	for _, l := range r.Layers {
		name := strings.TrimPrefix(l.DiffID, "sha256:") + ".tar"
		it.Layers = append(it.Layers, name)
		if written[name] {
			continue
		}
		written[name] = true
		if err := e.plainLayer(ctx, name, l); err != nil {
			return fmt.Errorf("layer %s: %w", l.Blob.Digest, err)
		}
	}
	return e.json(manifestFile, []item{it})
}

// plainLayer writes a layer without its compression. The tar needs its size first, which is known
// at the end, so a temporary file holds it.
func (e *export) plainLayer(ctx context.Context, name string, l store.Layer) (err error) {
	f, err := e.store.OpenBlob(l.Blob.Digest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	plain, err := layer.Uncompress(store.WithContext(ctx, f), l.Blob.MediaType, layer.NoLimits())
	if err != nil {
		return err
	}
	defer plain.Close()
	tmp, err := e.store.TempFile()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tmp.Close()) }()
	size, err := io.Copy(tmp, plain)
	if err != nil {
		return err
	}
	id, err := plain.DiffID()
	if err != nil {
		return err
	}
	if id != l.DiffID {
		return errdefs.Classf(errdefs.ErrInvalid, "the stored blob is damaged: it unpacks to %s, not %s; remove the image and pull it anew", id, l.DiffID)
	}
	if _, err := tmp.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return e.file(name, size, store.WithContext(ctx, tmp))
}
