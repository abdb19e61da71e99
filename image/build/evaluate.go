package build

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Image is an image's configuration with Docker's additional fields.
type Image = dockerspec.DockerOCIImage

// ParseImage parses the configuration of a base image.
func ParseImage(data []byte) (*Image, error) {
	img := new(Image)
	if err := json.Unmarshal(data, img); err != nil {
		return nil, invalidf("read the configuration of the base: %w", err)
	}
	return img, nil
}

// Step is one instruction with everything filled in. At most one of Run, Copy and Dir is set; none
// if only the configuration changes.
type Step struct {
	Line int
	Text string // the instruction on one line, for display
	Run  *Run
	Copy *Copy
	Dir  *Dir
	// History is the entry for the image's history; its EmptyLayer is right for steps that change no
	// files.
	History ocispec.History
}

// Run is a program to execute.
type Run struct {
	Argv    []string
	Env     []string // complete, with the arguments
	Proxy   []string // variables of proxies, for the program; the result does not depend on them
	Cwd     string
	User    string
	Network string // "none", or empty for that of the build
	// Script is a here-document that is a program of its own, beginning with "#!"; the last word of
	// Argv is its path.
	Script string
	Mounts []Mount `json:",omitempty"` // by target
}

// Copy is a COPY or ADD.
type Copy struct {
	Add     bool // archives are unpacked
	Unpack  bool // false with ADD --unpack=false
	From    string
	Stage   *Stage // the stage in From, or
	Image   string // the image in From; both empty: the context
	Sources []string
	Inline  []Inline
	Dest    string // absolute; a slash at its end marks a directory
	Chown   string
	Chmod   string
}

// Inline is a file whose content is in the Dockerfile.
type Inline struct{ Name, Data string }

// Dir is a directory that must exist.
type Dir struct {
	Path string
	User string // owner of a new directory
}

// evaluation is the state of a stage during Evaluate.
type evaluation struct {
	stage  *Stage
	image  *Image
	vars   *scope
	cmdSet bool // CMD was given in this stage
	steps  []Step
}

// Evaluate fills in the variables of a stage. Base is the configuration of its base, nil for
// scratch. The returned image lacks layers, times and history.
func (s *Stage) Evaluate(ctx context.Context, base *Image) ([]Step, *Image, error) {
	img := &Image{}
	if base != nil {
		data, err := json.Marshal(base)
		if err == nil {
			err = json.Unmarshal(data, img)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("copy the configuration of the base: %w", err)
		}
	}
	f := s.plan.file
	if len(img.Config.OnBuild) > 0 {
		return nil, nil, &Error{File: f.name, Line: s.Line, Err: invalidf("FROM %s: the image has ONBUILD instructions, which are not supported: %s",
			clip(s.From), clip(img.Config.OnBuild[0]))}
	}
	p := s.plan.opts.Platform
	img.OS, img.Architecture, img.Variant = p.OS, p.Architecture, p.Variant
	img.RootFS, img.History, img.Created = ocispec.RootFS{Type: "layers"}, nil, nil
	if base == nil {
		img.Config.WorkingDir = "/"
	}
	if !slices.ContainsFunc(img.Config.Env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		img.Config.Env = append(img.Config.Env, "PATH="+defaultPath)
	}
	e := &evaluation{stage: s, image: img}
	// A stage passes its arguments on to stages based on it, as with BuildKit.
	if s.Base != nil && s.Base.vars != nil {
		e.vars = s.Base.vars.clone()
	} else {
		e.vars = newScope()
		for _, kv := range img.Config.Env {
			k, v, ok := strings.Cut(kv, "=")
			if !ok {
				kv = k + "=" + v
			}
			e.vars.set(k, kv)
		}
	}
	for _, c := range s.in.Commands {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		s.plan.filled.instruction = 0
		if err := e.command(c); err != nil {
			return nil, nil, f.fault(c, err)
		}
		if data, err := json.Marshal(img.Config); err != nil || len(data) > maxConfig {
			return nil, nil, f.fault(c, invalidf("the configuration has more than %d bytes", maxConfig))
		}
	}
	s.vars = e.vars
	return e.steps, img, nil
}

