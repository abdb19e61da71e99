package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

const exitAgent = `  0    the model submitted
  1    the run ended otherwise: out of steps, tokens or time, no tool call, a
       model that cannot be reached, an interrupt; stderr says which, and the
       output up to then is kept
  2    the command line is wrong
  125  sandboxd itself failed; stderr says how and what to do`

func newAgent(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Let a language model work in a sandbox",
		Long: `Let a language model work in a sandbox: it is given shell, files and a task, and
the results are handed back.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newAgentRun(d))
	exitStatus(cmd, exitPlain)
	return cmd
}

// agentRunOptions are the flags of agent run. Those with an underscore carry the names that users of LLM-in-Sandbox know;
// a dash in place of the underscore is the same flag.
type agentRunOptions struct {
	query, llmName, model, baseURL, apiKey string
	image                                  string
	maxSteps, maxTokenLimit, maxTokens     int
	temperature                            float64
	inputDir, outputDir                    string
	promptConfig, settings                 string
	saveResponses                          bool
	extraBody                              string
	retries                                int
	stream                                 bool
	prices                                 string
	timeout                                seconds
	memory                                 size
	cpus                                   float64
	pids                                   int64
	json                                   bool
}

func newAgentRun(d deps) *cobra.Command {
	var opts agentRunOptions
	cmd := &cobra.Command{
		Use:   "run --query TASK [flags]",
		Short: "Have a task solved by a model in a new sandbox",
		Long: `Have a task solved by a model in a new sandbox. The model works with three tools,
execute_bash, str_replace_editor and submit, until it submits. The sandbox is
deleted at the end, whatever happens; what the model left in its output
directory is copied to OUTPUT_DIR/YYYYmmdd_HHMMSS/files, and every turn is
recorded beside it in trajectory.json as it happens.

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
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := runAgent(cmd.Context(), opts, cmd.Flags().Changed, d)
			var usage *usageError
			var exit *exitError
			if err == nil || errors.As(err, &usage) || errors.As(err, &exit) {
				return err
			}
			return &exitError{codeOurs, err}
		},
	}
	opts.addFlags(cmd.Flags())
	exitStatus(cmd, exitAgent)
	return cmd
}

func (o *agentRunOptions) addFlags(f *pflag.FlagSet) {
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name = strings.ReplaceAll(name, "-", "_"); name == "docker_image" {
			name = "image"
		}
		return pflag.NormalizedName(name)
	})
	o.memory.least = 1
	f.SortFlags = false
	f.StringVar(&o.query, "query", "", "the `task`; required, except in a replay")
	f.StringVar(&o.llmName, "llm_name", "", "the model's `name`, with its provider before it: anthropic/, openai/responses/, openai/, azure/, hosted_vllm/")
	f.StringVar(&o.baseURL, "llm_base_url", "", "`URL` of the model's server (default http://localhost:8000/v1; for anthropic/ https://api.anthropic.com)")
	f.StringVar(&o.apiKey, "api_key", "", "the server's `key`; better put into the environment or settings, where ps does not show it")
	f.StringVar(&o.model, "llm", "", "`replay:FILE` plays the model turns of a recorded trajectory.json")
	f.StringVar(&o.image, "image", api.HostImage, "`image` of the sandbox (also --docker_image)")
	f.StringVar(&o.inputDir, "input_dir", "", "copy what is in this `directory` into the sandbox")
	f.StringVar(&o.outputDir, "output_dir", "./output", "`directory` for the results; each run makes one below it")
	f.StringVar(&o.promptConfig, "prompt_config", "", "YAML `file` with prompts and the sandbox's directories (default: built in)")
	f.StringVar(&o.settings, "settings", "", "YAML `file` with llm_name, llm_base_url, api_key, prompt_config")
	f.IntVar(&o.maxSteps, "max_steps", agent.DefaultMaxSteps, "most turns, a `number`")
	f.IntVar(&o.maxTokenLimit, "max_token_limit", agent.DefaultMaxTokenLimit, "most tokens of the whole conversation, a `number`")
	f.IntVar(&o.maxTokens, "max_tokens_per_call", agent.DefaultMaxTokensPerCall, "most tokens of one answer, a `number`")
	f.Float64Var(&o.temperature, "temperature", 1.0, "sampling temperature, a `number`; not sent to models that refuse one")
	f.StringVar(&o.extraBody, "extra_body", "", "`JSON` object added to every request")
	f.BoolVar(&o.saveResponses, "save_litellm_response", false, "keep request_NNN.json and response_NNN.json beside the trajectory")
	f.IntVar(&o.retries, "llm_retries", llm.DefaultRetries, "how often a failed model call is repeated, a `number`")
	f.BoolVar(&o.stream, "stream", true, "have answers sent as they are written, and show them; false for servers that do it badly")
	f.StringVar(&o.prices, "prices", "", "YAML `file` with prices of models, over the built-in ones, for the cost in the record")
	f.Var(&o.timeout, "timeout", "end the run after this time (default 8h)")
	f.VarP(&o.memory, "memory", "m", "most memory of the sandbox, such as 2g")
	f.Float64Var(&o.cpus, "cpus", 0, "most processor time of the sandbox, in `cores`")
	f.Int64Var(&o.pids, "pids", 0, "most processes and threads in the sandbox, a `number`")
	f.BoolVar(&o.json, "json", false, "print how the run ended as JSON")
}

