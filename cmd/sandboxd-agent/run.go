package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

const exitAgent = `  0    the model submitted
  1    the run ended otherwise: a part of its budget used up, no tool call, a
       model that cannot be reached, an interrupt; stderr says which, and the
       output up to then is kept
  2    the command line is wrong
  125  sandboxd itself failed; stderr says how and what to do`

func newAgent(d cmdline.Deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Let a language model work in a sandbox",
		Long: `Let a language model work in a sandbox: it is given shell, files and a task, and
the results are handed back.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newRun(d), newList(d), newShow(d), newLogs(d), newCancel(d), newResume(d), newFork(d), newReplay(d), newRm(d), newBench(d),
		newWorker(d))
	completeRuns(cmd, d)
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// runOptions holds the flags of agent run. Those with an underscore have the names that users of
// LLM-in-Sandbox know; a dash in place of the underscore is accepted too.
type runOptions struct {
	modelFlags
	budgetFlags
	policyFlags
	endFlags

	query                  string
	image                  string
	maxTokens              int
	temperature            float64
	inputDir, outputDir    string
	repo                   string
	gitignore              bool
	promptConfig           string
	saveResponses          bool
	extraBody              string
	snapshotTurns          bool
	outputDeny             []string
	outputLinks            bool
	collect                []string
	outputLimit, fileLimit cmdline.Size
	memory                 cmdline.Size
	cpus                   float64
	pids                   int64
	network                cmdline.Network
	json                   bool
}

// endFlags control the end of a run.
type endFlags struct {
	keep   bool
	report string
}

func (o *endFlags) addFlags(f *pflag.FlagSet) {
	f.BoolVar(&o.keep, "keep_interrupted", true, "keep the stopped sandbox of an interrupted run, for resume")
	f.StringVar(&o.report, "report", "", "write the run as one HTML page to this `file`, at its end")
}

func (o *endFlags) keepInterrupted(error) bool { return o.keep }

// modelFlags select the model.
type modelFlags struct {
	llmName, model, baseURL, apiKey, settings, prices string
	retries                                           int
	stream                                            bool
}

func (o *modelFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.llmName, "llm_name", "", "the model's `name`, with its provider before it: anthropic/, openai/responses/, openai/, azure/, hosted_vllm/")
	f.StringVar(&o.baseURL, "llm_base_url", "", "`URL` of the model's server (default http://localhost:8000/v1; for anthropic/ https://api.anthropic.com)")
	f.StringVar(&o.apiKey, "api_key", "", "the server's `key`; environment and settings are safer, because ps shows flags")
	f.StringVar(&o.model, "llm", "", "`replay:FILE` plays the model turns of a recorded trajectory.json")
	f.StringVar(&o.settings, "settings", "", "YAML `file` with llm_name, llm_base_url, api_key, prompt_config")
	f.IntVar(&o.retries, "llm_retries", llm.DefaultRetries, "maximum `number` of retries of a failed model call")
	f.BoolVar(&o.stream, "stream", true, "stream answers and show them; false for servers with faulty streaming")
	f.StringVar(&o.prices, "prices", "", "YAML `file` with prices of models, over the built-in ones, for the cost in the record")
}

// budgetFlags limit a run; the first limit that is reached ends it.
type budgetFlags struct {
	maxSteps, maxTokenLimit, maxTotalTokens int
	maxCost                                 float64
	timeout, maxCPU                         cmdline.Seconds
	maxEgress                               cmdline.Size
}

func (o *budgetFlags) addFlags(f *pflag.FlagSet, steps, tokens int) {
	o.maxEgress.Least = 1
	f.IntVar(&o.maxSteps, "max_steps", steps, "maximum `number` of turns")
	f.IntVar(&o.maxTokenLimit, "max_token_limit", tokens, "maximum `number` of tokens of the whole conversation")
	f.IntVar(&o.maxTotalTokens, "max_total_tokens", 0, "maximum `number` of tokens of all model calls together")
	f.Float64Var(&o.maxCost, "max_cost", 0, "maximum cost of all model calls, in US `dollars`")
	f.Var(&o.timeout, "timeout", "end the run after this time (default 8h)")
	f.Var(&o.maxCPU, "max_cpu", "end the run when the sandbox has used this much processor time")
	f.Var(&o.maxEgress, "max_egress", "maximum bytes that leave the sandbox over its network, such as 100m")
}

// budget checks the given limits. The others are zero.
func (o *budgetFlags) budget(changed func(string) bool) (agent.Budget, error) {
	b := agent.Budget{Time: timeSpan(o.timeout), CPU: timeSpan(o.maxCPU)}
	for name, v := range map[string]struct{ given, to *int }{
		"max_steps": {&o.maxSteps, &b.Turns}, "max_token_limit": {&o.maxTokenLimit, &b.Conversation}, "max_total_tokens": {&o.maxTotalTokens, &b.Tokens},
	} {
		if changed(name) && *v.given < 1 {
			return b, cmdline.Usagef("--%s %d is less than 1", name, *v.given)
		}
		*v.to = *v.given
	}
	if changed("max_cost") && !(o.maxCost > 0 && o.maxCost <= 1e9) {
		return b, cmdline.Usagef("--max_cost %v is not an amount greater than 0", o.maxCost)
	}
	b.Cost = o.maxCost
	return b, nil
}

func timeSpan(s cmdline.Seconds) time.Duration {
	return time.Duration(float64(s) * float64(time.Second))
}

// policyFlags select the policy of tool calls, and the asker.
type policyFlags struct{ policy, hook string }

func (o *policyFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.policy, "policy", "", "policy of tool calls: a YAML `file`, or "+strings.Join(policy.Presets(), ", ")+" (default open)")
	f.StringVar(&o.hook, "policy_hook", "", "`URL` to ask where the policy says ask (default: the person at the terminal)")
}

// resolve sets the run's policy and asker. Without --policy the policy stays nil.
func (o *policyFlags) resolve(run *agent.Options, d cmdline.Deps) error {
	if o.policy != "" {
		var err error
		if slices.Contains(policy.Presets(), o.policy) {
			run.Policy, err = policy.Preset(o.policy)
		} else {
			var text []byte
			if text, err = os.ReadFile(o.policy); err != nil {
				return cmdline.Usagef("--policy: want a file or one of %s: %v", strings.Join(policy.Presets(), ", "), err)
			}
			if run.Policy, err = policy.Parse(text); err != nil {
				err = fmt.Errorf("%s: %w", o.policy, err)
			}
		}
		if err != nil {
			return err
		}
	}
	switch {
	case o.hook != "":
		hook, err := policy.NewHook(o.hook)
		if err != nil {
			return cmdline.Usagef("--policy_hook: %v", err)
		}
		run.Asker = hook
		run.Secrets = append(run.Secrets, o.hook)
	case d.Stdin != nil && d.Stderr != nil && cmdline.IsTerminal(d.Stdin) && cmdline.IsTerminal(d.Stderr):
		run.Asker = &terminalAsker{in: d.Stdin, out: d.Stderr}
	}
	return nil
}

func newRun(d cmdline.Deps) *cobra.Command {
	var opts runOptions
	cmd := &cobra.Command{
		Use:   "run --query TASK [flags]",
		Short: "Have a task solved by a model in a new sandbox",
		Long: `Have a task solved by a model in a new sandbox. The model works with three tools,
execute_bash, str_replace_editor and submit, until it submits. The sandbox is
deleted at the end, whatever the reason, but for Ctrl-C and SIGTERM: these leave it
stopped, and "sandboxd agent resume" goes on in it. What the model left in its
output directory is copied to OUTPUT_DIR/YYYYmmdd_HHMMSS/files. Beside it, record.jsonl
holds every turn as it happens, and trajectory.json the whole run at its end.

With --repo DIR the model works on a project of this host as on its own. DIR stays
as it is; changes.patch, beside files, has the differences for "git apply". Input and
output directories that would lie in it are put beside it in the sandbox.

Any server with OpenAI's chat completions and tool calls will do. A name that
begins with anthropic/ is called by Anthropic's Messages, one that begins with
openai/responses/ by OpenAI's Responses. With --llm replay:FILE no model is
needed: the turns come from a recorded trajectory.json, and every command is
really executed.

What --llm_name, --llm_base_url, --api_key and --prompt_config do not say comes
from a settings file: --settings, $LLM_IN_SANDBOX_CONFIG, ./llm-in-sandbox.yaml,
./llm_in_sandbox.yaml, ~/.llm-in-sandbox/config.yaml, ~/.llm-in-sandbox.yaml,
the first that exists. After that from the environment: LLM_NAME, LLM_BASE_URL,
LLM_API_KEY, and OPENAI_API_KEY, ANTHROPIC_API_KEY or AZURE_API_KEY.

Turns are printed to stderr; the content of answer.txt, if there is one, to
stdout.`,
		Example: `  sandboxd agent run --query 'How many primes are below 10^6?' --llm_name qwen3-coder --llm_base_url http://localhost:8000/v1
  sandboxd agent run --query "$(cat task.txt)" --input_dir ./data --memory 2g
  sandboxd agent run --llm replay:examples/quickstart/trajectory.json --input_dir examples/quickstart/input`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return exitOurs(runRun(cmd.Context(), opts, cmd.Flags().Changed, d))
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, exitAgent)
	return cmd
}

// underscores accepts dashes in flag names in place of underscores.
func underscores(f *pflag.FlagSet) {
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name = strings.ReplaceAll(name, "-", "_"); name == "docker_image" {
			name = "image"
		}
		return pflag.NormalizedName(name)
	})
	f.SortFlags = false
}

func (o *runOptions) addFlags(f *pflag.FlagSet) {
	underscores(f)
	o.memory.Least, o.outputLimit.Least, o.fileLimit.Least = 1, 1, 1
	f.StringVar(&o.query, "query", "", "the `task`; required, except in a replay")
	o.modelFlags.addFlags(f)
	f.StringVar(&o.image, "image", api.HostImage, "`image` of the sandbox (also --docker_image)")
	f.StringVar(&o.inputDir, "input_dir", "", "copy the content of this `directory` into the sandbox")
	f.StringVar(&o.repo, "repo", "", "let the model change a copy-on-write view of this `directory`, its working directory; changes.patch has what it did")
	f.BoolVar(&o.gitignore, "gitignore", false, "hide what .gitignore files name from the model too, as .sandboxdignore of the --repo does in any case")
	f.StringVar(&o.outputDir, "output_dir", "./output", "`directory` for the results; each run makes one below it")
	f.StringVar(&o.promptConfig, "prompt_config", "", "YAML `file` with prompts and the sandbox's directories (default: built in)")
	o.budgetFlags.addFlags(f, agent.DefaultMaxSteps, agent.DefaultMaxTokenLimit)
	f.IntVar(&o.maxTokens, "max_tokens_per_call", agent.DefaultMaxTokensPerCall, "maximum `number` of tokens of one answer")
	f.Float64Var(&o.temperature, "temperature", 1.0, "sampling temperature, a `number`; not sent to models that refuse one")
	f.StringVar(&o.extraBody, "extra_body", "", "`JSON` object added to every request")
	f.BoolVar(&o.saveResponses, "save_litellm_response", false, "keep request_NNN.json and response_NNN.json beside the trajectory")
	f.BoolVar(&o.snapshotTurns, "snapshot_turns", false, "take a snapshot after each turn, for resume and fork")
	o.policyFlags.addFlags(f)
	f.StringArrayVar(&o.outputDeny, "output_deny", nil, "`pattern` of output that stays in the sandbox, such as '**/*.so'; may be repeated")
	f.StringArrayVar(&o.collect, "collect", nil, "`path` in the sandbox that is collected beside the output directory; may be repeated")
	f.BoolVar(&o.outputLinks, "output_links", false, "keep links of the output that lead out of it: on this host they lead to its own files")
	f.Var(&o.outputLimit, "output_limit", "maximum bytes of output (default 4GiB)")
	f.Var(&o.fileLimit, "output_file_limit", "maximum bytes of an output file; larger ones stay in the sandbox")
	f.VarP(&o.memory, "memory", "m", "maximum memory of the sandbox, such as 2g")
	f.Float64Var(&o.cpus, "cpus", 0, "maximum processor time of the sandbox, in `cores`")
	f.Int64Var(&o.pids, "pids", 0, "maximum `number` of processes and threads in the sandbox")
	f.Var(&o.network, "network", cmdline.NetworkUsage)
	f.BoolVar(&o.json, "json", false, "print how the run ended as JSON")
	o.endFlags.addFlags(f)
}

// exitOurs makes every failure of ours exit with 125.
func exitOurs(err error) error {
	var usage *cmdline.UsageError
	var exit *cmdline.ExitError
	if err == nil || errors.As(err, &usage) || errors.As(err, &exit) {
		return err
	}
	return &cmdline.ExitError{Code: cmdline.CodeOurs, Err: err}
}

func runRun(ctx context.Context, opts runOptions, changed func(string) bool, d cmdline.Deps) error {
	run, err := opts.resolve(ctx, changed, os.Getenv, noteTo(d))
	if err != nil {
		return err
	}
	if err := opts.policyFlags.resolve(&run, d); err != nil {
		return err
	}
	res, err := show(&run, opts.stream, d, func() (*agent.Result, error) { return agent.Run(ctx, run) })
	return endRun(res, err, opts.json, opts.report, d)
}

// noteTo returns a function that prints notes on stderr.
func noteTo(d cmdline.Deps) func(string) {
	return func(text string) { fmt.Fprintf(d.Stderr, "sandboxd: %s\n", cmdline.Printable(text)) }
}

// connect gives a run the daemon. Call end after the run.
func connect(run *agent.Options, dial func(context.Context) (*client.Client, error), d cmdline.Deps) (end func()) {
	// Connect after everything else is checked: a wrong command line must not start a daemon.
	var c *client.Client
	daemon := func(ctx context.Context) (_ *client.Client, err error) {
		if c == nil {
			c, err = dial(ctx)
		}
		return c, err
	}
	run.Create = func(ctx context.Context, req api.CreateSandbox) (*agent.Sandbox, error) {
		c, err := daemon(ctx)
		if err != nil {
			return nil, err
		}
		sb, err := cmdline.CreateSandbox(ctx, c, req, d.Stderr)
		if err != nil {
			return nil, err
		}
		return agent.NewSandbox(c, sb.ID), nil
	}
	run.Open = func(ctx context.Context, ref string, lifetime time.Duration) (*agent.Sandbox, error) {
		c, err := daemon(ctx)
		if err != nil {
			return nil, err
		}
		return agent.OpenSandbox(ctx, c, ref, lifetime)
	}
	return func() {
		if c != nil {
			c.Close()
		}
	}
}

// attachTerminal gives a run the daemon, and shows its progress on the terminal. Call end after the
// run.
func attachTerminal(run *agent.Options, stream bool, d cmdline.Deps) (end func()) {
	disconnect := connect(run, d.Daemon, d)
	var out io.Writer = d.Stderr
	v := newView(d.Stderr)
	if v != nil {
		out = v
		run.OnEvent, run.OnOutput = v.event, v.output
		if asker, ok := run.Asker.(*terminalAsker); ok {
			asker.view = v
		}
	}
	run.OnStart = func(s agent.Started) {
		fmt.Fprintf(out, "model: %s\nsandbox: %s, image %s\nrecord: %s\n", cmdline.Printable(s.ModelSource), s.SandboxID, cmdline.Printable(s.Image), s.Dir)
		if v != nil {
			v.begin()
		}
	}
	run.OnStep = func(s agent.Step) { _ = agent.PrintStep(out, s) } // a closed stderr must not end the run
	if stream {
		run.OnDelta = func(llm.Delta) {} // complete turns read better in a file
		if v != nil {
			run.OnDelta = v.delta
		}
	}
	run.OnOutputs = func(o agent.Outputs) { _ = agent.PrintOutputs(out, o) } // a closed stderr must not end the run
	run.OnNote = func(text string) { fmt.Fprintf(out, "sandboxd: %s\n", cmdline.Printable(text)) }
	if retry, ok := run.Model.(*llm.Retry); ok {
		retry.Notice = run.OnNote
	}
	return func() {
		if v != nil {
			v.close()
		}
		disconnect()
	}
}

// show calls do while the view shows the run. It removes the view before it returns, even on a
// panic.
func show(run *agent.Options, stream bool, d cmdline.Deps, do func() (*agent.Result, error)) (*agent.Result, error) {
	defer attachTerminal(run, stream, d)()
	return do()
}

// endRun prints how a run ended, and returns the exit status.
func endRun(res *agent.Result, err error, asJSON bool, report string, d cmdline.Deps) error {
	if res != nil {
		printErr := printResult(res, asJSON, d.Stdout, d.Stderr)
		if report != "" {
			printErr = errors.Join(printErr, agent.SaveReport(res.Dir, report))
		}
		if err == nil {
			err = printErr
		}
	}
	switch {
	case err != nil:
		return err
	case res.ExitReason == agent.ExitSubmitted:
		return nil
	case res.ExitReason == agent.ExitFailed:
		return fmt.Errorf("the run failed: %s", res.Detail)
	}
	return &cmdline.ExitError{Code: cmdline.CodeError, Err: nil}
}

// printResult prints how a run ended: the answer or JSON on stdout, the rest on stderr.
func printResult(res *agent.Result, asJSON bool, stdout, stderr io.Writer) error {
	fmt.Fprintf(stderr, "\nended: %s after %d turns\n", res.ExitReason, res.Steps)
	if res.Detail != "" {
		fmt.Fprintf(stderr, "       %s\n", cmdline.Printable(res.Detail))
	}
	if res.Usage != (llm.Usage{}) {
		fmt.Fprintf(stderr, "used: %s\n", used(res.Usage))
	}
	if res.Output != nil {
		fmt.Fprintf(stderr, "output: %s/files (%d entries, %d bytes)\n", res.Dir, res.Output.Entries, res.Output.Bytes)
		for _, s := range res.Output.Skipped {
			fmt.Fprintf(stderr, "left out: %s\n", cmdline.Printable(s))
		}
		for _, path := range slices.Sorted(maps.Keys(res.Output.Elsewhere)) {
			c := res.Output.Elsewhere[path]
			fmt.Fprintf(stderr, "collected: %s in %s/collected (%d entries, %d bytes)\n", cmdline.Printable(path), res.Dir, c.Entries, c.Bytes)
			for _, s := range c.Skipped {
				fmt.Fprintf(stderr, "left out: %s\n", cmdline.Printable(s))
			}
		}
	}
	if p := res.Patch; p != nil {
		printPatch(p, stderr)
	}
	if res.Kept != "" {
		fmt.Fprintf(stderr, "kept: sandbox %s, stopped\n", res.Kept)
		fmt.Fprintf(stderr, "hint: sandboxd agent resume %s goes on in it; sandboxd agent rm %s removes it, with the run, and sandboxd rm %s the sandbox alone\n",
			cmdline.Printable(res.Dir), cmdline.Printable(res.Dir), res.Kept)
	}
	if asJSON {
		return cmdline.PrintJSON(stdout, res)
	}
	if res.Answer == "" {
		return nil
	}
	answer := agent.Printable(res.Answer)
	if !strings.HasSuffix(answer, "\n") {
		answer += "\n"
	}
	_, err := io.WriteString(stdout, answer)
	return err
}

// printPatch says where the changes of the repository are, and which are elsewhere.
func printPatch(p *agent.Patch, stderr io.Writer) {
	fmt.Fprintf(stderr, "changes: %s (%d)\n", cmdline.Printable(p.File), p.Changes)
	if p.Changes > 0 {
		fmt.Fprintf(stderr, "hint: git apply %s, in the repository, makes them\n", cmdline.Printable(p.File))
	}
	for _, path := range p.Protected {
		fmt.Fprintf(stderr, "look at it before you apply it: programs of this host would execute or trust %s\n", cmdline.Printable(path))
	}
	if p.Conflicts > 0 {
		fmt.Fprintf(stderr, "conflicts: %d, in %s beside it: applied, they undo what has changed on this host since\n", p.Conflicts, agent.ConflictsName)
	}
	for _, s := range p.Skipped {
		fmt.Fprintf(stderr, "left out of the changes: %s\n", cmdline.Printable(s))
	}
	if p.InGit > 0 {
		fmt.Fprintf(stderr, "left out of the changes: %d of git's own files, such as commits and the index\n", p.InGit)
	}
}

// resolve merges flags, settings and environment into the options of one run.
func (o *runOptions) resolve(ctx context.Context, changed func(string) bool, getenv func(string) string, note func(string)) (agent.Options, error) {
	run := agent.Options{
		Query: o.query, Image: o.image, InputDir: o.inputDir, RepoDir: o.repo, GitIgnore: o.gitignore, OutputDir: o.outputDir, MaxTokensPerCall: o.maxTokens,
		Limits:       api.Limits{Memory: o.memory.Bytes, CPUs: o.cpus, Pids: o.pids},
		SaveRequests: o.saveResponses, SnapshotTurns: o.snapshotTurns, KeepInterrupted: o.keepInterrupted,
		Collect: agent.CollectLimits{Bytes: o.outputLimit.Bytes, File: o.fileLimit.Bytes, Deny: o.outputDeny, Links: o.outputLinks, Paths: o.collect},
	}
	var err error
	if run.Budget, err = o.budget(changed); err != nil {
		return run, err
	}
	if run.Network, err = o.network.With(&o.maxEgress, "--max_egress"); err != nil {
		return run, err
	}
	switch {
	case o.maxTokens < 1:
		return run, cmdline.Usagef("--max_tokens_per_call %d is less than 1", o.maxTokens)
	case o.retries < 0:
		return run, cmdline.Usagef("--llm_retries %d is less than 0", o.retries)
	case !(o.temperature >= 0 && o.temperature <= 100): // rejects NaN too
		return run, cmdline.Usagef("--temperature %v is not a temperature", o.temperature)
	case changed("cpus") && !(o.cpus > 0 && o.cpus <= 1e6):
		return run, cmdline.Usagef("--cpus %v is not a number of cores greater than 0", o.cpus)
	case changed("pids") && o.pids < 1:
		return run, cmdline.Usagef("--pids %d is less than 1", o.pids)
	case changed("repo") && o.repo == "":
		return run, cmdline.Usagef("--repo: the directory has an empty name")
	case o.gitignore && o.repo == "":
		return run, cmdline.Usagef("--gitignore is about the directory of --repo, and there is none")
	case o.repo != "" && o.snapshotTurns:
		return run, cmdline.Usagef("--snapshot_turns: a snapshot has no files of --repo; leave one of the two out, or copy the files in with --input_dir")
	case o.image == "":
		return run, cmdline.Usagef("the image has an empty name")
	}
	if run.ExtraBody, err = parseExtraBody(o.extraBody); err != nil {
		return run, err
	}
	settings, _, err := agent.LoadSettings(o.settings, getenv)
	if err != nil {
		return run, err
	}
	if run.Prompt, err = agent.LoadPromptConfig(first(o.promptConfig, settings.PromptConfig)); err != nil {
		return run, err
	}
	if run.Query == "" && o.model == "" {
		return run, cmdline.Usagef("--query is required: say what the model shall do")
	}
	if err := o.modelFlags.resolve(ctx, &run, settings, getenv, note, agent.RunEvent{}, 0); err != nil {
		return run, err
	}
	if replay, ok := run.Model.(*llm.Replay); ok {
		run.Query = first(run.Query, replay.Recording().ProblemStatement)
		// The recorded run stayed within its limits. Defaults must not end its replay earlier, which
		// costs nothing.
		if !changed("max_token_limit") {
			run.Budget.Conversation = math.MaxInt
		}
		if !changed("max_steps") {
			run.Budget.Turns = max(run.Budget.Turns, len(replay.Recording().Turns))
		}
	} else if llm.AcceptsTemperature(run.ModelName) {
		run.Temperature = &o.temperature
	}
	if run.Query == "" {
		return run, cmdline.Usagef("--query is required: say what the model shall do")
	}
	return run, nil
}

// resolve sets the run's model. was is the record of a resumed run, and turns the number of its
// recorded turns.
func (o *modelFlags) resolve(ctx context.Context, run *agent.Options, settings agent.Settings, getenv func(string) string, note func(string), was agent.RunEvent, turns int) error {
	recorded := was.LLMName
	if o.llmName != "" { // another model may have another server
		was = agent.RunEvent{}
	}
	file, isReplay := strings.CutPrefix(o.model, "replay:")
	if !isReplay && o.model != "" {
		return cmdline.Usagef("--llm %q: want replay:FILE; a live model is named with --llm_name", o.model)
	}
	if o.model == "" && o.llmName == "" {
		file, isReplay = strings.CutPrefix(recorded, "replay:")
	}
	if isReplay {
		replay, err := llm.OpenReplay(file)
		if err != nil {
			return err
		}
		for range turns { // played before
			if _, err := replay.Complete(ctx, llm.Request{}); err != nil {
				return err
			}
		}
		if file, err = filepath.Abs(file); err != nil {
			return err
		}
		run.Model, run.ModelName, run.LLMName, run.Price = replay, first(o.llmName, "replay"), "replay:"+file, &llm.Price{}
		return nil
	}
	name := first(o.llmName, was.LLMName, settings.LLMName, getenv("LLM_NAME"))
	if name == "" {
		return cmdline.Usagef("--llm_name is required: name the model, here, in a settings file or in LLM_NAME (or use --llm replay:FILE)")
	}
	provider, wireName, err := llm.ParseName(name)
	if err != nil {
		return err
	}
	baseURL := first(o.baseURL, was.BaseURL, settings.LLMBaseURL, getenv("LLM_BASE_URL"), provider.BaseURL)
	if baseURL == "" {
		return cmdline.Usagef("--llm_base_url is required for %s: nobody knows where it is served", name)
	}
	key := first(o.apiKey, settings.APIKey, getenv("LLM_API_KEY"), getenv(provider.KeyName))
	server, err := llm.Open(provider.Format, llm.ServerOptions{BaseURL: baseURL, APIKey: key})
	if err != nil {
		return err
	}
	run.BaseURL = server.BaseURL()
	if key == "" && llm.RequiresKey(run.BaseURL) {
		return cmdline.Usagef("%w %s: set LLM_API_KEY or %s, or give it in a settings file or with --api_key", errNoKey, run.BaseURL, provider.KeyName)
	}
	prices, err := llm.LoadPrices(o.prices)
	if err != nil {
		return err
	}
	if price, known := prices.Of(wireName); known {
		run.Price = &price
	}
	run.LLMName, run.ModelName, run.Secrets = name, wireName, append(run.Secrets, key)
	run.Model = &llm.Retry{Model: server, Retries: o.retries, Notice: note}
	return nil
}

// errNoKey is part of the error for a server that answers no call without a key. It is found before
// a sandbox is created.
var errNoKey = errors.New("there is no key for the model at")

// first returns the first text that is not empty.
func first(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}

// parseExtraBody reads the JSON of --extra_body. The texts "true" and "false" in it become
// booleans, at any depth: shells make real booleans hard to write, and configurations for
// LLM-in-Sandbox rely on this.
func parseExtraBody(text string) (map[string]any, error) {
	if text == "" {
		return nil, nil
	}
	var body map[string]any
	if err := json.Unmarshal([]byte(text), &body); err != nil {
		return nil, cmdline.Usagef("--extra_body: want a JSON object such as {\"top_k\": 20}: %v", err)
	}
	for key := range body {
		switch key {
		case "messages", "input", "instructions", "system", "tools", "stream":
			return nil, cmdline.Usagef("--extra_body must not set %q, which the run itself sets", key)
		}
	}
	booleans(body)
	return body, nil
}

func booleans(v any) any {
	switch v := v.(type) {
	case string:
		switch strings.ToLower(v) {
		case "true":
			return true
		case "false":
			return false
		}
	case map[string]any:
		for key, value := range v {
			v[key] = booleans(value)
		}
	case []any:
		for i, value := range v {
			v[i] = booleans(value)
		}
	}
	return v
}