// defaultPath is Docker's for images without one.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func (e *evaluation) setEnv(key, value string) error {
	if err := validVariable(key); err != nil {
		return err
	}
	if len(value) > maxValue || strings.IndexByte(value, 0) >= 0 {
		return invalidf("the value of %s has %d bytes, %d are allowed, and no NUL", clip(key), len(value), maxValue)
	}
	config := &e.image.Config
	pair := key + "=" + value
	i := slices.IndexFunc(config.Env, func(kv string) bool { return strings.HasPrefix(kv, pair[:len(key)+1]) })
	switch {
	case i >= 0:
		config.Env[i] = pair
	case len(config.Env) >= maxVariables:
		return invalidf("more than %d variables", maxVariables)
	default:
		config.Env = append(config.Env, pair)
	}
	e.vars.set(key, pair)
	return nil
}

func (e *evaluation) expander() instructions.SingleWordExpander {
	return func(word string) (string, error) { return e.stage.plan.expand(word, e.vars) }
}

// add adds a step. The displayed text is the instruction, on one line.
func (e *evaluation) add(c instructions.Command, s Step) {
	s.Line = lineOf(c.Location())
	text := c.Name()
	if full, ok := c.(fmt.Stringer); ok {
		text = full.String()
	}
	s.Text = clip(strings.Join(strings.Fields(text), " "))
	if s.History.CreatedBy == "" {
		s.History.CreatedBy = s.Text
	}
	// Every image keeps the text, so it cannot be as long as its variables.
	most := maxCreatedBy
	if e.stage.plan.history > maxHistory {
		most = 200
	}
	s.History.CreatedBy = clipTo(s.History.CreatedBy, most)
	e.stage.plan.history += len(s.History.CreatedBy)
	s.History.EmptyLayer = s.Run == nil && s.Copy == nil && s.Dir == nil
	e.steps = append(e.steps, s)
}

//nolint:gocyclo // one case for each instruction, and the order is that of the manual
func (e *evaluation) command(c instructions.Command) error {
	if arg, ok := c.(*instructions.ArgCommand); ok {
		return e.arg(arg)
	}
	c = duplicate(c)
	if x, ok := c.(instructions.SupportsSingleWordExpansion); ok {
		if err := x.Expand(e.expander()); err != nil {
			return err
		}
	}
	if x, ok := c.(instructions.SupportsSingleWordExpansionRaw); ok {
		err := x.ExpandRaw(func(word string) (string, error) {
			lex := shell.NewLex('\\')
			lex.SkipProcessQuotes = true
			out, _, err := e.stage.plan.expandWith(lex, word, e.vars)
			return out, err
		})
		if err != nil {
			return err
		}
	}
	config := &e.image.Config
	switch c := c.(type) {
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			if err := e.setEnv(kv.Key, kv.Value); err != nil {
				return err
			}
		}
	case *instructions.LabelCommand:
		if config.Labels == nil {
			config.Labels = make(map[string]string)
		}
		for _, kv := range c.Labels {
			config.Labels[kv.Key] = kv.Value
		}
	case *instructions.MaintainerCommand:
		e.image.Author = c.Maintainer
	case *instructions.RunCommand:
		return e.run(c)
	case *instructions.CopyCommand:
		return e.copy(c, Copy{From: c.From, Chown: c.Chown, Chmod: c.Chmod}, c.SourcesAndDest)
	case *instructions.AddCommand:
		for _, s := range c.SourcePaths {
			if remote(s) {
				return invalidf("ADD %s: nothing is fetched, there is no network in a build; COPY a file of the context", clip(s))
			}
		}
		return e.copy(c, Copy{Add: true, Unpack: c.Unpack == nil || *c.Unpack, Chown: c.Chown, Chmod: c.Chmod}, c.SourcesAndDest)
	case *instructions.WorkdirCommand:
		dir, err := e.absolute(cmp.Or(c.Path, ".")) // as BuildKit treats an empty variable
		if err != nil {
			return err
		}
		config.WorkingDir = path.Clean(dir)
		e.add(c, Step{Dir: &Dir{Path: config.WorkingDir, User: config.User}, History: ocispec.History{CreatedBy: "WORKDIR " + config.WorkingDir}})
		return nil
	case *instructions.UserCommand:
		config.User = c.User
	case *instructions.CmdCommand:
		config.Cmd = e.words(c.ShellDependantCmdLine)
		e.cmdSet = true
	case *instructions.EntrypointCommand:
		config.Entrypoint = e.words(c.ShellDependantCmdLine)
		if !e.cmdSet {
			config.Cmd = nil // the base's belongs to the base's entry point
		}
	case *instructions.ExposeCommand:
		return e.expose(c)
	case *instructions.VolumeCommand:
		if config.Volumes == nil {
			config.Volumes = make(map[string]struct{})
		}
		for _, v := range c.Volumes {
			if v == "" {
				return invalidf("VOLUME: an empty path")
			}
			config.Volumes[v] = struct{}{}
		}
	case *instructions.ShellCommand:
		config.Shell = c.Shell
	case *instructions.StopSignalCommand:
		if err := validSignal(c.Signal); err != nil {
			return err
		}
		config.StopSignal = c.Signal
	case *instructions.HealthCheckCommand:
		config.Healthcheck = c.Health
	default:
		return invalidf("%s is not supported", strings.ToUpper(c.Name()))
	}
	e.add(c, Step{})
	return nil
}

