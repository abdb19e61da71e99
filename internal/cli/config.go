package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

// Flags of serve that are no settings.
const (
	flagConfig     = "config"
	flagBackground = "background"
)

// noConfig is the value of --config that means no file.
const noConfig = "none"

const flagSocket = "socket"

// ofRoot are the settings that an ordinary user's daemon does not take from the host's file: places
// and tenants there are those of root's daemon, and secrets are not the user's to read.
var ofRoot = []string{"agent-inputs", "data-dir", "multi-tenant", "pool", "runtime-dir", "secrets", flagSocket, "tenants"}

// configHost holds what the settings of a daemon depend on. Tests fill it in; other code uses
// [hostConfig].
type configHost struct {
	uid    int
	files  []string
	getenv func(string) string
	read   func(path string) ([]byte, error)
	// lenient leaves settings with mistakes out, and collects the mistakes; without are further places
	// of settings to leave out.
	lenient bool
	without map[config.Place]bool
}

func hostConfig() configHost {
	return configHost{uid: os.Getuid(), files: dirs.ConfigFiles(), getenv: os.Getenv, read: config.Read}
}

// The origins of a setting.
const (
	fromDefault     = "default"
	fromFile        = "file"
	fromFlag        = "flag"
	fromEnvironment = "environment"
)

// origin tells where the value of a setting comes from.
type origin struct {
	kind     string
	place    config.Place // of a file
	variable string       // of the environment
}

func (o origin) String() string {
	switch o.kind {
	case fromFile:
		return fmt.Sprintf("%s:%d", o.place.File, o.place.Line)
	case fromEnvironment:
		return "environment " + o.variable
	}
	return o.kind
}

// loaded is the outcome of reading the config.
type loaded struct {
	files   []string          // that count, missing ones too
	found   []string          // that are there
	origins map[string]origin // by setting; missing: default
	ignored []config.Setting  // of root's daemon, in the host's file
	errs    []error           // mistakes, each at a place
}

// load sets the flags that are not given to the values of the config files and of the environment.
// A given flag comes first, then the environment, then the last file.
func (o *serveOptions) load(flags *pflag.FlagSet, given func(string) bool, h configHost) (*loaded, error) {
	c := &loaded{files: h.files, origins: make(map[string]origin)}
	if o.background && !given("idle-exit") {
		o.IdleExit = backgroundIdleExit
	}
	switch o.config {
	case "":
	case noConfig:
		c.files = nil
	default:
		path, err := filepath.Abs(o.config)
		if err != nil {
			return nil, fmt.Errorf("make %s absolute: %w", o.config, err)
		}
		c.files = []string{path}
	}
	contents := make(map[string][]byte)
	for _, path := range c.files {
		data, err := h.read(path)
		if errors.Is(err, os.ErrNotExist) && o.config == "" {
			continue
		}
		if err != nil {
			return nil, err
		}
		contents[path] = data
	}
	if err := c.apply(contents, flags, given, &h); err != nil {
		return nil, err
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if given(f.Name) {
			c.origins[f.Name] = origin{kind: fromFlag}
		}
	})
	if path := h.getenv("SANDBOXD_SOCKET"); path != "" && !given(flagSocket) && !given("runtime-dir") {
		if err := flags.Lookup(flagSocket).Value.Set(path); err != nil {
			return nil, err
		}
		c.origins[flagSocket] = origin{kind: fromEnvironment, variable: "SANDBOXD_SOCKET"}
	}
	if dir := h.getenv("XDG_DATA_HOME"); h.uid != 0 && filepath.IsAbs(dir) && c.origins["data-dir"].kind == "" {
		c.origins["data-dir"] = origin{kind: fromEnvironment, variable: "XDG_DATA_HOME"}
	}
	return c, nil
}

