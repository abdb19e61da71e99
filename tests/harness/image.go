package harness

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// File is one entry of a layer. The zero type is a regular file.
type File struct {
	Name string
	Body string
	Mode int64 // 0: 0644, for directories 0755
	Type byte  // tar.TypeReg, ...
	Link string
	UID  int // of the owner, whose group has the same number
	// Attrs are extended attributes.
	Attrs map[string]string
}

// Tar writes entries as they are given, however wrong they are.
func Tar(t testing.TB, files ...File) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.Name, Typeflag: f.Type, Linkname: f.Link, Mode: f.Mode, Size: int64(len(f.Body)), Uid: f.UID, Gid: f.UID}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeChar {
			h.Devmajor, h.Devminor = 1, 3
		}
		for name, value := range f.Attrs {
			if h.PAXRecords == nil {
				h.PAXRecords = make(map[string]string)
			}
			h.PAXRecords["SCHILY.xattr."+name] = value
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatalf("write tar entry %q: %v", f.Name, err)
		}
		if _, err := io.WriteString(w, f.Body); err != nil {
			t.Fatalf("write tar entry %q: %v", f.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// layers are those that tests have made, by [layerKey]: most images have the same one, and
// compressing it takes longer than its test. Larger ones than largestKept are made each time.
var layers sync.Map

const largestKept = 4 << 20

type layerKey struct {
	how string
	of  [sha256.Size]byte
}

// Layer makes an OCI layer of a tar, compressed with "gzip", "zstd" or "" for not at all.
func Layer(t testing.TB, how string, data []byte) v1.Layer {
	t.Helper()
	key := layerKey{how, sha256.Sum256(data)}
	if known, ok := layers.Load(key); ok {
		return known.(v1.Layer)
	}
	opener := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
	var options []tarball.LayerOption
	switch how {
	case "gzip":
		options = []tarball.LayerOption{tarball.WithMediaType(types.OCILayer)}
	case "zstd":
		options = []tarball.LayerOption{tarball.WithCompression(compression.ZStd), tarball.WithMediaType(types.OCILayerZStd)}
	case "":
		options = []tarball.LayerOption{tarball.WithCompression(compression.None), tarball.WithMediaType(types.OCIUncompressedLayer)}
	default:
		t.Fatalf("unknown compression %q", how)
	}
	keep := len(data) <= largestKept
	if keep {
		options = append(options, tarball.WithCompressedCaching)
	}
	l, err := tarball.LayerFromOpener(opener, options...)
	if err != nil {
		t.Fatalf("make a layer: %v", err)
	}
	if keep {
		layers.Store(key, l)
	}
	return l
}

// busyboxCommands are the names under which images find busybox.
var busyboxCommands = strings.Fields("sh ash cat ls echo true false id ps sleep env mkdir touch ln rm mv stat head tail find test " +
	"printf grep sed wc kill setsid nohup seq chmod chown mount umount ip date dd sort tr pwd readlink yes")

// Busybox returns the files of a root file system that has Debian's busybox-static and little more.
func Busybox(t testing.TB) []File {
	t.Helper()
	program, err := os.ReadFile(testenv.RequirePeer(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	files := []File{
		{Name: "bin/", Type: tar.TypeDir},
		{Name: "etc/", Type: tar.TypeDir},
		{Name: "root/", Type: tar.TypeDir, Mode: 0o700},
		{Name: "tmp/", Type: tar.TypeDir, Mode: 0o1777},
		{Name: "home/", Type: tar.TypeDir},
		{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home:/bin/sh\n"},
		{Name: "etc/group", Body: "root:x:0:\nuser:x:1000:\n"},
		{Name: "bin/busybox", Body: string(program), Mode: 0o755},
	}
	for _, c := range busyboxCommands {
		files = append(files, File{Name: "bin/" + c, Type: tar.TypeSymlink, Link: "busybox"})
	}
	return files
}

// Image puts layers together for this machine's platform.
func Image(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	return ImageFor(t, &v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}, config, layers...)
}

// ImageFor puts layers together for a platform.
func ImageFor(t testing.TB, platform *v1.Platform, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		t.Fatalf("append layers: %v", err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = platform.OS, platform.Architecture, config
	img, err = mutate.ConfigFile(img, file)
	if err != nil {
		t.Fatalf("set the config: %v", err)
	}
	return img
}

// Index makes an index of this platform's image and one for a platform that this machine is not,
// which stands first so that taking the first is a mistake that shows.
func Index(t testing.TB, mine v1.Image) v1.ImageIndex {
	t.Helper()
	other := &v1.Platform{OS: "linux", Architecture: "s390x"}
	wrong := ImageFor(t, other, v1.Config{}, Layer(t, "gzip", Tar(t, File{Name: "wrong-platform", Body: "x"})))
	return mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: wrong, Descriptor: v1.Descriptor{Platform: other}},
		mutate.IndexAddendum{Add: mine, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}}})
}

// Pull pulls through the API and returns the image, or the problem that ended the progress lines.
func (d *Daemon) Pull(ctx context.Context, reference string, insecure bool) (*Pulled, error) {
	response, err := d.Do(ctx, "POST", "/v1/images/pull", pullBody{Reference: reference, Insecure: insecure})
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return nil, problem(response)
	}
	return readPull(response.Body)
}

// Name joins a registry and a repository: host:port/path:tag.
func (r *Registry) Name(repository string) string { return path.Join(r.Host, repository) }

// Platform is this machine's, as images spell it.
func Platform() string { return fmt.Sprintf("linux/%s", goruntime.GOARCH) }

// OnlyFor makes an index with one image, for a platform that this machine is not.
func OnlyFor(t testing.TB, platform *v1.Platform) v1.ImageIndex {
	t.Helper()
	image := ImageFor(t, platform, v1.Config{}, Layer(t, "gzip", Tar(t, File{Name: "x", Body: "x"})))
	return mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
}
