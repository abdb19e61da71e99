package snapshot

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// A snapshot file is a tar: snapshot.json, then layer-1.tar, layer-2.tar and so on, the layers of
// snapshots, lowest first. Of the image it has only the name and digest.

// header is snapshot.json. In version 1 no layer leaves out holes: a reader of that version alone
// would unpack the pieces of a file as the file.
type header struct {
	Version  int             `json:"version"` // 2
	Snapshot *store.Snapshot `json:"snapshot"`
}

const (
	headerName = "snapshot.json"
	maxHeader  = 4 << 20 // bytes: two environments of 1 MiB, as JSON
)

func layerName(i int) string { return "layer-" + strconv.Itoa(i+1) + ".tar" }

// ReadLayer writes the uppermost layer of a source, a snapshot's, as an uncompressed tar stream.
// Holes leaves out the zeros of files that are mostly zeros, as [layer.DiffOptions].Holes does.
type ReadLayer func(ctx context.Context, source rootfs.Source, holes bool, w io.Writer) (layer.Result, error)

// ReadAs reads the uppermost layer of a source, whose stream had the diff id want when it was made.
// Older streams did not leave out holes, so a stream with another diff id is read once more with
// its zeros. Reset is called between the two. If neither matches, ReadAs returns the result of the
// first.
func (read ReadLayer) ReadAs(ctx context.Context, source rootfs.Source, want string, w io.Writer, reset func() error) (layer.Result, error) {
	result, err := read(ctx, source, true, w)
	if err != nil || result.DiffID == want {
		return result, err
	}
	if err := reset(); err != nil {
		return layer.Result{}, err
	}
	older, err := read(ctx, source, false, w)
	if err != nil {
		return layer.Result{}, err
	}
	if older.DiffID == want {
		return older, nil
	}
	return result, nil
}

// Export writes a snapshot as one file. It compares each layer with its diff id before it writes a
// byte of it.
func Export(ctx context.Context, st *store.Store, snap *store.Snapshot, read ReadLayer, w io.Writer) error {
	out := tar.NewWriter(w)
	copied := *snap
	// The places of its layers, its sandbox and its network mean nothing elsewhere.
	copied.Rootfs, copied.Sandbox, copied.ImportedAt, copied.Tenant = rootfs.Source{Snapshots: snap.Rootfs.Snapshots}, "", time.Time{}, ""
	copied.Network = api.Network{}
	data, err := json.Marshal(header{Version: 2, Snapshot: &copied})
	if err != nil {
		return fmt.Errorf("encode snapshot: %w", err)
	}
	begun := false
	for i := range snap.Rootfs.Snapshots {
		err := exportLayer(ctx, st, snap, i, read, func(f io.Reader, size int64) error {
			if !begun {
				begun = true
				if err := writeFile(out, headerName, int64(len(data)), nil, data, snap.CreatedAt); err != nil {
					return err
				}
			}
			return writeFile(out, layerName(i), size, f, nil, snap.CreatedAt)
		})
		if err != nil {
			return err
		}
	}
	return out.Close()
}

// exportLayer reads one layer into a temporary file, because the tar needs its size first.
func exportLayer(ctx context.Context, st *store.Store, snap *store.Snapshot, i int, read ReadLayer, write func(r io.Reader, size int64) error) (err error) {
	f, err := st.TempFile()
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // it has no name
	want := snap.Rootfs.Snapshots[i]
	result, err := read.ReadAs(ctx, snap.Rootfs.Below(len(snap.Rootfs.Snapshots)-1-i), want, f, func() error {
		_, err := f.Seek(0, io.SeekStart)
		return errors.Join(err, f.Truncate(0))
	})
	if err != nil {
		return err
	}
	if result.DiffID != want {
		return errdefs.Classf(errdefs.ErrInvalid, "the snapshot is damaged: layer %d reads as %s, and was %s when it was taken", i+1, result.DiffID, want)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	return write(f, size)
}

func writeFile(out *tar.Writer, name string, size int64, r io.Reader, data []byte, at time.Time) error {
	err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, ModTime: at.Truncate(time.Second).UTC()})
	if err != nil {
		return err
	}
	if r == nil {
		_, err = out.Write(data)
	} else {
		_, err = io.Copy(out, r)
	}
	return err
}

// File is a snapshot file that is being read. It may come from anywhere: its claims are unchecked.
type File struct {
	Snapshot *store.Snapshot

	tar  *tar.Reader
	next int // layer
}

// Open reads the record at the beginning of a snapshot file.
func Open(r io.Reader) (*File, error) {
	in := tar.NewReader(r)
	hdr, err := in.Next()
	switch {
	case errors.Is(err, io.EOF):
		return nil, Invalidf("it is empty")
	case err != nil:
		return nil, Invalidf("it is not a tar: %w", err)
	case hdr.Name != headerName || hdr.Typeflag != tar.TypeReg || hdr.Size > maxHeader:
		return nil, Invalidf("it does not begin with a %s of at most %d bytes, so it is no snapshot; images are imported with sandboxd import", headerName, maxHeader)
	}
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	var h header
	if err := d.Decode(&h); err != nil {
		return nil, Invalidf("%s: %w", headerName, err)
	}
	if h.Version < 1 || h.Version > 2 || h.Snapshot == nil {
		return nil, Invalidf("%s is of version %d, not 1 or 2", headerName, h.Version)
	}
	h.Snapshot.Tenant = ""             // the importer's is set by the importer
	h.Snapshot.Network = api.Network{} // no file gives a sandbox a network that the user did not ask for
	return &File{Snapshot: h.Snapshot, tar: in}, nil
}

// Layer returns the content of the next layer, which is valid until the next call of a method.
func (f *File) Layer() (io.Reader, error) {
	want := layerName(f.next)
	hdr, err := f.tar.Next()
	if err != nil {
		return nil, Invalidf("read %s: %w", want, err)
	}
	if hdr.Name != want || hdr.Typeflag != tar.TypeReg {
		return nil, Invalidf("%.80q stands where %s must be", hdr.Name, want)
	}
	f.next++
	return f.tar, nil
}

// End returns an error unless all of the file has been read.
func (f *File) End() error {
	if _, err := f.tar.Next(); !errors.Is(err, io.EOF) {
		return Invalidf("there is more than the snapshot's %d layers", f.next)
	}
	return nil
}

// Invalidf returns an error about the content of a snapshot file.
func Invalidf(format string, args ...any) error {
	return errdefs.Classf(errdefs.ErrInvalid, "the snapshot file cannot be imported: %w", fmt.Errorf(format, args...))
}