// apply sets flags that are not given to the values of the files' contents. All values are checked,
// also those that do not count.
func (c *loaded) apply(contents map[string][]byte, flags *pflag.FlagSet, given func(string) bool, h *configHost) error {
	values := make(map[string]config.Setting)
	for _, path := range c.files {
		data, ok := contents[path]
		if !ok {
			continue
		}
		c.found = append(c.found, path)
		settings, err := config.Parse(path, data, settingKinds())
		if err != nil {
			c.errs = append(c.errs, err)
		}
		for _, s := range settings {
			if h.without[s.Place] {
				continue
			}
			if err := checkSetting(s); err != nil {
				c.errs = append(c.errs, err)
				continue
			}
			if path == dirs.SystemConfig && h.uid != 0 && slices.Contains(ofRoot, s.Name) {
				c.ignored = append(c.ignored, s)
				continue
			}
			values[s.Name] = s
		}
	}
	if len(c.errs) > 0 && !h.lenient {
		return errors.Join(c.errs...)
	}
	for name, s := range values {
		if given(name) {
			continue
		}
		if err := setFlag(flags.Lookup(name), s.Values); err != nil {
			return config.Errorf(s.Place, "%s: %v", name, err)
		}
		c.origins[name] = origin{kind: fromFile, place: s.Place}
	}
	return nil
}

// placed names the place in a file where the message names a flag that a file has set. Errors of
// options begin with the flag.
func (c *loaded) placed(err error) error {
	text, ok := strings.CutPrefix(err.Error(), "--")
	if !ok {
		return err
	}
	name := text[:max(0, strings.IndexAny(text, " :,"))]
	if o := c.origins[name]; o.kind == fromFile {
		return config.Errorf(o.place, "%s", text)
	}
	return err
}

// settings returns new flags of serve that parse no command line: the settings of files.
func settings(o *serveOptions, socket *string) *pflag.FlagSet {
	f := pflag.NewFlagSet("settings", pflag.ContinueOnError)
	o.addFlags(f)
	f.StringVar(socket, flagSocket, "", "the daemon's Unix `socket`")
	return f
}

// isSetting reports whether a flag of serve may stand in a file.
func isSetting(f *pflag.Flag) bool {
	return f.Name != flagConfig && f.Name != flagBackground && f.Name != "help"
}

// settingKinds derives the names and kinds of settings from the flags.
func settingKinds() map[string]config.Kind {
	kinds := make(map[string]config.Kind)
	settings(newServeOptions(), new(string)).VisitAll(func(f *pflag.Flag) {
		if !isSetting(f) {
			return
		}
		kind := config.Text
		switch f.Value.Type() {
		case "string":
			kind = config.String
		case "bool":
			kind = config.Bool
		case "int", "int64":
			kind = config.Integer
		case "float64":
			kind = config.Number
		case "stringArray", "stringSlice":
			kind = config.List
		}
		kinds[f.Name] = kind
	})
	return kinds
}

// checkSetting tries a value.
func checkSetting(s config.Setting) error {
	f := settings(newServeOptions(), new(string)).Lookup(s.Name)
	if err := setFlag(f, s.Values); err != nil {
		return config.Errorf(s.Place, "%s: %v", s.Name, err)
	}
	// A daemon that a command has started works in /.
	what, _ := pflag.UnquoteUsage(f)
	for _, v := range s.Values {
		if s.Name == "service" {
			if _, to, ok := strings.Cut(v, "=unix:"); ok && !filepath.IsAbs(to) {
				return config.Errorf(s.Place, "%s: %q is no absolute path", s.Name, to)
			}
		}
		isPath := what == "directory" || what == flagSocket || what == "file" && (s.Name != "network-ceiling" && s.Name != "code-policy" || strings.ContainsAny(v, "./"))
		if isPath && s.Name == "mount-root" && (v == "$HOME" || strings.HasPrefix(v, "$HOME/")) {
			continue
		}
		if isPath && v != "" && !filepath.IsAbs(v) {
			return config.Errorf(s.Place, "%s: %q is no absolute path", s.Name, v)
		}
	}
	return nil
}

func setFlag(f *pflag.Flag, values []string) error {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.Replace(values)
	}
	if err := f.Value.Set(values[0]); err != nil {
		return errors.New(cmdline.FlagMistake(f, values[0], err))
	}
	return nil
}

