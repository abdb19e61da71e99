package image

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// ImportOptions say what an archive becomes.
type ImportOptions struct {
	// Reference is the name of the image; needed where the archive has none. An archive with several images cannot be
	// imported under one name.
	Reference string
	Platform  string // as in PullOptions
	// Rootfs says that the archive is no image but a root file system, and Config how that is run.
	Rootfs bool
	Config api.ImageConfig
	// Progress is told what becomes of the layers, by one goroutine at a time, once the archive has been read, and not after
	// Import has returned. It should be quick.
	Progress func(api.PullEvent)
}

const (
	maxArchiveEntries = 100_000
	maxArchiveImages  = 1000
	maxArchiveNames   = 1000 // of all its images
	maxArchiveName    = 1024 // bytes of a file's name, or of what a link leads to

	layoutFile   = "oci-layout"
	indexFile    = "index.json"
	manifestFile = "manifest.json" // of docker save

	// Names of images in an index: containerd's and Docker's is whole, that of the specification may be a mere tag.
	annotationName    = "io.containerd.image.name"
	annotationRefName = "org.opencontainers.image.ref.name"
)

// Import stores what the archive in r has: an OCI layout in a tar, what docker save writes, or a root file system. It is
// read once and never kept in memory; every file in it becomes a blob under the digest of its bytes, and nothing is ever
// written under a name that the archive has. What turns out to belong to no image is removed.
//
// An archive is imported whole or not at all. Errors of reading r are returned as they are.
func (s *Service) Import(ctx context.Context, r io.Reader, opts ImportOptions) (_ []*Image, err error) {
	want, err := platform(opts.Platform)
	if err != nil {
		return nil, err
	}
	var target name.Reference
	if opts.Reference != "" {
		if target, err = importName(opts.Reference); err != nil {
			return nil, err
		}
	}
	src := &source{r: r, progress: func(int64) {}}
	a := &archive{service: s, left: s.opts.Limits.Bytes, blobs: make(map[string]store.Blob), links: make(map[string]string), documents: make(map[string][]byte)}
	defer func() {
		if rerr := s.release(ctx, a.pinned, nil, true); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}()
	var roots []root
	if opts.Rootfs {
		if target == nil {
			return nil, classf(ErrReference, "a root file system has no name; give one, like tools/base:1.0")
		}
		roots, err = a.rootfs(ctx, src, want, opts.Config)
	} else {
		roots, err = a.read(ctx, src)
	}
	switch {
	case src.err != nil:
		return nil, src.err // whatever came of it
	case err != nil:
		return nil, err
	case target != nil && len(roots) > 1:
		return nil, classf(ErrReference, "the archive has %d images, which cannot all be called %s; leave the name out to use theirs", len(roots), normalised(target))
	}
	var ready []*prepared
	defer func() {
		for _, p := range ready { // none once they are finished
			err = errors.Join(err, s.release(ctx, p.blobs, p.chains, true))
		}
	}()
	names := 0
	for _, root := range roots {
		refs := root.names
		if target != nil {
			refs = []name.Reference{target}
		}
		if len(refs) == 0 {
			return nil, classf(ErrReference, "the archive does not say what its image %s is called; give a name, like tools/base:1.0", root.digest)
		}
		if names += len(refs); names > maxArchiveNames {
			return nil, archiveInvalid("its images have more than %d names", maxArchiveNames)
		}
		p := &pull{service: s, ref: refs[0], want: want, explicit: opts.Platform != "", origin: &archiveOrigin{service: s, root: root.digest}}
		p.progress.tell = opts.Progress
		r, err := p.run(ctx)
		p.progress.end()
		if err != nil {
			return nil, err
		}
		for _, ref := range refs[1:] {
			r.names = append(r.names, normalised(ref))
		}
		ready = append(ready, r)
	}
	finishing := ready
	ready = nil
	return s.finish(ctx, finishing)
}

// importName is a name that an image can be given: a tag, not a digest.
func importName(ref string) (name.Reference, error) {
	if ref == api.HostImage {
		return nil, classf(ErrReference, "%q is this host's own image; choose another name", ref)
	}
	parsed, err := parse(ref)
	if err != nil {
		return nil, err
	}
	if _, ok := parsed.(name.Digest); ok {
		return nil, classf(ErrReference, "%q is a digest, which follows from what is imported; give a tag", ref)
	}
	return parsed, nil
}

// root is an image of an archive: the digest of its manifest or index, stored as a blob, and what the archive calls it.
type root struct {
	digest string
	names  []name.Reference
}

// archiveOrigin is an archive whose files are blobs already.
type archiveOrigin struct {
	service *Service
	root    string
}

