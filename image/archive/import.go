package archive

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/reference"
	"github.com/sandboxd/sandboxd/image/store"
)

const (
	maxArchiveEntries = 100_000
	maxArchiveImages  = 1000
	maxArchiveName    = 1024 // bytes of the name of a file or of a link's target

	layoutFile   = "oci-layout"
	indexFile    = "index.json"
	manifestFile = "manifest.json" // of docker save

	// Names of images in an index: containerd's and Docker's is complete, that of the specification
	// may be a mere tag.
	annotationName    = "io.containerd.image.name"
	annotationRefName = "org.opencontainers.image.ref.name"
)

// Root is an image of an archive.
type Root struct {
	Digest string           // of its manifest or index, stored as a blob
	Names  []name.Reference // in the archive
	Made   []string         // diff ids of layers that the import has compressed itself
}

// Source is an archive whose files are blobs already.
type Source struct {
	Store *store.Store
	Root  string                            // digest of the manifest or index
	Known func(digest string) (bool, error) // whether the archive, or its importer, has a stored blob
}

// Sender names the source in messages about its content.
func (Source) Sender() string { return "the archive" }

// Document returns a stored manifest or index: that of the digest, or the root's if digest is
// empty.
func (s Source) Document(_ context.Context, digest string) ([]byte, error) {
	if digest == "" {
		digest = s.Root
	}
	known, err := s.Known(digest)
	if err != nil {
		return nil, err
	}
	if !known {
		return nil, errdefs.Classf(errdefs.ErrInvalid, "the archive lacks manifest %s", digest)
	}
	data, err := s.Store.ReadBlob(digest, store.MaxDocument)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrMismatch) {
		return nil, errdefs.Classf(errdefs.ErrInvalid, "the archive: manifest %w", err)
	}
	return data, err
}

// Blob fails: it is called for blobs that the archive lacks and its importer has not in the store.
func (Source) Blob(_ context.Context, b store.Blob, _ func(io.Reader) error, _ func(int64)) error {
	return errdefs.Classf(errdefs.ErrInvalid, "the archive lacks blob %s of %d bytes", b.Digest, b.Size)
}

// Import stores the files of a tar, which is an OCI layout or written by docker save, and returns
// its images. It reads the tar once and keeps no file in memory. Every file becomes a blob under
// the digest of its bytes; no name of the archive is ever used as a path.
func Import(ctx context.Context, s *Staging, r io.Reader) ([]Root, error) {
	a := &archive{Staging: s, blobs: make(map[string]store.Blob), links: make(map[string]string), documents: make(map[string][]byte)}
	return a.read(ctx, r)
}

// archive is an archive that is being read.
type archive struct {
	*Staging

	blobs     map[string]store.Blob // by name in the archive, which is never more than a key
	links     map[string]string     // symbolic and hard links among those names
	documents map[string][]byte     // index and marker files, by name
}

// Invalidf returns an error about the content of an archive.
func Invalidf(format string, args ...any) error {
	return errdefs.Classf(errdefs.ErrInvalid, "the archive cannot be imported: %w", fmt.Errorf(format, args...))
}

// read stores the files of a tar and finds its images.
func (a *archive) read(ctx context.Context, r io.Reader) ([]Root, error) {
	plain, err := layer.Uncompress(r, "", a.Limits)
	if err != nil {
		return nil, Invalidf("%w", err)
	}
	defer plain.Close()
	tr := tar.NewReader(plain)
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return nil, Invalidf("read entry %d: %w; is it a tar of an OCI layout or of docker save? (a root file system is imported with --rootfs)", n+1, err)
		}
		if n == maxArchiveEntries {
			return nil, Invalidf("it has more than %d entries; is it a root file system? (--rootfs)", maxArchiveEntries)
		}
		if err := a.entry(ctx, hdr, tr); err != nil {
			return nil, err
		}
	}
	switch {
	case a.documents[indexFile] != nil:
		return a.layout(ctx)
	case a.documents[manifestFile] != nil:
		return a.dockerSave(ctx)
	}
	return nil, Invalidf("it has neither %s (an OCI layout) nor %s (docker save); a root file system is imported with --rootfs", indexFile, manifestFile)
}

