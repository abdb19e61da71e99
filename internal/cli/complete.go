package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// completeTimeout bounds the wait for a daemon's names: a shell waits meanwhile.
const completeTimeout = time.Second

// candidates returns the names of one kind of object that a word may become, with a description
// each.
type candidates func(ctx context.Context, c *client.Client, word string) ([]cobra.Completion, error)

// argKinds are the words of usage lines that stand for objects of the daemon.
var argKinds = map[string]candidates{
	"SANDBOX":   sandboxNames,
	"SNAPSHOT":  snapshotNames,
	"IMAGE":     imageNames,
	"REFERENCE": imageNames,
	"VOLUME":    volumeNames,
	"NETWORK":   namedNetworks,
}

// argExceptions are the arguments whose word in the usage line does not say what they are, by the
// command's path. All arguments are of the one kind.
var argExceptions = map[string]candidates{
	"sandboxd inspect":       anyNames,
	"sandboxd secret rm":     secretNames,
	"sandboxd profiles show": profileNames,
	"sandboxd cp":            sandboxPaths,
	"sandboxd pull":          nil, // a name of a registry's
}

// flagKinds are the flags of all commands whose values are names of objects.
var flagKinds = map[string]candidates{
	"snapshot": snapshotNames,
	"profile":  profileNames,
	"network":  networkNames,
	"secret":   secretNames,
	"volume":   volumeSources,
}

// addCompletion lets shells complete names of objects. It asks a running daemon and starts none;
// what goes wrong is silent, since the user is typing.
func addCompletion(root *cobra.Command, d deps) {
	for _, cmd := range root.Commands() {
		if cmd.Name() != agentName {
			addCompletion(cmd, d)
		}
	}
	for name, kind := range flagKinds {
		if f := root.Flags().Lookup(name); f != nil && !f.Hidden {
			_ = root.RegisterFlagCompletionFunc(name, func(cmd *cobra.Command, _ []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
				return ask(cmd, d, kind, word)
			}) // it fails for a flag that has one already
		}
	}
	if root.ValidArgsFunction != nil {
		return
	}
	args, repeats := usedArgs(root.Use)
	exception, excepted := argExceptions[root.CommandPath()]
	if !excepted && !slices.ContainsFunc(args, func(a string) bool { return argKinds[a] != nil }) {
		return
	}
	root.ValidArgsFunction = func(cmd *cobra.Command, typed []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
		kind := exception
		if !excepted {
			at := len(typed)
			if repeats {
				at = min(at, len(args)-1)
			}
			if at >= len(args) {
				return nil, cobra.ShellCompDirectiveDefault // arguments of a program, or files
			}
			if kind = argKinds[args[at]]; kind == nil {
				return nil, cobra.ShellCompDirectiveDefault
			}
		}
		fit, directive := ask(cmd, d, kind, word)
		if len(fit) == 0 && cmd.Name() == "cp" {
			directive = cobra.ShellCompDirectiveDefault // a file of the host
		}
		return fit, directive
	}
}

// usedArgs returns the arguments in the first usage line of a command, and whether the last one may
// be repeated. It stops at the program that a command runs.
func usedArgs(use string) (args []string, repeats bool) {
	line, _, _ := strings.Cut(use, "\n")
	for _, word := range strings.Fields(line)[1:] {
		name := strings.Trim(word, "[].")
		if name == "flags" {
			continue
		}
		if name == "--" || name == "PROGRAM" {
			return args, false
		}
		args, repeats = append(args, name), strings.HasSuffix(word, "...")
	}
	return args, repeats
}

func ask(cmd *cobra.Command, d deps, kind candidates, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if kind == nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
	defer cancel()
	c := d.Client()
	defer c.Close()
	found, err := kind(ctx, c, word)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	directive := cobra.ShellCompDirectiveNoFileComp
	var fit []cobra.Completion
	for _, f := range found {
		name, _, _ := strings.Cut(f, "\t")
		if strings.HasPrefix(name, word) && cmdline.Printable(name) == name {
			fit = append(fit, f)
		}
		if strings.HasSuffix(name, ":") {
			directive = cobra.ShellCompDirectiveNoSpace // a path follows; without candidates, files do
		}
	}
	return fit, directive
}