func (o *archiveOrigin) sender() string { return "the archive" }

func (o *archiveOrigin) document(_ context.Context, digest string) ([]byte, error) {
	if digest == "" {
		digest = o.root
	}
	data, err := o.service.store.ReadBlob(digest, maxDocument)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrMismatch) {
		return nil, classf(ErrInvalid, "the archive: manifest %w", err)
	}
	return data, err
}

func (o *archiveOrigin) blob(_ context.Context, b store.Blob, _ func(int64)) error {
	// It would have been found in the store before this is asked.
	return classf(ErrInvalid, "the archive lacks blob %s of %d bytes", b.Digest, b.Size)
}

// archive is one that is being read.
type archive struct {
	service   *Service
	pinned    []string
	left      int64                 // how many bytes its files may still have
	blobs     map[string]store.Blob // by the name in the archive, which is never more than a key
	links     map[string]string     // symbolic and hard links among those names
	documents map[string][]byte     // the few files that say what the others are
}

func archiveInvalid(format string, args ...any) error {
	return classf(ErrInvalid, "the archive cannot be imported: %w", fmt.Errorf(format, args...))
}

// add stores a file's bytes as a blob that stays until the end of the import.
func (a *archive) add(ctx context.Context, r io.Reader, limit int64) (store.Blob, error) {
	return a.service.store.AddBlob(ctx, r, limit, func(digest string) error {
		if err := a.service.pin(ctx, blobKeys([]string{digest})); err != nil {
			return err
		}
		a.pinned = append(a.pinned, digest)
		return nil
	})
}

// read stores the files of a tar and finds out what images they make.
func (a *archive) read(ctx context.Context, r io.Reader) ([]root, error) {
	plain, err := layer.Uncompress(r, "", a.service.opts.Limits)
	if err != nil {
		return nil, archiveInvalid("%w", err)
	}
	defer plain.Close()
	tr := tar.NewReader(plain)
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return nil, archiveInvalid("read entry %d: %w; is it a tar of an OCI layout or of docker save? (a root file system is imported with --rootfs)", n+1, err)
		}
		if n == maxArchiveEntries {
			return nil, archiveInvalid("it has more than %d entries; is it a root file system? (--rootfs)", maxArchiveEntries)
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
	return nil, archiveInvalid("it has neither %s (an OCI layout) nor %s (docker save); a root file system is imported with --rootfs", indexFile, manifestFile)
}

func (a *archive) entry(ctx context.Context, hdr *tar.Header, r io.Reader) error {
	key := path.Clean("/" + hdr.Name)[1:]
	if len(key) > maxArchiveName || slices.Contains(strings.Split(hdr.Name, "/"), "..") {
		return archiveInvalid("an entry is called %.100q", hdr.Name)
	}
	_, twice := a.blobs[key]
	if twice = twice || a.documents[key] != nil || a.links[key] != ""; twice {
		return archiveInvalid("it has %.100q twice", key)
	}
	if len(hdr.Linkname) > maxArchiveName {
		return archiveInvalid("%.100q leads to a name of %d bytes, %d are allowed", key, len(hdr.Linkname), maxArchiveName)
	}
	// The holes of a sparse file are not in the stream, which is what the limits of decompression count. Who writes images
	// has no use for them.
	if sparse(hdr) {
		return archiveInvalid("%.100q is a sparse file", key)
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
		data, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
		if err != nil {
			return archiveInvalid("read %s: %w", key, err)
		}
		if len(data) > maxDocument || len(data) == 0 {
			return archiveInvalid("%s has %d bytes, 1 to %d are allowed", key, hdr.Size, maxDocument)
		}
		a.documents[key] = data
		return nil
	}
	if hdr.Size > a.left {
		return archiveInvalid("%w", layer.ExceededBytes.Errorf("its files have more than %d bytes", a.service.opts.Limits.Bytes))
	}
	a.left -= hdr.Size
	b, err := a.add(ctx, r, hdr.Size)
	if err != nil {
		if errors.Is(err, layer.ErrInvalid) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, store.ErrMismatch) {
			return archiveInvalid("%.100q: %w", key, err)
		}
		return err
	}
	if hexa, ok := strings.CutPrefix(key, "blobs/sha256/"); ok && b.Digest != "sha256:"+hexa {
		return archiveInvalid("%.100q has the digest %s", key, b.Digest)
	}
	a.blobs[key] = b
	return nil
}

// sparse reports whether an entry is a file with holes, in any of the ways that GNU tar writes them.
func sparse(hdr *tar.Header) bool {
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return hdr.Typeflag == tar.TypeGNUSparse
}