// flagValue returns the value of a flag in one line, or its elements.
func flagValue(f *pflag.Flag) (text string, list []string) {
	if values, ok := f.Value.(pflag.SliceValue); ok {
		list = values.GetSlice()
		return strings.Join(list, " "), append([]string{}, list...)
	}
	return f.Value.String(), nil
}

// finish returns the options of the daemon. Mistakes in values of a file have their place.
func (o *serveOptions) finish(c *loaded, d deps) (boot.Options, error) {
	if err := o.convert(d.SocketFlag()); err != nil {
		return boot.Options{}, &cmdline.UsageError{Err: c.placed(err)}
	}
	opts, err := o.complete("", dirs.Default) // load has asked the environment
	if _, usage := errors.AsType[*cmdline.UsageError](err); usage {
		return opts, &cmdline.UsageError{Err: c.placed(err)}
	}
	return opts, err
}

// reloader returns the function that computes the options anew from the contents of the files.
// Given are the options as the command line has them, and running what the daemon was started with.
func reloader(given serveOptions, running *pflag.FlagSet, c *loaded) func(map[string][]byte) (boot.Options, []string, error) {
	inEffect := make(map[string]string)
	running.VisitAll(func(f *pflag.Flag) { inEffect[f.Name], _ = flagValue(f) })
	isGiven := running.Changed
	return func(contents map[string][]byte) (boot.Options, []string, error) {
		for _, path := range c.found {
			if _, ok := contents[path]; !ok { // perhaps it is being replaced; defaults could delete what it keeps
				return boot.Options{}, nil, fmt.Errorf("%s is missing, and was there when the daemon started: restart the daemon to do without it", path)
			}
		}
		next, socket := new(serveOptions), ""
		flags := settings(next, &socket)
		*next = given // addFlags has set defaults
		if next.background && !isGiven("idle-exit") {
			next.IdleExit = backgroundIdleExit
		}
		again := &loaded{files: c.files, origins: make(map[string]origin)}
		if err := again.apply(contents, flags, isGiven, &configHost{uid: os.Getuid()}); err != nil {
			return boot.Options{}, nil, err
		}
		err := next.convert(socket)
		if err == nil {
			err = checkValues(&next.Options)
		}
		if err != nil {
			return boot.Options{}, nil, again.placed(err)
		}
		var changed []string
		flags.VisitAll(func(f *pflag.Flag) {
			text, _ := flagValue(f)
			// A flag or the environment has set the socket if no file did; nothing here says to what.
			if !isSetting(f) || text == inEffect[f.Name] || f.Name == flagSocket && again.origins[flagSocket].kind == "" {
				return
			}
			changed = append(changed, f.Name)
			if boot.Reloadable(f.Name) {
				inEffect[f.Name] = text
			}
		})
		return next.Options, changed, nil
	}
}

