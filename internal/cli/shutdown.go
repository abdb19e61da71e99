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
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// shutdownTimeout limits the time in which the daemon deletes its sandboxes and ends.
const shutdownTimeout = time.Minute

// shutdownPoll is the interval of looking whether the daemon has ended.
const shutdownPoll = 10 * time.Millisecond

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
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runShutdown(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *shutdownOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.keep, "keep-sandboxes", false, "leave the sandboxes running for the next daemon")
}

func runShutdown(ctx context.Context, opts shutdownOptions, d deps) error {
	ctx, cancel := context.WithTimeoutCause(ctx, shutdownTimeout, fmt.Errorf("the daemon has not ended within %v", shutdownTimeout))
	defer cancel()
	c := d.Client()
	defer c.Close()
	err := c.Shutdown(ctx, api.Shutdown{KeepSandboxes: opts.keep})
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		fmt.Fprintf(d.Stderr, "sandboxd: no daemon is running at %s\n", c.Socket())
		return nil
	}
	// A daemon may end before its answer arrives.
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	tick := time.NewTicker(shutdownPoll)
	defer tick.Stop()
	for {
		// A stopping daemon refuses connections at once, and removes the socket's path near its end.
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
