package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// hostedRuns returns the runs that the daemon hosts. None is running, or only for others, if there
// are none: a list of runs starts no daemon.
func hostedRuns(ctx context.Context, d cmdline.Deps) ([]api.AgentRun, error) {
	c := d.Client()
	defer c.Close()
	runs, err := c.AgentRuns(ctx)
	if _, ok := errors.AsType[*client.NotRunning](err); ok || errors.Is(err, &api.Problem{Code: api.CodeForbidden}) {
		return nil, nil
	}
	return runs, err
}

// hostedRow returns a run's line in the list.
func hostedRow(run *api.AgentRun) []string {
	if run.Error != "" {
		return []string{run.ID, "daemon", string(run.State), "", "", "", "", "", "", agent.OneLine(run.Error, 60)}
	}
	state := string(run.State)
	if run.State == api.AgentEnded {
		state = agent.OneLine(run.ExitReason, 60)
	}
	return []string{
		run.ID, "daemon", state, strconv.Itoa(run.Turns), strconv.Itoa(run.ToolCalls), strconv.Itoa(run.Denied), strconv.Itoa(run.Tokens),
		agent.CostText(run.Cost, run.UnpricedCalls), agent.OneLine(run.Model, 60), agent.OneLine(run.Query, 60),
	}
}

// findRun returns the directory of a run, or else the run of this id that the daemon hosts.
func findRun(ctx context.Context, outputDir, ref string, c *client.Client) (dir string, hosted *api.AgentRun, err error) {
	dir, err = agent.FindRun(outputDir, ref)
	if _, ok := errors.AsType[*agent.NoRunError](err); !ok || !agents.IsID(ref) {
		return dir, nil, err
	}
	hosted, askErr := c.GetAgentRun(ctx, ref)
	if _, ok := errors.AsType[*client.NotRunning](askErr); ok || errors.Is(askErr, &api.Problem{Code: api.CodeNotFound}) {
		return "", nil, err
	}
	return "", hosted, askErr
}

// errShown ends a stream of events when all that there is has been shown.
var errShown = errors.New("shown")

// readHosted calls on for each complete turn of a hosted run, and follows the run if asked to. on
// may be nil.
func readHosted(ctx context.Context, c *client.Client, run *api.AgentRun, follow bool, on func(agent.Step) error) (*agent.Summary, *agent.Trajectory, error) {
	reading := agent.NewReading()
	ended, err := c.AgentRunEvents(ctx, run.ID, 1, func(e api.AgentRunEvent) error {
		if e.Omitted > 0 {
			return fmt.Errorf("read the run %s: line %d of its record has %d bytes, which are not sent; it is in %s", run.ID, e.N, e.Omitted, run.Dir)
		}
		step, err := reading.Add(e.Event)
		if err == nil && step != nil && on != nil {
			err = on(*step)
		}
		// The stream of a run in progress has no end. Its state names the turns that are on record.
		if err == nil && !follow && run.State == api.AgentRunning && reading.Turns() >= run.Turns {
			return errShown
		}
		return err
	})
	if err != nil && !errors.Is(err, errShown) {
		return nil, nil, err
	}
	if ended != nil {
		run = ended
	}
	s, t := reading.Run(run.Dir, run.State == api.AgentRunning)
	return s, t, nil
}

func newLogs(d cmdline.Deps) *cobra.Command {
	var outputDir string
	follow := false
	cmd := &cobra.Command{
		Use:   "logs [flags] RUN",
		Short: "Print the turns of a run, as they come",
		Long: `Print the turns of a run, and how it ended. RUN is the run's directory, its name
below OUTPUT_DIR, or the id of a run that the daemon hosts. With --follow, further
turns are printed until the run ends.`,
		Example: `  sandboxd agent logs -f 20260116_143000`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runLogs(cmd.Context(), args[0], outputDir, follow, d)
		},
	}
	underscores(cmd.Flags())
	cmd.Flags().StringVar(&outputDir, "output_dir", "./output", "`directory` with the runs")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print further turns until the run ends")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runLogs(ctx context.Context, ref, outputDir string, follow bool, d cmdline.Deps) error {
	c := d.Client()
	defer c.Close()
	dir, hosted, err := findRun(ctx, outputDir, ref, c)
	if err != nil {
		return err
	}
	show := func(s agent.Step) error { return agent.PrintStep(d.Stdout, s) }
	if hosted != nil {
		summary, t, err := readHosted(ctx, c, hosted, follow, show)
		if err != nil {
			return err
		}
		return agent.PrintEnd(d.Stdout, summary, t)
	}
	reading := agent.NewReading()
	err = agent.FollowRun(ctx, dir, follow, func(line []byte) error {
		step, err := reading.Add(line)
		if err != nil || step == nil {
			return err
		}
		return show(*step)
	})
	if err != nil {
		return err
	}
	summary, _, err := agent.LoadRun(dir) // also says whether it goes on
	if err != nil {
		return err
	}
	_, t := reading.Run(dir, false)
	return agent.PrintEnd(d.Stdout, summary, t)
}

func newCancel(d cmdline.Deps) *cobra.Command {
	keep := false
	cmd := &cobra.Command{
		Use:   "cancel [flags] RUN...",
		Short: "End runs that the daemon hosts",
		Long: `End runs that the daemon hosts, as Ctrl-C ends a run of "agent run": their programs
are ended and their output is collected. The command does not wait for that;
"sandboxd agent logs -f" does.`,
		Example: `  sandboxd agent cancel 20260116_143000`,
		Args:    cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCancel(cmd.Context(), args, keep, d)
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the sandbox, stopped, for a resume")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runCancel(ctx context.Context, refs []string, keep bool, d cmdline.Deps) error {
	c := d.Client()
	defer c.Close()
	for _, ref := range refs {
		if !agents.IsID(ref) {
			return fmt.Errorf("cancel %s: only runs that the daemon hosts can be cancelled, by their id; end another with Ctrl-C where it runs", cmdline.Printable(ref))
		}
		run, err := c.CancelAgentRun(ctx, ref, api.CancelAgentRun{Keep: keep})
		if err != nil {
			return err
		}
		said := "is asked to end"
		if run.State != api.AgentRunning {
			said = "has ended before"
		}
		if _, err := fmt.Fprintf(d.Stdout, "%s: %s\n", run.ID, said); err != nil {
			return err
		}
	}
	return nil
}

// showHosted prints a run that the daemon hosts.
func showHosted(ctx context.Context, c *client.Client, run *api.AgentRun, asJSON bool, w io.Writer) error {
	s, t, err := readHosted(ctx, c, run, false, nil)
	switch {
	case err != nil:
		return err
	case asJSON:
		return cmdline.PrintJSON(w, t)
	}
	return agent.PrintRun(w, s, t)
}
