package libct

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/quota"
)

// Volumes.
//
// A volume is a directory among those of the sandboxes. A sandbox with a range of ids of its own
// sees it through the mount of that range, so that an id of one sandbox is that id of all others
// that share the volume. Init mounts the volume's data directory. Nothing above that can be reached
// from inside, and the launcher names nothing below it: it counts and removes through descriptors,
// without following links, and archives are read and written by confined children.
//
// A volume with a limit is a subject of the disk watch of its own (docs/decisions/0034).

// volumes are the volumes that something is done with, by id.
type volumes struct {
	mu     sync.Mutex
	all    map[string]*volume
	left   chan struct{} // closed at the end of the next archive; nil while no removal waits
	serial int           // of removals
}

type volume struct {
	// gate is held by the one that begins or ends a use: a sandbox's start, an import, a removal.
	gate chan struct{}

	// Guarded by volumes.mu.
	gates   int // those who hold the gate or wait for it
	users   map[*instance]volumeUser
	readers int  // archives that are written of it
	filling bool // an import
	name    string
	limit   quota.Usage
}

type volumeUser struct {
	id     string // of the sandbox
	writes bool
}

// removedVolume is the prefix of the directory of a volume that is being removed.
const removedVolume = ".removed-"

// fillingVolume is a file in the directory of a volume while the image's files are copied to it.
const fillingVolume = "filling"

// usedVolume is a file in the directory of a volume that has been mounted.
const usedVolume = "used"

func validVolume(id string) error {
	if id == "" || len(id) > 64 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return fmt.Errorf("volume id %q is not 1 to 64 lower-case letters and digits", id)
	}
	return nil
}

func volumeDir(id string) string { return filepath.Join(launcher.VolumesDir, id) }

func volumeData(id string) string { return filepath.Join(volumeDir(id), launcher.VolumeData) }

// volumeRoot is the end of the root of a volume's mounts, as mountinfo has it.
func volumeRoot(id string) string {
	return filepath.Join("/", filepath.Base(launcher.VolumesDir), id, launcher.VolumeData)
}

// sweepVolumes finishes the removals of an earlier launcher, in the background.
func (e *Engine) sweepVolumes() {
	entries, err := os.ReadDir(launcher.VolumesDir)
	if err != nil {
		return // there are none
	}
	var left []string
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), removedVolume) {
			left = append(left, filepath.Join(launcher.VolumesDir, entry.Name()))
		}
	}
	e.volumes.serial = len(left)
	go func() {
		for _, dir := range left {
			if err := removeTree(dir); err != nil {
				slog.Error("files of a removed volume are left", "error", err)
			}
		}
	}()
}

