package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// private makes a sandbox that no other user has, with one file in it.
func private(ctx context.Context, u *user) (*box, error) {
	b := u.w.newBox(false)
	b.doomed = true // its state may be any in the midst of this; its files must be right all the same
	if err := u.w.create(ctx, b); err != nil {
		return b, err
	}
	return b, put(ctx, u, b, fmt.Sprintf("/u%d/0", u.n), someBytes(u.r, 20_000))
}

func put(ctx context.Context, u *user, b *box, name string, data []byte) error {
	b.intend(name, sum(data))
	if err := u.c.WriteFile(ctx, b.id, name, bytes.NewReader(data), 0, ""); err != nil {
		return err
	}
	b.settle(name, sum(data))
	return nil
}

// has compares a file with its expected content.
func has(ctx context.Context, u *user, b *box, name string) error {
	r, err := u.c.ReadFile(ctx, b.id, name)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) && strings.Contains(err.Error(), name) {
		return wrongf("%s of sandbox %s is lost", name, b.name)
	}
	if err != nil {
		return err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err == nil && b.certain(name)[name] != sum(data) {
		return wrongf("%s of sandbox %s has %d other bytes", name, b.name, len(data))
	}
	return err
}

func stopAndStart(ctx context.Context, u *user, _ *box) error {
	b, err := private(ctx, u)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("/u%d/0", u.n)
	grace := 0.2 * float64(u.r.IntN(2))
	s, err := u.c.StopSandbox(ctx, b.id, api.StopSandbox{Grace: &grace})
	if err != nil {
		return err
	}
	if s.State != api.StateStopped || s.Reason == "" {
		return wrongf("a sandbox that was stopped is %s (%q)", s.State, s.Reason)
	}
	if s, err = u.c.StartSandbox(ctx, b.id, api.StartSandbox{}); err != nil {
		return err
	}
	if s.State != api.StateRunning {
		return wrongf("a sandbox that was started is %s (%q)", s.State, s.Reason)
	}
	return errors.Join(has(ctx, u, b, name), exec(ctx, u, b), remove(ctx, u, b))
}

func pauseAndResume(ctx context.Context, u *user, _ *box) error {
	b, err := private(ctx, u)
	if err != nil {
		return err
	}
	s, err := u.c.PauseSandbox(ctx, b.id)
	if err != nil {
		return err
	}
	if s.State != api.StatePaused {
		return wrongf("a sandbox that was paused is %s", s.State)
	}
	if err := exec(ctx, u, b); err == nil {
		return wrongf("an exec in a paused sandbox")
	}
	if _, err = u.c.ResumeSandbox(ctx, b.id); err != nil {
		return err
	}
	return errors.Join(exec(ctx, u, b), remove(ctx, u, b))
}