// duplicate copies the parts that Expand changes: one stage may be evaluated more than once.
func duplicate(c instructions.Command) instructions.Command {
	switch c := c.(type) {
	case *instructions.EnvCommand:
		d := *c
		d.Env = slices.Clone(c.Env)
		return &d
	case *instructions.LabelCommand:
		d := *c
		d.Labels = slices.Clone(c.Labels)
		return &d
	case *instructions.CopyCommand:
		d := *c
		d.SourcePaths, d.SourceContents = slices.Clone(c.SourcePaths), slices.Clone(c.SourceContents)
		return &d
	case *instructions.AddCommand:
		d := *c
		d.SourcePaths, d.SourceContents = slices.Clone(c.SourcePaths), slices.Clone(c.SourceContents)
		return &d
	case *instructions.WorkdirCommand:
		return new(*c)
	case *instructions.UserCommand:
		return new(*c)
	case *instructions.VolumeCommand:
		d := *c
		d.Volumes = slices.Clone(c.Volumes)
		return &d
	case *instructions.StopSignalCommand:
		return new(*c)
	case *instructions.ExposeCommand:
		d := *c
		d.Ports = slices.Clone(c.Ports)
		return &d
	}
	return c
}

func (e *evaluation) arg(c *instructions.ArgCommand) error {
	for _, a := range c.Args {
		key, err := e.stage.plan.expand(a.Key, e.vars)
		if err != nil {
			return err
		}
		a.Key = key
		v, err := e.stage.plan.argument(a, e.vars)
		if err == nil && v != nil {
			err = e.vars.setArg(key, *v)
		}
		if err != nil {
			return err
		}
	}
	e.add(c, Step{})
	return nil
}

// words returns a command line, with the shell in front if it needs one.
func (e *evaluation) words(c instructions.ShellDependantCmdLine) []string {
	if !c.PrependShell {
		return c.CmdLine
	}
	shell := e.image.Config.Shell
	if len(shell) == 0 {
		shell = []string{"/bin/sh", "-c"}
	}
	return append(slices.Clone(shell), strings.Join(c.CmdLine, " "))
}

// proxies are the arguments that need no declaration. A build's result must not depend on them.
var proxies = []string{
	"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "FTP_PROXY", "ftp_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy",
}

// scriptDir is BuildKit's place for here-documents that are programs. It is in a file system that
// is new in every sandbox, so nothing of it stays.
const scriptDir = "/dev/pipes/"