func (a *archive) entry(ctx context.Context, hdr *tar.Header, r io.Reader) error {
	key := path.Clean("/" + hdr.Name)[1:]
	if len(key) > maxArchiveName || slices.Contains(strings.Split(hdr.Name, "/"), "..") {
		return Invalidf("an entry is called %.100q", hdr.Name)
	}
	_, twice := a.blobs[key]
	if twice = twice || a.documents[key] != nil || a.links[key] != ""; twice {
		return Invalidf("it has %.100q twice", key)
	}
	if len(hdr.Linkname) > maxArchiveName {
		return Invalidf("%.100q leads to a name of %d bytes, %d are allowed", key, len(hdr.Linkname), maxArchiveName)
	}
	// The holes of a sparse file are not in the stream, whose bytes the limits count. No writer of
	// images needs them.
	if sparse(hdr) {
		return Invalidf("%.100q is a sparse file", key)
	}
	switch hdr.Typeflag {
	case tar.TypeReg:
	case tar.TypeSymlink:
		a.links[key] = path.Clean("/" + path.Join(path.Dir(key), hdr.Linkname))[1:] //nolint:gosec // G305: a key of a map, never a path
		return nil
	case tar.TypeLink:
		a.links[key] = path.Clean("/" + hdr.Linkname)[1:]
		return nil
	default:
		return nil
	}
	switch key {
	case layoutFile, indexFile, manifestFile:
		data, err := io.ReadAll(io.LimitReader(r, store.MaxDocument+1))
		if err != nil {
			return Invalidf("read %s: %w", key, err)
		}
		if len(data) > store.MaxDocument || len(data) == 0 {
			return Invalidf("%s has %d bytes, 1 to %d are allowed", key, hdr.Size, store.MaxDocument)
		}
		a.documents[key] = data
		return nil
	}
	if hdr.Size > a.Left {
		return Invalidf("%w", layer.ExceededBytes.Errorf("its files have more than %d bytes", a.Limits.Bytes))
	}
	a.Left -= hdr.Size
	b, err := a.add(ctx, r, hdr.Size)
	if err != nil {
		if errors.Is(err, layer.ErrInvalid) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, store.ErrMismatch) {
			return Invalidf("%.100q: %w", key, err)
		}
		return err
	}
	if hexa, ok := strings.CutPrefix(key, "blobs/sha256/"); ok && b.Digest != "sha256:"+hexa {
		return Invalidf("%.100q has the digest %s", key, b.Digest)
	}
	a.blobs[key] = b
	return nil
}

// sparse reports whether an entry is a file with holes, in any of GNU tar's formats.
func sparse(hdr *tar.Header) bool {
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return hdr.Typeflag == tar.TypeGNUSparse
}

// layout finds the images of an OCI layout.
func (a *archive) layout(ctx context.Context) ([]Root, error) {
	var marker struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := json.Unmarshal(a.documents[layoutFile], &marker); err != nil || !strings.HasPrefix(marker.Version, "1.") {
		return nil, Invalidf("its file %s does not say that this is an OCI layout of version 1", layoutFile)
	}
	ix, err := v1.ParseIndexManifest(bytes.NewReader(a.documents[indexFile]))
	if err != nil {
		return nil, Invalidf("%s: %w", indexFile, err)
	}
	var roots []Root
	manifests, err := a.platforms(ctx, ix.Manifests)
	if err != nil {
		return nil, err
	}
	for _, d := range manifests {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() {
			continue // artefacts, signatures: not runnable
		}
		r := Root{Digest: d.Digest.String()}
		if n := layoutName(d.Annotations); n != nil {
			r.Names = append(r.Names, n)
		}
		if same := slices.IndexFunc(roots, func(o Root) bool { return o.Digest == r.Digest }); same >= 0 {
			roots[same].Names = append(roots[same].Names, r.Names...)
			continue
		}
		roots = append(roots, r)
	}
	if len(roots) == 0 || len(roots) > maxArchiveImages {
		return nil, Invalidf("%s lists %d images, 1 to %d are allowed", indexFile, len(roots), maxArchiveImages)
	}
	return roots, nil
}