// lock takes the gate of a volume.
func (v *volumes) lock(ctx context.Context, id string) (*volume, error) {
	if err := validVolume(id); err != nil {
		return nil, err
	}
	v.mu.Lock()
	vol := v.all[id]
	if vol == nil {
		if v.all == nil {
			v.all = make(map[string]*volume)
		}
		vol = &volume{gate: make(chan struct{}, 1), users: make(map[*instance]volumeUser)}
		v.all[id] = vol
	}
	vol.gates++
	v.mu.Unlock()
	select {
	case vol.gate <- struct{}{}:
		if ctx.Err() == nil { // or both came together
			return vol, nil
		}
		<-vol.gate
	case <-ctx.Done():
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	vol.gates--
	v.forget(id, vol)
	return nil, fmt.Errorf("wait for volume %s, which another request holds: %w", id, context.Cause(ctx))
}

// unlock gives the gate back, and forgets a volume that nothing uses.
func (v *volumes) unlock(id string, vol *volume) {
	<-vol.gate
	v.mu.Lock()
	defer v.mu.Unlock()
	vol.gates--
	v.forget(id, vol)
}

// forget needs mu.
func (v *volumes) forget(id string, vol *volume) {
	if vol.gates == 0 && len(vol.users) == 0 && vol.readers == 0 && !vol.filling && v.all[id] == vol {
		delete(v.all, id)
	}
}

// awaitArchives waits for the end of archives of a volume that are read or written: their client
// may have given up, and a removal is its last request.
func (v *volumes) awaitArchives(ctx context.Context, vol *volume) error {
	for {
		v.mu.Lock()
		if vol.readers == 0 && !vol.filling {
			v.mu.Unlock()
			return nil
		}
		if v.left == nil {
			v.left = make(chan struct{})
		}
		left := v.left
		v.mu.Unlock()
		select {
		case <-left:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// endArchive needs mu.
func (v *volumes) endArchive() {
	if v.left != nil {
		close(v.left)
		v.left = nil
	}
}

// busy returns an error that names the users of a volume, nil if it has none. It needs mu.
func (vol *volume) busy() error {
	switch {
	case len(vol.users) > 0:
		var ids []string
		for _, u := range vol.users {
			ids = append(ids, u.id)
		}
		slices.Sort(ids)
		return fmt.Errorf("sandbox %s has it: %w", strings.Join(slices.Compact(ids), ", "), runtime.ErrVolumeInUse)
	case vol.filling:
		return fmt.Errorf("an archive is being unpacked to it: %w", runtime.ErrVolumeInUse)
	case vol.readers > 0:
		return fmt.Errorf("it is being exported: %w", runtime.ErrVolumeInUse)
	}
	return nil
}

// makeVolume makes the directories of a volume that is not there yet.
func (e *Engine) makeVolume(id string) error {
	e.volumes.mu.Lock() // a removal may take the parent away
	defer e.volumes.mu.Unlock()
	for _, dir := range []string{launcher.VolumesDir, volumeDir(id)} {
		if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, os.ErrExist) { //nolint:gosec // G301: roots of sandboxes pass through
			return fmt.Errorf("make volume: %w", err)
		}
	}
	root := uint32(e.host.IDs[0].Outside) //nolint:gosec // G115: an id of the host
	if err := makeOwned(volumeData(id), &unix.Stat_t{Uid: root, Gid: root, Mode: 0o755}); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make volume: %w", err)
	}
	return nil
}

// heldVolumes are the volumes of a sandbox that is being started, with their gates held.
type heldVolumes struct {
	e    *Engine
	all  []*volume
	spec []runtime.VolumeMount
	fill []bool
}

// holdVolumes makes the volumes of a sandbox, and keeps others from using them until release.
func (e *Engine) holdVolumes(ctx context.Context, spec *runtime.Spec) (_ *heldVolumes, err error) {
	h := &heldVolumes{e: e, spec: slices.Clone(spec.Volumes)}
	defer func() {
		if err != nil {
			err = fmt.Errorf("volume: %w", errors.Join(err, h.release()))
		}
	}()
	// In one order, so that no two sandboxes wait for each other.
	slices.SortFunc(h.spec, func(a, b runtime.VolumeMount) int { return strings.Compare(a.ID, b.ID) })
	for i := range h.spec {
		m := &h.spec[i]
		if i > 0 && m.ID == h.spec[i-1].ID { // at two places
			h.all, h.fill = append(h.all, h.all[i-1]), append(h.fill, false)
			continue
		}
		vol, err := e.volumes.lock(ctx, m.ID)
		if err != nil {
			return nil, err
		}
		h.all, h.fill = append(h.all, vol), append(h.fill, false)
		if h.fill[i], err = e.openVolume(m, vol); err != nil {
			return nil, fmt.Errorf("%s: %w", m.Name, err)
		}
	}
	return h, nil
}

// openVolume makes a volume ready to be mounted. It reports whether the image's files may be
// copied.
func (e *Engine) openVolume(m *runtime.VolumeMount, vol *volume) (fill bool, err error) {
	e.volumes.mu.Lock()
	used, filling := len(vol.users) > 0, vol.filling
	e.volumes.mu.Unlock()
	if filling {
		return false, fmt.Errorf("an archive is being unpacked to it: %w", runtime.ErrVolumeInUse)
	}
	if err := e.makeVolume(m.ID); err != nil {
		return false, err
	}
	if used {
		return false, nil
	}
	marker := filepath.Join(volumeDir(m.ID), fillingVolume)
	if _, err := os.Lstat(marker); err == nil { // of a launcher that has died
		if err := errors.Join(emptyVolume(m.ID), os.Remove(marker)); err != nil {
			return false, err
		}
	}
	if m.NoCopy {
		return false, nil
	}
	empty, err := isEmpty(volumeData(m.ID))
	if err != nil || !empty {
		return false, err
	}
	return true, os.WriteFile(marker, nil, 0o600)
}

// emptyVolume removes the files of a volume.
func emptyVolume(id string) error {
	fd, err := openDir(unix.AT_FDCWD, volumeData(id))
	if err != nil {
		return fmt.Errorf("empty volume: %w", err)
	}
	r := remover{top: fd, buf: make([]byte, 16<<10)}
	for {
		err = r.empty(fd, 0)
		if err != nil {
			break
		}
		if _, err = unix.Seek(fd, 0, io.SeekStart); err != nil {
			break
		}
		var empty bool
		if empty, err = isEmpty(volumeData(id)); err != nil || empty {
			break
		}
	}
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return fmt.Errorf("empty volume: %w", err)
	}
	return nil
}

// isEmpty reports whether a directory has no entry. A link in its place is an error.
func isEmpty(dir string) (bool, error) {
	fd, err := openDir(unix.AT_FDCWD, dir)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close() // only read
	if _, err = f.Readdirnames(1); errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// join notes the sandbox, which runs, as a user of its volumes. No program of it has been started.
func (h *heldVolumes) join(in *instance, id string) {
	h.e.volumes.mu.Lock()
	for i := range h.spec {
		m := &h.spec[i]
		u := h.all[i].users[in]
		h.all[i].users[in] = volumeUser{id, u.writes || !m.ReadOnly}
		h.all[i].name, h.all[i].limit = m.Name, quota.Usage(m.Limit)
	}
	h.e.volumes.mu.Unlock()
	for i := range h.spec {
		h.e.watchVolume(h.spec[i].ID, &h.spec[i], h.all[i])
	}
	if in.hasEnded() {
		h.e.leaveVolumes(in)
	}
}

// keep notes that the image's files have been copied.
func (h *heldVolumes) keep() error {
	for i := range h.all {
		if !h.fill[i] {
			continue
		}
		dir := volumeDir(h.spec[i].ID)
		if err := errors.Join(os.WriteFile(filepath.Join(dir, usedVolume), nil, 0o600), os.Remove(filepath.Join(dir, fillingVolume))); err != nil {
			return fmt.Errorf("volume: %w", err)
		}
		h.fill[i] = false
	}
	return nil
}

// release lets others use the volumes. Copies that did not come to their end are removed. A second
// call does nothing.
func (h *heldVolumes) release() error {
	var errs []error
	for i, vol := range h.all {
		m := &h.spec[i]
		if i > 0 && m.ID == h.spec[i-1].ID {
			continue
		}
		if h.fill[i] {
			errs = append(errs, emptyVolume(m.ID), os.Remove(filepath.Join(volumeDir(m.ID), fillingVolume)))
		}
		h.e.volumes.unlock(m.ID, vol)
	}
	h.all = nil
	return errors.Join(errs...)
}

// leaveVolumes ends the use of its volumes by a sandbox that has ended.
func (e *Engine) leaveVolumes(in *instance) {
	e.volumes.mu.Lock()
	defer e.volumes.mu.Unlock()
	for id, vol := range e.volumes.all {
		if _, ok := vol.users[in]; !ok {
			continue
		}
		delete(vol.users, in)
		writers := 0
		for _, u := range vol.users {
			if u.writes {
				writers++
			}
		}
		if writers == 0 {
			e.disk.Remove(volumeSubject(id))
		}
		e.volumes.forget(id, vol)
	}
}

// volumeSubject is the name of a volume for the watch of the disk: no sandbox has it.
func volumeSubject(id string) string { return "volume " + id }

// watchVolume counts the files of a volume while a sandbox can write to it. One that belongs to a
// single sandbox is counted with that.
func (e *Engine) watchVolume(id string, m *runtime.VolumeMount, vol *volume) {
	limit := quota.Usage(m.Limit)
	if m.Own || m.ReadOnly || limit == (quota.Usage{}) && e.host.DiskReserve == 0 {
		return
	}
	e.disk.Set(volumeSubject(id), quota.Subject{
		Limit:   limit,
		Measure: func(limit quota.Usage) (quota.Usage, error) { return e.measureVolume(id, vol, limit) },
		Hold:    func(ctx context.Context) (func(), error) { return e.holdUsers(ctx, vol) },
		End: func(reason string) {
			for in, u := range e.usersOf(vol, true) {
				e.mu.Lock()
				if in.exceeded == "" {
					in.exceeded = "volume " + m.Name + ": " + reason
				}
				e.mu.Unlock()
				_ = e.strike(in, u.id) // tried again while it runs
			}
		},
	})
	if len(e.usersOf(vol, true)) == 0 { // it has ended meanwhile
		e.disk.Remove(volumeSubject(id))
	}
}

// usersOf returns the sandboxes that have a volume, or can write to it.
func (e *Engine) usersOf(vol *volume, writers bool) map[*instance]volumeUser {
	e.volumes.mu.Lock()
	defer e.volumes.mu.Unlock()
	users := maps.Clone(vol.users)
	if writers {
		maps.DeleteFunc(users, func(_ *instance, u volumeUser) bool { return !u.writes })
	}
	return users
}

// measureVolume returns the disk space of a volume directory, and of files without a name that
// sandboxes have opened there.
func (e *Engine) measureVolume(id string, vol *volume, limit quota.Usage) (quota.Usage, error) {
	used, err := quota.Measure([]string{volumeData(id)}, limit)
	if err != nil || used.Exceeds(limit) {
		return used, err
	}
	var pids []int
	for in := range e.usersOf(vol, false) {
		pids = append(pids, in.processes()...)
	}
	held := quota.Processes{Proc: "/proc", Below: []string{volumeRoot(id)}, Only: true}.Measure(pids)
	return quota.Usage{Bytes: used.Bytes + held.Bytes, Inodes: used.Inodes + held.Inodes}, nil
}

// holdUsers makes the sandboxes stand still that can write to a volume: all of them, or none.
func (e *Engine) holdUsers(ctx context.Context, vol *volume) (release func(), err error) {
	var releases []func()
	release = func() {
		for _, r := range slices.Backward(releases) {
			r()
		}
	}
	users := e.usersOf(vol, true)
	for in, u := range users {
		r, err := e.hold(ctx, in, u.id)
		if err != nil {
			release()
			return nil, err
		}
		releases = append(releases, r)
	}
	return release, nil
}

// RemoveVolume removes a volume with its files.
func (e *Engine) RemoveVolume(ctx context.Context, id string) error {
	vol, err := e.volumes.lock(ctx, id)
	if err != nil {
		return fmt.Errorf("remove volume: %w", err)
	}
	defer e.volumes.unlock(id, vol)
	// With the gate: no other use begins.
	if err := e.volumes.awaitArchives(ctx, vol); err != nil {
		return fmt.Errorf("remove volume: wait for its archive: %w", err)
	}
	e.volumes.mu.Lock()
	if err := vol.busy(); err != nil {
		e.volumes.mu.Unlock()
		return fmt.Errorf("remove volume: %w", err)
	}
	e.volumes.serial++
	gone := filepath.Join(launcher.VolumesDir, removedVolume+strconv.Itoa(e.volumes.serial)+"-"+id)
	err = os.Rename(volumeDir(id), gone) // a half removed volume is none
	e.volumes.mu.Unlock()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove volume: %w", err)
	}
	if err == nil {
		if err := removeTree(gone); err != nil {
			return fmt.Errorf("remove volume: %w", err)
		}
	}
	e.volumes.mu.Lock()
	defer e.volumes.mu.Unlock()
	_ = os.Remove(launcher.VolumesDir) // if it was the last one
	return nil
}

// MeasureVolume counts the files of a volume.
func (e *Engine) MeasureVolume(ctx context.Context, id string) (runtime.VolumeUsage, error) {
	if err := errors.Join(ctx.Err(), validVolume(id)); err != nil {
		return runtime.VolumeUsage{}, err
	}
	// It may be removed meanwhile: a directory that is gone has no files.
	used, err := quota.Measure([]string{volumeData(id)}, quota.Usage{})
	if err != nil {
		return runtime.VolumeUsage{}, fmt.Errorf("measure volume: %w", err)
	}
	if used.Inodes > 0 {
		used.Inodes-- // its own directory
	}
	return runtime.VolumeUsage(used), nil
}

// ReadVolume keeps a volume from being removed, and its directory from being replaced.
func (e *Engine) ReadVolume(ctx context.Context, id string) (dir string, release func(), err error) {
	vol, err := e.volumes.lock(ctx, id)
	if err != nil {
		return "", nil, fmt.Errorf("read volume: %w", err)
	}
	defer e.volumes.unlock(id, vol)
	e.volumes.mu.Lock()
	filling := vol.filling
	if !filling {
		vol.readers++
	}
	e.volumes.mu.Unlock()
	if filling {
		return "", nil, fmt.Errorf("read volume: an archive is being unpacked to it: %w", runtime.ErrVolumeInUse)
	}
	release = func() {
		e.volumes.mu.Lock()
		defer e.volumes.mu.Unlock()
		vol.readers--
		e.volumes.endArchive()
		e.volumes.forget(id, vol)
	}
	if err := e.makeVolume(id); err != nil {
		release()
		return "", nil, err
	}
	return volumeData(id), release, nil
}

// WriteVolume reserves an empty volume for its caller.
func (e *Engine) WriteVolume(ctx context.Context, id string) (dir string, release func(), err error) {
	vol, err := e.volumes.lock(ctx, id)
	if err != nil {
		return "", nil, err
	}
	defer e.volumes.unlock(id, vol)
	e.volumes.mu.Lock()
	err = vol.busy()
	e.volumes.mu.Unlock()
	if err != nil {
		return "", nil, err
	}
	if err := e.makeVolume(id); err != nil {
		return "", nil, err
	}
	marker := filepath.Join(volumeDir(id), fillingVolume)
	if _, err := os.Lstat(marker); err == nil { // of a launcher that has died
		if err := errors.Join(emptyVolume(id), os.Remove(marker)); err != nil {
			return "", nil, err
		}
	}
	empty, err := isEmpty(volumeData(id))
	if err != nil {
		return "", nil, err
	}
	if !empty {
		return "", nil, runtime.ErrVolumeNotEmpty
	}
	e.volumes.mu.Lock()
	vol.filling = true
	e.volumes.mu.Unlock()
	return volumeData(id), func() {
		e.volumes.mu.Lock()
		defer e.volumes.mu.Unlock()
		vol.filling = false
		e.volumes.endArchive()
		e.volumes.forget(id, vol)
	}, nil
}

// SpareDisk returns the bytes of the disk that may be written without touching the reserve.
func (e *Engine) SpareDisk() (int64, error) {
	free, err := quota.ReadFree(launcher.SandboxesDir)
	if err != nil {
		return 0, err
	}
	return free.Available - e.host.DiskReserve, nil
}
