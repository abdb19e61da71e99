package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newSecret(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret",
		Short: "Keep secrets that sandboxes use without having them",
		Long: `Keep secrets that sandboxes use without having them. A sandbox that was created with
--secret NAME has a placeholder; the gateway puts the secret into requests of one
host. "sandboxd docs network-policy" explains it.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newSecretSet(d), newSecretLs(d), newSecretRm(d))
	return cmd
}

type secretSetOptions struct {
	file      string
	tokenFile string
	host      string
	port      uint16
	methods   []string
	paths     []string
	always    bool
	variable  string

	basic  string
	header string
	aws    string
}

func newSecretSet(d deps) *cobra.Command {
	var opts secretSetOptions
	cmd := &cobra.Command{
		Use:   "set [flags] NAME --host HOST",
		Short: "Store a secret, or another value of one",
		Long: `Store a secret, in the place of one that has its name. Its value is read from stdin
or from a file, without its last line end; it is a bearer token unless a flag says
otherwise. Running sandboxes that have the secret use the new value at once.`,
		Example: `  sandboxd secret set github --host api.github.com --path '/repos/*' --variable GITHUB_TOKEN < token
  sandboxd secret set model --host api.example.com --header x-api-key --always --file key
  sandboxd run --network egress:github-read --secret github -- ./job`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runSecretSet(cmd.Context(), args[0], opts, cmd.Flags().Changed, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *secretSetOptions) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.file, "file", "-", "`file` that has the value; - is stdin")
	f.StringVar(&o.host, "host", "", "`name` of the one host that gets the secret")
	f.Uint16Var(&o.port, "port", 0, "`port` of that host (default 443)")
	f.StringArrayVar(&o.methods, "method", nil, "`method` of requests that get the secret; repeatable (default: all)")
	f.StringArrayVar(&o.paths, "path", nil, "`path` of requests that get the secret, as in policies; repeatable (default: all)")
	f.BoolVar(&o.always, "always", false, "put the secret also into requests that lack the header")
	f.StringVar(&o.variable, "variable", "", "environment `variable` of sandboxes that has the placeholder")
	f.StringVar(&o.basic, "basic", "", "the value is the password of this `user`; empty for the user that the client sends")
	f.StringVar(&o.header, "header", "", "the value is that of the header of this `name`")
	f.StringVar(&o.aws, "aws", "", "the value is the secret key of this access key `id` of AWS")
	f.StringVar(&o.tokenFile, "session-token-file", "", "`file` that has the session token of --aws")
}

func runSecretSet(ctx context.Context, name string, opts secretSetOptions, changed func(string) bool, d deps) error {
	req := api.SetSecret{
		Kind: api.SecretBearer, Host: opts.host, Port: opts.port, Methods: opts.methods, Paths: opts.paths, Always: opts.always, Variable: opts.variable,
		User: opts.basic, Header: opts.header, AccessKeyID: opts.aws,
	}
	kinds := 0
	for flag, kind := range map[string]api.SecretKind{"basic": api.SecretBasic, "header": api.SecretHeader, "aws": api.SecretAWS} {
		if changed(flag) {
			req.Kind = kind
			kinds++
		}
	}
	switch {
	case kinds > 1:
		return cmdline.Usagef("--basic, --header and --aws are different kinds of secrets; give one")
	case opts.host == "":
		return cmdline.Usagef("--host is missing: a secret goes to one host")
	case opts.tokenFile != "" && !changed("aws"):
		return cmdline.Usagef("--session-token-file is for --aws")
	}
	var err error
	if req.Value, err = readSecret(opts.file, d.Stdin); err != nil {
		return err
	}
	if opts.tokenFile != "" {
		if req.SessionToken, err = readSecret(opts.tokenFile, d.Stdin); err != nil {
			return err
		}
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	secret, err := c.SetSecret(ctx, name, req)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(secret.Name))
	return err
}

// maxSecret is more than any secret may have, in bytes.
const maxSecret = 64 << 10

// readSecret reads a value, without its last line end.
func readSecret(file string, stdin *os.File) (string, error) {
	if file == "-" && cmdline.IsTerminal(stdin) {
		return "", cmdline.Usagef("a value is expected on stdin, which is a terminal; name a file with --file")
	}
	f, err := openInput(file, stdin)
	if err != nil {
		return "", fmt.Errorf("read the secret: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err == nil && len(data) > maxSecret {
		err = errors.New("it is larger than any secret may be")
	}
	if err != nil {
		return "", fmt.Errorf("read the secret: %w", err)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r"), nil
}

func newSecretLs(d deps) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List secrets, without their values",
		Long: `List your secrets and the requests that get them, without their values. The list of
the daemon's user has those of its file too (sandboxd serve --secrets).`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runSecretLs(cmd.Context(), asJSON, d) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runSecretLs(ctx context.Context, asJSON bool, d deps) error {
	c := d.Client()
	defer c.Close()
	list, err := c.Secrets(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return cmdline.PrintJSON(d.Stdout, api.SecretList{Secrets: append([]api.Secret{}, list...)})
	}
	rows := [][]string{{"NAME", "KIND", "HOST", "METHODS", "PATHS", "VARIABLE", "CHANGED"}}
	for i := range list {
		s := &list[i]
		if s.Error != "" {
			rows = append(rows, []string{s.Name, "(unreadable)", "-", "-", "-", "-", "-"})
			continue
		}
		kind, when := string(s.Kind), "(file)"
		if s.Header != "" {
			kind += " " + s.Header
		}
		if !s.File {
			when = since(s.ChangedAt)
		}
		rows = append(rows, []string{
			s.Name, kind, net.JoinHostPort(s.Host, strconv.Itoa(int(s.Port))), cmp.Or(strings.Join(s.Methods, ","), "all"), cmp.Or(strings.Join(s.Paths, ","), "all"),
			cmp.Or(s.Variable, "-"), when,
		})
	}
	if err := cmdline.Table(d.Stdout, rows); err != nil {
		return err
	}
	for i := range list {
		if list[i].Error != "" {
			if _, err := fmt.Fprintln(d.Stderr, cmdline.Printable(list[i].Error)); err != nil {
				return err
			}
		}
	}
	return nil
}

func newSecretRm(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rm NAME...",
		Short: "Remove secrets",
		Long: `Remove secrets and print their names. Running sandboxes that have one are left with a
placeholder that stands for nothing.`,
		Args: cmdline.UsageArgs(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error { return runSecretRm(cmd.Context(), args, d) },
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runSecretRm(ctx context.Context, names []string, d deps) error {
	c := d.Client()
	defer c.Close()
	return removeEach(ctx, names, d, func(name string) (bool, error) { return true, c.RemoveSecret(ctx, name) })
}
