package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/document"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// policyArguments explains the arguments of the commands about policies.
const policyArguments = `A POLICY is a file, if its name has a slash or a dot, or built-in rule sets with
commas between them, such as pypi,github-read. FLOWS is a record of a network, a
JSON value a line. A - stands for standard input.`

func newPolicy(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Check, compare, test and learn policies of networks",
		Long: `Check, compare, test and learn the policies that say which connections leave a
sandbox. No daemon is needed. "sandboxd docs network-policy" explains the
documents.

` + policyArguments,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	for _, newCommand := range []func(deps) *cobra.Command{newPolicyCheck, newPolicyShow, newPolicyTest, newPolicyDiff, newPolicyLearn} {
		cmd.AddCommand(newCommand(d))
	}
	return cmd
}

// policyDocument returns the document that an argument stands for: see policyArguments.
func policyDocument(arg string, stdin io.Reader) ([]byte, error) {
	if arg == "-" {
		return cmdline.ReadPolicy(stdin)
	}
	return cmdline.PolicyDocument(arg, policy.Named)
}

// openInput opens a file, or standard input for "-".
func openInput(arg string, stdin io.Reader) (io.ReadCloser, error) {
	if arg == "-" {
		return io.NopCloser(stdin), nil
	}
	return os.Open(arg)
}

// readPolicy returns the policy that an argument stands for.
func readPolicy(arg string, stdin io.Reader) (*policy.Policy, error) {
	doc, err := policyDocument(arg, stdin)
	if err != nil {
		return nil, err
	}
	p, err := policy.Parse(doc)
	if all := document.Mistakes(err); len(all) > 1 {
		return nil, fmt.Errorf("%s:%w, and %d more that sandboxd policy check shows", arg, all[0], len(all)-1)
	} else if len(all) == 1 {
		return nil, fmt.Errorf("%s:%w", arg, all[0])
	}
	return p, err
}

type policyCheckOptions struct{ json bool }

// policyFinding is a mistake or a warning, as check prints it.
type policyFinding struct {
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Message string `json:"message"`
}

