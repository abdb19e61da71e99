package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/guests"
	"github.com/sandboxd/sandboxd/runtime"
)

// use takes a lease and a client for one request about files.
func (s *API) use(ctx context.Context, ref string) (context.Context, *host.Client, *runtime.Lease, func(), error) {
	lease, err := s.begin(ref)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	ctx, cancel := guests.WithGone(ctx, lease)
	return ctx, guests.Of(lease), lease, func() { cancel(); lease.End() }, nil
}

// fail classifies an error of a request about the file at path.
func (s *core) fail(ctx context.Context, lease *runtime.Lease, path string, err error) error {
	if errors.Is(err, guests.ErrEnded) {
		return s.guests.Ended(lease)
	}
	return s.guests.Lost(ctx, lease, fileError(path, err))
}

// ReadFile opens a regular file of a sandbox of any state but paused. The descriptor is the
// caller's; it stays good when the sandbox ends.
func (s *API) ReadFile(ctx context.Context, ref, path string) (*os.File, error) {
	if err := validatePath("path", path); err != nil {
		return nil, err
	}
	s, ref, done, err := s.reader(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer done()
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return nil, err
	}
	defer end()
	f, err := client.Open(ctx, path)
	if err != nil {
		return nil, s.fail(ctx, lease, path, err)
	}
	return f, nil
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	Mode fs.FileMode // permissions; 0 means 0644
	User string      // owner; default: the sandbox's user. Root's is nothing where no program runs as root
	// Owners has an archive's files keep the owners that it states, where the sandbox has several
	// ids.
	Owners bool
}

// validate checks the path and options of a new file.
func (o *WriteOptions) validate(path string) error {
	if err := validatePath("path", path); err != nil {
		return err
	}
	if o.Mode&^0o777 != 0 {
		return class.Invalidf("mode %#o: permissions only, at most 0777", o.Mode)
	}
	return validateUser(o.User)
}

// AppendFile appends body to the file at path, part by part: the sandbox sees each at once, and
// parts before an error stay. Each part is one write with O_APPEND, so that other such writers come
// between parts only. Mode and owner count if the first part makes the file: a request that fails
// before leaves nothing.
func (s *API) AppendFile(ctx context.Context, ref, path string, opts WriteOptions, body io.Reader) (err error) {
	if err := opts.validate(path); err != nil {
		return err
	}
	if err := s.spareDisk(ctx); err != nil {
		return err
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	id, err := owner(ctx, client, &lease.Record, opts.User)
	if err != nil {
		return s.fail(ctx, lease, "/etc/passwd", err)
	}
	f, err := client.Append(ctx, path, cmp.Or(opts.Mode, 0o644), id.uid, id.gid)
	if err != nil {
		return s.fail(ctx, lease, path, err)
	}
	_, err = io.Copy(f, &endsWith{body, ctx})
	if err == nil {
		err = f.Close()
	} else if aerr := f.Abort(); aerr != nil && !errors.Is(aerr, host.ErrLost) {
		s.log.Warn("a file that nothing was appended to may be left in a sandbox", "id", lease.Record.ID, "error", aerr)
	}
	if _, ok := errors.AsType[*guest.Error](err); ok || errors.Is(err, host.ErrLost) {
		return s.fail(ctx, lease, path, err)
	}
	if err != nil {
		return s.copyError(lease, path, err)
	}
	return nil
}

// copyError classifies an error of copying a body to a file: of the file, the sandbox or the body.
func (s *core) copyError(lease *runtime.Lease, path string, err error) error {
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return writeError(path, err)
	}
	if errors.Is(err, guests.ErrEnded) {
		return s.guests.Ended(lease)
	}
	return bodyError(err)
}

// bodyError describes an error of a body that a client sends. A face may have put it into a class.
func bodyError(err error) error {
	switch {
	case errors.Is(err, class.ErrInvalid), errors.Is(err, class.ErrTooLarge):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return class.Invalidf("body: it broke off")
	}
	return fmt.Errorf("read body: %w", err)
}

func writeError(path string, err error) error {
	return fileError(path, &guest.Error{Stage: guest.StageWrite, Errno: errnoOf(err), Path: path})
}

