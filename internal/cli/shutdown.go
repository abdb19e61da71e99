package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// shutdownTimeout is how long the daemon may take to delete its sandboxes and end.
const shutdownTimeout = time.Minute

type shutdownOptions struct {
	keep bool
}

func newShutdown(d deps) *cobra.Command {
	var opts shutdownOptions
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "Stop the daemon",
		Long: `Stop the daemon and wait until it has ended. Every sandbox is deleted, unless
--keep-sandboxes says otherwise. That no daemon was running is no error.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runShutdown(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitPlain)
	return cmd
}

func (o *shutdownOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.keep, "keep-sandboxes", false, "leave the sandboxes running for the next daemon")
}

func runShutdown(ctx context.Context, opts shutdownOptions, d deps) error {
	ctx, cancel := context.WithTimeoutCause(ctx, shutdownTimeout, fmt.Errorf("the daemon has not ended within %v", shutdownTimeout))
	defer cancel()
	c := d.client()
	defer c.Close()
	err := c.Shutdown(ctx, api.Shutdown{KeepSandboxes: opts.keep})
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		fmt.Fprintf(d.stderr, "sandboxd: no daemon is running at %s\n", c.Socket())
		return nil
	}
	// A daemon that is quicker than its answer has done what it was asked for.
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	tick := time.NewTicker(startPoll)
	defer tick.Stop()
	for {
		// It refuses connections as soon as it begins to stop; the socket's path is among the last things to go.
		if _, err := os.Lstat(c.Socket()); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
