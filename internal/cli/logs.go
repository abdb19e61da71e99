package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type logsOptions struct {
	follow     bool
	tail       string
	since      string
	until      string
	timestamps bool
	json       bool
}

func newLogs(d deps) *cobra.Command {
	var opts logsOptions
	cmd := &cobra.Command{
		Use:   "logs [flags] SANDBOX",
		Short: "Print what the main process of a sandbox has written",
		Long: `Print what the main process of a sandbox has written, to stdout and stderr as it did.
The log goes on when the sandbox is started again, and is kept until it is deleted;
of a long one the beginning is not (see --log-size and --log-files of "sandboxd serve").

As with exec and attach, what a program writes comes out as it is: on a terminal
its escape sequences act. With --json they do not.`,
		Example: `  sandboxd logs -f web
  sandboxd logs --tail 20 --since 10m --timestamps web`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runLogs(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *logsOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.follow, "follow", "f", false, "go on until the main process ends")
	f.StringVarP(&o.tail, "tail", "n", "all", "print only so many `lines` from the end")
	f.StringVar(&o.since, "since", "", "print only what was written since a `time`: 10m ago, or 2006-01-02T15:04:05Z")
	f.StringVar(&o.until, "until", "", "print only what was written before a `time`, as for --since")
	f.BoolVarP(&o.timestamps, "timestamps", "t", false, "begin each line with the time at which the daemon took it")
	f.BoolVar(&o.json, "json", false, "print the entries as JSON, one a line")
}

// choose returns the daemon's options for the flags.
func (o *logsOptions) choose(now time.Time) (client.LogOptions, error) {
	c := client.LogOptions{Follow: o.follow}
	if o.tail != "all" {
		n, err := strconv.Atoi(o.tail)
		if err != nil || n < 0 {
			return c, cmdline.Usagef("--tail %q is neither all nor a number of lines", o.tail)
		}
		c.Last = &n
	}
	var err error
	c.Since, err = parseTime("since", o.since, now)
	return c, err
}

// parseTime returns the time that a flag's value means, zero if it is empty: a span before now, or
// a time.
func parseTime(flag, value string, now time.Time) (time.Time, error) {
	if value == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(value); err == nil && d == 0 {
		return now, nil // no time span of a flag is zero
	}
	var span cmdline.Seconds
	if span.Set(value) == nil {
		return now.Add(-time.Duration(float64(span) * float64(time.Second))), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, value, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, cmdline.Usagef("--%s %q is neither a time span such as 10m nor a time such as 2006-01-02T15:04:05Z", flag, value)
}

func runLogs(ctx context.Context, id string, opts logsOptions, d deps) error {
	now := time.Now()
	chosen, err := opts.choose(now)
	if err != nil {
		return err
	}
	until, err := parseTime("until", opts.until, now)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	err = readLogs(ctx, c, id, chosen, until, opts, d)
	if errors.Is(err, errUntil) || !until.IsZero() && !until.After(time.Now()) && errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// errUntil ends a log at the time of --until.
var errUntil = errors.New("the rest is of a later time")

func readLogs(ctx context.Context, c *client.Client, id string, chosen client.LogOptions, until time.Time, opts logsOptions, d deps) error {
	if chosen.Follow && !until.IsZero() { // nothing may be written then
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, until)
		defer cancel()
	}
	if opts.json {
		lines := json.NewEncoder(d.Stdout)
		return c.Logs(ctx, id, chosen, func(e api.LogEntry) error {
			if !until.IsZero() && !e.Time.Before(until) {
				return errUntil
			}
			return lines.Encode(e)
		})
	}
	out, errs := &stamped{w: d.Stdout, on: opts.timestamps}, &stamped{w: d.Stderr, on: opts.timestamps}
	return c.Logs(ctx, id, chosen, func(e api.LogEntry) error {
		if !until.IsZero() && !e.Time.Before(until) {
			return errUntil
		}
		if e.Dropped > 0 {
			fmt.Fprintf(d.Stderr, "sandboxd: %d bytes of output before this are kept no more\n", e.Dropped)
		}
		w := out
		if e.Stream == "stderr" {
			w = errs
		}
		return w.write(e.Time, client.Output(api.ExecEvent{Text: e.Text, Data: e.Data}))
	})
}

// stamped writes lines, each with its time if on is set.
type stamped struct {
	w      io.Writer
	on     bool
	within bool // the last line is incomplete
}

func (s *stamped) write(t time.Time, p []byte) error {
	if !s.on {
		_, err := s.w.Write(p)
		return err
	}
	var b bytes.Buffer
	for line := range bytes.Lines(p) {
		if !s.within {
			b.WriteString(t.Format(time.RFC3339Nano) + " ")
		}
		b.Write(line)
		s.within = line[len(line)-1] != '\n'
	}
	_, err := s.w.Write(b.Bytes())
	return err
}

func newWait(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "wait [flags] SANDBOX...",
		Short: "Wait until sandboxes have ended",
		Long: `Wait until sandboxes have ended, one after the other, and print the exit code of each
one's main process, 128+n where signal n ended it: "-" where it has none, or where
nobody knows.`,
		Example: `  id=$(sandboxd run -d debian:12 -- make -C /src)
  code=$(sandboxd wait $id)`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachSandbox(cmd.Context(), args, asJSON, d, (*client.Client).WaitSandbox, func(sb *api.Sandbox) string {
				if sb.Exit == nil {
					return "-"
				}
				return strconv.Itoa(sb.Exit.Code)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}
