package build

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// File is a parsed Dockerfile.
type File struct {
	name   string
	escape rune
	global []instructions.ArgCommand
	stages []instructions.Stage
}

// syntaxes match the frontends that equal this parser: the directive then changes nothing.
var syntaxes = regexp.MustCompile(`^(docker\.io/)?docker/dockerfile(:(1(\.\d+){0,2}|latest))?$`)

// Parse parses a Dockerfile and refuses unsupported instructions. Name is its name in errors.
func Parse(name string, data []byte) (_ *File, err error) {
	if len(data) > maxDockerfile {
		return nil, &Error{File: name, Err: invalidf("it has %d bytes, %d are allowed", len(data), maxDockerfile)}
	}
	if before, _, found := bytes.Cut(data, []byte{0}); found {
		return nil, &Error{File: name, Line: 1 + bytes.Count(before, []byte("\n")), Err: invalidf("a NUL byte")}
	}
	// The parser is not ours, and its input comes from strangers: a defect in it is an error of one
	// build.
	defer func() {
		if p := recover(); p != nil {
			err = &Error{File: name, Err: invalidf("the parser cannot read it (%v)", p)}
		}
	}()
	if syntax, _, where, ok := parser.DetectSyntax(data); ok && !syntaxes.MatchString(syntax) {
		return nil, &Error{File: name, Line: lineOf(where), Err: invalidf("syntax=%s: other frontends than docker/dockerfile:1 are not supported", clip(syntax))}
	}
	result, err := parser.Parse(bytes.NewReader(data))
	if err != nil {
		return nil, located(name, err)
	}
	f := &File{name: name, escape: result.EscapeToken}
	if f.stages, f.global, err = instructions.Parse(result.AST, nil); err != nil {
		return nil, located(name, err)
	}
	if len(f.stages) == 0 {
		return nil, &Error{File: name, Err: invalidf("it has no FROM")}
	}
	if len(f.stages) > maxStages {
		return nil, &Error{File: name, Line: lineOf(f.stages[maxStages].Location), Err: invalidf("more than %d stages", maxStages)}
	}
	if len(f.global) > maxVariables {
		return nil, f.fault(&f.global[maxVariables], invalidf("more than %d arguments before the first FROM", maxVariables))
	}
	for i := range f.global {
		if err := supported(&f.global[i]); err != nil {
			return nil, f.fault(&f.global[i], err)
		}
	}
	commands := 0
	for i, s := range f.stages {
		if _, same := instructions.HasStage(f.stages[:i], s.Name); same && s.Name != "" {
			return nil, &Error{File: name, Line: lineOf(s.Location), Err: invalidf("FROM … AS %s: a stage before has that name", s.Name)}
		}
		for _, c := range s.Commands {
			if commands++; commands > maxCommands {
				return nil, f.fault(c, invalidf("more than %d instructions", maxCommands))
			}
			if err := supported(c); err != nil {
				return nil, f.fault(c, err)
			}
		}
	}
	return f, nil
}

func lineOf(where []parser.Range) int {
	if len(where) == 0 {
		return 0
	}
	return where[0].Start.Line
}

// fault returns an error of an instruction.
func (f *File) fault(c instructions.Command, err error) error {
	return &Error{File: f.name, Line: lineOf(c.Location()), Err: err}
}

// located returns an error of the parser with the line first, like all of ours.
func located(name string, err error) error {
	e := &Error{File: name, Err: &invalid{errors.New(clip(strings.ToValidUTF8(innermost(err), "\uFFFD")))}}
	if at, ok := errors.AsType[*parser.LocationError](err); ok && len(at.Locations) > 0 {
		e.Line = lineOf(at.Locations[0])
	}
	return e
}

var parsePrefix = regexp.MustCompile(`^dockerfile parse error on line \d+: `)

func innermost(err error) string { return parsePrefix.ReplaceAllString(err.Error(), "") }

// supported refuses instructions that this package does not implement. BuildKit's parser has
// refused unknown ones.
func supported(c instructions.Command) error {
	if n := words(c); n > maxVariables {
		return invalidf("%s of %d words, %d are allowed", strings.ToUpper(c.Name()), n, maxVariables)
	}
	switch c := c.(type) {
	case *instructions.OnbuildCommand:
		return invalidf("ONBUILD is not supported: images with instructions for later builds are not made")
	case *instructions.RunCommand:
		return supportedRun(c)
	case *instructions.CopyCommand:
		switch {
		case c.Link:
			return invalidf("COPY --link is not supported; leave it out, the image is the same")
		case c.Parents:
			return invalidf("COPY --parents is not supported")
		case len(c.ExcludePatterns) > 0:
			return invalidf("COPY --exclude is not supported; .dockerignore is")
		}
	case *instructions.AddCommand:
		switch {
		case c.Link:
			return invalidf("ADD --link is not supported; leave it out, the image is the same")
		case len(c.ExcludePatterns) > 0:
			return invalidf("ADD --exclude is not supported; .dockerignore is")
		case c.KeepGitDir != nil:
			return invalidf("ADD --keep-git-dir is not supported: repositories are not fetched")
		case c.Checksum != "":
			return invalidf("ADD --checksum is not supported: nothing is fetched")
		}
	}
	return nil
}

