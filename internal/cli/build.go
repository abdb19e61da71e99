package cli

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/patternmatcher"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/build"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type buildOptions struct {
	limitFlags

	tags       []string
	file       string
	args       []string
	labels     []string
	target     string
	platform   string
	network    cmdline.Network
	secrets    []string
	noCache    bool
	timeout    cmdline.Seconds
	runTimeout cmdline.Seconds
	quiet      bool
	json       bool
}

func newBuild(d deps) *cobra.Command {
	var opts buildOptions
	cmd := &cobra.Command{
		Use:   "build [flags] PATH|-",
		Short: "Build an image from a Dockerfile",
		Long: `Build an image from the Dockerfile in PATH and print its reference and digest.
PATH is the context: what COPY finds there, but for what .dockerignore leaves
out. "-" reads a context from stdin, a tar.

Every RUN is a program in a sandbox of its own, with the limits given here and
the network of --network, by default none. Steps whose result is known are not done again. With
SOURCE_DATE_EPOCH in the environment, or as a --build-arg, no file has a later
time, and the same input makes the same image to the byte.

A secret is seen by the RUN that mounts it, and is in no layer, history, log or cache.`,
		Example: `  sandboxd build -t tools/app:1.0 .
  sandboxd build -f docker/Dockerfile --target test --build-arg VERSION=3 .
  sandboxd build --secret id=npmrc,src=$HOME/.npmrc .  # RUN --mount=type=secret,id=npmrc,target=/root/.npmrc npm ci
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) sandboxd build -t app .`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := opts.request(cmd.Flags().Changed)
			if err != nil {
				return err
			}
			return runBuild(cmd.Context(), args[0], opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *buildOptions) addFlags(f *pflag.FlagSet) {
	o.limitFlags.addFlags(f)
	o.memory.Least, o.memoryHigh.Least, o.readBPS.Least, o.writeBPS.Least = 1, 1, 1, 1
	f.StringArrayVarP(&o.tags, "tag", "t", nil, "`name` of the image; may be given more than once")
	f.StringVarP(&o.file, "file", "f", "", "the Dockerfile, a `file` in PATH or elsewhere, or - for stdin (default PATH/Dockerfile)")
	f.StringArrayVar(&o.args, "build-arg", nil, "value of an ARG: `NAME=value`, or NAME to pass on its value here")
	f.StringArrayVarP(&o.labels, "label", "l", nil, "`label` of the image: key=value")
	f.StringVar(&o.target, "target", "", "`stage` to build (default: the last)")
	f.StringVar(&o.platform, "platform", "", "`platform`, one that this host runs (default: this host's)")
	f.Var(&o.network, "network", cmdline.NetworkUsage+"; of RUN")
	f.StringArrayVar(&o.secrets, "secret", nil, "`secret` for RUN --mount=type=secret: id=NAME[,src=FILE|,env=VARIABLE]; by default the variable NAME, else the file NAME; repeatable")
	f.BoolVar(&o.noCache, "no-cache", false, "do every step anew")
	f.Var(&o.timeout, "timeout", "give up after this time (default 1h)")
	f.Var(&o.runTimeout, "run-timeout", "end the program of a RUN after this time (default: --timeout)")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "show no progress, and output only of a RUN that fails")
	f.BoolVar(&o.json, "json", false, "print the image as JSON")
}

// request returns the build request without the Dockerfile's name.
func (o *buildOptions) request(changed func(string) bool) (api.Build, error) {
	req := api.Build{
		Tags: o.tags, Target: o.target, Platform: o.platform, NoCache: o.noCache, Args: map[string]string{},
		Network: o.network.Value(), Timeout: float64(o.timeout), RunTimeout: float64(o.runTimeout),
	}
	var err error
	if req.Limits, err = o.limits(changed); err != nil {
		return req, err
	}
	if req.Labels, err = labelsOf(o.labels); err != nil {
		return req, err
	}
	if req.Secrets, err = readSecrets(o.secrets); err != nil {
		return req, err
	}
	if epoch, ok := os.LookupEnv("SOURCE_DATE_EPOCH"); ok && epoch != "" {
		req.Args["SOURCE_DATE_EPOCH"] = epoch
	}
	for _, a := range o.args {
		name, value, ok := strings.Cut(a, "=")
		if name == "" {
			return req, cmdline.Usagef("--build-arg %q has no name", a)
		}
		if !ok {
			if value, ok = os.LookupEnv(name); !ok {
				continue
			}
		}
		req.Args[name] = value
	}
	return req, nil
}

func runBuild(ctx context.Context, source string, opts buildOptions, req api.Build, d deps) error {
	body, wait, err := opts.open(source, &req, d)
	if err != nil {
		return err
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return errors.Join(err, body.Close())
	}
	defer c.Close()
	p := &buildProgress{w: d.Stderr}
	show := p.event
	var failed lastOutput
	if opts.quiet {
		show = failed.event
	}
	image, err := c.Build(ctx, body, req, show)
	if err != nil {
		failed.show(p)
	}
	p.end()
	_ = body.Close() // read to its end, or no longer needed
	if perr := wait(); perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return perr
	}
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, image)
	}
	return printImage(d.Stdout, image)
}

