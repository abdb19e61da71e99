package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
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
	keep, delete, yes bool
}

func newShutdown(d deps) *cobra.Command {
	var opts shutdownOptions
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "Stop the daemon",
		Long: `Stop the daemon and wait until it has ended. Every sandbox is stopped and keeps its
files: after "sandboxd serve", "sandboxd start" runs it again. --keep-sandboxes
leaves the sandboxes running, and --delete deletes them with their files, which it
asks for on a terminal. That no daemon was running is no error.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runShutdown(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmd.MarkFlagsMutuallyExclusive("keep-sandboxes", "delete")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *shutdownOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.keep, "keep-sandboxes", false, "leave the sandboxes running for the next daemon")
	f.BoolVar(&o.delete, "delete", false, "delete every sandbox with its files and logs")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask before --delete")
}

func runShutdown(ctx context.Context, opts shutdownOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	list, cancel := context.WithTimeout(ctx, shutdownTimeout)
	all, err := c.ListSandboxes(list, client.ListOptions{})
	cancel()
	if _, down := errors.AsType[*client.NotRunning](err); !down && opts.delete && !opts.yes {
		if err != nil {
			return fmt.Errorf("list what would be deleted: %w; --yes deletes all the same", err)
		}
		if cmdline.IsTerminal(d.Stdin) {
			what := "all sandboxes"
			if len(all) > 0 {
				what = namesOf(all)
			}
			// The list has those of the caller only, and a daemon may have tenants.
			yes, err := confirmed(ctx, d, fmt.Sprintf("delete with all files, and those of all tenants: %s?", what))
			if err != nil {
				return err
			}
			if !yes {
				return &cmdline.ExitError{Code: cmdline.CodeError, Err: errors.New("nothing was deleted, and the daemon runs on")}
			}
		}
	}
	ctx, cancel = context.WithTimeoutCause(ctx, shutdownTimeout, fmt.Errorf("the daemon has not ended within %v", shutdownTimeout))
	defer cancel()
	if _, ok := errors.AsType[*client.NotRunning](err); !ok { // what cannot be listed can be stopped all the same
		err = c.Shutdown(ctx, api.Shutdown{KeepSandboxes: opts.keep, StopSandboxes: !opts.keep && !opts.delete})
	}
	if _, ok := errors.AsType[*client.NotRunning](err); ok {
		fmt.Fprintf(d.Stderr, "sandboxd: no daemon is running at %s\n", c.Socket())
		return nil
	}
	// A daemon may end before its answer arrives.
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	if err := awaitEnd(ctx, c.Socket()); err != nil {
		return err
	}
	if len(all) > 0 && !opts.delete && !opts.keep {
		_, _ = fmt.Fprintf(d.Stderr, "stopped, and kept with their files: %s\nwith a daemon (sandboxd serve), sandboxd start runs one again and sandboxd shutdown --delete deletes all\n", namesOf(all)) // a note
	}
	return nil
}

// namesOf returns the names of the first sandboxes, and the number of the others.
func namesOf(all []api.Sandbox) string {
	const most = 10
	var names []string
	for _, sb := range all[:min(len(all), most)] {
		names = append(names, cmdline.Printable(sb.Name))
	}
	text := strings.Join(names, ", ")
	if len(all) > most {
		text += fmt.Sprintf(" and %d more", len(all)-most)
	}
	return text
}

// awaitEnd returns when the daemon at the socket has ended.
func awaitEnd(ctx context.Context, socket string) error {
	tick := time.NewTicker(shutdownPoll)
	defer tick.Stop()
	for {
		// A stopping daemon refuses connections at once, and removes the socket's path near its end.
		if _, err := os.Lstat(socket); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
