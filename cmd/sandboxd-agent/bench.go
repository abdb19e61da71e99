package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/bench"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

const exitBench = `  0    every problem has a score
  1    it stopped before: an interrupt, a model that cannot be reached or refuses
       the key; stderr says which, and --resume goes on
  2    the command line is wrong
  125  sandboxd itself failed; stderr says how and what to do`

// benchOptions holds the flags of agent bench, under the names that users of LLM-in-Sandbox know.
type benchOptions struct {
	modelFlags
	budgetFlags
	policyFlags

	task, data, resume, mode       string
	scoring, scoreImage            string
	judgeModel, judgeURL, judgeKey string
	image                          string
	workers, start, end            int
	maxTokens, maxResponse         int
	temperature                    float64
	extraBody                      string
	saveResponses                  bool
	outputDir                      string
	memory                         cmdline.Size
	cpus                           float64
	pids                           int64
	network                        cmdline.Network
	json                           bool
}

func newBench(d cmdline.Deps) *cobra.Command {
	var opts benchOptions
	cmd := &cobra.Command{
		Use:     "bench {--task DIRECTORY | --resume DIRECTORY} [flags]",
		Aliases: []string{"benchmark"},
		Short:   "Have the problems of a task solved by a model, and score the answers",
		Long: `Have every problem of a task solved by a model, each in a sandbox of its own, and
score the answers. A task is a directory with config.yaml, a file of problems and
a rule of scoring; those of LLM-in-Sandbox can be used as they are, and
docs/reference/agent-bench.md says what else they may have.

With --mode llm the model answers each problem in one turn, without a sandbox, for
comparison.

The results are in OUTPUT_DIR/TIME_TASK_MODEL_MODE: results.json, trajectory.json,
a log of each problem and the records of the runs. --resume goes on with a
benchmark that was interrupted or killed: what is scored stays, what is
answered is scored, and runs go on in their sandboxes as they are.

Model, key and address are found as by "agent run". LLM_NUM_WORKERS and
LLM_TEMPERATURE are read as well. --llm replay:DIRECTORY plays the recorded
trajectory DIRECTORY/ID.json for the problem of that id; "replay:" alone takes the
task's own directory "replay".`,
		Example: `  sandboxd agent bench --task examples/bench/demo --llm replay:
  sandboxd agent bench --task ./chem --data chem.jsonl --llm_name qwen3-coder --num_workers 8
  sandboxd agent bench --resume output/20260116_143000_chem_qwen3-coder_LLMinSandbox`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return exitOurs(runBench(cmd.Context(), opts, cmd.Flags(), d))
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, exitBench)
	return cmd
}

