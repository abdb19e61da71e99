package faults

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// A user does one thing after another in the sandboxes of a world. What he writes is his own: his
// files and labels begin with his number.
type user struct {
	w *world
	n int
	r *rand.Rand
	c *client.Client
}

// file is one of the few files that a user has in each sandbox.
func (u *user) file() string { return fmt.Sprintf("/u%d/%d", u.n, u.r.IntN(6)) }

// An operation is one entry of the mixed load. It notes its request before it asks, and the
// changes after the answer. An untrue answer is a [wrong]; other errors are judged by the fault of
// the round.
type operation struct {
	name   string
	weight int
	do     func(ctx context.Context, u *user, b *box) error
	// alone: it is for sandboxes that are no residents. own: it finds its sandbox itself.
	alone, own bool
}

// operations are the load. To add one: a function, and a line here.
var operations = [...]operation{
	{name: "create", weight: 8, do: create, own: true},
	{name: "claim", weight: 3, do: claim, own: true},
	{name: "delete", weight: 4, do: remove, alone: true},
	{name: "exec", weight: 10, do: exec},
	{name: "exec that leaves a process", weight: 5, do: leave, alone: true},
	{name: "exec that times out", weight: 2, do: timeout},
	{name: "exec that is let go", weight: 2, do: letGo},
	{name: "write", weight: 8, do: write},
	{name: "read", weight: 6, do: read},
	{name: "unlink", weight: 2, do: unlink},
	{name: "archive in", weight: 4, do: archiveIn},
	{name: "archive out", weight: 4, do: archiveOut},
	{name: "label", weight: 4, do: label},
	{name: "diff", weight: 2, do: diff},
	{name: "commit", weight: 2, do: commit},
	{name: "list", weight: 2, do: list, own: true},
	{name: "move", weight: 2, do: move},
	{name: "append", weight: 2, do: appendTo},
	{name: "remove a file", weight: 2, do: unlinkByName},
	{name: "list files", weight: 2, do: listFiles},
	{name: "stop and start", weight: 2, do: stopAndStart, own: true},
	{name: "pause and resume", weight: 2, do: pauseAndResume, own: true},
	{name: "snapshot", weight: 3, do: snapshot},
	{name: "fork", weight: 2, do: fork},
	{name: "roll back", weight: 2, do: rollback, own: true},
	{name: "detached exec", weight: 6, do: detach},
	{name: "main process", weight: 3, do: mainProcess, own: true},
}

// choose picks an operation, by weight.
func choose(r *rand.Rand) int {
	total := 0
	for _, o := range operations {
		total += o.weight
	}
	n := r.IntN(total)
	for i, o := range operations {
		if n -= o.weight; n < 0 {
			return i
		}
	}
	return 0
}

func create(ctx context.Context, u *user, _ *box) error {
	if len(u.w.all()) >= residents+most {
		return nil
	}
	return u.w.create(ctx, u.w.newBox(false))
}

// claim is create where a sandbox is parked, which must be as new.
func claim(ctx context.Context, u *user, _ *box) error {
	sys, err := u.c.System(ctx)
	if err != nil || len(sys.Pools) != 1 || sys.Pools[0].Ready == 0 || len(u.w.all()) >= residents+most {
		return err
	}
	b, err := private(ctx, u)
	if err != nil {
		return err
	}
	out, _, exit, err := execute(ctx, u.c, b.id, buffered, api.ExecRequest{Argv: []string{"sh", "-c", "hostname; mkdir /claimed"}}, nil)
	if err != nil {
		return err
	}
	if exit.Code != 0 || string(out) != b.name+"\n" {
		return wrongf("a sandbox called %s that may have been parked says %q, %+v", b.name, out, exit)
	}
	return remove(ctx, u, b)
}

func remove(ctx context.Context, u *user, b *box) error {
	b.mu.Lock()
	b.doomed = true
	b.mu.Unlock()
	if err := u.c.DeleteSandbox(ctx, b.id); err != nil {
		return err
	}
	b.mu.Lock()
	b.deleted = true
	b.mu.Unlock()
	if _, err := u.c.GetSandbox(ctx, b.id); err == nil {
		return wrongf("sandbox %s is still there after its deletion was answered", b.name)
	}
	return nil
}

