package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type eventsOptions struct {
	since    string
	until    string
	filters  []string
	tail     int
	noFollow bool
	json     bool
	format   string
}

func newEvents(d deps) *cobra.Command {
	var opts eventsOptions
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print what happens to sandboxes, images and the rest",
		Long: `Print each change of your sandboxes, execs, published ports, images, builds, snapshots,
secrets, volumes and named networks when it happens, until Ctrl-C. --since and --tail
begin with events of the past; about the last 8 MiB are kept, across restarts of the
daemon.

Filters are KEY=VALUE with the key type, action, object, name, sandbox, image or
label. Several of one key select events with any of the values, filters of different
keys those that fit all.`,
		Example: `  sandboxd events --filter type=sandbox --filter action=stopped
  sandboxd events --since 1h --no-follow
  sandboxd events --json --since 1795635487213904   # continue after this id`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runEvents(cmd.Context(), opts, cmd.Flags().Changed("tail"), d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *eventsOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.since, "since", "", "begin with events since a `time`, 10m ago or 2006-01-02T15:04:05Z, or after an event's id")
	f.StringVar(&o.until, "until", "", "end at a `time`: 10m ago, or 2006-01-02T15:04:05Z")
	f.StringArrayVar(&o.filters, "filter", nil, "print only events with `key=value`; may be given again")
	f.IntVarP(&o.tail, "tail", "n", 0, "begin with so many `events` of the past, at most")
	f.BoolVar(&o.noFollow, "no-follow", false, "print events of the past, and end")
	f.BoolVar(&o.json, "json", false, "print the events as JSON, one a line")
	f.StringVar(&o.format, "format", "", formatUsage)
}

// eventKeys are Docker's keys of filters that have other names here.
var eventKeys = map[string]string{"event": "action", "container": "sandbox"}

// choose returns the daemon's options for the flags. Without a flag that asks for the past only new
// events are wanted.
func (o *eventsOptions) choose(now time.Time, tail bool) (c client.EventOptions, err error) {
	c.Follow = !o.noFollow
	if tail && o.tail < 0 {
		return c, cmdline.Usagef("--tail %d is not a number of events", o.tail)
	}
	if tail || o.since == "" && !o.noFollow && o.until == "" {
		c.Last = &o.tail
	}
	for _, f := range o.filters {
		key, value, ok := strings.Cut(f, "=")
		if !ok || key == "" {
			return c, cmdline.Usagef("--filter %q is not key=value", f)
		}
		key = cmp.Or(eventKeys[key], key)
		if !slices.Contains(api.EventFilterKeys(), key) {
			return c, cmdline.Usagef("--filter %q: the key must be one of %s", f, strings.Join(api.EventFilterKeys(), ", "))
		}
		c.Filters = append(c.Filters, key+"="+value)
	}
	// An id is a number of microseconds since 1970; a bare number of seconds is never as large.
	if id, err := strconv.ParseUint(o.since, 10, 64); err == nil && id > 1e12 {
		c.After = id
	} else if c.Since, err = parseTime("since", o.since, now); err != nil {
		return c, err
	}
	c.Until, err = parseTime("until", o.until, now)
	return c, err
}

func runEvents(ctx context.Context, opts eventsOptions, tail bool, d deps) error {
	chosen, err := opts.choose(time.Now(), tail)
	if err != nil {
		return err
	}
	format, err := newFormat(opts.format)
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	lines := json.NewEncoder(d.Stdout)
	return c.Events(ctx, chosen, func(e api.Event) error {
		switch {
		case opts.json:
			return lines.Encode(e)
		case e.Lost > 0:
			fmt.Fprintf(d.Stderr, "sandboxd: %d or more events before this are not kept, or came too fast\n", e.Lost)
			return nil
		case format != nil:
			return format.line(d.Stdout, &e)
		}
		_, err := fmt.Fprintln(d.Stdout, eventLine(&e))
		return err
	})
}

// eventLine is one line for people.
func eventLine(e *api.Event) string {
	words := []string{e.Time.Local().Format("2006-01-02T15:04:05.000"), string(e.Type), string(e.Action), e.Object}
	add := func(key, value string) {
		if value != "" {
			words = append(words, key+"="+strconv.Quote(value))
		}
	}
	add("name", e.Name)
	add("from", e.From)
	add("sandbox", e.Sandbox)
	add("program", e.Program)
	add("image", e.Image)
	add("snapshot", e.Snapshot)
	add("forks", strings.Join(e.Forks, ","))
	if e.Port != nil {
		add("port", strconv.Itoa(int(e.Port.Port)))
	}
	if e.Code != nil {
		words = append(words, "code="+strconv.Itoa(*e.Code))
	}
	add("health", string(e.Health))
	add("reason", e.Reason)
	return cmdline.Printable(strings.Join(words, " "))
}