func (e *evaluation) run(c *instructions.RunCommand) error {
	config := &e.image.Config
	r := &Run{Cwd: path.Join("/", config.WorkingDir), User: config.User} // a base may have it relative
	if instructions.GetNetwork(c) == instructions.NetworkNone {
		r.Network = "none"
	}
	var err error
	if r.Mounts, err = e.mounts(c); err != nil {
		return err
	}
	line := c.ShellDependantCmdLine
	if len(line.CmdLine) == 0 || !line.PrependShell && line.CmdLine[0] == "" {
		return invalidf("RUN: no program is named")
	}
	if len(line.Files) > 0 {
		if len(line.CmdLine) != 1 || !line.PrependShell {
			return invalidf("RUN: a here-document needs the shell form")
		}
		if err := e.heredoc(r, &line); err != nil {
			return err
		}
	}
	if r.Argv == nil {
		r.Argv = e.words(line)
	}
	var given []string // for display, so only the given ones
	for shown, i := 0, 0; i < len(e.vars.args) && shown < maxCreatedBy; i++ {
		if k := e.vars.args[i]; e.vars.isArg[k] && !slices.Contains(proxies, k) {
			given = append(given, e.vars.list[e.vars.at[k]])
			shown += len(given[len(given)-1])
		}
	}
	for _, pair := range e.vars.list {
		if k, _, _ := strings.Cut(pair, "="); e.vars.isArg[k] && slices.Contains(proxies, k) {
			r.Proxy = append(r.Proxy, pair)
		} else {
			r.Env = append(r.Env, pair)
		}
	}
	if !e.vars.has("SOURCE_DATE_EPOCH") && e.stage.plan.opts.Epoch != "" {
		r.Env = append(r.Env, "SOURCE_DATE_EPOCH="+e.stage.plan.opts.Epoch)
	}
	for _, k := range proxies {
		if v, ok := e.stage.plan.opts.Args[k]; ok && !e.vars.has(k) {
			r.Proxy = append(r.Proxy, k+"="+v)
		}
	}
	created := "RUN "
	if len(given) > 0 {
		created += fmt.Sprintf("|%d %s ", len(given), strings.Join(given, " "))
	}
	created += strings.Join(r.Argv, " ")
	if r.Script != "" {
		created += "\n" + r.Script
	}
	e.add(c, Step{Run: r, History: ocispec.History{CreatedBy: created}})
	return nil
}

// heredoc does the same as BuildKit. A document that is a program is executed; one without a
// command is the script; all others are reassembled for the shell.
func (e *evaluation) heredoc(r *Run, line *instructions.ShellDependantCmdLine) error {
	text := line.CmdLine[0]
	only, err := parser.ParseHeredoc(text)
	if err != nil {
		return invalidf("RUN: %w", err)
	}
	if only == nil {
		for _, f := range line.Files {
			text += "\n" + f.Data + f.Name
		}
		line.CmdLine = []string{text}
		return nil
	}
	f := line.Files[0]
	data := f.Data
	if f.Chomp {
		data = parser.ChompHeredocContent(data)
	}
	if !strings.HasPrefix(f.Data, "#!") {
		line.CmdLine = []string{data}
		return nil
	}
	if len(data) > maxScript || strings.ContainsAny(f.Name, "/\x00") || f.Name == "." || f.Name == ".." || len(f.Name) > 200 {
		return invalidf("RUN <<%s: a program in a here-document has a plain name and at most %d bytes", clip(f.Name), maxScript)
	}
	r.Script, r.Argv = data, []string{scriptDir + f.Name}
	return nil
}

const maxScript = 32 << 10 // its file system is small

func (e *evaluation) copy(c instructions.Command, cp Copy, what instructions.SourcesAndDest) error {
	dest, err := e.absolute(cmp.Or(what.DestPath, "./")) // as BuildKit treats an empty variable
	if err != nil {
		return err
	}
	cp.Dest, cp.Sources = dest, what.SourcePaths
	for _, s := range cp.Sources {
		if s == "" || len(s) > maxName || strings.IndexByte(s, 0) >= 0 {
			return invalidf("%s: %q is not the name of a file", strings.ToUpper(c.Name()), clip(s))
		}
	}
	for _, content := range what.SourceContents {
		if content.Path == "" || strings.ContainsAny(content.Path, "/\x00") || content.Path == "." || content.Path == ".." || len(content.Path) > 255 {
			return invalidf("%s <<%s: not the name of a file", strings.ToUpper(c.Name()), clip(content.Path))
		}
		cp.Inline = append(cp.Inline, Inline{content.Path, content.Data})
	}
	if _, err := parseMode(cp.Chmod); err != nil {
		return err
	}
	if n := len(cp.Sources) + len(cp.Inline); n > 1 && !strings.HasSuffix(dest, "/") {
		return invalidf("%s of %d sources: the destination %q must be a directory, with a slash at its end", strings.ToUpper(c.Name()), n, clip(dest))
	}
	if cp.From != "" {
		src, ok := e.stage.uses[cp.From]
		if !ok {
			return invalidf("COPY --from=%s: no such stage", clip(cp.From))
		}
		cp.Stage, cp.Image = src.stage, src.image
	}
	e.add(c, Step{Copy: &cp})
	return nil
}

