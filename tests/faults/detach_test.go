package faults

import (
	"context"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// detached is a program that was started to go on without its client and the daemon.
type detached struct {
	id   string
	said string
	code int
}

func detach(ctx context.Context, u *user, b *box) error {
	d := detached{said: fmt.Sprintf("begun %d\nended\n", u.r.Uint32()), code: u.r.IntN(256)}
	script := fmt.Sprintf("printf %q; sleep 0.%d; echo ended; exit %d", d.said[:len(d.said)-len("ended\n")], u.r.IntN(4), d.code)
	x, err := u.c.Detach(ctx, b.id, api.ExecRequest{Argv: []string{"sh", "-c", script}})
	if err != nil {
		return err
	}
	d.id = x.ID
	b.mu.Lock()
	b.detached = append(b.detached, d)
	b.mu.Unlock()
	if u.r.IntN(2) == 0 {
		return nil // the round asks at its end
	}
	return d.attach(ctx, u.c, b)
}

// attach asks for all that the program has written, and how it ended.
func (d *detached) attach(ctx context.Context, c *client.Client, b *box) error {
	said := ""
	end, err := c.AttachStream(ctx, b.id, d.id, 0, func(e api.ExecEvent) error {
		said += string(client.Output(e))
		return nil
	})
	if err != nil {
		return err
	}
	if said != d.said || end.Exit.Code != d.code || end.Exit.Signal != "" {
		return wrongf("detached exec %s of sandbox %s said %q and ended with %+v, not %q and %d", d.id, b.name, said, end.Exit, d.said, d.code)
	}
	return nil
}

// reattach asks for all detached execs of a sandbox that has survived, and forgets them.
func (w *world) reattach(ctx context.Context, b *box) error {
	b.mu.Lock()
	all := b.detached
	b.detached = nil
	b.mu.Unlock()
	for _, d := range all {
		if err := d.attach(ctx, w.c, b); err != nil {
			return fmt.Errorf("detached exec %s: %w", d.id, err)
		}
	}
	// An exec whose start was not answered is forgotten too.
	execs, err := w.c.ListExecs(ctx, b.id)
	if err != nil {
		return err
	}
	for _, x := range execs {
		if err := w.c.DeleteExec(ctx, b.id, x.ID); err != nil {
			return fmt.Errorf("forget detached exec %s: %w", x.ID, err)
		}
	}
	return nil
}