func (o *benchOptions) addFlags(f *pflag.FlagSet) {
	underscores(f)
	o.memory.Least = 1
	var methods []string
	for _, m := range bench.Methods() {
		methods = append(methods, string(m))
	}
	f.StringVar(&o.task, "task", "", "`directory` of the task")
	f.StringVar(&o.resume, "resume", "", "go on with the benchmark in this `directory`")
	f.StringVar(&o.data, "data", "", "`file` with the problems, JSON or JSON lines, in place of the task's own")
	f.StringVar(&o.mode, "mode", string(bench.ModeSandbox), "llm-in-sandbox, or llm: one answer without tools")
	f.IntVar(&o.workers, "num_workers", 1, "maximum `number` of problems in progress")
	f.IntVar(&o.start, "start_id", 0, "`number` of the first problem, from 0")
	f.IntVar(&o.end, "end_id", 0, "`number` of the problem to stop before (default: all)")
	f.StringVar(&o.scoring, "scoring", "", "score by this `method` in place of the task's: "+strings.Join(methods, ", "))
	f.StringVar(&o.scoreImage, "score_image", "", "`image` of the sandboxes in which a task's own programs score (default: that of the runs)")
	f.StringVar(&o.judgeModel, "judge_model", "", "`name` of the model that judges, for --scoring judge")
	f.StringVar(&o.judgeURL, "judge_base_url", "", "`URL` of its server")
	f.StringVar(&o.judgeKey, "judge_api_key", "", "its server's `key` (default: the model's if the server is the same, or its provider's in the environment)")
	o.modelFlags.addFlags(f)
	f.StringVar(&o.image, "image", api.HostImage, "`image` of the sandboxes (also --docker_image)")
	f.StringVar(&o.outputDir, "output_dir", "./output", "`directory` for the results; each benchmark makes one below it")
	o.budgetFlags.addFlags(f, agent.DefaultMaxSteps, agent.DefaultMaxTokenLimit)
	for name, usage := range map[string]string{
		"timeout": "end the work on a problem after this time (default 30m)", "max_steps": "maximum `number` of turns of a problem",
		"max_total_tokens": "maximum `number` of tokens of all model calls of a problem", "max_cost": "maximum cost of the model calls of a problem, in US `dollars`",
		"max_cpu": "end the work on a problem when its sandbox has used this much processor time",
		"stream":  "stream answers; false for servers with faulty streaming",
	} {
		f.Lookup(name).Usage = usage
	}
	f.IntVar(&o.maxTokens, "max_tokens_per_call", agent.DefaultMaxTokensPerCall, "maximum `number` of tokens of one answer")
	f.IntVar(&o.maxResponse, "max_response_len", agent.DefaultMaxTokensPerCall, "maximum `number` of tokens of the answer with --mode llm")
	f.Float64Var(&o.temperature, "temperature", 1.0, "sampling temperature, a `number`; not sent to models that refuse one")
	f.StringVar(&o.extraBody, "extra_body", "", "`JSON` object added to every request")
	f.BoolVar(&o.saveResponses, "save_litellm_response", false, "keep request_NNN.json and response_NNN.json beside each trajectory")
	o.policyFlags.addFlags(f)
	f.VarP(&o.memory, "memory", "m", "maximum memory of a sandbox, such as 2g")
	f.Float64Var(&o.cpus, "cpus", 0, "maximum processor time of a sandbox, in `cores`")
	f.Int64Var(&o.pids, "pids", 0, "maximum `number` of processes and threads in a sandbox")
	f.Var(&o.network, "network", cmdline.NetworkUsage)
	f.BoolVar(&o.json, "json", false, "print the results as JSON")
}

// resumable lists the flags that may be given with --resume; all others are fixed by the record.
var resumable = []string{"resume", "num_workers", "llm_base_url", "api_key", "judge_base_url", "judge_api_key", "settings", "llm_retries", "stream", "json", "socket", "policy_hook"}

func runBench(ctx context.Context, opts benchOptions, flags *pflag.FlagSet, d cmdline.Deps) error {
	run, err := opts.resolve(ctx, flags, os.Getenv, d)
	if err != nil {
		return err
	}
	// Connect after everything else is checked: a wrong command line must not start a daemon.
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	run.Run.Create = func(ctx context.Context, req api.CreateSandbox) (*agent.Sandbox, error) {
		sb, err := cmdline.CreateSandbox(ctx, c, req, d.Stderr)
		if err != nil {
			return nil, err
		}
		return agent.NewSandbox(c, sb.ID), nil
	}
	run.Run.Open = func(ctx context.Context, ref string, lifetime time.Duration) (*agent.Sandbox, error) {
		return agent.OpenSandbox(ctx, c, ref, lifetime)
	}
	run.Remove = func(ctx context.Context, id string) error { return agent.RemoveSandbox(ctx, c, id) }
	run.Clean = func(ctx context.Context, labels map[string]string) error { return agent.RemoveLabelled(ctx, c, labels) }
	total, done := 0, 0
	run.OnStart = func(dir string, problems, scored int) {
		total, done = problems, scored
		fmt.Fprintf(d.Stderr, "task: %s, %d problems", cmdline.Printable(run.Task.Name), problems)
		if scored > 0 {
			fmt.Fprintf(d.Stderr, ", of which %d are scored", scored)
		}
		fmt.Fprintf(d.Stderr, "\nresults: %s\n", dir)
	}
	run.OnResult = func(r bench.Result) {
		done++
		ended := r.ExitReason
		if ended == "" { // with --mode llm
			ended = "answered"
		}
		text := fmt.Sprintf("[%d/%d] %s  %.2f  %s, %d steps, %.1f s", done, total, r.ID, r.Score, ended, r.Steps, r.Seconds)
		if r.Error != "" {
			text += "  error: " + agent.OneLine(r.Error, 200)
		}
		fmt.Fprintln(d.Stderr, cmdline.Printable(text))
	}
	run.OnNote = noteTo(d)
	res, err := bench.Run(ctx, run)
	if res == nil {
		return err
	}
	if opts.json {
		if printErr := cmdline.PrintJSON(d.Stdout, res); err == nil {
			err = printErr
		}
	} else if printErr := printBench(d.Stdout, res); err == nil {
		err = printErr
	}
	if err != nil {
		return &cmdline.ExitError{Code: cmdline.CodeError, Err: fmt.Errorf("stopped: %w (sandboxd agent bench --resume %s goes on)", err, res.Dir)}
	}
	return nil
}