func newConfig(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check and show the settings of the daemon",
		Long: `Settings of the daemon stand in /etc/sandboxd/sandboxd.yaml, and in an ordinary
user's own $XDG_CONFIG_HOME/sandboxd/sandboxd.yaml, which comes first. Their names
are those of the flags of "sandboxd serve"; a flag comes before both files.

  log-level: debug
  default-timeout: 30m
  pool: [host=4]

The file belongs to root or the daemon's user, and no other one may write it.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newConfigCheck(d), newConfigShow(d))
	return cmd
}

func newConfigCheck(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a config file, or those that the daemon reads",
		Long: `Check a config file, or those that the daemon reads, without starting one. Each
mistake is printed with its line and column.`,
		Args: cmdline.UsageArgs(cobra.MaximumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			opts := newServeOptions()
			if len(args) == 1 {
				opts.config = args[0]
			}
			return runConfigCheck(opts, hostConfig(), d)
		},
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func runConfigCheck(opts *serveOptions, h configHost, d deps) error {
	c, errs := checkConfig(opts.config, h, d)
	for _, err := range errs {
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintf(d.Stderr, "sandboxd: %s\n", cmdline.Printable(strings.TrimSuffix(line, "\n")))
		}
	}
	if len(errs) > 0 {
		return &cmdline.ExitError{Code: cmdline.CodeError}
	}
	printIgnored(d, c)
	for _, path := range c.found {
		if _, err := fmt.Fprintf(d.Stdout, "%s: ok\n", cmdline.Printable(path)); err != nil {
			return err
		}
	}
	if len(c.found) == 0 {
		_, err := fmt.Fprintf(d.Stdout, "no config file; looked for %s\n", cmdline.Printable(strings.Join(c.files, " and ")))
		return err
	}
	return nil
}

// checkConfig returns all mistakes of the config files. Most checks end with the first mistake:
// they are made again without the setting that has it.
func checkConfig(name string, h configHost, d deps) (*loaded, []error) {
	h.lenient, h.without = true, make(map[config.Place]bool)
	var found []error
	for {
		socket, opts := "", newServeOptions()
		flags := settings(opts, &socket)
		opts.config = name // addFlags has set the default
		c, err := opts.load(flags, func(string) bool { return false }, h)
		if err != nil {
			return nil, append(found, err)
		}
		var o boot.Options
		if o, err = opts.finish(c, deps{Deps: d.WithSocket(socket)}); err == nil {
			err = boot.Check(&o)
		}
		if err == nil {
			return c, append(slices.Clone(c.errs), found...)
		}
		err = c.placed(err)
		found = append(found, err)
		mistake, ok := errors.AsType[*config.Error](err)
		if !ok || h.without[mistake.Place] { // of no setting, or of one that is left out
			return c, append(slices.Clone(c.errs), found...)
		}
		h.without[mistake.Place] = true
	}
}

func printIgnored(d deps, c *loaded) {
	for _, s := range c.ignored {
		_, _ = fmt.Fprintf(d.Stderr, "%s: %s is for the daemon of root; yours does not take it from here\n", s.Place, s.Name) // a note
	}
}

func newConfigShow(d deps) *cobra.Command {
	opts := newServeOptions()
	var json bool
	cmd := &cobra.Command{
		Use:   "show [FLAG of serve...]",
		Short: "Show the settings that a daemon would start with, and their origins",
		Long: `Show the settings that a daemon would start with: value and origin of each, which is
a file and line, a flag, the environment or the default. The flags of
"sandboxd serve" may be given, --config too.`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runConfigShow(cmd.Context(), opts, cmd.Flags(), json, hostConfig(), d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = true })
	cmd.Flags().BoolVar(&json, "json", false, "print them as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// shownSetting is a setting as config show prints it.
type shownSetting struct {
	Name     string `json:"name"`
	Value    any    `json:"value"` // a string, or a list of strings
	Origin   string `json:"origin"`
	File     string `json:"file,omitempty"`
	Line     int    `json:"line,omitempty"`
	Variable string `json:"variable,omitempty"`
}

func runConfigShow(_ context.Context, opts *serveOptions, flags *pflag.FlagSet, json bool, h configHost, d deps) error {
	c, err := opts.load(flags, flags.Changed, h)
	if err != nil {
		return err
	}
	o, err := opts.finish(c, d) //nolint:contextcheck // it reads files
	if err != nil {
		return err
	}
	printIgnored(d, c)
	places := map[string]string{"data-dir": o.DataDir, "runtime-dir": o.RuntimeDir, flagSocket: o.Socket}
	shown, rows := []shownSetting{}, [][]string{{"SETTING", "VALUE", "ORIGIN"}}
	flags.VisitAll(func(f *pflag.Flag) {
		if _, ok := settingKinds()[f.Name]; !ok {
			return
		}
		from := c.origins[f.Name]
		if from.kind == "" {
			from.kind = fromDefault
		}
		text, list := flagValue(f)
		if place, ok := places[f.Name]; ok {
			text = place
		}
		one := shownSetting{Name: f.Name, Value: text, Origin: from.kind, File: from.place.File, Line: from.place.Line, Variable: from.variable}
		if list != nil {
			one.Value = list
		}
		shown = append(shown, one)
		rows = append(rows, []string{f.Name, text, from.String()})
	})
	if json {
		return cmdline.PrintJSON(d.Stdout, shown)
	}
	return cmdline.Table(d.Stdout, rows)
}
