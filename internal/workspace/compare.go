package workspace

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/api/client"
)

// Comparison is the plan that brings the changes of a sandbox into a directory.
type Comparison struct {
	*Plan
	Name string // of the directory
}

// Close frees the changes and closes the directories.
func (c *Comparison) Close() error {
	err := errors.Join(c.set.Close(), c.base.Close())
	if c.to != c.base {
		err = errors.Join(err, c.to.Close())
	}
	return err
}

// Compare fetches the changes of a sandbox and compares them with a directory; by default, with
// an empty name, that of its workspace.
func Compare(ctx context.Context, c *client.Client, id, to string) (_ *Comparison, err error) {
	sb, err := c.GetSandbox(ctx, id)
	if err != nil {
		return nil, err
	}
	w := sb.Workspace
	if w == nil {
		return nil, fmt.Errorf("sandbox %s has no workspace: it was created without --workspace; see sandboxd diff", id)
	}
	base, err := Open(w.Source)
	if err != nil {
		return nil, fmt.Errorf("workspace of %s: %w", id, err)
	}
	out, target := &Comparison{Name: w.Source}, base
	defer func() {
		if err == nil {
			return
		}
		if target != base {
			err = errors.Join(err, target.Close())
		}
		err = errors.Join(err, base.Close())
	}()
	same, err := base.Is(w.Device, w.Inode)
	if err != nil {
		return nil, err
	}
	if !same {
		return nil, fmt.Errorf("workspace of %s: another directory is at %s now", id, Quote(w.Source))
	}
	if to != "" {
		dir, err := Open(to)
		if err != nil {
			return nil, err
		}
		out.Name = to
		if same, err = dir.Is(w.Device, w.Inode); same || err != nil {
			err = errors.Join(err, dir.Close()) // it is the workspace itself
		} else {
			target = dir
		}
		if err != nil {
			return nil, err
		}
	}
	stream, err := c.Changes(ctx, id)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	set, err := Read(stream, os.TempDir())
	if err != nil {
		return nil, err
	}
	if out.Plan, err = set.Plan(target, base, w.Since, w.Hidden); err != nil {
		return nil, errors.Join(err, set.Close())
	}
	return out, nil
}