// open starts to send the context. Call wait when the reader is done.
func (o *buildOptions) open(source string, req *api.Build, d deps) (io.ReadCloser, func() error, error) {
	if source == "-" {
		if o.file == "-" {
			return nil, nil, cmdline.Usagef("context and Dockerfile cannot both come from stdin")
		}
		if cmdline.IsTerminal(d.Stdin) {
			return nil, nil, cmdline.Usagef("a context is expected on stdin, which is a terminal")
		}
		req.Dockerfile = o.file
		return io.NopCloser(d.Stdin), func() error { return nil }, nil
	}
	fi, err := os.Stat(source)
	if err != nil {
		return nil, nil, err
	}
	if !fi.IsDir() {
		return nil, nil, cmdline.Usagef("%s is not a directory; give the one that is the context, and the Dockerfile with -f", source)
	}
	root, err := os.OpenRoot(source)
	if err != nil {
		return nil, nil, err
	}
	var extra []byte // a Dockerfile outside the context
	switch name, inside := within(source, o.file); {
	case o.file == "-":
		extra, err = io.ReadAll(io.LimitReader(d.Stdin, maxDockerfile+1))
	case o.file != "" && inside:
		req.Dockerfile = name
	case o.file != "":
		extra, err = readDockerfile(o.file)
	}
	if err == nil && extra != nil {
		req.Dockerfile = build.HiddenDockerfile
	}
	var ignore *patternmatcher.PatternMatcher
	if err == nil {
		ignore, err = readIgnore(root, req.Dockerfile)
	}
	if err != nil {
		return nil, nil, errors.Join(err, root.Close())
	}
	needed := []string{cmp.Or(req.Dockerfile, defaultDockerfile)}
	if target, inside := within(source, filepath.Join(source, needed[0])); extra == nil && inside {
		needed = append(needed, target) // a link whose target .dockerignore may exclude
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := packContext(w, root, ignore, needed, extra, d.Stderr)
		_ = w.CloseWithError(err) // nil is io.EOF
		done <- errors.Join(err, root.Close())
	}()
	return r, func() error { return <-done }, nil
}

const (
	defaultDockerfile = "Dockerfile"
	maxDockerfile     = 1 << 20 // the daemon's limit
)

func readDockerfile(name string) (_ []byte, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(io.LimitReader(f, maxDockerfile+1))
}

// within returns the name of a file relative to a directory, if it lies there. It follows links in
// both.
func within(dir, file string) (string, bool) {
	if file == "" || file == "-" {
		return "", false
	}
	realDir, err1 := filepath.EvalSymlinks(dir)
	realFile, err2 := filepath.EvalSymlinks(file)
	if err1 != nil || err2 != nil {
		return "", false
	}
	absDir, err1 := filepath.Abs(realDir)
	absFile, err2 := filepath.Abs(realFile)
	if err1 != nil || err2 != nil {
		return "", false
	}
	name, err := filepath.Rel(absDir, absFile)
	return filepath.ToSlash(name), err == nil && filepath.IsLocal(name)
}