// resolve returns the options of the benchmark, from the flags or from the record of a resumed one.
func (o *benchOptions) resolve(ctx context.Context, flags *pflag.FlagSet, getenv func(string) string, d cmdline.Deps) (bench.Options, error) {
	settings, _, err := agent.LoadSettings(o.settings, getenv)
	if err != nil {
		return bench.Options{}, err
	}
	if text := getenv("LLM_NUM_WORKERS"); text != "" && !flags.Changed("num_workers") {
		if o.workers, err = strconv.Atoi(text); err != nil {
			return bench.Options{}, cmdline.Usagef("LLM_NUM_WORKERS %q is not a number", text)
		}
	}
	if o.workers < 1 || o.workers > 1024 {
		return bench.Options{}, cmdline.Usagef("--num_workers %d is not from 1 to 1024", o.workers)
	}
	run := agent.Options{}
	var cfg *bench.Config
	if o.resume != "" {
		cfg, err = o.recorded(flags)
	} else {
		cfg, err = o.config(flags, getenv, settings)
	}
	if err != nil {
		return bench.Options{}, err
	}
	opts := bench.Options{
		Mode: cfg.Mode, MaxResponse: cfg.MaxResponse, Workers: o.workers, OutputDir: o.outputDir, Resume: o.resume,
	}
	if opts.Task, err = bench.LoadTask(cfg.TaskDir, cfg.Data); err != nil {
		return opts, err
	}
	if cfg.Scoring != "" {
		if err := opts.Task.Override(cfg.Scoring); err != nil {
			return opts, err
		}
	}
	cfg.Scoring, cfg.Digest = opts.Task.Scoring.Method, opts.Task.Digest
	if cfg.ScoreImage != "" {
		opts.Task.Scoring.Image = cfg.ScoreImage
	}
	if o.resume == "" && !flags.Changed("end_id") {
		cfg.End = len(opts.Task.Problems)
	}
	opts.Start, opts.End = cfg.Start, min(cfg.End, len(opts.Task.Problems))
	if opts.Start >= opts.End {
		return opts, cmdline.Usagef("no problem from --start_id %d on and before --end_id %d; the task has %d", cfg.Start, cfg.End, len(opts.Task.Problems))
	}
	cfg.End = opts.End

	run.Image, run.Limits, run.Network, run.Budget, run.MaxTokensPerCall = cfg.Image, cfg.Limits, cfg.Network, cfg.Budget, cfg.MaxTokens
	run.Temperature, run.ExtraBody, run.SaveRequests = cfg.Temperature, cfg.ExtraBody, cfg.SaveRequests
	if run.Policy == nil && cfg.Policy != "" {
		if run.Policy, err = policy.Parse([]byte(cfg.Policy)); err != nil {
			return opts, err
		}
	}
	unattended := d
	unattended.Stdin = nil // several problems cannot ask one person
	if o.resume != "" {
		o.policy = ""
	}
	if err := o.policyFlags.resolve(&run, unattended); err != nil {
		return opts, err
	}
	if run.Policy != nil {
		cfg.Policy = run.Policy.Source()
	}
	if err := o.models(ctx, &opts, &run, cfg, settings, getenv, noteTo(d)); err != nil {
		return opts, err
	}
	opts.Run, opts.Config = run, *cfg
	return opts, nil
}

// recorded returns the configuration of the resumed benchmark.
func (o *benchOptions) recorded(flags *pflag.FlagSet) (*bench.Config, error) {
	var wrong string
	flags.Visit(func(f *pflag.Flag) {
		if !slices.Contains(resumable, f.Name) {
			wrong = f.Name
		}
	})
	if wrong != "" {
		return nil, cmdline.Usagef("--%s cannot be changed with --resume: the scores would not be of one kind", wrong)
	}
	return bench.ReadConfig(o.resume)
}