// words returns the number of words with variables.
func words(c instructions.Command) int {
	switch c := c.(type) {
	case *instructions.EnvCommand:
		return len(c.Env)
	case *instructions.LabelCommand:
		return len(c.Labels)
	case *instructions.ArgCommand:
		return len(c.Args)
	case *instructions.ExposeCommand:
		return len(c.Ports)
	case *instructions.VolumeCommand:
		return len(c.Volumes)
	case *instructions.CopyCommand:
		return len(c.SourcePaths) + len(c.SourceContents)
	case *instructions.AddCommand:
		return len(c.SourcePaths) + len(c.SourceContents)
	}
	return 1
}

func supportedRun(c *instructions.RunCommand) error {
	if err := supportedMounts(c); err != nil {
		return err
	}
	if len(instructions.GetDevices(c)) > 0 {
		return invalidf("RUN --device is not supported")
	}
	if instructions.GetSecurity(c) != instructions.SecuritySandbox {
		return invalidf("RUN --security=%s is not supported: programs run in a sandbox", instructions.GetSecurity(c))
	}
	if n := instructions.GetNetwork(c); n != instructions.NetworkDefault && n != instructions.NetworkNone {
		return invalidf("RUN --network=%s is not supported: a step has the build's network, or none", n)
	}
	return nil
}

// Options are the options of a build.
type Options struct {
	Args     map[string]string // --build-arg
	Target   string            // name or number of a stage; empty means the last
	Platform Platform
	Epoch    string // SOURCE_DATE_EPOCH in seconds; empty means none
}

// Platform is the platform of an image or of this host.
type Platform struct{ OS, Architecture, Variant string }

func (p Platform) String() string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// Plan holds the needed stages, each after those that it needs.
type Plan struct {
	Stages []*Stage
	file   *File
	opts   Options
	global *scope // arguments before the first FROM
	filled filled
	// Bytes of histories so far.
	history int
}

// Stage is a needed stage.
type Stage struct {
	Index int
	Name  string
	Line  int
	From  string // as written, with variables filled in
	Base  *Stage // another stage, or
	Image string // an image; both empty: scratch

	plan *Plan
	in   *instructions.Stage
	uses map[string]source // by the value of --from
	vars *scope            // at its end, for the stages based on it
}

// Fault returns an error of a line of the Dockerfile.
func (s *Stage) Fault(line int, err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return &Error{File: s.plan.file.name, Line: line, Err: err}
}

// Steps returns the number of steps that Evaluate will return.
func (s *Stage) Steps() int { return len(s.in.Commands) }

// Uses returns the stages and the images that it is based on or copies from.
func (s *Stage) Uses() (stages []*Stage, images []string) {
	stages, images = append(stages, s.Base), append(images, s.Image)
	for _, from := range s.uses {
		stages, images = append(stages, from.stage), append(images, from.image)
	}
	return stages, images
}

// source is the source of a --from or from: a stage or an image.
type source struct {
	stage *Stage
	image string
}

