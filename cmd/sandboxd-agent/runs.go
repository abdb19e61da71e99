package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

const exitReplay = `  0    every observation was as recorded, but for times
  1    some differ
  2    the command line is wrong
  125  sandboxd itself failed; stderr says how and what to do`

// runFlags name an existing run.
type runFlags struct {
	outputDir string
	json      bool
}

func (o *runFlags) addFlags(f *pflag.FlagSet, what string) {
	underscores(f)
	f.StringVar(&o.outputDir, "output_dir", "./output", "`directory` with the runs")
	f.BoolVar(&o.json, "json", false, "print "+what+" as JSON")
}

func newList(d cmdline.Deps) *cobra.Command {
	var opts runFlags
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List runs",
		Long: `List the runs in a directory ("here"), and those that a running daemon hosts
("daemon"). A run that is "stopped" has no process and no end: its agent was
killed, and "sandboxd agent resume" goes on with it.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runList(cmd.Context(), opts, d) },
	}
	opts.addFlags(cmd.Flags(), "the list")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runList(ctx context.Context, opts runFlags, d cmdline.Deps) error {
	runs, err := agent.ListRuns(opts.outputDir)
	if err != nil {
		return err
	}
	hosted, err := hostedRuns(ctx, d)
	if err != nil { // the others are listed all the same
		noteTo(d)("the runs that the daemon hosts are not listed: " + err.Error())
	}
	if opts.json {
		if runs == nil {
			runs = []agent.Summary{}
		}
		if hosted == nil {
			hosted = []api.AgentRun{}
		}
		return cmdline.PrintJSON(d.Stdout, map[string]any{"runs": runs, "hosted": hosted})
	}
	rows := [][]string{{"RUN", "WHERE", "STATE", "TURNS", "CALLS", "DENIED", "TOKENS", "COST", "MODEL", "TASK"}}
	for i := range runs {
		s := &runs[i]
		if s.Error != "" {
			rows = append(rows, []string{filepath.Base(s.Dir), "here", "unreadable", "", "", "", "", "", "", s.Error})
			continue
		}
		state := string(s.State)
		if s.State == agent.RunEnded {
			state = string(s.ExitReason)
		}
		cost := agent.CostText(s.Spent.Cost, s.Unpriced)
		rows = append(rows, []string{
			filepath.Base(s.Dir), "here", state, strconv.Itoa(s.Turns), strconv.Itoa(s.Calls), strconv.Itoa(s.Denied), strconv.Itoa(s.Spent.Tokens), cost, s.Model, agent.OneLine(s.Query, 60),
		})
	}
	for i := range hosted {
		rows = append(rows, hostedRow(&hosted[i]))
	}
	return cmdline.Table(d.Stdout, rows)
}

func newShow(d cmdline.Deps) *cobra.Command {
	var opts runFlags
	var report string
	cmd := &cobra.Command{
		Use:   "show RUN",
		Short: "Show the turns of a run",
		Long: `Show the turns of a run: what the model said, the tool calls with what was
decided about them, and the observations, shortened. RUN is the run's directory,
its name below OUTPUT_DIR, or the id of a run that the daemon hosts. It may still be
going on. With --json the whole trajectory is printed, as it follows from the
record; with --report it is written as one HTML page, which needs nothing else and
runs nothing.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runShow(cmd.Context(), args[0], opts, report, d)
		},
	}
	opts.addFlags(cmd.Flags(), "the trajectory")
	cmd.Flags().StringVar(&report, "report", "", "write the run as one HTML page to this `file`, and print nothing")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runShow(ctx context.Context, ref string, opts runFlags, report string, d cmdline.Deps) error {
	c := d.Client()
	defer c.Close()
	dir, hosted, err := findRun(ctx, opts.outputDir, ref, c)
	switch {
	case err != nil:
		return err
	case hosted != nil && report != "":
		dir = hosted.Dir // the report is made from the files, which one's own daemon keeps
	case hosted != nil:
		return showHosted(ctx, c, hosted, opts.json, d.Stdout)
	}
	if report != "" {
		return agent.SaveReport(dir, report)
	}
	summary, trajectory, err := agent.LoadRun(dir)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, trajectory)
	}
	return agent.PrintRun(d.Stdout, summary, trajectory)
}

// resumeOptions holds the flags of the commands that continue a run.
type resumeOptions struct {
	runFlags
	modelFlags
	budgetFlags
	policyFlags
	endFlags

	message string
}

func (o *resumeOptions) addFlags(f *pflag.FlagSet) {
	o.runFlags.addFlags(f, "how the run ended")
	f.StringVar(&o.message, "message", "", "`text` that is said to the model before it goes on")
	o.modelFlags.addFlags(f)
	o.budgetFlags.addFlags(f, 0, 0)
	o.policyFlags.addFlags(f)
	o.endFlags.addFlags(f)
}

// resolve returns the directory of the run, and the options to continue it with. at is the number
// of turns to share, -1 for all.
func (o *resumeOptions) resolve(ctx context.Context, ref string, at int, changed func(string) bool, d cmdline.Deps) (dir string, run agent.Options, err error) {
	run = agent.Options{Message: o.message, KeepInterrupted: o.keepInterrupted}
	if run.Budget, err = o.budget(changed); err != nil {
		return "", run, err
	}
	if o.maxEgress.Given {
		return "", run, cmdline.Usagef("--max_egress was set when the run began, and stays")
	}
	if o.retries < 0 {
		return "", run, cmdline.Usagef("--llm_retries %d is less than 0", o.retries)
	}
	if dir, err = agent.FindRun(o.outputDir, ref); err != nil {
		return "", run, err
	}
	was, answered, err := agent.RecordedModel(dir)
	if err != nil {
		return "", run, err
	}
	if at >= 0 {
		answered = at
	}
	settings, _, err := agent.LoadSettings(o.settings, os.Getenv)
	if err != nil {
		return "", run, err
	}
	if err := o.modelFlags.resolve(ctx, &run, settings, os.Getenv, noteTo(d), was, answered); err != nil {
		return "", run, err
	}
	return dir, run, o.policyFlags.resolve(&run, d)
}