// config checks the flags of a new benchmark.
func (o *benchOptions) config(flags *pflag.FlagSet, getenv func(string) string, settings agent.Settings) (*bench.Config, error) {
	network, err := o.network.With(&o.maxEgress, "--max_egress")
	if err != nil {
		return nil, err
	}
	budget, err := o.budget(flags.Changed)
	if err != nil {
		return nil, err
	}
	if budget.Time == 0 {
		budget.Time = bench.DefaultTimeout
	}
	if text := getenv("LLM_TEMPERATURE"); text != "" && !flags.Changed("temperature") {
		if o.temperature, err = strconv.ParseFloat(text, 64); err != nil {
			return nil, cmdline.Usagef("LLM_TEMPERATURE %q is not a number", text)
		}
	}
	switch {
	case o.task == "":
		return nil, cmdline.Usagef("--task is required: the directory of a task")
	case o.mode != string(bench.ModeSandbox) && o.mode != string(bench.ModeLLM):
		return nil, cmdline.Usagef("--mode %q: want %s or %s", o.mode, bench.ModeSandbox, bench.ModeLLM)
	case o.mode == string(bench.ModeLLM) && (flags.Changed("max_cost") || flags.Changed("max_total_tokens")):
		return nil, cmdline.Usagef("--max_cost and --max_total_tokens cannot be held with --mode llm: a problem is one call; --max_response_len bounds its answer")
	case o.start < 0 || flags.Changed("end_id") && o.end <= o.start:
		return nil, cmdline.Usagef("no problem from --start_id %d on and before --end_id %d", o.start, o.end)
	case o.maxTokens < 1 || o.maxResponse < 1:
		return nil, cmdline.Usagef("--max_tokens_per_call %d, --max_response_len %d: less than 1", o.maxTokens, o.maxResponse)
	case o.retries < 0:
		return nil, cmdline.Usagef("--llm_retries %d is less than 0", o.retries)
	case !(o.temperature >= 0 && o.temperature <= 100): // rejects NaN too
		return nil, cmdline.Usagef("--temperature %v is not a temperature", o.temperature)
	case flags.Changed("cpus") && !(o.cpus > 0 && o.cpus <= 1e6):
		return nil, cmdline.Usagef("--cpus %v is not a number of cores greater than 0", o.cpus)
	case flags.Changed("pids") && o.pids < 1:
		return nil, cmdline.Usagef("--pids %d is less than 1", o.pids)
	case o.image == "":
		return nil, cmdline.Usagef("the image has an empty name")
	}
	cfg := &bench.Config{
		Mode: bench.Mode(o.mode), Scoring: bench.Method(o.scoring), Start: o.start, End: o.end, JudgeName: o.judgeModel, JudgeURL: o.judgeURL,
		Image: o.image, ScoreImage: o.scoreImage, Limits: api.Limits{Memory: o.memory.Bytes, CPUs: o.cpus, Pids: o.pids}, MaxSteps: o.maxSteps,
		MaxTokenLimit: o.maxTokenLimit, MaxTokens: o.maxTokens, MaxResponse: o.maxResponse, SaveRequests: o.saveResponses, Budget: budget, Network: network,
	}
	if cfg.ExtraBody, err = parseExtraBody(o.extraBody); err != nil {
		return nil, err
	}
	for _, file := range []struct{ name, to *string }{{&o.task, &cfg.TaskDir}, {&o.data, &cfg.Data}, {&o.prices, &cfg.Prices}} {
		if *file.name == "" {
			continue
		}
		if *file.to, err = filepath.Abs(*file.name); err != nil {
			return nil, err
		}
	}
	switch file, isReplay := strings.CutPrefix(o.model, "replay:"); {
	case o.model != "" && !isReplay:
		return nil, cmdline.Usagef("--llm %q: want replay:DIRECTORY; a live model is named with --llm_name", o.model)
	case isReplay:
		if file == "" {
			file = filepath.Join(cfg.TaskDir, "replay")
		}
		if file, err = filepath.Abs(file); err != nil {
			return nil, err
		}
		cfg.LLMName = "replay:" + file
		// The recorded runs stayed within their limits.
		if !flags.Changed("max_token_limit") {
			cfg.Budget.Conversation = 1 << 40
		}
	default:
		cfg.LLMName = first(o.llmName, settings.LLMName, getenv("LLM_NAME"))
		cfg.Temperature = &o.temperature
	}
	return cfg, nil
}

