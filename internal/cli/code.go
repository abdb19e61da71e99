package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/interpreter"
)

// Bounds of one request to the daemon, in bytes.
const (
	maxSource = 1 << 20
	maxStdin  = 16 << 20
)

type codeOptions struct {
	sandboxFlags

	image       string
	in          string
	context     string
	lang        string
	code        string
	libraries   []string
	libraryDir  string
	outputDir   string
	interactive bool
	timeout     cmdline.Seconds
	json        bool
	list        bool
	policy      string
	check       bool

	file string // of the source; "-": stdin; empty: --code has it
	args []string
}

func newCode(d deps) *cobra.Command {
	var opts codeOptions
	cmd := &cobra.Command{
		Use:   "code [flags] FILE|- [ARG]...",
		Short: "Run source code in a new sandbox, or in a running one",
		Long: `Run source code of a file, of stdin ("-") or of --code: with the interpreter or
compiler that the sandbox's image has. Output and exit code are the program's.

The language is that of --lang or of the file's extension, else python; --list
shows all. The sandbox is a new one, deleted afterwards whatever happens, or with
--in a running one, which stays. With --context it runs in an interpreter whose
variables stay, and values that it displays are printed. The source lies in a private directory while it
runs; line numbers are its own.

--library installs libraries first, by the language's package manager: from the
network, for which the sandbox needs --network, or from --library-dir. A failing
installation is an error.

--code-policy judges the code before it runs: a file, or presets such as strict.
The daemon's own policy counts as well. --check only judges, and prints the
findings.

SIGINT, SIGTERM and SIGHUP kill the program.`,
		Example: `  sandboxd code hello.py
  echo 'print(6*7)' | sandboxd code -
  sandboxd code --lang javascript --code 'console.log(6*7)'
  sandboxd code --image polyglot --timeout 10s main.go --verbose
  sandboxd code --in work --library-dir /wheels --library 'six>=1.16' job.py`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.parse(args, cmd.Flags()); err != nil {
				return err
			}
			if opts.list {
				return listLanguages(opts, d)
			}
			req, err := opts.request(cmd.Context(), opts.image, cmd.Flags().Changed)
			if err != nil {
				return err
			}
			code, err := opts.codeRequest(d.Stdin)
			if err != nil {
				return err
			}
			return runCode(cmd.Context(), opts, req, code, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitCode)
	return cmd
}

func (o *codeOptions) addFlags(f *pflag.FlagSet) {
	f.SetInterspersed(false) // flags after FILE are the program's
	o.sandboxFlags.addFlags(f)
	for _, name := range []string{"entrypoint", "image-command", "restart", "stop-signal"} {
		if flag := f.Lookup(name); flag != nil {
			flag.Hidden = true // of main processes
		}
	}
	f.StringVar(&o.image, "image", "", "`image` of the new sandbox (default \"host\")")
	f.StringVar(&o.in, "in", "", "run in this `sandbox`, by its id or name, instead of a new one")
	f.StringVar(&o.context, "context", "", "run in this `context` of the sandbox that --in names, whose variables stay")
	f.StringVar(&o.lang, "lang", "", "`language` (default: by the file's extension, else python)")
	f.StringVar(&o.code, "code", "", "source `text`; all arguments are then the program's")
	f.StringArrayVar(&o.libraries, "library", nil, "install a `library` before, such as requests or 'six>=1.16'; repeatable")
	f.StringVar(&o.outputDir, "output-dir", "", "`directory` of the sandbox whose files that the code writes are in --json")
	f.StringVar(&o.libraryDir, "library-dir", "", "`directory` of the sandbox with the packages of all libraries, instead of the network")
	f.BoolVarP(&o.interactive, "interactive", "i", false, "give the program our stdin, which is read to its end before (otherwise it is empty)")
	f.Var(&o.timeout, "timeout", "stop the program and all its children after this time, installation and compilation included")
	f.BoolVar(&o.json, "json", false, "print the result with its output, exit and usage as JSON")
	f.BoolVar(&o.list, "list", false, "list the languages")
	f.StringVar(&o.policy, "code-policy", "", "judge the code by a policy `file`, or by presets such as production,web_scraping, before it runs")
	f.BoolVar(&o.check, "check", false, "print the findings of the code policies, and do not run the code")
}

// runFlags are the flags that are not about a new sandbox.
var runFlags = []string{
	"in", "context", "lang", "code", "library", "library-dir", "output-dir", "interactive", "timeout", "json", "list", "code-policy", "check", "env", "env-file", "cwd", "user", "socket",
}

func (o *codeOptions) parse(args []string, f *pflag.FlagSet) error {
	given := f.Changed("code")
	switch {
	case o.list && (given || len(args) > 0):
		return cmdline.Usagef("--list lists the languages and runs no code")
	case o.list:
		return nil
	case !given && len(args) == 0:
		return cmdline.Usagef("no source is named; as in: sandboxd code FILE, or - for stdin")
	case given && o.code == "":
		return cmdline.Usagef("--code is empty")
	case given:
		o.args = args
	default:
		o.file, o.args = args[0], args[1:]
	}
	if o.file == "-" && o.interactive {
		return cmdline.Usagef("-: stdin has the source, so it cannot be the program's; give the source as a file or with --code")
	}
	if o.context != "" {
		return o.checkContext(f)
	}
	if o.in == "" {
		return nil
	}
	var err error
	f.Visit(func(flag *pflag.Flag) {
		if !slices.Contains(runFlags, flag.Name) && err == nil {
			err = cmdline.Usagef("--%s is about a new sandbox, and --in names one that there is", flag.Name)
		}
	})
	return err
}

// contextFlags are the flags of a run in a context.
var contextFlags = []string{"in", "context", "code", "library", "library-dir", "output-dir", "timeout", "json", "code-policy", "check", "env", "env-file", "socket"}

func (o *codeOptions) checkContext(f *pflag.FlagSet) (err error) {
	f.Visit(func(flag *pflag.Flag) {
		if !slices.Contains(contextFlags, flag.Name) && err == nil {
			err = cmdline.Usagef("--%s: a context has been created, with its language, directory and user", flag.Name)
		}
	})
	switch {
	case err != nil:
		return err
	case o.in == "":
		return cmdline.Usagef("--context names a context of the sandbox that --in names")
	case len(o.args) > 0:
		return cmdline.Usagef("code in a context has no arguments")
	}
	return nil
}

// codeRequest reads the source, and stdin if it is the program's.
func (o *codeOptions) codeRequest(stdin *os.File) (api.CodeRequest, error) {
	req := api.CodeRequest{
		Code: o.code, Context: o.context, Language: o.lang, Args: o.args, Libraries: o.libraries, LibraryDir: o.libraryDir, OutputDir: o.outputDir,
		Timeout: float64(o.timeout), Check: o.check,
	}
	if o.policy != "" {
		doc, err := codePolicyDocument(o.policy)
		if err != nil {
			return req, err
		}
		req.Policy = string(doc)
	}
	if o.in != "" {
		env, err := o.resolve(os.LookupEnv)
		if err != nil {
			return req, err
		}
		req.Env, req.Cwd, req.User = env, o.cwd, o.user
	}
	if o.file != "" {
		from := stdin
		if o.file != "-" {
			f, err := os.Open(o.file)
			if err != nil {
				return req, fmt.Errorf("read the source: %w", err)
			}
			defer f.Close()
			from = f
		}
		source, err := readUpTo(from, maxSource, "the source")
		if err != nil {
			return req, err
		}
		req.Code = string(source)
		if lang := interpreter.OfFile(o.file); lang != nil && o.lang == "" && o.context == "" {
			req.Language = lang.Name
		}
	}
	if o.interactive {
		var err error
		if req.Stdin, err = readUpTo(stdin, maxStdin, "stdin"); err != nil {
			return req, err
		}
	}
	return req, nil
}

func readUpTo(f *os.File, most int64, what string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	if int64(len(data)) > most {
		return nil, fmt.Errorf("read %s: it has more than %d bytes", what, most)
	}
	return data, nil
}

func runCode(ctx context.Context, opts codeOptions, req api.CreateSandbox, code api.CodeRequest, d deps) error {
	if opts.in != "" {
		c := d.Client()
		defer c.Close()
		return showCode(ctx, c, opts.in, opts, code, d)
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if opts.timeout != 0 && req.Timeout == 0 {
		req.Timeout = lifetimeFor(float64(opts.timeout))
	}
	if req.Workspace != nil { // its changes are looked at afterwards
		sb, err := cmdline.CreateSandbox(ctx, c, req, d.Stderr)
		if err != nil {
			return err
		}
		defer hintChanges(sb, d)
		return showCode(ctx, c, sb.ID, opts, code, d)
	}
	sb, tie, err := cmdline.CreateTied(ctx, c, req, d.Stderr)
	if err != nil {
		return err
	}
	defer tie.Close() // after the deletion
	defer func() {
		if derr := remove(ctx, c, sb.ID); derr != nil {
			cmdline.Explain(d.Stderr, fmt.Errorf("sandbox %s was left behind: %w", sb.ID, derr))
		}
	}()
	if ctx.Err() != nil { // a signal arrived while the sandbox was created
		return context.Cause(ctx)
	}
	return showCode(ctx, c, sb.ID, opts, code, d)
}

// showCode runs code in a sandbox and shows its output, or its result as JSON.
func showCode(ctx context.Context, c *client.Client, id string, opts codeOptions, code api.CodeRequest, d deps) error {
	t := terminalFlags{timeout: opts.timeout}
	if opts.json || opts.check {
		res, err := c.RunCode(ctx, id, code)
		if err != nil {
			return err
		}
		if !opts.json {
			return showFindings(d.Stdout, res.Findings)
		}
		if err := cmdline.PrintJSON(d.Stdout, res); err != nil {
			return err
		}
		return ending(res.Exit, t, d.Stderr)
	}
	stdout, stderr, stop, err := interruptibleOutput(ctx, d)
	if err != nil {
		return err
	}
	defer stop()
	end, err := c.StreamCode(ctx, id, code, func(e api.CodeEvent) error {
		var to io.Writer
		switch e.Type {
		case api.CodeStdout:
			to = stdout
		case api.CodeStderr:
			to = stderr
		case api.CodeValued:
			return showValue(stdout, e.Result)
		case api.CodeFailed:
			if code.Context == "" {
				return nil // its text is part of stderr
			}
			_, err := fmt.Fprintln(stderr, cmp.Or(e.Failure.Traceback, e.Failure.Name+": "+e.Failure.Value))
			return err
		case api.CodeStarted:
			if opts.policy == "" {
				return nil // the operator's policy warns in the result
			}
			return showFindings(stderr, e.Findings)
		case api.CodeEnded:
			return nil
		}
		if to == nil {
			return nil // of a later daemon
		}
		if e.Data != nil {
			_, err := to.Write(e.Data)
			return err
		}
		_, err := io.WriteString(to, e.Text)
		return err
	})
	if err != nil {
		return err
	}
	return ending(*end.Exit, t, d.Stderr)
}

// showFindings writes findings that refuse nothing.
func showFindings(w io.Writer, found []api.CodeFinding) error {
	for _, f := range found {
		text := fmt.Sprintf("%s: %s %s", f.Severity, f.Kind, f.Name)
		if f.Line > 0 {
			text = fmt.Sprintf("line %d: %s", f.Line, text)
		}
		if f.Reason != "" {
			text += ": " + f.Reason
		}
		if _, err := fmt.Fprintln(w, cmdline.Printable(text)); err != nil {
			return err
		}
	}
	return nil
}

// showValue writes the text of a displayed value.
func showValue(w io.Writer, v *api.CodeValue) error {
	text := v.Text
	if text == "" {
		text = "[a value without text; --json shows its other forms]"
	}
	_, err := fmt.Fprintln(w, text)
	return err
}

func listLanguages(opts codeOptions, d deps) error {
	list := api.LanguageList{}
	for _, l := range interpreter.All() {
		list.Languages = append(list.Languages, l.Describe())
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, list)
	}
	rows := [][]string{{"LANGUAGE", "ALIASES", "FILE", "LIBRARIES", "IMAGE"}}
	for _, l := range list.Languages {
		rows = append(rows, []string{l.Name, cmp.Or(strings.Join(l.Aliases, ","), "-"), l.FileName, cmp.Or(l.Libraries, "-"), "images/" + l.Image})
	}
	return cmdline.Table(d.Stdout, rows)
}