func newResume(d cmdline.Deps) *cobra.Command {
	var opts resumeOptions
	cmd := &cobra.Command{
		Use:   "resume [flags] RUN",
		Short: "Go on with a run that has stopped",
		Long: `Go on with a run whose agent or daemon was killed, from wherever it stopped and in
its sandbox as it is; or with one that ended without a submit, where the sandbox
is still there or --snapshot_turns has kept its files. RUN is the run's
directory, or its name below OUTPUT_DIR.

No turn that is on record is asked of the model again. A call that had begun is
not run again, unless it only looks at something: the model is told that it is
unknown whether it was done.

Model, limits and policy are those of the record where no flag says otherwise.
The model's key is not on record: it comes from a flag, settings or environment,
as in "agent run".`,
		Example: `  sandboxd agent resume 20260116_143000
  sandboxd agent resume output/20260116_143000 --max_steps 200 --message 'You have more time now.'`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return exitOurs(runResume(cmd.Context(), args[0], opts, cmd.Flags().Changed, d))
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, exitAgent)
	return cmd
}

func runResume(ctx context.Context, ref string, opts resumeOptions, changed func(string) bool, d cmdline.Deps) error {
	dir, run, err := opts.resolve(ctx, ref, -1, changed, d)
	if err != nil {
		return err
	}
	res, err := show(&run, opts.stream, d, func() (*agent.Result, error) { return agent.Resume(ctx, dir, run) })
	return endRun(res, err, opts.json, opts.report, d)
}

func newFork(d cmdline.Deps) *cobra.Command {
	var opts resumeOptions
	at := -1
	cmd := &cobra.Command{
		Use:   "fork [flags] --at TURN RUN",
		Short: "Branch a new run from a turn of another",
		Long: `Begin a new run that shares the first turns of another, in a new sandbox, and go on
from there: with another model, another message, or the same to see what else
comes of it. The sandbox is made of the snapshot that --snapshot_turns has kept
of that turn; where there is none, the calls of the shared turns are run again,
and it is said how many observations differ.`,
		Example: `  sandboxd agent fork 20260116_143000 --at 3 --message 'Use a script this time.'`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if at < 0 {
				return cmdline.Usagef("--at is required: the last turn that is shared, 0 for none")
			}
			return exitOurs(runFork(cmd.Context(), args[0], at, opts, cmd.Flags().Changed, d))
		},
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().IntVar(&at, "at", -1, "the last `turn` that is shared; 0 shares the task only")
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, exitAgent)
	return cmd
}

func runFork(ctx context.Context, ref string, at int, opts resumeOptions, changed func(string) bool, d cmdline.Deps) error {
	dir, run, err := opts.resolve(ctx, ref, at, changed, d)
	if err != nil {
		return err
	}
	res, err := show(&run, opts.stream, d, func() (*agent.Result, error) { return agent.Fork(ctx, dir, at, run) })
	return endRun(res, err, opts.json, opts.report, d)
}

func newReplay(d cmdline.Deps) *cobra.Command {
	var opts runFlags
	var inputDir string
	cmd := &cobra.Command{
		Use:   "replay [flags] RUN",
		Short: "Run the recorded tool calls of a run again and compare",
		Long: `Run every tool call of a run again, in a new sandbox with the same image, limits
and input, and print the lines in which the observations differ. Times that mean
the moment of a call, times of day and durations do not count. No model is asked. (To
have a recorded model's turns played in a new run: agent run --llm replay:FILE.)`,
		Example: `  sandboxd agent replay 20260116_143000`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return exitOurs(runReplay(cmd.Context(), args[0], inputDir, opts, d))
		},
	}
	opts.addFlags(cmd.Flags(), "what differs")
	cmd.Flags().StringVar(&inputDir, "input_dir", "", "`directory` with the input, if it is elsewhere now")
	cmdline.ExitStatus(cmd, exitReplay)
	return cmd
}

func runReplay(ctx context.Context, ref, inputDir string, opts runFlags, d cmdline.Deps) error {
	dir, err := agent.FindRun(opts.outputDir, ref)
	if err != nil {
		return err
	}
	run := agent.Options{InputDir: inputDir}
	defer attachTerminal(&run, false, d)()
	replayed, err := agent.ReplayRun(ctx, dir, run)
	if err != nil {
		return err
	}
	if opts.json {
		err = cmdline.PrintJSON(d.Stdout, replayed)
	} else {
		err = printReplayed(d.Stdout, replayed)
	}
	if err == nil && len(replayed.Differences) > 0 {
		return &cmdline.ExitError{Code: cmdline.CodeError, Err: nil}
	}
	return err
}

func printReplayed(w io.Writer, r *agent.Replayed) error {
	for _, diff := range r.Differences {
		if err := agent.PrintDifference(w, diff); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%d calls of %d turns were run again; %d observations differ", r.Calls, r.Turns, len(r.Differences))
	if err == nil && len(r.Times) > 0 {
		_, err = fmt.Fprintf(w, "; %d more only in times", len(r.Times))
	}
	if err == nil && r.Unknown > 0 {
		_, err = fmt.Fprintf(w, "; %d calls were left out, because nobody knows whether they were done", r.Unknown)
	}
	if err == nil {
		_, err = fmt.Fprintln(w)
	}
	return err
}