// models sets the benchmark's model and judge.
func (o *benchOptions) models(ctx context.Context, opts *bench.Options, run *agent.Options, cfg *bench.Config, settings agent.Settings, getenv func(string) string, note func(string)) error {
	o.model, o.llmName, o.prices = "", cfg.LLMName, cfg.Prices
	o.baseURL = first(o.baseURL, cfg.BaseURL)
	if dir, isReplay := strings.CutPrefix(cfg.LLMName, "replay:"); isReplay {
		run.ModelName, run.LLMName, run.Price = "replay", cfg.LLMName, &llm.Price{}
		opts.Model = func(p *bench.Problem, turns int) (llm.Model, error) {
			replay, err := bench.OpenReplay(dir, p.ID)
			if err != nil {
				return nil, err
			}
			for range turns { // played before the interruption
				if _, err := replay.Complete(ctx, llm.Request{}); err != nil {
					return nil, err
				}
			}
			return replay, nil
		}
	} else {
		if err := o.modelFlags.resolve(ctx, run, settings, getenv, note, agent.RunEvent{}, 0); err != nil {
			return err
		}
		cfg.BaseURL = run.BaseURL
		if !llm.AcceptsTemperature(run.ModelName) {
			run.Temperature, cfg.Temperature = nil, nil
		}
		model := run.Model
		opts.Model = func(*bench.Problem, int) (llm.Model, error) { return model, nil }
		if o.stream {
			run.OnDelta = func(llm.Delta) {}
		}
	}
	if opts.Task.Scoring.Method != bench.MethodJudge {
		cfg.JudgeName, cfg.JudgeURL = "", "" // no judge is asked, and the URL may have a password
		return nil
	}
	if cfg.JudgeName == "" {
		return cmdline.Usagef("--judge_model is required: the task is scored by a model")
	}
	flags := modelFlags{
		llmName: cfg.JudgeName, baseURL: first(o.judgeURL, cfg.JudgeURL), apiKey: o.judgeKey, settings: o.settings, prices: o.prices, retries: o.retries,
	}
	// A judge gets the model's key only if it is served by the same server. Otherwise it has its own,
	// or its provider's.
	own := settings
	own.APIKey = ""
	ownEnv := func(name string) string {
		if name == "LLM_API_KEY" {
			return ""
		}
		return getenv(name)
	}
	var judge agent.Options
	err := flags.resolve(ctx, &judge, own, ownEnv, note, agent.RunEvent{}, 0)
	if (err == nil || errors.Is(err, errNoKey)) && o.judgeKey == "" && judge.BaseURL == first(run.BaseURL, settings.LLMBaseURL, getenv("LLM_BASE_URL")) {
		flags.apiKey, judge = o.apiKey, agent.Options{}
		err = flags.resolve(ctx, &judge, settings, getenv, note, agent.RunEvent{}, 0)
	}
	if err != nil {
		return fmt.Errorf("judge: %w", err)
	}
	cfg.JudgeURL = judge.BaseURL
	run.Secrets = append(run.Secrets, judge.Secrets...)
	opts.Judge = &bench.Judge{Model: judge.Model, Name: judge.ModelName, LLMName: judge.LLMName, BaseURL: judge.BaseURL, Price: judge.Price}
	return nil
}

// printBench writes the results as a table.
func printBench(w io.Writer, r *bench.Results) error {
	row := func(s *bench.Summary, name string) []string {
		return []string{
			cmdline.Printable(name), strconv.Itoa(s.Total), fmt.Sprintf("%.4f", s.Mean), fmt.Sprintf("%.4f - %.4f", s.Low, s.High), strconv.Itoa(s.Errors), strconv.Itoa(s.Steps),
			strconv.Itoa(s.Usage.PromptTokens + s.Usage.CompletionTokens), agent.CostText(s.Usage.CostUSD, s.Usage.UnpricedCalls),
		}
	}
	rows := [][]string{{"DOMAIN", "PROBLEMS", "MEAN", "95%", "ERRORS", "STEPS", "TOKENS", "COST"}}
	if len(r.Domains) > 1 {
		for i := range r.Domains {
			rows = append(rows, row(&r.Domains[i], r.Domains[i].Domain))
		}
	}
	rows = append(rows, row(&r.Summary, r.Task))
	if err := cmdline.Table(w, rows); err != nil {
		return err
	}
	if r.Total < r.Problems {
		if _, err := fmt.Fprintf(w, "%d of %d problems have no score\n", r.Problems-r.Total, r.Problems); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%s/results.json\n", r.Dir)
	return err
}