// readIgnore reads .dockerignore, to send less. The daemon applies it in any case.
func readIgnore(root *os.Root, dockerfile string) (*patternmatcher.PatternMatcher, error) {
	dockerfile = cmp.Or(dockerfile, defaultDockerfile)
	for _, name := range []string{dockerfile + ".dockerignore", ".dockerignore"} {
		data, err := root.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return build.Ignore(data)
	}
	return nil, nil //nolint:nilnil // nothing is ignored
}

// packContext writes a context as a tar stream. It sends the files that the daemon itself needs
// even if they are ignored: the Dockerfile under its names, and .dockerignore.
func packContext(w io.Writer, root *os.Root, ignore *patternmatcher.PatternMatcher, dockerfiles []string, extra []byte, notes io.Writer) error {
	t := tar.NewWriter(w)
	if extra != nil {
		hdr := &tar.Header{Typeflag: tar.TypeReg, Name: build.HiddenDockerfile, Mode: 0o644, Size: int64(len(extra))}
		if err := t.WriteHeader(hdr); err != nil {
			return err
		}
		if _, err := t.Write(extra); err != nil {
			return err
		}
	}
	err := fs.WalkDir(root.FS(), ".", func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("read %s: %w", filepath.Join(root.Name(), p), err)
		}
		if p == "." || p == build.HiddenDockerfile {
			return nil
		}
		needed := p == ".dockerignore" || p == dockerfiles[0]+".dockerignore" || slices.Contains(dockerfiles, p)
		if ignore != nil && !needed {
			out, err := ignore.MatchesOrParentMatches(p)
			if err != nil {
				return err
			}
			switch {
			case out && e.IsDir() && !ignore.Exclusions() && !slices.ContainsFunc(dockerfiles, func(d string) bool { return strings.HasPrefix(d, p+"/") }):
				return fs.SkipDir
			case out && !e.IsDir():
				return nil
			}
		}
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // deleted since the directory was listed
		}
		if err != nil {
			return err
		}
		return packOne(t, root, p, fi, p, notes)
	})
	if err != nil {
		return err
	}
	return t.Close()
}

// buildProgress prints the steps of a build and the output of its programs as lines, which are
// worth keeping.
type buildProgress struct {
	w io.Writer
	// The incomplete lines by stream: pieces of stdout and stderr arrive in any order.
	stdout, stderr strings.Builder
}

func (p *buildProgress) event(e api.BuildEvent) {
	at := fmt.Sprintf("[%d/%d]", e.Step, e.Steps)
	switch {
	case e.Pull != nil:
		if e.Pull.Status == "done" {
			fmt.Fprintf(p.w, "%s pulled layer %s\n", at, cmdline.Printable(cmdline.ShortDigest(e.Pull.Layer)))
		}
	case e.Stream != "":
		p.output(e)
	case e.Status == api.BuildStarted:
		p.end() // of the previous step, which may have no layer
		fmt.Fprintf(p.w, "%s %s\n", at, cmdline.Printable(e.Text))
	case e.Status == api.BuildCached && e.Layer != "":
		fmt.Fprintf(p.w, "%s cached\n", at)
	case e.Status == api.BuildDone && e.Layer != "":
		p.end()
		fmt.Fprintf(p.w, "%s done in %v\n", at, time.Duration(e.WallMS)*time.Millisecond)
	}
}

// output prints complete lines of both streams. A program's output is untrusted, so control
// characters are escaped.
func (p *buildProgress) output(e api.BuildEvent) {
	text := e.Output
	if text == "" {
		text = string(e.Data)
	}
	line := &p.stdout
	if e.Stream == "stderr" {
		line = &p.stderr
	}
	for {
		before, after, whole := strings.Cut(text, "\n")
		if line.Len() < 64<<10 {
			line.WriteString(before)
		}
		if !whole {
			return
		}
		p.show(line)
		text = after
	}
}

// end prints incomplete lines.
func (p *buildProgress) end() {
	p.show(&p.stdout)
	p.show(&p.stderr)
}

func (p *buildProgress) show(line *strings.Builder) {
	if line.Len() == 0 {
		return
	}
	fmt.Fprintf(p.w, "  | %s\n", cmdline.Printable(strings.ReplaceAll(strings.TrimRight(line.String(), "\r"), "\t", "        ")))
	line.Reset()
}
