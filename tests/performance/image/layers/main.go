// Command layers makes the images for `make bench-image` out of one root file system: an OCI layout
// with
//
//	big         two layers: a Debian base, and everything that apt-get put above it
//	forty       those files in forty layers
//	forty-next  those again, with changes in the four highest layers
//
// Every layer begins with the parent directories of its files, like layers of docker build.
package main

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	many    = 40
	changed = 4
	// baseList is a file in the archive with the names of the base, a line each.
	baseList = ".base.list"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: layers ROOTFS.tar LAYOUT")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "layers:", err)
		os.Exit(1)
	}
}

func run(archive, into string) (err error) {
	work, err := os.MkdirTemp(filepath.Dir(into), "layers-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	in, err := survey(archive)
	if err != nil {
		return fmt.Errorf("read %s: %w", archive, err)
	}
	out, err := layout.Write(into, empty.Index)
	if err != nil {
		return err
	}
	two := func(name string, _ int64) int {
		if in.base[name] {
			return 0
		}
		return 1
	}
	forty := func(_ string, before int64) int { return int(min(before*many/in.total, many-1)) }
	for _, image := range []struct {
		name   string
		layers int
		choose func(name string, before int64) int
		fresh  int // from which layer on there is one file more
	}{{"big", 2, two, 2}, {"forty", many, forty, many}, {"forty-next", many, forty, many - changed}} {
		files, err := split(archive, filepath.Join(work, image.name), image.layers, image.choose, image.fresh)
		if err != nil {
			return fmt.Errorf("split into %s: %w", image.name, err)
		}
		made, err := assemble(files)
		if err != nil {
			return fmt.Errorf("make %s: %w", image.name, err)
		}
		if err := out.AppendImage(made, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": image.name})); err != nil {
			return fmt.Errorf("write %s: %w", image.name, err)
		}
	}
	return nil
}

// contents is the result of the first pass over the archive.
type contents struct {
	total int64 // bytes, with a block for every header
	base  map[string]bool
}

func cost(hdr *tar.Header) int64 { return 512 + hdr.Size }

func survey(archive string) (*contents, error) {
	in := &contents{base: map[string]bool{}}
	err := walk(archive, func(hdr *tar.Header, r io.Reader) error {
		in.total += cost(hdr)
		if hdr.Name != baseList {
			return nil
		}
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			in.base[lines.Text()] = true
		}
		return lines.Err()
	})
	if err == nil && len(in.base) == 0 {
		err = fmt.Errorf("it has no %s", baseList)
	}
	return in, err
}

// walk calls f for every entry that belongs into an image. Devices do not: no rootless tool can
// make them.
func walk(archive string, f func(*tar.Header, io.Reader) error) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	tr := tar.NewReader(bufio.NewReaderSize(file, 1<<20))
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		hdr.Name = strings.Trim(strings.TrimPrefix(hdr.Name, "./"), "/")
		if hdr.Typeflag == tar.TypeLink {
			hdr.Linkname = strings.TrimPrefix(hdr.Linkname, "./")
		}
		if hdr.Name == "" || hdr.Name == "." || strings.HasPrefix(hdr.Name, "dev/") {
			continue
		}
		if err := f(hdr, tr); err != nil {
			return fmt.Errorf("%s: %w", hdr.Name, err)
		}
	}
}

// part is one layer on its way.
type part struct {
	file *os.File
	buf  *bufio.Writer
	tar  *tar.Writer
	dirs map[string]bool
}

// split distributes the entries over n archives. Choose receives the number of bytes before the
// entry.
func split(archive, prefix string, n int, choose func(name string, before int64) int, fresh int) (files []string, err error) {
	parts := make([]part, n)
	for i := range parts {
		name := fmt.Sprintf("%s-%02d.tar", prefix, i)
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		buf := bufio.NewWriterSize(f, 1<<20)
		parts[i] = part{file: f, buf: buf, tar: tar.NewWriter(buf), dirs: map[string]bool{}}
		files = append(files, name)
	}
	dirs := map[string]tar.Header{}
	where := map[string]int{} // a hard link goes where its target is
	var before int64
	err = walk(archive, func(hdr *tar.Header, r io.Reader) error {
		if hdr.Name == baseList {
			return nil
		}
		at := choose(hdr.Name, before)
		before += cost(hdr)
		if hdr.Typeflag == tar.TypeLink {
			at = where[hdr.Linkname]
		}
		where[hdr.Name] = at
		p := &parts[at]
		if hdr.Typeflag == tar.TypeDir {
			dirs[hdr.Name] = *hdr
		}
		if err := p.parents(dirs, hdr.Name); err != nil {
			return err
		}
		if p.dirs[hdr.Name] {
			return nil
		}
		return p.add(hdr, r)
	})
	if err != nil {
		return nil, err
	}
	for i := range parts {
		p := &parts[i]
		if i >= fresh {
			body := fmt.Sprintf("changed layer %d\n", i)
			hdr := &tar.Header{Name: fmt.Sprintf("changed-%d", i), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}
			if err := p.add(hdr, strings.NewReader(body)); err != nil {
				return nil, err
			}
		}
		if err := errors.Join(p.tar.Close(), p.buf.Flush()); err != nil {
			return nil, err
		}
	}
	return files, nil
}

func (p *part) add(hdr *tar.Header, r io.Reader) error {
	if hdr.Typeflag == tar.TypeDir {
		p.dirs[hdr.Name] = true
	}
	if err := p.tar.WriteHeader(hdr); err != nil {
		return err
	}
	_, err := io.Copy(p.tar, r)
	return err
}

func (p *part) parents(dirs map[string]tar.Header, name string) error {
	for i, c := range name {
		if c != '/' || p.dirs[name[:i]] {
			continue
		}
		hdr, ok := dirs[name[:i]]
		if !ok {
			return fmt.Errorf("directory %s comes after what is in it", name[:i])
		}
		if err := p.add(&hdr, strings.NewReader("")); err != nil {
			return err
		}
	}
	return nil
}

// assemble compresses as docker build does, with gzip at its default level.
func assemble(files []string) (v1.Image, error) {
	var layers []v1.Layer
	for _, f := range files {
		l, err := tarball.LayerFromFile(f, tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.DefaultCompression))
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", goruntime.GOARCH
	return mutate.ConfigFile(img, config)
}