func snapshot(ctx context.Context, u *user, b *box) error {
	w := u.w
	m := &made{files: b.certain(fmt.Sprintf("/u%d/", u.n))}
	w.mu.Lock()
	w.count++
	name := fmt.Sprintf("snap%d", w.count)
	w.snapshots[name] = m
	w.mu.Unlock()
	_, err := u.c.TakeSnapshot(ctx, b.id, api.TakeSnapshot{Name: name})
	if changed(err) {
		return nil
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m.answered = true
	return nil
}

func fork(ctx context.Context, u *user, b *box) error {
	certain := b.certain(fmt.Sprintf("/u%d/", u.n))
	var names []string
	var forks []*box
	for range 1 + u.r.IntN(2) {
		f := u.w.newBox(false)
		f.doomed, f.loose = true, true
		for name, hash := range certain {
			f.may[name] = []string{hash}
		}
		forks, names = append(forks, f), append(names, f.name)
	}
	out, err := u.c.Fork(ctx, b.id, api.ForkSandbox{Count: len(names), Names: names})
	if changed(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(out.Sandboxes) != len(forks) {
		return wrongf("%d forks, not %d", len(out.Sandboxes), len(forks))
	}
	for i, f := range forks {
		f.mu.Lock()
		f.id, f.made = out.Sandboxes[i].ID, true
		f.mu.Unlock()
		for name := range maps.Keys(certain) {
			if err := has(ctx, u, f, name); err != nil {
				return err
			}
		}
		if err := remove(ctx, u, f); err != nil {
			return err
		}
	}
	return nil
}

func rollback(ctx context.Context, u *user, _ *box) error {
	b, err := private(ctx, u)
	if err != nil {
		return err
	}
	w, first, later := u.w, fmt.Sprintf("/u%d/0", u.n), fmt.Sprintf("/u%d/1", u.n)
	w.mu.Lock()
	w.count++
	name := fmt.Sprintf("snap%d", w.count)
	m := &made{files: b.certain(first)}
	w.snapshots[name] = m
	w.mu.Unlock()
	if _, err := u.c.TakeSnapshot(ctx, b.id, api.TakeSnapshot{Name: name}); err != nil {
		return err
	}
	w.mu.Lock()
	m.answered = true
	w.mu.Unlock()
	if err := put(ctx, u, b, later, []byte("later")); err != nil {
		return err
	}
	b.intend(later, absent)
	if _, err := u.c.Rollback(ctx, b.id, api.RollbackSandbox{Snapshot: name}); err != nil {
		return err
	}
	b.settle(later, absent)
	if err := has(ctx, u, b, first); err != nil {
		return err
	}
	if r, err := u.c.ReadFile(ctx, b.id, later); err == nil {
		_ = r.Close()
		return wrongf("%s of sandbox %s is there after it was rolled back", later, b.name)
	}
	return remove(ctx, u, b)
}

func move(ctx context.Context, u *user, b *box) error {
	from, to := u.file(), u.file()
	hash, known := b.certain(from)[from]
	if from == to || !known {
		return nil
	}
	b.intend(from, absent)
	b.intend(to, hash)
	if err := u.c.MoveFile(ctx, b.id, api.MoveFile{From: from, To: to, Overwrite: true}); err != nil {
		return err
	}
	b.settle(from, absent)
	b.settle(to, hash)
	return nil
}

func appendTo(ctx context.Context, u *user, b *box) error {
	name := fmt.Sprintf("/u%d/log", u.n)
	b.intend(name, anything)
	return u.c.AppendFile(ctx, b.id, name, bytes.NewReader(someBytes(u.r, 5000)), 0, "")
}

func unlinkByName(ctx context.Context, u *user, b *box) error {
	name := u.file()
	b.intend(name, absent)
	err := u.c.RemoveFile(ctx, b.id, name, false)
	if err != nil && (!errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || !strings.Contains(err.Error(), name)) {
		return err
	}
	b.settle(name, absent)
	return nil
}

func listFiles(ctx context.Context, u *user, b *box) error {
	mine := fmt.Sprintf("/u%d/", u.n)
	want := b.certain(mine)
	if len(want) == 0 {
		return nil
	}
	list, err := u.c.ListFiles(ctx, b.id, path.Clean(mine), 1)
	if err != nil {
		return err
	}
	for _, e := range list.Entries {
		delete(want, e.Path)
	}
	if len(want) > 0 {
		return wrongf("a list of files of sandbox %s lacks %v", b.name, want)
	}
	return nil
}

// trySnapshots makes sandboxes of snapshots that were answered, a few of them, and takes all away.
func (w *world) trySnapshots() {
	w.t.Helper()
	ctx := w.t.Context()
	all, err := w.c.Snapshots(ctx, "")
	if err != nil {
		w.t.Fatal(err)
	}
	listed, tried := map[string]bool{}, 0
	for _, s := range all {
		listed[s.Name] = true
		m := w.snapshots[s.Name]
		if m == nil {
			w.t.Errorf("snapshot %s is listed, and nobody has asked for it", s.Name)
			continue
		}
		if m.answered && len(m.files) > 0 && tried < 2 {
			tried++
			box := w.d.Create(w.t, api.CreateSandbox{Snapshot: s.Name})
			got, err := w.filesOf(ctx, box.ID)
			if err != nil {
				w.t.Errorf("snapshot %s: %v", s.Name, err)
			}
			for name, hash := range m.files {
				if got[name] != hash {
					w.t.Errorf("snapshot %s has %s as %q, not %q", s.Name, name, got[name], hash)
				}
			}
			box.Delete(w.t)
		}
		if _, err := w.c.RemoveSnapshot(ctx, s.ID); err != nil {
			w.t.Errorf("remove snapshot %s: %v", s.Name, err)
		}
	}
	for name, m := range w.snapshots {
		if m.answered && !listed[name] {
			w.t.Errorf("snapshot %s was answered and is lost", name)
		}
	}
	clear(w.snapshots)
}