func exec(ctx context.Context, u *user, b *box) error {
	return echo(ctx, u.c, b.id, mode(u.r.IntN(modes)), someBytes(u.r, 100_000), u.r.IntN(256))
}

func leave(ctx context.Context, u *user, b *box) error {
	_, _, exit, err := execute(ctx, u.c, b.id, buffered, api.ExecRequest{Argv: []string{"sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"}}, nil)
	if err == nil && exit.Code != 0 {
		return wrongf("a shell ended with %+v", exit)
	}
	return err
}

func timeout(ctx context.Context, u *user, b *box) error {
	req := api.ExecRequest{Argv: []string{"sh", "-c", "echo partial; setsid sleep 600 & sleep 600"}, Timeout: 0.3}
	out, _, exit, err := execute(ctx, u.c, b.id, mode(u.r.IntN(modes)), req, nil)
	if err != nil {
		return err
	}
	if !exit.Timeout || string(out) != "partial\n" && len(out) > 0 {
		return wrongf("an exec that ran out of time ended with %+v and wrote %q", exit, out)
	}
	return nil
}

func letGo(ctx context.Context, u *user, b *box) error {
	short, cancel := context.WithTimeout(ctx, time.Duration(u.r.IntN(100))*time.Millisecond)
	defer cancel()
	// It leaves a process that nothing but the loss of its client ends.
	req := api.ExecRequest{Argv: []string{"sh", "-c", "setsid sleep 600 & sleep 600"}}
	_, _, exit, err := execute(short, u.c, b.id, mode(u.r.IntN(modes)), req, nil)
	if err == nil {
		return wrongf("a program that sleeps ended with %+v", exit)
	}
	if short.Err() != nil && ctx.Err() == nil {
		return nil
	}
	return err
}

// A halting reader pauses half way, so that what takes it is often cut off there.
type halting struct {
	r     *bytes.Reader
	half  int
	pause time.Duration
	ctx   context.Context //nolint:containedctx // of the one request that it is for
}

func (u *user) halting(ctx context.Context, data []byte) io.Reader {
	h := &halting{r: bytes.NewReader(data), half: len(data) / 2, ctx: ctx}
	if u.r.IntN(3) == 0 {
		h.pause = time.Duration(u.r.IntN(50)) * time.Millisecond
	}
	return h
}

func (h *halting) Read(p []byte) (int, error) {
	if read := int(h.r.Size()) - h.r.Len(); read < h.half && len(p) > h.half-read {
		p = p[:h.half-read]
	} else if read == h.half && h.pause > 0 {
		select {
		case <-time.After(h.pause):
		case <-h.ctx.Done():
		}
		h.pause = 0
	}
	return h.r.Read(p)
}

func write(ctx context.Context, u *user, b *box) error {
	name, data := u.file(), someBytes(u.r, 300_000)
	b.intend(name, sum(data))
	if err := u.c.WriteFile(ctx, b.id, name, u.halting(ctx, data), 0, ""); err != nil {
		return err
	}
	b.settle(name, sum(data))
	return nil
}

func read(ctx context.Context, u *user, b *box) error {
	name := u.file()
	b.mu.Lock()
	may := slices.Clone(b.may[name])
	b.mu.Unlock()
	if may == nil {
		may = []string{absent}
	}
	got := absent
	r, err := u.c.ReadFile(ctx, b.id, name)
	if err == nil {
		defer r.Close()
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		got = sum(data)
	} else if !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || !strings.Contains(err.Error(), name) {
		return err
	}
	if !slices.Contains(may, got) && !slices.Contains(may, anything) {
		return wrongf("%s of sandbox %s is %q, not one of %q", name, b.name, got, may)
	}
	return nil
}

func unlink(ctx context.Context, u *user, b *box) error {
	name := u.file()
	b.intend(name, absent)
	_, _, exit, err := execute(ctx, u.c, b.id, buffered, api.ExecRequest{Argv: []string{"rm", "-f", name}}, nil)
	if err != nil {
		return err
	}
	if exit.Code != 0 {
		return wrongf("rm -f %s ended with %+v", name, exit)
	}
	b.settle(name, absent)
	return nil
}