// platforms replaces manifests that have one name, or none, and different platforms by an index of
// them: some tools write the platforms of an image straight into the layout. The wanted platform is
// chosen from it like from any index. Two manifests for one platform are not one image.
func (a *archive) platforms(ctx context.Context, all []v1.Descriptor) ([]v1.Descriptor, error) {
	called := func(d v1.Descriptor) string {
		if n := layoutName(d.Annotations); n != nil {
			return reference.Normalize(n)
		}
		return d.Annotations[annotationRefName] // a bare tag, which is no name but distinguishes images
	}
	same := make(map[string][]v1.Descriptor)
	twice := make(map[string]bool)
	for _, d := range all {
		if !d.MediaType.IsImage() || d.Platform == nil {
			continue
		}
		name := called(d)
		if slices.ContainsFunc(same[name], func(o v1.Descriptor) bool {
			return o.Digest != d.Digest && o.Platform.OS != unknownPlatform && o.Platform.Equals(*d.Platform)
		}) {
			if n := layoutName(d.Annotations); n != nil {
				return nil, Invalidf("%s calls two images for %s %s", indexFile, d.Platform, reference.Normalize(n))
			}
			twice[name] = true
		}
		same[name] = append(same[name], d)
	}
	var out []v1.Descriptor
	done := make(map[string]bool)
	for _, d := range all {
		name := called(d)
		of := same[name]
		if !d.MediaType.IsImage() || d.Platform == nil || len(of) < 2 || twice[name] {
			out = append(out, d)
			continue
		}
		if done[name] {
			continue
		}
		done[name] = true
		digest, err := a.AddJSON(ctx, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: of})
		if err != nil {
			return nil, err
		}
		hash, err := v1.NewHash(digest)
		if err != nil {
			return nil, fmt.Errorf("index of the platforms: %w", err)
		}
		out = append(out, v1.Descriptor{MediaType: types.OCIImageIndex, Digest: hash, Annotations: d.Annotations})
	}
	return out, nil
}

// unknownPlatform is the operating system of attestations, which are in an index but are no images.
const unknownPlatform = "unknown"

// layoutName returns the image's name in the annotations, nil if there is none. A bare tag is no
// name: "latest" would be docker.io/library/latest.
func layoutName(annotations map[string]string) name.Reference {
	for _, key := range []string{annotationName, annotationRefName} {
		text := annotations[key]
		if key == annotationRefName && !strings.ContainsAny(text, ":/") {
			continue
		}
		if ref, err := reference.ParseTag(text); err == nil {
			return ref
		}
	}
	return nil
}

// dockerSave finds the images of an archive of docker save. It has no manifests as in registries,
// so they are made.
func (a *archive) dockerSave(ctx context.Context) ([]Root, error) {
	var items []struct {
		Config   string   `json:"Config"`
		RepoTags []string `json:"RepoTags"`
		Layers   []string `json:"Layers"`
	}
	if err := json.Unmarshal(a.documents[manifestFile], &items); err != nil {
		return nil, Invalidf("%s: %w", manifestFile, err)
	}
	if len(items) == 0 || len(items) > maxArchiveImages {
		return nil, Invalidf("%s lists %d images, 1 to %d are allowed", manifestFile, len(items), maxArchiveImages)
	}
	var roots []Root
	for _, item := range items {
		if len(item.Layers) > store.MaxLayers {
			return nil, Invalidf("an image has %d layers, %d are allowed", len(item.Layers), store.MaxLayers)
		}
		config, err := a.lookup(item.Config)
		if err != nil {
			return nil, err
		}
		config.MediaType = string(types.OCIConfigJSON)
		var layers []store.Blob
		for _, l := range item.Layers {
			b, err := a.lookup(l)
			if err != nil {
				return nil, err
			}
			if b.MediaType, err = a.layerType(b); err != nil {
				return nil, err
			}
			layers = append(layers, b)
		}
		digest, err := a.Manifest(ctx, config, layers)
		if err != nil {
			return nil, err
		}
		r := Root{Digest: digest}
		for _, tag := range item.RepoTags {
			ref, err := reference.ParseTag(tag)
			if err != nil {
				return nil, Invalidf("the name of an image in %s: %v", manifestFile, err) // not the class of names that the caller gave
			}
			r.Names = append(r.Names, ref)
		}
		roots = append(roots, r)
	}
	return roots, nil
}

// lookup finds a file of the archive by its name, through links.
func (a *archive) lookup(file string) (store.Blob, error) {
	key := path.Clean("/" + file)[1:]
	for range 8 { // more links in a row are a loop
		if b, ok := a.blobs[key]; ok {
			return b, nil
		}
		next, ok := a.links[key]
		if !ok {
			break
		}
		key = next
	}
	return store.Blob{}, Invalidf("%s names the file %.200q, which is not in it", manifestFile, file)
}

