package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// A snapshot as one file is a tar: snapshot.json, and then layer-1.tar, layer-2.tar and so on, the layers that are snapshots',
// lowest first. The image is not in it, only its name and digest.

// snapshotFile is snapshot.json. In version 1 no layer leaves holes out: who knows that alone would unpack the pieces of a file as
// the file.
type snapshotFile struct {
	Version  int       `json:"version"` // 2
	Snapshot *Snapshot `json:"snapshot"`
}

const (
	snapshotName    = "snapshot.json"
	maxSnapshotName = 4 << 20 // bytes of it: two environments of 1 MiB, and what JSON makes of them
)

func layerFile(i int) string { return "layer-" + strconv.Itoa(i+1) + ".tar" }

// ReadLayer writes the uppermost layer of a source, which is a snapshot's, as an uncompressed tar stream, with or without the
// zeros of files that are mostly that ([layer.DiffOptions].Holes).
type ReadLayer func(ctx context.Context, source rootfs.Source, holes bool, w io.Writer) (layer.Result, error)

// ReadAs has the uppermost layer of a source read whose stream had the diff id want when it was made. Streams have left holes out only since
// there are files without them, so one that is not as it was is read once more, with them: again is called between the two. Where neither
// is as it was, the result is the first.
func (read ReadLayer) ReadAs(ctx context.Context, source rootfs.Source, want string, w io.Writer, again func() error) (layer.Result, error) {
	result, err := read(ctx, source, true, w)
	if err != nil || result.DiffID == want {
		return result, err
	}
	if err := again(); err != nil {
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

// ExportSnapshot writes a snapshot as one file. Each layer is held against its diff id before a byte of it is written.
func (s *Service) ExportSnapshot(ctx context.Context, ref string, read ReadLayer, w io.Writer) error {
	snap, release, err := s.AcquireSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	out := tar.NewWriter(w)
	told := *snap
	// Where its layers and its sandbox lie means nothing elsewhere.
	told.Rootfs, told.Sandbox, told.ImportedAt = rootfs.Source{Snapshots: snap.Rootfs.Snapshots}, "", time.Time{}
	data, err := json.Marshal(snapshotFile{Version: 2, Snapshot: &told})
	if err != nil {
		return fmt.Errorf("encode snapshot: %w", err)
	}
	begun := false
	for i := range snap.Rootfs.Snapshots {
		err := s.exportLayer(ctx, snap, i, read, func(f io.Reader, size int64) error {
			if !begun {
				begun = true
				if err := writeFile(out, snapshotName, int64(len(data)), nil, data, snap.CreatedAt); err != nil {
					return err
				}
			}
			return writeFile(out, layerFile(i), size, f, nil, snap.CreatedAt)
		})
		if err != nil {
			return fmt.Errorf("export snapshot %s: %w", ref, err)
		}
	}
	return out.Close()
}

// exportLayer reads one layer into a file, which tells its size.
func (s *Service) exportLayer(ctx context.Context, snap *Snapshot, i int, read ReadLayer, write func(r io.Reader, size int64) error) (err error) {
	f, err := s.store.TempFile()
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
		return classf(ErrInvalid, "the snapshot is damaged: layer %d reads as %s, and was %s when it was taken", i+1, result.DiffID, want)
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

// ImportSnapshot keeps a snapshot that is in r as [Service.ExportSnapshot] has written it, or somebody else: nothing in it is
// believed but what check, which is told all that it says, lets through, and every layer must be what its diff id says. The image
// must be here. Name takes the place of the one that it has, unless it is empty.
//
// What is recorded of a layer is the diff id that read finds, and it is held to that from then on. It is another one where the
// file was not written by us, or where this host cannot keep all of it, as owners with a single id.
func (s *Service) ImportSnapshot(ctx context.Context, r io.Reader, name string, check func(*Snapshot) error, read ReadLayer) (_ api.Snapshot, err error) {
	in := tar.NewReader(r)
	snap, err := readSnapshotFile(in)
	if err != nil {
		return api.Snapshot{}, err
	}
	if name != "" {
		snap.Name = name
	}
	if err := check(snap); err != nil {
		return api.Snapshot{}, err
	}
	base, release, err := s.baseOf(ctx, snap)
	if err != nil {
		return api.Snapshot{}, err
	}
	defer release()
	diffIDs := snap.Rootfs.Snapshots
	if n := len(base.Layers) + len(diffIDs); len(diffIDs) == 0 || n > rootfs.MaxLayers {
		return api.Snapshot{}, archiveInvalid("the snapshot has %d layers, at least one and with the image's at most %d are possible", len(diffIDs), rootfs.MaxLayers)
	}
	var t *Taken
	defer func() {
		if t != nil {
			err = errors.Join(err, t.Release(ctx))
		}
	}()
	for i, diffID := range diffIDs {
		hdr, err := in.Next()
		if err != nil {
			return api.Snapshot{}, archiveInvalid("read %s: %w", layerFile(i), err)
		}
		if hdr.Name != layerFile(i) || hdr.Typeflag != tar.TypeReg {
			return api.Snapshot{}, archiveInvalid("%.80q stands where %s must be", hdr.Name, layerFile(i))
		}
		apply := func(ctx context.Context, chainID string) (layer.Result, error) {
			parents, limits := base.Layers, s.opts.Limits
			if t != nil {
				parents = t.Rootfs.Layers
			}
			var err error
			if limits.Below, err = s.usage(parents); err != nil {
				return layer.Result{}, err
			}
			if t != nil {
				for _, made := range t.sizes { // which are noted when it is kept
					limits.Below = limits.Below.Add(usageOf(made))
				}
			}
			return s.applyStream(ctx, in, parents, layer.Request{ChainID: chainID, MediaType: uncompressedTar, DiffID: diffID, Limits: limits, FromDiff: true})
		}
		var result layer.Result
		if t == nil {
			t, result, err = s.Take(ctx, snap.ImageDigest, base, apply)
		} else {
			result, err = t.Add(ctx, apply)
		}
		if err != nil {
			if errors.Is(err, layer.ErrInvalid) {
				err = archiveInvalid("%s: %w", layerFile(i), err)
			}
			return api.Snapshot{}, err
		}
		if result.DiffID != diffID {
			return api.Snapshot{}, archiveInvalid("%s is %s, the snapshot promises %s", layerFile(i), result.DiffID, diffID)
		}
		kept, err := read(ctx, t.Rootfs, true, io.Discard)
		if err != nil {
			return api.Snapshot{}, fmt.Errorf("read %s as it is kept: %w", layerFile(i), err)
		}
		t.Rootfs.Snapshots[i] = kept.DiffID
		snap.Size, snap.Entries = result.Size, result.Entries
	}
	if _, err := in.Next(); !errors.Is(err, io.EOF) {
		return api.Snapshot{}, archiveInvalid("there is more than the snapshot's %d layers", len(diffIDs))
	}
	snap.ID, snap.Sandbox = NewSnapshotID(), ""
	snap.ImportedAt = time.Now().UTC()
	if snap.CreatedAt.After(snap.ImportedAt) {
		snap.CreatedAt = snap.ImportedAt // or it would be the last that a limit takes
	}
	if err := t.Keep(snap); err != nil {
		return api.Snapshot{}, err
	}
	// While it is held: it may be the oldest of all, and is the one that is wanted now.
	if err := s.EnforceSnapshots(context.WithoutCancel(ctx)); err != nil {
		s.opts.Log.Warn("the limit of snapshots could not be kept to", "error", err)
	}
	return s.InspectSnapshot(snap.ID)
}

const uncompressedTar = "application/vnd.oci.image.layer.v1.tar"

func readSnapshotFile(in *tar.Reader) (*Snapshot, error) {
	hdr, err := in.Next()
	switch {
	case errors.Is(err, io.EOF):
		return nil, archiveInvalid("it is empty")
	case err != nil:
		return nil, archiveInvalid("it is not a tar: %w", err)
	case hdr.Name != snapshotName || hdr.Typeflag != tar.TypeReg || hdr.Size > maxSnapshotName:
		return nil, archiveInvalid("it does not begin with a %s of at most %d bytes, so it is no snapshot; images are imported with sandboxd import", snapshotName, maxSnapshotName)
	}
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	var file snapshotFile
	if err := d.Decode(&file); err != nil {
		return nil, archiveInvalid("%s: %w", snapshotName, err)
	}
	if file.Version < 1 || file.Version > 2 || file.Snapshot == nil {
		return nil, archiveInvalid("%s is of version %d, not 1 or 2", snapshotName, file.Version)
	}
	return file.Snapshot, nil
}

// baseOf finds the image that a snapshot from elsewhere needs, and keeps it until release.
func (s *Service) baseOf(ctx context.Context, snap *Snapshot) (rootfs.Source, func(), error) {
	if snap.Image == api.HostImage {
		img, release, err := s.Acquire(ctx, api.HostImage)
		if err != nil {
			return rootfs.Source{}, nil, err
		}
		if img.Digest != snap.ImageDigest {
			release()
			return rootfs.Source{}, nil, classf(ErrNotFound, "the snapshot is of another host's programs, or of an earlier state of this one's: its host image is %.80s, this one's %s",
				snap.ImageDigest, img.Digest)
		}
		return img.Rootfs, release, nil
	}
	record, release, err := s.byDigest(ctx, snap.ImageDigest)
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			err = classf(ErrNotFound, "the snapshot needs the image %s of digest %.80s, which is not stored here; pull it first", snap.Image, snap.ImageDigest)
		}
		return rootfs.Source{}, nil, err
	}
	var base rootfs.Source
	for _, l := range record.Layers {
		base.Layers = append(base.Layers, l.ChainID)
	}
	return base, release, nil
}

// applyStream has a layer extracted from a stream. What ends the stream too early makes it another one than its diff id says.
func (s *Service) applyStream(ctx context.Context, content io.Reader, parents []string, req layer.Request) (layer.Result, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return layer.Result{}, err
	}
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, store.WithContext(ctx, content))
		copied <- errors.Join(err, w.Close())
	}()
	req.Blob = r
	results, err := s.applier.Apply(ctx, layer.ApplyRequest{Parents: parents, Layers: []layer.Request{req}})
	_ = r.Close() // a copy that is not done ends
	cerr := <-copied
	if err == nil {
		err = cerr
	}
	if err == nil && len(results) != 1 {
		err = fmt.Errorf("%d layers were extracted, not 1", len(results))
	}
	if err != nil {
		return layer.Result{}, err
	}
	return results[0], nil
}