// described returns a candidate with its description, which may come from an image.
func described(name string, words ...string) cobra.Completion {
	return cobra.CompletionWithDesc(name, cmdline.Printable(strings.Join(words, ", ")))
}

// sandboxNames offers names, and ids to those who have begun to type one.
func sandboxNames(ctx context.Context, c *client.Client, word string) (out []cobra.Completion, err error) {
	all, err := c.ListSandboxes(ctx, client.ListOptions{})
	for _, s := range all {
		out = append(out, described(s.Name, string(s.State), s.Image))
		if word != "" {
			out = append(out, described(s.ID, s.Name, string(s.State)))
		}
	}
	return out, err
}

// sandboxPaths offers names of sandboxes with a colon, behind which a path stands.
func sandboxPaths(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.ListSandboxes(ctx, client.ListOptions{})
	for _, s := range all {
		out = append(out, described(s.Name+":", string(s.State), s.Image))
	}
	return out, err
}

func snapshotNames(ctx context.Context, c *client.Client, word string) (out []cobra.Completion, err error) {
	all, err := c.Snapshots(ctx, "")
	for _, s := range all {
		if s.Name != "" {
			out = append(out, described(s.Name, "of "+s.SandboxName, since(s.CreatedAt)))
		}
		if s.Name == "" || word != "" {
			out = append(out, described(s.ID, "of "+s.SandboxName, since(s.CreatedAt)))
		}
	}
	return out, err
}

// imageNames offers references, and their short forms: debian:12 for docker.io/library/debian:12.
func imageNames(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.Images(ctx)
	for _, i := range all {
		short := strings.TrimPrefix(strings.TrimPrefix(i.Reference, "docker.io/"), "library/")
		out = append(out, described(short, i.Platform))
		if short != i.Reference {
			out = append(out, described(i.Reference, i.Platform))
		}
	}
	return out, err
}

func profileNames(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.Profiles(ctx)
	for _, p := range all {
		out = append(out, described(p.Name, p.Description))
	}
	return out, err
}

func volumeNames(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.Volumes(ctx, nil)
	for _, v := range all {
		out = append(out, described(v.Name, since(v.CreatedAt)))
	}
	return out, err
}

// volumeSources offers names of volumes with a colon, behind which the target stands.
func volumeSources(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.Volumes(ctx, nil)
	for _, v := range all {
		out = append(out, described(v.Name+":", since(v.CreatedAt)))
	}
	return out, err
}

func secretNames(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.Secrets(ctx)
	for _, s := range all {
		out = append(out, s.Name)
	}
	return out, err
}

// networkNames offers the values of --network: the modes, and the named networks.
func networkNames(ctx context.Context, c *client.Client, _ string) ([]cobra.Completion, error) {
	out := []cobra.Completion{
		described(string(api.NetworkNone), "no way out"), described(string(api.NetworkFull), "all public addresses"),
		described(string(api.NetworkEgress)+":", "what a policy allows"), described(string(api.NetworkSandbox)+":", "that of another sandbox"),
	}
	all, err := c.NamedNetworks(ctx)
	if err != nil {
		return out, nil //nolint:nilerr // the modes need no daemon
	}
	for _, n := range all {
		out = append(out, described("net:"+n.Name, "named network"))
	}
	return out, nil
}

// namedNetworks offers named networks.
func namedNetworks(ctx context.Context, c *client.Client, _ string) (out []cobra.Completion, err error) {
	all, err := c.NamedNetworks(ctx)
	for _, n := range all {
		out = append(out, described(n.Name, "named network"))
	}
	return out, err
}

// anyNames offers what inspect takes.
func anyNames(ctx context.Context, c *client.Client, word string) (out []cobra.Completion, err error) {
	for _, kind := range []candidates{sandboxNames, snapshotNames, imageNames, volumeNames, namedNetworks} {
		some, kerr := kind(ctx, c, word)
		out = append(out, some...)
		if err = kerr; err != nil {
			return nil, err
		}
	}
	return out, nil
}