// ImportRootfs stores a root file system as an image of one layer. An archive and a configuration
// always make the same image.
func ImportRootfs(ctx context.Context, s *Staging, r io.Reader, want v1.Platform, c api.ImageConfig) ([]Root, error) {
	b, packed, err := addRootfs(ctx, s, r)
	if err != nil {
		return nil, err
	}
	if b.MediaType, err = s.layerType(b); err != nil {
		return nil, err
	}
	if err := checkTar(ctx, s, b); err != nil {
		return nil, err
	}
	limits := s.Limits
	if packed {
		limits = limits.AnyRatio()
	}
	diffID, err := s.DiffID(ctx, b, limits)
	if err != nil {
		return nil, err
	}
	digest, err := v1.NewHash(diffID)
	if err != nil {
		return nil, fmt.Errorf("diff id: %w", err)
	}
	type dockers struct {
		v1.Config

		Healthcheck *dockerspec.HealthcheckConfig `json:",omitempty"` // with the start interval, which v1 lacks
	}
	file := struct {
		v1.ConfigFile

		Config dockers `json:"config"`
	}{v1.ConfigFile{
		OS: want.OS, Architecture: want.Architecture, Variant: want.Variant,
		RootFS:  v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{digest}},
		History: []v1.History{{CreatedBy: "sandboxd import --rootfs"}},
	}, dockers{v1.Config{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Labels: c.Labels,
		Volumes: Set(c.Volumes), ExposedPorts: Set(c.Ports), StopSignal: c.StopSignal,
	}, Healthcheck(c.HealthCheck)}}
	data, err := json.Marshal(file)
	if err != nil {
		return nil, fmt.Errorf("encode configuration: %w", err)
	}
	config, err := s.AddDocument(ctx, data)
	if err != nil {
		return nil, err
	}
	config.MediaType = string(types.OCIConfigJSON)
	manifest, err := s.Manifest(ctx, config, []store.Blob{b})
	root := Root{Digest: manifest}
	if packed {
		root.Made = []string{diffID}
	}
	return []Root{root}, err
}

// Set returns names in the form that a configuration has for volumes and ports.
func Set(names []string) map[string]struct{} {
	out := make(map[string]struct{}, len(names))
	for _, name := range names {
		out[name] = struct{}{}
	}
	return out
}

// Healthcheck returns a health check in the form that a configuration has for it; nil for none.
func Healthcheck(h *api.HealthCheck) *dockerspec.HealthcheckConfig {
	if h == nil {
		return nil
	}
	nanos := func(seconds float64) time.Duration { return time.Duration(math.Round(seconds * float64(time.Second))) }
	return &dockerspec.HealthcheckConfig{
		Test: h.Test, Interval: nanos(h.Interval), Timeout: nanos(h.Timeout),
		StartPeriod: nanos(h.StartPeriod), StartInterval: nanos(h.StartInterval), Retries: h.Retries,
	}
}

// sniffed is the number of bytes that tell a compression.
const sniffed = 512

// addRootfs stores the archive of a root file system. One without compression is compressed: its
// files take their space once more where they are extracted. Packed reports that.
func addRootfs(ctx context.Context, s *Staging, r io.Reader) (b store.Blob, packed bool, err error) {
	tooLarge := Invalidf("%w", layer.ExceededBytes.Errorf("the root file system has more than %d bytes", s.Left))
	in := bufio.NewReaderSize(r, sniffed)
	begin, _ := in.Peek(sniffed) // the next read has the error
	media, err := layer.MediaType(begin)
	if err == nil && media == string(types.OCIUncompressedLayer) && len(begin) > 0 {
		b, err = s.Pack(ctx, func(_ context.Context, w io.Writer) error {
			n, err := io.Copy(w, io.LimitReader(in, s.Left+1))
			if err == nil && n > s.Left {
				err = tooLarge
			}
			return err
		})
		return b, true, err
	}
	b, err = s.add(ctx, in, s.Left)
	if errors.Is(err, store.ErrMismatch) {
		err = tooLarge
	}
	return b, false, err
}

// checkTar checks that a stored layer begins like a tar with an entry. Zeros, or nothing at all,
// are an empty tar, which is never meant as a root file system.
func checkTar(ctx context.Context, s *Staging, b store.Blob) error {
	plain, done, err := s.plain(ctx, b, s.Limits)
	if err != nil {
		return err
	}
	defer done()
	switch _, err := tar.NewReader(plain).Next(); {
	case errors.Is(err, io.EOF):
		return Invalidf("the root file system has nothing in it")
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && !errors.Is(err, tar.ErrInsecurePath):
		return Invalidf("the root file system is not a tar: %w", err)
	}
	return nil
}
