package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// defaultTarget is where programs see a workspace of an image that names no working directory.
const defaultTarget = "/workspace"

// workspace completes the workspace that a client asks for: its target, the ids of the programs and
// the time. Without one it does nothing. Cwd means that the request names the working directory.
func (s *API) workspace(r *runtime.Request, cwd bool) error {
	if r.Workspace == nil {
		return nil
	}
	if s.caller.Tenant != "" {
		return class.Invalidf("workspace: only the daemon's own user has one; start a daemon of your own, or copy the files with sandboxd cp")
	}
	if firstBind(r.Mounts) >= 0 {
		return class.Invalidf("workspace: a sandbox has one or mounts of other directories of the host, not both; copy the files of one in with sandboxd cp")
	}
	w := *r.Workspace // the request's stays as it was sent
	r.Workspace = &w
	if err := validatePath("workspace.source", w.Source); err != nil {
		return err
	}
	if path.Clean(w.Source) != w.Source || w.Source == "/" {
		return class.Invalidf("workspace.source %q: not the shortest path of a directory below \"/\"", class.Clip(w.Source))
	}
	if r.Cwd == "/" && !cwd { // where programs of most images begin, for want of anything better
		r.Cwd = ""
	}
	if r.Cwd != "/" {
		w.Target = cmp.Or(w.Target, r.Cwd)
	}
	w.Target = cmp.Or(w.Target, defaultTarget)
	if err := validatePath("workspace.target", w.Target); err != nil {
		return err
	}
	if hasControl(w.Target) || path.Clean(w.Target) != w.Target || w.Target == "/" {
		return class.Invalidf("workspace.target %q: not a path in its shortest form below \"/\"", class.Clip(w.Target))
	}
	for _, at := range covered {
		if within(w.Target, at) || within(at, w.Target) {
			return class.Invalidf("workspace.target %q: %s is sandboxd's; what is there cannot be hidden", class.Clip(w.Target), at)
		}
	}
	places := append(append([]api.Scratch{}, r.Profile.Mounts...), r.Tmpfs...)
	for _, m := range places {
		if within(w.Target, m.Path) || within(m.Path, w.Target) {
			return class.Invalidf("workspace.target %q: the file system in memory at %s would hide it, or be hidden", class.Clip(w.Target), m.Path)
		}
	}
	for _, m := range r.Mounts {
		if within(w.Target, m.Target) || within(m.Target, w.Target) {
			return class.Invalidf("workspace.target %q: the volume at %s would hide it, or be hidden", class.Clip(w.Target), m.Target)
		}
	}
	if err := runtime.CheckHidden(w.Hidden); err != nil {
		return class.Invalidf("workspace.hidden: %v", err)
	}
	w.Hidden = outermost(w.Hidden)
	r.Cwd = cmp.Or(r.Cwd, w.Target)
	var err error
	if w.UID, w.GID, err = numericUser(r.User); err != nil {
		return err
	}
	if w.Since, err = between(); err != nil {
		return fmt.Errorf("read the clock of files: %w", err)
	}
	return nil
}

// outermost returns the paths that lie below none of the others, sorted and each once.
func outermost(paths []string) []string {
	given := make(map[string]bool, len(paths))
	for _, p := range paths {
		given[p] = true
	}
	var out []string
	for p := range given {
		at := path.Dir(p)
		for at != "." && !given[at] {
			at = path.Dir(at)
		}
		if at == "." {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

// between returns a time after those of all files that were written before the call, and no later
// than those of files written after it; for this it blocks for a tick of the kernel's clock. Time
// stamps on files are of the clock that a tick moves on, or, of files that were looked at, since
// Linux 6.13 of the one that time.Now reads.
func between() (time.Time, error) {
	wait := time.NewTicker(time.Millisecond)
	defer wait.Stop()
	for before := time.Now().Round(0); ; <-wait.C {
		var tick unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &tick); err != nil {
			return time.Time{}, err
		}
		if at := time.Unix(tick.Unix()); at.After(before) {
			return at.UTC(), nil
		}
		if now := time.Now().Round(0); now.Before(before) {
			before = now // the clock was set back
		}
	}
}

// numericUser returns the ids of a user that is given by numbers; empty means root.
func numericUser(user string) (uid, gid int, err error) {
	if isRoot(user) {
		return 0, 0, nil
	}
	name, group, both := strings.Cut(user, ":")
	if !both {
		group = name
	}
	uid, uerr := strconv.Atoi(name)
	gid, gerr := strconv.Atoi(group)
	if err := errors.Join(uerr, gerr); err != nil {
		return 0, 0, class.Invalidf("workspace: its files are to belong to the programs' user, %q, whose numbers are known only inside: give them, as in --user 1000:1000",
			class.Clip(user))
	}
	return uid, gid, nil
}

// Changes returns a function that writes what a sandbox of any state has changed in its workspace,
// as the uncompressed tar of a layer: whiteouts stand for deletions. It does not count as a use.
func (s *API) Changes(ref string) (write func(ctx context.Context, w io.Writer) error, err error) {
	req, rec, doomed, err := s.diffRequest(ref)
	if err != nil {
		return nil, err
	}
	if rec.Workspace == nil {
		return nil, class.Invalidf("sandbox %s has no workspace: it was created without --workspace", ref)
	}
	req.Workspace, req.Limits = true, diffLimits(layer.NoLimits())
	return func(ctx context.Context, w io.Writer) error {
		ctx, whole := unlessDeleted(ctx, doomed, &rec)
		_, err := s.differ.WriteDiff(ctx, req, w)
		if err = whole(err); err != nil {
			return fmt.Errorf("changes of sandbox %s: %w", ref, err)
		}
		return nil
	}, nil
}