// builtins returns the arguments that exist without a declaration before the first FROM, and in a
// stage that declares them. Arguments of the caller take precedence.
func (o *Options) builtins(last string) (*scope, error) {
	p, s := o.Platform, newScope()
	for _, kv := range [][2]string{
		{"BUILDPLATFORM", p.String()},
		{"BUILDOS", p.OS},
		{"BUILDOSVERSION", ""},
		{"BUILDARCH", p.Architecture},
		{"BUILDVARIANT", p.Variant},
		{"TARGETPLATFORM", p.String()},
		{"TARGETOS", p.OS},
		{"TARGETOSVERSION", ""},
		{"TARGETARCH", p.Architecture},
		{"TARGETVARIANT", p.Variant},
		{"TARGETSTAGE", cmp.Or(o.Target, last, "default")},
	} {
		if v, ok := o.Args[kv[0]]; ok {
			kv[1] = v
		}
		if err := s.setArg(kv[0], kv[1]); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Plan chooses the stages that the target needs.
func (f *File) Plan(ctx context.Context, opts Options) (*Plan, error) {
	for k, v := range opts.Args {
		if k == "" || strings.ContainsAny(k, "=\x00") || len(k) > 255 || len(v) > maxValue || strings.IndexByte(v, 0) >= 0 {
			return nil, invalidf("build argument %q: a name has no \"=\", and a value at most %d bytes", clip(k), maxValue)
		}
	}
	global, err := opts.builtins(f.stages[len(f.stages)-1].Name)
	if err != nil {
		return nil, err
	}
	p := &Plan{file: f, opts: opts, global: global}
	for i := range f.global {
		c := &f.global[i]
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		p.filled.instruction = 0
		for _, a := range c.Args {
			v, err := p.argument(a, p.global)
			if err == nil && v != nil {
				err = p.global.setArg(a.Key, *v)
			}
			if err != nil {
				return nil, f.fault(c, err)
			}
		}
	}
	target := len(f.stages) - 1
	if opts.Target != "" {
		i, ok := f.stage(opts.Target, len(f.stages))
		if !ok {
			return nil, &Error{File: f.name, Err: invalidf("no stage is called %q", clip(opts.Target))}
		}
		target = i
	}
	done := make(map[int]*Stage)
	if _, err := p.add(target, done); err != nil {
		return nil, err
	}
	return p, nil
}

// Target returns the stage of the wanted image.
func (p *Plan) Target() *Stage { return p.Stages[len(p.Stages)-1] }

// stage finds one of the first n stages by name or number.
func (f *File) stage(name string, n int) (int, bool) {
	if i, ok := instructions.HasStage(f.stages[:n], name); ok {
		return i, true
	}
	if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < n {
		return i, true
	}
	return 0, false
}

// add adds a stage after all that it needs. Only earlier stages can be named, so this ends.
func (p *Plan) add(i int, done map[int]*Stage) (*Stage, error) {
	if s := done[i]; s != nil {
		return s, nil
	}
	f := p.file
	in := &f.stages[i]
	s := &Stage{Index: i, Name: in.Name, Line: lineOf(in.Location), plan: p, in: in, uses: make(map[string]source)}
	fault := func(err error) error { return &Error{File: f.name, Line: s.Line, Err: err} }
	p.filled.instruction = 0
	from, err := p.expand(in.BaseName, p.global)
	if err != nil {
		return nil, fault(err)
	}
	platform, err := p.expand(in.Platform, p.global)
	if err != nil {
		return nil, fault(err)
	}
	if platform != "" && platform != p.opts.Platform.String() && platform != p.opts.Platform.OS+"/"+p.opts.Platform.Architecture {
		return nil, fault(invalidf("FROM --platform=%s: programs of this build run on %s only", clip(platform), p.opts.Platform))
	}
	s.From = from
	if from == "" {
		return nil, fault(invalidf("FROM %s: the name of the image is empty", clip(in.BaseName)))
	}
	if j, ok := instructions.HasStage(f.stages[:i], from); ok {
		if s.Base, err = p.add(j, done); err != nil {
			return nil, err
		}
	} else if from != scratch {
		s.Image = from
	}
	for _, c := range in.Commands {
		switch c := c.(type) {
		case *instructions.CopyCommand:
			if c.From != "" {
				err = p.use(s, i, c.From, "COPY --from=", done)
			}
		case *instructions.RunCommand:
			for _, from := range froms(c) {
				if err = p.use(s, i, from, "RUN --mount=from=", done); err != nil {
					break
				}
			}
		}
		if _, located := errors.AsType[*Error](err); err != nil && !located {
			err = f.fault(c, err)
		}
		if err != nil {
			return nil, err
		}
	}
	done[i] = s
	p.Stages = append(p.Stages, s)
	return s, nil
}

const scratch = "scratch"

// use adds the stage or image that an instruction of the i-th stage takes files from.
func (p *Plan) use(s *Stage, i int, from, what string, done map[int]*Stage) error {
	if j, ok := p.file.stage(from, i); ok {
		other, err := p.add(j, done)
		if err != nil {
			return err
		}
		s.uses[from] = source{stage: other}
		return nil
	}
	switch _, number := strconv.Atoi(from); {
	case strings.Contains(from, "$"):
		return invalidf("%s%s: variables are not filled in here", what, clip(from))
	case number == nil || strings.EqualFold(from, s.in.Name):
		return invalidf("%s%s: no stage before this one", what, clip(from))
	case from == scratch:
		return invalidf("%s%s: there is nothing in it", what, scratch)
	}
	s.uses[from] = source{image: from}
	return nil
}

// argument returns the value of an ARG: the caller's, else the default, else the one before the
// first FROM; nil if unset.
func (p *Plan) argument(a instructions.KeyValuePairOptional, env *scope) (*string, error) {
	if err := validVariable(a.Key); err != nil {
		return nil, err
	}
	if v, ok := p.opts.Args[a.Key]; ok {
		return &v, nil
	}
	if a.Value != nil {
		v, err := p.expand(*a.Value, env)
		return &v, err
	}
	if v, ok := p.global.Get(a.Key); ok {
		return &v, nil
	}
	return nil, nil //nolint:nilnil // unset is not empty
}

func validVariable(key string) error {
	if key == "" || strings.ContainsAny(key, "=\x00") || len(key) > 255 {
		return invalidf("%q is not the name of a variable", clip(key))
	}
	return nil
}