func archiveIn(ctx context.Context, u *user, b *box) error {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	sums := map[string]string{}
	for i := range 6 {
		name := fmt.Sprintf("/u%d/%d", u.n, i)
		if u.r.IntN(2) == 0 {
			continue
		}
		data := someBytes(u.r, 50_000)
		if err := errors.Join(w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path.Base(name), Size: int64(len(data)), Mode: 0o644}), second(w.Write(data))); err != nil {
			return wrong{err}
		}
		sums[name] = sum(data)
		b.intend(name, sums[name])
		b.intend(name, anything)
	}
	if err := w.Close(); err != nil {
		return wrong{err}
	}
	if err := u.c.ArchiveIn(ctx, b.id, fmt.Sprintf("/u%d", u.n), u.halting(ctx, buf.Bytes())); err != nil {
		return err
	}
	for name, s := range sums {
		b.settle(name, s)
	}
	return nil
}

func second[A, B any](_ A, b B) B { return b }

func archiveOut(ctx context.Context, u *user, b *box) error {
	mine := fmt.Sprintf("/u%d/", u.n)
	want := b.certain(mine)
	if len(want) == 0 {
		return nil
	}
	r, err := u.c.ArchiveOut(ctx, b.id, mine)
	if err != nil {
		return err
	}
	defer r.Close()
	for files := tar.NewReader(r); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		data, err := io.ReadAll(files)
		if err != nil {
			return err
		}
		name := mine + path.Base(h.Name)
		if s, known := want[name]; known && h.Typeflag == tar.TypeReg {
			if s != sum(data) {
				return wrongf("%s in an archive of sandbox %s has %d bytes that were never written", name, b.name, len(data))
			}
			delete(want, name)
		}
	}
	if len(want) > 0 {
		return wrongf("an archive of sandbox %s lacks %v", b.name, want)
	}
	return nil
}

func label(ctx context.Context, u *user, b *box) error {
	key, value := fmt.Sprintf("u%d", u.n), fmt.Sprint(u.r.Uint64())
	b.intend(key, value)
	if _, err := u.c.UpdateSandbox(ctx, b.id, api.UpdateSandbox{Labels: map[string]*string{key: &value}}); err != nil {
		return err
	}
	b.settle(key, value)
	return nil
}

// changed reports whether an error says that a file was written while it was read.
func changed(err error) bool {
	p, ok := errors.AsType[*api.Problem](err)
	return ok && p.Code == api.CodeConflict && strings.Contains(p.Hint, "try again")
}

func diff(ctx context.Context, u *user, b *box) error {
	want := b.certain(fmt.Sprintf("/u%d/", u.n))
	d, err := u.c.Diff(ctx, b.id)
	if changed(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, c := range d.Changes {
		if c.Kind == api.Added && c.Type == "file" {
			delete(want, c.Path)
		}
	}
	if len(want) > 0 {
		return wrongf("a diff of sandbox %s lacks %v", b.name, want)
	}
	return nil
}

func commit(ctx context.Context, u *user, b *box) error {
	w := u.w
	m := &made{files: b.certain(fmt.Sprintf("/u%d/", u.n))}
	w.mu.Lock()
	w.count++
	reference := fmt.Sprintf("localhost/made:%d", w.count)
	w.images[reference] = m
	w.mu.Unlock()
	_, err := u.c.Commit(ctx, b.id, api.CommitSandbox{Reference: reference})
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

func list(ctx context.Context, u *user, _ *box) error {
	there := map[string]*box{}
	for _, b := range u.w.all() {
		b.mu.Lock()
		if b.id != "" && !b.doomed {
			there[b.id] = b
		}
		b.mu.Unlock()
	}
	sandboxes, err := u.c.ListSandboxes(ctx, client.ListOptions{})
	if err != nil {
		return err
	}
	for _, s := range sandboxes {
		delete(there, s.ID)
	}
	for _, b := range there {
		if !b.isDoomed() {
			return wrongf("a list lacks sandbox %s", b.name)
		}
	}
	return nil
}

// dropped is a context that now and then ends early, as if the user went away.
func (u *user) dropped(ctx context.Context) (context.Context, context.CancelFunc) {
	if u.r.IntN(10) == 0 {
		return context.WithTimeoutCause(ctx, time.Duration(u.r.IntN(30_000))*time.Microsecond, errDropped)
	}
	return context.WithCancel(ctx)
}

var errDropped = errors.New("the user went away")
