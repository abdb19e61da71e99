package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/netns/policy"
)

const (
	// learnedOnStderr is the value of --learn without a file.
	learnedOnStderr = "-"
	// maxLearned bounds the flows that a policy is learned from.
	maxLearned = 100_000
	// learnTimeout bounds the wait for the end of the sandbox and its last flows.
	learnTimeout = 60 * time.Second
)

// A lesson is the record of a sandbox's network, read while the sandbox runs: the daemon keeps the
// last part of it only.
type lesson struct {
	done   chan struct{} // closed when the other fields are complete
	flows  []api.Flow
	lost   uint64 // flows that are missing
	err    error
	cancel context.CancelFunc
}

// listen begins to read the record. It goes on when ctx ends: a server that is ended with Ctrl-C
// has a policy too. The caller calls [lesson.end].
func listen(ctx context.Context, c *client.Client, id string) *lesson {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l := &lesson{done: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(l.done)
		l.err = c.Flows(ctx, id, true, -1, func(f api.Flow) error {
			l.lost += f.Lost
			if len(l.flows) >= maxLearned {
				l.lost++
				return nil
			}
			l.flows = append(l.flows, f)
			return nil
		})
	}()
	return l
}

// end stops the sandbox, so that its last flows are recorded, and prints the policy, or writes it
// to a file.
func (l *lesson) end(ctx context.Context, c *client.Client, id, file string, d deps) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), learnTimeout, fmt.Errorf("no answer within %v", learnTimeout))
	defer cancel()
	defer l.cancel()
	_, err := c.StopSandbox(ctx, id, api.StopSandbox{Grace: new(0.0)})
	if errors.Is(err, &api.Problem{Code: api.CodeConflict}) || errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		err = nil // it has ended
	}
	if err == nil {
		select {
		case <-l.done:
			err = l.err
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		return fmt.Errorf("learn a policy: read the record of the network: %w", err)
	}
	doc, err := policy.Learn(l.flows)
	if err != nil {
		return err
	}
	if l.lost > 0 {
		fmt.Fprintf(d.Stderr, "sandboxd: %d flows were not recorded; the policy may lack rules\n", l.lost)
	}
	if file == learnedOnStderr {
		_, err := d.Stderr.Write(doc)
		return err
	}
	if err := os.WriteFile(file, doc, 0o644); err != nil { //nolint:gosec // G306: a policy is no secret
		_, perr := d.Stderr.Write(doc)
		return errors.Join(fmt.Errorf("write the learned policy, which is here instead: %w", err), perr)
	}
	return nil
}

// learnFrom checks what --learn is combined with, and gives the sandbox its network.
func (o *runOptions) learnFrom(changed func(string) bool) error {
	if !changed("learn") {
		return nil
	}
	switch {
	case o.learn == "":
		return cmdline.Usagef("--learn names no file")
	case o.detach:
		return cmdline.Usagef("--learn prints a policy when the program has ended, for which --detach does not wait; see sandboxd policy learn")
	case !changed("network"):
		return o.network.Set(string(api.NetworkFull))
	case o.network.Value().Mode == api.NetworkNone:
		return cmdline.Usagef("--learn: a sandbox without a network needs no policy")
	case o.network.Value().Mode == api.NetworkSandbox:
		return cmdline.Usagef("--learn: the record of a shared network is its owner's; see sandboxd policy learn")
	}
	return nil
}