// layout finds the images of an OCI layout.
func (a *archive) layout(ctx context.Context) ([]root, error) {
	var marker struct {
		Version string `json:"imageLayoutVersion"`
	}
	if err := json.Unmarshal(a.documents[layoutFile], &marker); err != nil || !strings.HasPrefix(marker.Version, "1.") {
		return nil, archiveInvalid("its file %s does not say that this is an OCI layout of version 1", layoutFile)
	}
	ix, err := v1.ParseIndexManifest(bytes.NewReader(a.documents[indexFile]))
	if err != nil {
		return nil, archiveInvalid("%s: %w", indexFile, err)
	}
	var roots []root
	manifests, err := a.platforms(ctx, ix.Manifests)
	if err != nil {
		return nil, err
	}
	for _, d := range manifests {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() {
			continue // artefacts, signatures: nothing to run
		}
		r := root{digest: d.Digest.String()}
		if n := layoutName(d.Annotations); n != nil {
			r.names = append(r.names, n)
		}
		if same := slices.IndexFunc(roots, func(o root) bool { return o.digest == r.digest }); same >= 0 {
			roots[same].names = append(roots[same].names, r.names...)
			continue
		}
		roots = append(roots, r)
	}
	if len(roots) == 0 || len(roots) > maxArchiveImages {
		return nil, archiveInvalid("%s lists %d images, 1 to %d are allowed", indexFile, len(roots), maxArchiveImages)
	}
	return roots, nil
}

// platforms puts an index in the place of manifests that are called the same, or nothing, and say what platform each is for:
// some tools write the platforms of an image straight into the layout. The one that is wanted is chosen from it as from any
// index. Where two are for one platform they are not one image.
func (a *archive) platforms(ctx context.Context, all []v1.Descriptor) ([]v1.Descriptor, error) {
	called := func(d v1.Descriptor) string {
		if n := layoutName(d.Annotations); n != nil {
			return normalised(n)
		}
		return d.Annotations[annotationRefName] // a bare tag, which is no name and tells images from each other all the same
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
				return nil, archiveInvalid("%s calls two images for %s %s", indexFile, d.Platform, normalised(n))
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
		digest, err := a.addJSON(ctx, v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: of})
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

// unknownPlatform is the operating system of what belongs to the images of an index and is none: attestations.
const unknownPlatform = "unknown"

// layoutName is what annotations call an image, nil where they do not. A bare tag is no name: "latest" would be
// docker.io/library/latest.
func layoutName(annotations map[string]string) name.Reference {
	for _, key := range []string{annotationName, annotationRefName} {
		text := annotations[key]
		if key == annotationRefName && !strings.ContainsAny(text, ":/") {
			continue
		}
		if ref, err := importName(text); err == nil {
			return ref
		}
	}
	return nil
}

// dockerSave finds the images of an archive that docker save wrote. It has no manifests as registries know them, so they
// are made.
func (a *archive) dockerSave(ctx context.Context) ([]root, error) {
	var items []struct {
		Config   string   `json:"Config"`
		RepoTags []string `json:"RepoTags"`
		Layers   []string `json:"Layers"`
	}
	if err := json.Unmarshal(a.documents[manifestFile], &items); err != nil {
		return nil, archiveInvalid("%s: %w", manifestFile, err)
	}
	if len(items) == 0 || len(items) > maxArchiveImages {
		return nil, archiveInvalid("%s lists %d images, 1 to %d are allowed", manifestFile, len(items), maxArchiveImages)
	}
	var roots []root
	for _, item := range items {
		if len(item.Layers) > maxLayers {
			return nil, archiveInvalid("an image has %d layers, %d are allowed", len(item.Layers), maxLayers)
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
		digest, err := a.manifest(ctx, config, layers)
		if err != nil {
			return nil, err
		}
		r := root{digest: digest}
		for _, tag := range item.RepoTags {
			ref, err := importName(tag)
			if err != nil {
				return nil, archiveInvalid("the name of an image in %s: %v", manifestFile, err) // not the class of names that the caller gave
			}
			r.names = append(r.names, ref)
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
	return store.Blob{}, archiveInvalid("%s names the file %.200q, which is not in it", manifestFile, file)
}

// layerType tells the compression of a stored layer.
func (a *archive) layerType(b store.Blob) (string, error) {
	f, err := a.service.store.OpenBlob(b.Digest)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // only read
	begin := make([]byte, 512)
	n, err := io.ReadFull(f, begin)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", fmt.Errorf("read blob %s: %w", b.Digest, err)
	}
	media, err := layer.MediaType(begin[:n])
	if err != nil {
		return "", archiveInvalid("layer %s: %w", b.Digest, err)
	}
	return media, nil
}

// manifest makes and stores the manifest of an image whose other blobs are stored.
func (a *archive) manifest(ctx context.Context, config store.Blob, layers []store.Blob) (string, error) {
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{}}
	var err error
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

func (a *archive) addJSON(ctx context.Context, v any) (string, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode: %w", err)
	}
	b, err := a.addDocument(ctx, data)
	return b.Digest, err
}

// addDocument stores a manifest or configuration that is made here.
func (a *archive) addDocument(ctx context.Context, data []byte) (store.Blob, error) {
	if len(data) > maxDocument { // made of what has less
		return store.Blob{}, classf(ErrInvalid, "the image would have a manifest or configuration of %d bytes, %d are allowed", len(data), maxDocument)
	}
	return a.add(ctx, bytes.NewReader(data), maxDocument)
}

func asDescriptor(b store.Blob) (v1.Descriptor, error) {
	digest, err := v1.NewHash(b.Digest)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("blob %s: %w", b.Digest, err)
	}
	return v1.Descriptor{MediaType: types.MediaType(b.MediaType), Digest: digest, Size: b.Size}, nil
}

// rootfs makes an image of one layer. The same archive and configuration make the same image, whenever and wherever.
func (a *archive) rootfs(ctx context.Context, r io.Reader, want v1.Platform, c api.ImageConfig) ([]root, error) {
	b, err := a.add(ctx, r, a.left)
	if errors.Is(err, store.ErrMismatch) {
		return nil, archiveInvalid("%w", layer.ExceededBytes.Errorf("the root file system has more than %d bytes", a.left))
	}
	if err != nil {
		return nil, err
	}
	if b.MediaType, err = a.layerType(b); err != nil {
		return nil, err
	}
	if err := a.checkTar(ctx, b); err != nil {
		return nil, err
	}
	diffID, err := a.diffID(ctx, b, a.service.opts.Limits)
	if err != nil {
		return nil, err
	}
	digest, err := v1.NewHash(diffID)
	if err != nil {
		return nil, fmt.Errorf("diff id: %w", err)
	}
	file := v1.ConfigFile{
		OS: want.OS, Architecture: want.Architecture, Variant: want.Variant,
		Config:  v1.Config{Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Labels: c.Labels},
		RootFS:  v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{digest}},
		History: []v1.History{{CreatedBy: "sandboxd import --rootfs"}},
	}
	data, err := json.Marshal(file)
	if err != nil {
		return nil, fmt.Errorf("encode configuration: %w", err)
	}
	config, err := a.addDocument(ctx, data)
	if err != nil {
		return nil, err
	}
	config.MediaType = string(types.OCIConfigJSON)
	manifest, err := a.manifest(ctx, config, []store.Blob{b})
	return []root{{digest: manifest}}, err
}