func runAgent(ctx context.Context, opts agentRunOptions, changed func(string) bool, d deps) error {
	run, err := opts.resolve(changed, os.Getenv, func(text string) {
		fmt.Fprintf(d.stderr, "sandboxd: %s\n", printable(text))
	})
	if err != nil {
		return err
	}
	// The daemon is asked for when everything else has been checked: a wrong command line starts none.
	var c *client.Client
	defer func() {
		if c != nil {
			c.Close()
		}
	}()
	run.Create = func(ctx context.Context, req api.CreateSandbox) (_ agent.Sandbox, err error) {
		if c, err = d.daemon(ctx); err != nil {
			return nil, err
		}
		sb, err := create(ctx, c, req, d)
		if err != nil {
			return nil, err
		}
		return agent.NewClient(c, sb.ID), nil
	}
	run.OnStart = func(s agent.Started) {
		fmt.Fprintf(d.stderr, "model: %s\nsandbox: %s, image %s\nrecord: %s\n", printable(s.ModelSource), s.SandboxID, printable(s.Image), s.Dir)
	}
	watch := &live{w: d.stderr}
	run.OnStep = watch.step
	if opts.stream {
		run.OnDelta = watch.delta
		if !isTerminal(d.stderr) {
			run.OnDelta = func(llm.Delta) {} // whole turns read better in a file
		}
	}
	run.OnNote = func(text string) { fmt.Fprintf(d.stderr, "sandboxd: %s\n", printable(text)) }

	res, err := agent.Run(ctx, run)
	if res != nil {
		if printErr := printAgentResult(res, opts.json, d.stdout, d.stderr); err == nil {
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
	return &exitError{codeError, nil}
}

// printAgentResult says how a run ended: the answer or the JSON on stdout, the rest on stderr.
func printAgentResult(res *agent.Result, asJSON bool, stdout, stderr io.Writer) error {
	fmt.Fprintf(stderr, "\nended: %s after %d turns\n", res.ExitReason, res.Steps)
	if res.Detail != "" {
		fmt.Fprintf(stderr, "       %s\n", printable(res.Detail))
	}
	if res.Usage != (llm.Usage{}) {
		fmt.Fprintf(stderr, "used: %s\n", used(res.Usage))
	}
	if res.Output != nil {
		fmt.Fprintf(stderr, "output: %s/files (%d entries, %d bytes)\n", res.Dir, res.Output.Entries, res.Output.Bytes)
		for _, s := range res.Output.Skipped {
			fmt.Fprintf(stderr, "left out: %s\n", printable(s))
		}
	}
	if asJSON {
		return printJSON(stdout, res)
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

// resolve merges flags, settings and environment into the options of one run.
func (o *agentRunOptions) resolve(changed func(string) bool, getenv func(string) string, note func(string)) (agent.Options, error) {
	run := agent.Options{
		Query: o.query, Image: o.image, InputDir: o.inputDir, OutputDir: o.outputDir,
		MaxSteps: o.maxSteps, MaxTokenLimit: o.maxTokenLimit, MaxTokensPerCall: o.maxTokens,
		Limits:       api.Limits{Memory: o.memory.bytes, CPUs: o.cpus, Pids: o.pids},
		SaveRequests: o.saveResponses, Timeout: time.Duration(float64(o.timeout) * float64(time.Second)),
	}
	switch {
	case o.maxSteps < 1:
		return run, usagef("--max_steps %d is less than 1", o.maxSteps)
	case o.maxTokenLimit < 1:
		return run, usagef("--max_token_limit %d is less than 1", o.maxTokenLimit)
	case o.maxTokens < 1:
		return run, usagef("--max_tokens_per_call %d is less than 1", o.maxTokens)
	case o.retries < 0:
		return run, usagef("--llm_retries %d is less than 0", o.retries)
	case !(o.temperature >= 0 && o.temperature <= 100): // NaN too
		return run, usagef("--temperature %v is not a temperature", o.temperature)
	case changed("cpus") && !(o.cpus > 0 && o.cpus <= 1e6):
		return run, usagef("--cpus %v is not a number of cores greater than 0", o.cpus)
	case changed("pids") && o.pids < 1:
		return run, usagef("--pids %d is less than 1", o.pids)
	case o.image == "":
		return run, usagef("the image has an empty name")
	}
	var err error
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

	if file, ok := strings.CutPrefix(o.model, "replay:"); ok {
		replay, err := llm.OpenReplay(file)
		if err != nil {
			return run, err
		}
		run.Model = replay
		run.ModelName = first(o.llmName, "replay")
		run.Query = first(run.Query, replay.Recording().ProblemStatement)
		// The recorded run stayed within its limits. Defaults must not end its replay, which costs nothing, before it did.
		if !changed("max_token_limit") {
			run.MaxTokenLimit = math.MaxInt
		}
		if !changed("max_steps") {
			run.MaxSteps = max(run.MaxSteps, len(replay.Recording().Turns))
		}
	} else if o.model != "" {
		return run, usagef("--llm %q: want replay:FILE; a live model is named with --llm_name", o.model)
	}
	if run.Query == "" {
		return run, usagef("--query is required: say what the model shall do")
	}
	if run.Model != nil {
		return run, nil
	}

	name := first(o.llmName, settings.LLMName, getenv("LLM_NAME"))
	if name == "" {
		return run, usagef("--llm_name is required: name the model, here, in a settings file or in LLM_NAME (or use --llm replay:FILE)")
	}
	provider, wireName, err := llm.ParseName(name)
	if err != nil {
		return run, err
	}
	run.ModelName = wireName
	if llm.AcceptsTemperature(wireName) {
		run.Temperature = &o.temperature
	}
	baseURL := first(o.baseURL, settings.LLMBaseURL, getenv("LLM_BASE_URL"), provider.BaseURL)
	if baseURL == "" {
		return run, usagef("--llm_base_url is required for %s: nobody knows where it is served", name)
	}
	server, err := llm.Open(provider.Format, llm.ServerOptions{
		BaseURL: baseURL, APIKey: first(o.apiKey, settings.APIKey, getenv("LLM_API_KEY"), getenv(provider.KeyName)),
	})
	if err != nil {
		return run, err
	}
	prices, err := llm.LoadPrices(o.prices)
	if err != nil {
		return run, err
	}
	run.BaseURL = server.BaseURL()
	run.Model = &llm.Priced{Model: &llm.Retry{Model: server, Retries: o.retries, Notice: note}, Prices: prices}
	return run, nil
}

// first is the first text that is not empty.
func first(texts ...string) string {
	for _, t := range texts {
		if t != "" {
			return t
		}
	}
	return ""
}

// parseExtraBody reads the JSON of --extra_body. The texts "true" and "false" in it become booleans, at any depth: shells make it
// hard to write the latter, and configurations for LLM-in-Sandbox rely on it.
func parseExtraBody(text string) (map[string]any, error) {
	if text == "" {
		return nil, nil
	}
	var body map[string]any
	if err := json.Unmarshal([]byte(text), &body); err != nil {
		return nil, usagef("--extra_body: want a JSON object such as {\"top_k\": 20}: %v", err)
	}
	for key := range body {
		switch key {
		case "messages", "input", "instructions", "system", "tools", "stream":
			return nil, usagef("--extra_body must not set %q, which the run itself sets", key)
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