// WriteFile writes body to the file at path. The sandbox sees all of it or nothing: an error of
// body, io.EOF apart, leaves the old file.
func (s *API) WriteFile(ctx context.Context, ref, path string, opts WriteOptions, body io.Reader) (err error) {
	if err := opts.validate(path); err != nil {
		return err
	}
	if err := s.spareDisk(ctx); err != nil {
		return err
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	id, err := owner(ctx, client, &lease.Record, opts.User)
	if err != nil {
		return s.fail(ctx, lease, "/etc/passwd", err)
	}
	pending, err := client.Create(ctx, path, cmp.Or(opts.Mode, 0o644), id.uid, id.gid)
	if err != nil {
		return s.fail(ctx, lease, path, err)
	}
	defer func() {
		if err == nil {
			return
		}
		if aerr := pending.Abort(); aerr != nil && !errors.Is(aerr, host.ErrLost) {
			s.log.Warn("a half-written file may be left in a sandbox", "id", lease.Record.ID, "error", aerr)
		}
	}()
	if _, err := io.Copy(pending.File, &endsWith{body, ctx}); err != nil {
		return s.copyError(lease, path, err)
	}
	if err := pending.Commit(); err != nil {
		return s.fail(ctx, lease, path, err)
	}
	return nil
}

// ArchiveOut writes the tree at path as a tar stream to w, of a sandbox as for ReadFile. Where it
// fails before the first byte, nothing is written.
func (s *API) ArchiveOut(ctx context.Context, ref, path string, w io.Writer) error {
	if err := validatePath("path", path); err != nil {
		return err
	}
	s, ref, done, err := s.reader(ctx, ref)
	if err != nil {
		return err
	}
	defer done()
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	pr, pw, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer pr.Close() // only read
	tctx, cancel := context.WithCancel(ctx)
	defer cancel()
	moved := &traffic{r: pr}
	client.Held = moved.since(client.Held)
	var tar error
	var wg sync.WaitGroup
	wg.Go(func() {
		tar = client.TarOut(tctx, path, pw)
		_ = pw.Close() // nothing is buffered; init had its own
	})
	_, werr := io.Copy(w, moved)
	if werr != nil {
		cancel() // init gives up when its connection closes
		_ = pr.Close()
	}
	wg.Wait()
	if werr != nil {
		return fmt.Errorf("send archive of %q: %w", path, werr)
	}
	if tar != nil {
		return s.fail(ctx, lease, path, tar)
	}
	return nil
}

// ArchiveIn extracts the tar stream in body below the directory path, as the user of opts.
func (s *API) ArchiveIn(ctx context.Context, ref, path string, opts WriteOptions, body io.Reader) error {
	if err := validatePath("path", path); err != nil {
		return err
	}
	if err := validateUser(opts.User); err != nil {
		return err
	}
	if err := s.spareDisk(ctx); err != nil {
		return err
	}
	ctx, client, lease, end, err := s.use(ctx, ref)
	if err != nil {
		return err
	}
	defer end()
	if opts.Owners && lease.Record.Enforced.NonRoot {
		return class.Invalidf("owners: the profile of the sandbox has no files of root; give the user")
	}
	id, err := owner(ctx, client, &lease.Record, opts.User)
	if err != nil {
		return s.fail(ctx, lease, "/etc/passwd", err)
	}
	as := guest.TarInRequest{UID: id.uid, GID: id.gid, Owners: opts.Owners && lease.Record.Enforced.IDs != api.IDsSingle}
	return s.extract(ctx, client, lease, path, as, body)
}

// extract extracts the tar stream in body below the directory path of a sandbox in use.
func (s *core) extract(
	ctx context.Context, client *host.Client, lease *runtime.Lease, path string, as guest.TarInRequest, body io.Reader,
) error {
	pr, pw, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer pw.Close() // all content has been acknowledged by then
	tctx, cancel := context.WithCancel(ctx)
	defer cancel()
	moved := &traffic{r: &endsWith{body, ctx}}
	client.Held = moved.since(client.Held)
	var tar error
	var wg sync.WaitGroup
	wg.Go(func() {
		tar = client.TarIn(tctx, path, pr, as)
		_ = pr.Close()                    // the writer then sees EPIPE
		_ = pw.SetWriteDeadline(longPast) // or this, while init keeps its own reading end
	})
	_, cerr := io.Copy(pw, moved)
	if cerr != nil {
		if _, ok := errors.AsType[*fs.PathError](cerr); !ok {
			// The body broke off. An archive that ended here could be mistaken for a whole one.
			cancel()
			wg.Wait()
			if errors.Is(cerr, guests.ErrEnded) {
				return s.guests.Ended(lease)
			}
			return bodyError(cerr)
		}
		// The pipe broke because init stopped reading: it says why.
	}
	_ = pw.Close() // end of file for init
	wg.Wait()
	if tar != nil {
		return s.fail(ctx, lease, path, tar)
	}
	return nil
}

// longPast is a deadline that wakes a blocked writer.
var longPast = time.Unix(1, 0)

// traffic is a reader that records its last read. The time for a whole archive is up to the client
// and the network: init is held responsible only for a time in which nothing moves.
type traffic struct {
	r    io.Reader
	last atomic.Pointer[time.Time]
}

func (t *traffic) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	now := time.Now()
	t.last.Store(&now)
	return n, err
}

// since returns the later of held and the last read.
func (t *traffic) since(held func() time.Time) func() time.Time {
	return func() time.Time {
		until := held()
		if last := t.last.Load(); last != nil && last.After(until) {
			return *last
		}
		return until
	}
}

// endsWith is a reader that ends with its context, between two reads.
type endsWith struct {
	r   io.Reader
	ctx context.Context //nolint:containedctx // lives as long as one copy
}

func (e *endsWith) Read(p []byte) (int, error) {
	if e.ctx.Err() != nil {
		return 0, context.Cause(e.ctx)
	}
	return e.r.Read(p)
}