// absolute returns a path of the stage. A slash at its end stays.
func (e *evaluation) absolute(name string) (string, error) {
	if name == "" || strings.IndexByte(name, 0) >= 0 || len(name) > maxName {
		return "", invalidf("%q is not a path", clip(name))
	}
	full := name
	if !path.IsAbs(full) {
		full = path.Join("/", e.image.Config.WorkingDir) + "/" + full
	}
	dir := strings.HasSuffix(full, "/") || strings.HasSuffix(full, "/.")
	if full = path.Clean(full); dir && full != "/" {
		full += "/"
	}
	if len(full) > maxName {
		return "", invalidf("%q is too long a path", clip(full))
	}
	return full, nil
}

func (e *evaluation) expose(c *instructions.ExposeCommand) error {
	config := &e.image.Config
	if config.ExposedPorts == nil {
		config.ExposedPorts = make(map[string]struct{})
	}
	for _, p := range c.Ports {
		_, words, err := e.stage.plan.expandWith(shell.NewLex(e.stage.plan.file.escape), p, e.vars)
		if err != nil {
			return err
		}
		for _, w := range words {
			if err := addPorts(config.ExposedPorts, w); err != nil {
				return err
			}
		}
	}
	e.add(c, Step{})
	return nil
}

// addPorts adds the ports of an EXPOSE: a port, or a range, of tcp unless another protocol is
// named. As with BuildKit, an address and a port of the host may precede it, which mean nothing in
// an image.
func addPorts(ports map[string]struct{}, spec string) error {
	bad := invalidf("EXPOSE %s: want a port like 80, 53/udp or 8000-8010", clip(spec))
	numbers, proto, _ := strings.Cut(spec, "/")
	switch proto = strings.ToLower(proto); proto {
	case "":
		proto = "tcp"
	case "tcp", "udp", "sctp":
	default:
		return bad
	}
	if i := strings.LastIndexByte(numbers, ':'); i >= 0 {
		host := numbers[:i]
		numbers = numbers[i+1:]
		address := ""
		if i := strings.LastIndexByte(host, ':'); i >= 0 {
			address, host = host[:i], host[i+1:]
		}
		if address != "" && net.ParseIP(strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")) == nil {
			return bad
		}
		if host != "" {
			hostFrom, hostTo, ok := portRange(host)
			from, to, _ := portRange(numbers)
			if !ok || to-from != hostTo-hostFrom && from != to {
				return bad
			}
		}
	}
	from, to, ok := portRange(numbers)
	if !ok {
		return bad
	}
	if len(ports)+to-from > 10_000 {
		return invalidf("EXPOSE %s: more than 10000 ports", clip(spec))
	}
	for n := from; n <= to; n++ {
		ports[fmt.Sprintf("%d/%s", n, proto)] = struct{}{}
	}
	return nil
}

// portRange parses a port, or two with a "-" between them.
func portRange(s string) (from, to int, ok bool) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	a, err1 := strconv.ParseUint(first, 10, 16)
	b, err2 := strconv.ParseUint(last, 10, 16)
	return int(a), int(b), err1 == nil && err2 == nil && a <= b
}

// realTime matches the names of signals that have only numbers.
var realTime = regexp.MustCompile(`^RTM(IN(\+([1-9]|1[0-5]))?|AX(-([1-9]|1[0-4]))?)$`)

func validSignal(s string) error {
	if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= 64 {
		return nil
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if unix.SignalNum("SIG"+name) != 0 || realTime.MatchString(name) {
		return nil
	}
	return invalidf("STOPSIGNAL %s: no such signal", clip(s))
}

// remote reports whether the source of an ADD is not a file of the context.
func remote(source string) bool {
	for _, prefix := range []string{"http://", "https://", "git://", "ssh://", "git@", "github.com/"} {
		if strings.HasPrefix(strings.ToLower(source), prefix) {
			return true
		}
	}
	return false
}

// parseMode parses the octal number of --chmod; -1 if there is none.
func parseMode(s string) (int64, error) {
	if s == "" {
		return -1, nil
	}
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o7777 {
		return -1, invalidf("--chmod=%s: only octal numbers up to 7777 are supported", clip(s))
	}
	return int64(n), nil
}

// Epoch returns the time of a SOURCE_DATE_EPOCH.
func Epoch(s string) (time.Time, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > 253402300799 { // the end of the year 9999
		return time.Time{}, invalidf("SOURCE_DATE_EPOCH %q: want seconds since 1970", clip(s))
	}
	return time.Unix(n, 0).UTC(), nil
}
