package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type execsOptions struct {
	quiet bool
	json  bool
}

func newExecs(d deps) *cobra.Command {
	var opts execsOptions
	cmd := &cobra.Command{
		Use:   "execs [flags] SANDBOX",
		Short: "List the programs started in a sandbox",
		Long: `List the programs that were started in a sandbox with run or exec, oldest first:
those that run and, of the detached ones, those that ended within the last hour.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runExecs(cmd.Context(), args[0], opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *execsOptions) addFlags(f *pflag.FlagSet) {
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print ids only")
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runExecs(ctx context.Context, id string, opts execsOptions, d deps) error {
	c := d.Client()
	defer c.Close()
	execs, err := c.ListExecs(ctx, id)
	if err != nil {
		return err
	}
	switch {
	case opts.json:
		if execs == nil {
			execs = []api.Exec{}
		}
		return cmdline.PrintJSON(d.Stdout, api.ExecList{Execs: execs})
	case opts.quiet:
		for _, x := range execs {
			if _, err := fmt.Fprintln(d.Stdout, cmdline.Printable(x.ID)); err != nil {
				return err
			}
		}
		return nil
	}
	rows := [][]string{{"ID", "PID", "STATE", "STARTED", "PROGRAM"}}
	for _, x := range execs {
		rows = append(rows, []string{x.ID, strconv.Itoa(x.PID), execState(x), since(x.StartedAt), commandLine(x.Argv)})
	}
	return cmdline.Table(d.Stdout, rows)
}

func execState(x api.Exec) string {
	switch {
	case x.State == api.ExecRunning && !x.Detached:
		return "running, attached"
	case x.Exit != nil && x.Exit.Signal != "":
		return "exited (" + x.Exit.Signal + ")"
	case x.Exit != nil:
		return "exited (" + strconv.Itoa(x.Exit.Code) + ")"
	}
	return string(x.State)
}

// commandLine quotes an argument list so that a shell would parse it back.
func commandLine(argv []string) string {
	const most = 80
	var b strings.Builder
	for i, a := range argv {
		if i > 0 {
			b.WriteByte(' ')
		}
		if a == "" || strings.ContainsFunc(a, func(r rune) bool {
			return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%", r)
		}) {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		b.WriteString(a)
	}
	line := []rune(b.String())
	if len(line) > most {
		return string(line[:most-3]) + "..."
	}
	return string(line)
}