// plain is a stored layer without its compression, until done is called.
func (a *archive) plain(ctx context.Context, b store.Blob, limits layer.Limits) (_ *layer.Uncompressed, done func(), err error) {
	f, err := a.service.store.OpenBlob(b.Digest)
	if err != nil {
		return nil, nil, err
	}
	plain, err := layer.Uncompress(store.WithContext(ctx, f), b.MediaType, limits)
	if err != nil {
		_ = f.Close() // only read, as below
		return nil, nil, archiveInvalid("%w", err)
	}
	return plain, func() {
		plain.Close()
		_ = f.Close()
	}, nil
}

// checkTar looks whether a stored layer begins like a tar with anything in it. Zeros, or nothing at all, are an empty
// one; nobody means that by a root file system.
func (a *archive) checkTar(ctx context.Context, b store.Blob) error {
	plain, done, err := a.plain(ctx, b, a.service.opts.Limits)
	if err != nil {
		return err
	}
	defer done()
	switch _, err := tar.NewReader(plain).Next(); {
	case errors.Is(err, io.EOF):
		return archiveInvalid("the root file system has nothing in it")
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && !errors.Is(err, tar.ErrInsecurePath):
		return archiveInvalid("the root file system is not a tar: %w", err)
	}
	return nil
}

// diffID is the digest of a stored layer without its compression.
func (a *archive) diffID(ctx context.Context, b store.Blob, limits layer.Limits) (string, error) {
	plain, done, err := a.plain(ctx, b, limits)
	if err != nil {
		return "", err
	}
	defer done()
	id, err := plain.DiffID()
	if errors.Is(err, layer.ErrInvalid) {
		return "", archiveInvalid("%w", err)
	}
	return id, err
}