func newPolicyCheck(d deps) *cobra.Command {
	var opts policyCheckOptions
	cmd := &cobra.Command{
		Use:   "check [flags] FILE",
		Short: "Find the mistakes in a policy",
		Long: `Find the mistakes in a policy, with their lines and columns. Rules that have no
effect are warnings. A - stands for standard input.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error { return runPolicyCheck(args[0], opts, d) },
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print mistakes and warnings as JSON")
	cmdline.ExitStatus(cmd, `  0    the policy has no mistake; it may have warnings
  1    it has mistakes, which the output shows, or cannot be read
  2    the command line is wrong`)
	return cmd
}

func runPolicyCheck(file string, opts policyCheckOptions, d deps) error {
	if file != "-" && !strings.ContainsAny(file, "./") {
		file = "./" + file // a file that has the name of a preset
	}
	doc, err := policyDocument(file, d.Stdin)
	if err != nil {
		return err
	}
	found := struct {
		Mistakes []policyFinding `json:"mistakes"`
		Warnings []policyFinding `json:"warnings"`
	}{[]policyFinding{}, []policyFinding{}}
	p, err := policy.Parse(doc)
	all := document.Mistakes(err)
	if err != nil && len(all) == 0 {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, e := range all {
		found.Mistakes = append(found.Mistakes, policyFinding{Line: e.Line, Column: e.Column, Message: e.Message})
	}
	if err == nil {
		for _, w := range p.Warnings() {
			found.Warnings = append(found.Warnings, policyFinding{w.Line, w.Column, w.Rule, w.Message})
		}
	}
	if opts.json {
		if err := cmdline.PrintJSON(d.Stdout, found); err != nil {
			return err
		}
	} else {
		var b strings.Builder
		for _, m := range found.Mistakes {
			fmt.Fprintf(&b, "%s\n", cmdline.Printable(fmt.Sprintf("%s:%d:%d: %s", file, m.Line, m.Column, m.Message)))
		}
		for _, w := range found.Warnings {
			fmt.Fprintf(&b, "%s\n", cmdline.Printable(fmt.Sprintf("%s:%d:%d: warning: %s: %s", file, w.Line, w.Column, w.Rule, w.Message)))
		}
		if b.Len() == 0 {
			fmt.Fprintf(&b, "%s: no mistakes\n", cmdline.Printable(file))
		}
		if _, err := io.WriteString(d.Stdout, b.String()); err != nil {
			return err
		}
	}
	if len(found.Mistakes) > 0 {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return nil
}

func newPolicyShow(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show [POLICY]",
		Short: "Print a policy with all of its rules",
		Long: `Print a policy as a document: built-in rule sets as their rules, and every default
filled in. Without a POLICY, list the built-in rule sets.

` + policyArguments,
		Example: `  sandboxd policy show github-read
  sandboxd policy show pypi,npm > policy.yaml`,
		Args: cmdline.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error { return runPolicyShow(args, d) },
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return policy.Presets(), cobra.ShellCompDirectiveDefault
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runPolicyShow(args []string, d deps) error {
	if len(args) == 0 {
		_, err := fmt.Fprintln(d.Stdout, strings.Join(policy.Presets(), "\n"))
		return err
	}
	p, err := readPolicy(args[0], d.Stdin)
	if err != nil {
		return err
	}
	doc, err := p.Document()
	if err != nil {
		return err
	}
	_, err = d.Stdout.Write(doc)
	return err
}

type policyDiffOptions struct{ json bool }

func newPolicyDiff(d deps) *cobra.Command {
	var opts policyDiffOptions
	cmd := &cobra.Command{
		Use:   "diff [flags] POLICY-A POLICY-B",
		Short: "Say whether a policy allows more than another",
		Long: `Say whether POLICY-B allows anything that POLICY-A refuses, and the other way
round, with an example of each. The comparison is exact: rules that are written
differently and decide alike are no difference. A budget of a rule that is missing
or larger allows more.

` + policyArguments,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error { return runPolicyDiff(args[0], args[1], opts, d) },
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print the outcome as JSON")
	cmdline.ExitStatus(cmd, `  0    POLICY-B allows nothing that POLICY-A refuses
  1    it does, and the output has an example; or an error, which stderr explains
  2    the command line is wrong`)
	return cmd
}

func runPolicyDiff(fileA, fileB string, opts policyDiffOptions, d deps) error {
	if fileA == "-" && fileB == "-" {
		return cmdline.Usagef("standard input is one policy, not two")
	}
	a, err := readPolicy(fileA, d.Stdin)
	if err != nil {
		return err
	}
	b, err := readPolicy(fileB, d.Stdin)
	if err != nil {
		return err
	}
	more, wider, err := policy.Widens(a, b)
	if err != nil {
		return err
	}
	less, narrower, err := policy.Widens(b, a)
	if err != nil {
		return err
	}
	var found struct {
		More string `json:"more,omitempty"` // an example that B allows
		Less string `json:"less,omitempty"` // an example that B refuses
	}
	var text string
	if wider {
		found.More = more.String()
		text += fmt.Sprintf("%s allows what %s refuses: %s\n", fileB, fileA, more)
	}
	if narrower {
		found.Less = less.String()
		text += fmt.Sprintf("%s refuses what %s allows: %s\n", fileB, fileA, less)
	}
	switch {
	case opts.json:
		err = cmdline.PrintJSON(d.Stdout, found)
	case text == "":
		_, err = fmt.Fprintln(d.Stdout, "both allow the same")
	default:
		_, err = io.WriteString(d.Stdout, text)
	}
	if err == nil && wider {
		err = &cmdline.ExitError{Code: cmdline.CodeError}
	}
	return err
}

func newPolicyLearn(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "learn FLOWS",
		Short: "Write the smallest policy that allows recorded flows",
		Long: `Write the smallest policy that would have allowed the flows of a record. Refused
flows are left out, and names that were only looked up. Names and paths are exact
unless eight or more share a domain or a directory: then a pattern takes their place,
and a comment says so. Read the policy before you use it: a program that you did not
trust has written the record.

` + policyArguments,
		Example: `  sandboxd policy learn flows.jsonl > policy.yaml`,
		Args:    cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			flows, err := readFlows(args[0], d.Stdin)
			if err != nil {
				return err
			}
			doc, err := policy.Learn(flows)
			if err != nil {
				return err
			}
			_, err = d.Stdout.Write(doc)
			return err
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}
