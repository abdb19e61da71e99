package service

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/exec"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/interpreter"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of code runs.
const (
	maxCode        = 1 << 20
	maxLibraries   = 64
	maxLocalFiles  = 4096     // names of a library directory
	maxFailureText = 64 << 10 // end of stderr in which an exception is looked for
	maxInstallText = 4 << 10  // end of a package manager's output that its error repeats
)

// codeParents are the directories for the private directories of runs, in order. The next one is
// tried where the sandbox's root is read-only.
var codeParents = []string{"/tmp", "/dev/shm"}

// Languages returns the languages of code runs.
func Languages() api.LanguageList {
	var list api.LanguageList
	for _, l := range interpreter.All() {
		list.Languages = append(list.Languages, l.Describe())
	}
	return list
}

// toolchains remembers for an image and a language which toolchain was used last. It is a hint: a
// sandbox may have lost it, or may have another one.
type toolchains struct {
	mu   sync.Mutex
	last map[toolchainKey]int
}

type toolchainKey struct{ image, language string }

// maxToolchains bounds the memory of hints. All are forgotten at once: each costs one lost start.
const maxToolchains = 4096

// order returns the toolchains' indexes in the order in which they are to be tried.
func (t *toolchains) order(k toolchainKey, n int) []int {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []int
	last, known := t.last[k]
	if known {
		out = append(out, last)
	}
	for i := range n {
		if !known || i != last {
			out = append(out, i)
		}
	}
	return out
}

func (t *toolchains) remember(k toolchainKey, i int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k.image == "" {
		return
	}
	if t.last == nil || len(t.last) >= maxToolchains {
		t.last = map[toolchainKey]int{}
	}
	t.last[k] = i
}

// RunCode runs source text to its end and keeps the beginning of its output. The caller calls done
// when it needs the result no more.
func (s *API) RunCode(ctx context.Context, ref string, req api.CodeRequest) (_ *api.CodeResult, done func(), err error) {
	limit := int(cmp.Or(req.OutputLimit, exec.DefaultOutputLimit))
	stdout, stderr := output.Head{Limit: limit}, output.Head{Limit: limit}
	if req.Context != "" {
		return s.bufferContext(ctx, ref, &req, &stdout, &stderr)
	}
	r := codeRun{
		whole: true,
		begin: func() error { return nil },
		sink:  func(x *Execution) sink { return x.KeepIn(&stdout, &stderr) },
	}
	written, err := s.outputs(ctx, ref, req.OutputDir)
	if err != nil {
		return nil, nil, err
	}
	end, err := s.code(ctx, ref, &req, &r)
	if err != nil {
		return nil, nil, err
	}
	res := &api.CodeResult{
		Results: []api.CodeValue{}, Failure: end.Failure, Exit: *end.Exit, Usage: *end.Usage, Findings: r.verdict.findings, Amended: r.verdict.amended,
	}
	made := written()
	res.Artifacts, res.ArtifactsMissed = made.found, made.missed
	withLogs(res, &stdout, &stderr)
	return res, func() {}, nil
}

// withLogs sets the output of a result.
func withLogs(res *api.CodeResult, stdout, stderr *output.Head) {
	res.Logs.Stdout, _ = stdout.Result()
	res.Logs.Stderr, _ = stderr.Result()
	res.Truncated = stdout.Truncated || stderr.Truncated
}

// bufferContext is RunCode in a context.
func (s *API) bufferContext(ctx context.Context, ref string, req *api.CodeRequest, stdout, stderr *output.Head) (_ *api.CodeResult, done func(), err error) {
	res := &api.CodeResult{Results: []api.CodeValue{}}
	left, cut := maxResults, false
	hold := &resultHold{quota: s.results}
	err = s.runInContext(ctx, ref, req, hold, func(e api.CodeEvent) error {
		output := e.Data
		if e.Data == nil {
			output = []byte(e.Text)
		}
		switch e.Type {
		case api.CodeStarted:
			res.Findings, res.Amended = e.Findings, e.Amended
		case api.CodeStdout:
			stdout.WritePaced(output, ctx.Done())
		case api.CodeStderr:
			stderr.WritePaced(output, ctx.Done())
		case api.CodeValued:
			size := sizeOfValue(e.Result)
			if left -= size; left < 0 || !hold.keep(size) {
				hold.refuse()
				cut = true
				return nil
			}
			res.Results = append(res.Results, *e.Result)
		case api.CodeFailed:
			if res.Failure != nil {
				hold.refuse() // the answer has one
			}
			res.Failure = e.Failure
		case api.CodeEnded:
			res.ExecutionCount, res.Artifacts, res.ArtifactsMissed = e.ExecutionCount, e.Artifacts, e.ArtifactsMissed
			if e.Exit != nil {
				res.Exit = *e.Exit
			}
			if e.Usage != nil {
				res.Usage = *e.Usage
			}
		}
		return nil
	})
	if err != nil {
		hold.free()
		return nil, nil, err
	}
	withLogs(res, stdout, stderr)
	res.Truncated = res.Truncated || cut
	return res, hold.free, nil
}

// StreamCode runs source text and emits events as they happen. Emit is called from one goroutine at
// a time, and a failing emit kills the run.
func (s *API) StreamCode(ctx context.Context, ref string, req api.CodeRequest, emit func(api.CodeEvent) error) error {
	if req.Context != "" {
		hold := &resultHold{quota: s.results}
		defer hold.free()
		return s.runInContext(ctx, ref, &req, hold, emit)
	}
	var chars output.Characters
	text := func(stream string, p []byte) error { return emit(codeOutput(stream, p)) }
	var r codeRun
	r = codeRun{
		begin: func() error { return emit(startedEvent(&r.verdict)) },
		sink:  func(*Execution) sink { return chars.Whole(text) },
		flush: func() error { return chars.Rest(text) },
	}
	written, err := s.outputs(ctx, ref, req.OutputDir)
	if err != nil {
		return err
	}
	end, err := s.code(ctx, ref, &req, &r)
	if err != nil {
		return err
	}
	made := written()
	if end.Failure != nil {
		if err := emit(api.CodeEvent{Type: api.CodeFailed, Time: time.Now().UTC(), Failure: end.Failure}); err != nil {
			return err
		}
	}
	return emit(api.CodeEvent{Type: api.CodeEnded, Time: time.Now().UTC(), Exit: end.Exit, Usage: end.Usage, Artifacts: made.found, ArtifactsMissed: made.missed})
}

// codeOutput is the event of output of a run.
func codeOutput(stream string, p []byte) api.CodeEvent {
	e := output.Event(stream, p)
	return api.CodeEvent{Type: api.CodeEventType(stream), Time: time.Now().UTC(), Text: e.Text, Data: e.Data}
}

func startedEvent(v *verdict) api.CodeEvent {
	return api.CodeEvent{Type: api.CodeStarted, Time: time.Now().UTC(), Findings: v.findings, Amended: v.amended}
}

type sink = func(stream string, p []byte) error

// codeRun is one run of source text. The caller of [API.code] sets how output leaves it.
type codeRun struct {
	whole bool                  // see [host.ExecRequest]
	begin func() error          // called when the first program has started
	sink  func(*Execution) sink // of the output of a program
	flush func() error          // called after each program; nil: nothing is to be done

	s       *API
	lang    *interpreter.Language
	req     *api.CodeRequest
	sandbox string // its id
	place   interpreter.Place
	env     []string  // of every program
	due     time.Time // zero: never
	begun   bool
	verdict verdict
	usage   api.Usage
}

// code runs source text and returns how it ended.
func (s *API) code(ctx context.Context, ref string, req *api.CodeRequest, r *codeRun) (end api.CodeEvent, err error) {
	if r.lang, err = validateCode(req); err != nil {
		return end, err
	}
	r.s, r.req = s, req
	if req.Timeout > 0 {
		r.due = time.Now().Add(time.Duration(req.Timeout * float64(time.Second)))
	}
	if err := s.spareDisk(ctx); err != nil {
		return end, err
	}
	ctx, client, lease, release, err := s.use(ctx, ref)
	if err != nil {
		return end, err
	}
	defer release()
	rec := &lease.Record
	r.sandbox, r.place.Cwd = rec.ID, cmp.Or(req.Cwd, rec.Cwd, "/")
	r.env = codeEnv(r.lang, r.place, rec, req)
	judged := judgedRun{sandbox: rec.ID, lang: r.lang, user: req.User, due: r.due}
	if r.verdict, err = s.judge(ctx, &judged, req); err != nil {
		return end, err
	}
	if req.Check {
		return r.ended(api.Exit{}, nil), r.start()
	}
	id, err := owner(ctx, client, rec, req.User)
	if err != nil {
		return end, s.fail(ctx, lease, "/etc/passwd", err)
	}
	for i, parent := range codeParents {
		r.place.Dir = parent + "/.code-" + exec.NewID()[:6]
		if err = s.extract(ctx, client, lease, parent, guest.TarInRequest{UID: id.uid, GID: id.gid}, r.archive(parent)); err == nil {
			defer s.removeCode(ctx, client, lease, r.place.Dir)
			break
		}
		if i == len(codeParents)-1 || !errors.Is(err, unix.EROFS) {
			s.removeCode(ctx, client, lease, r.place.Dir)
			return end, err
		}
	}
	if len(req.Libraries) > 0 {
		if err := r.install(ctx, client, lease); err != nil {
			return end, err
		}
	}
	return r.run(ctx, rec)
}

// validateCode checks a request and returns its language.
func validateCode(req *api.CodeRequest) (*interpreter.Language, error) {
	lang := interpreter.Find(cmp.Or(req.Language, "python"))
	switch {
	case lang == nil:
		return nil, class.Invalidf("language %q: must be one of %s", class.Clip(req.Language), strings.Join(interpreter.Names(), ", "))
	case req.Code == "":
		return nil, class.Invalidf("code is empty")
	case len(req.Code) > maxCode:
		return nil, class.Mark(class.ErrTooLarge, fmt.Errorf("code has %d bytes, at most %d are possible", len(req.Code), maxCode))
	}
	if err := validateLibraries(req, lang); err != nil {
		return nil, err
	}
	return lang, validateExec(&api.ExecRequest{
		Argv: append([]string{lang.Name}, req.Args...), Env: req.Env, Cwd: req.Cwd, User: req.User, Timeout: req.Timeout, OutputLimit: req.OutputLimit,
	})
}

func validateLibraries(req *api.CodeRequest, lang *interpreter.Language) error {
	switch {
	case len(req.Libraries) > maxLibraries:
		return class.Invalidf("libraries: %d, at most %d are possible", len(req.Libraries), maxLibraries)
	case len(req.Libraries) > 0 && lang.Libraries == nil:
		return class.Invalidf("libraries: %s has no package manager", lang.Name)
	case len(req.Libraries) == 0 && req.LibraryDir != "":
		return class.Invalidf("library_dir: no libraries are named")
	}
	for i, name := range req.Libraries {
		if err := lang.Libraries.Check(name); err != nil {
			return class.Invalidf("libraries[%d] %q: %w of %s", i, class.Clip(name), err, lang.Libraries.Manager)
		}
	}
	if req.LibraryDir == "" {
		return nil
	}
	return validatePath("library_dir", req.LibraryDir)
}

// codeEnv returns the variables of a run: the request's and the language's.
func codeEnv(lang *interpreter.Language, place interpreter.Place, rec *runtime.Record, req *api.CodeRequest) []string {
	env := slices.Clone(req.Env)
	if lang.Search == "" {
		return env
	}
	prefix, value := lang.Search+"=", place.Cwd
	for _, list := range [][]string{req.Env, rec.Env, rec.ImageEnv} {
		at := slices.IndexFunc(list, func(kv string) bool { return strings.HasPrefix(kv, prefix) })
		if at >= 0 {
			if old := list[at][len(prefix):]; old != "" {
				value += ":" + old
			}
			break
		}
	}
	return append(env, prefix+value)
}

// archive returns a tar of the private directory, relative to its parent.
func (r *codeRun) archive(parent string) *bytes.Buffer {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	base := strings.TrimPrefix(r.place.Dir, parent+"/") + "/"
	// Nothing fails: the buffer takes all, and the headers are valid.
	_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: base, Mode: 0o700})
	file := func(name, content string) {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: base + name, Mode: 0o600, Size: int64(len(content))})
		_, _ = w.Write([]byte(content))
	}
	file(r.lang.File, r.verdict.code)
	for _, name := range slices.Sorted(maps.Keys(r.lang.Files)) {
		file(name, r.lang.Files[name])
	}
	for _, name := range slices.Sorted(maps.Keys(r.lang.Links)) {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: base + name, Linkname: r.place.Fill(r.lang.Links[name])})
	}
	_ = w.Close()
	return &out
}

// removeCode removes the private directory of a run, also when the request was given up.
func (s *core) removeCode(ctx context.Context, client *host.Client, lease *runtime.Lease, dir string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	err := client.Remove(ctx, dir, true)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, host.ErrLost) {
		s.log.Warn("the files of a code run may be left in a sandbox", "id", lease.Record.ID, "path", dir, "error", err)
	}
}

// run compiles and runs the source with the first toolchain that the sandbox has.
func (r *codeRun) run(ctx context.Context, rec *runtime.Record) (end api.CodeEvent, err error) {
	key := toolchainKey{rec.ImageDigest, r.lang.Name}
	all := r.lang.Toolchains
	for _, i := range r.s.toolchains.order(key, len(all)) {
		end, err = r.try(ctx, &all[i])
		if errors.Is(err, errNoToolchain) {
			continue
		}
		if err == nil {
			r.s.toolchains.remember(key, i)
		}
		return end, err
	}
	var names []string
	for i := range all {
		for _, name := range all[i].Programs() {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return end, noLanguage(rec, r.lang, names)
}

// noLanguage is the error for a sandbox that has none of the programs of a language.
func noLanguage(rec *runtime.Record, lang *interpreter.Language, programs []string) error {
	return class.Mark(class.ErrNoLanguage, fmt.Errorf("sandbox %s of image %s has no %s: it needs %s; the image that images/%s/Dockerfile makes has it",
		rec.Name, cmp.Or(rec.Image, api.HostImage), lang.Name, strings.Join(programs, " or "), lang.Image))
}

// overdue is the exit of a run whose time ended before its program began.
var overdue = api.Exit{Code: 128 + int(unix.SIGKILL), Signal: "SIGKILL", Timeout: true}

var errNoToolchain = errors.New("the sandbox does not have the toolchain")

// try runs the source with one toolchain, or returns errNoToolchain.
func (r *codeRun) try(ctx context.Context, t *interpreter.Toolchain) (end api.CodeEvent, err error) {
	if t.Probe != nil {
		out, rest := output.Head{Limit: 256}, output.Head{Limit: 256}
		exit, err := r.program(ctx, api.ExecRequest{Argv: t.Probe.Argv}, func(x *Execution) (sink, error) { return x.KeepIn(&out, &rest), nil })
		if err != nil {
			return end, err
		}
		if exit.Timeout {
			return r.ended(overdue, nil), r.start()
		}
		if !t.Probe.Fits(exit.Code, string(out.Bytes())) {
			return end, errNoToolchain
		}
	}
	for _, argv := range t.Compile {
		var said tail
		exit, err := r.visible(ctx, api.ExecRequest{Argv: r.place.FillAll(argv), Cwd: r.place.Dir}, &said)
		if err != nil {
			return end, err
		}
		if exit.Timeout { // the compiler may have ended well in that moment
			return r.ended(overdue, nil), nil
		}
		if exit.Signal != "" {
			return r.ended(exit, nil), nil
		}
		if exit.Code != 0 {
			return r.ended(exit, r.lang.CompileFailure(said.String())), nil
		}
	}
	var said tail
	exit, err := r.visible(ctx, api.ExecRequest{
		Argv: append(r.place.FillAll(t.Run), r.req.Args...), Cwd: r.req.Cwd, Stdin: r.req.Stdin,
	}, &said)
	if err != nil {
		return end, err
	}
	var failure *api.CodeFailure
	if exit.Code != 0 && exit.Signal == "" && r.lang.Failure != nil {
		failure = r.lang.Failure(said.String())
	}
	return r.ended(exit, failure), nil
}

func (r *codeRun) ended(exit api.Exit, failure *api.CodeFailure) api.CodeEvent {
	return api.CodeEvent{Exit: &exit, Usage: &r.usage, Failure: failure}
}

// start reports the start of the run, once.
func (r *codeRun) start() error {
	if r.begun {
		return nil
	}
	r.begun = true
	return r.begin()
}

// visible runs a program whose output is the run's. Said keeps the end of its stderr.
func (r *codeRun) visible(ctx context.Context, req api.ExecRequest, said *tail) (api.Exit, error) {
	exit, err := r.program(ctx, req, func(x *Execution) (sink, error) {
		to := r.sink(x)
		return func(stream string, p []byte) error {
			if stream == "stderr" {
				said.write(p)
			}
			return to(stream, p)
		}, r.start()
	})
	if err == nil {
		err = r.start() // of a run that had no time left for its first program
	}
	if err == nil && r.flush != nil {
		err = r.flush()
	}
	return exit, err
}

// program runs one program of the run to its end, or returns errNoToolchain.
func (r *codeRun) program(ctx context.Context, req api.ExecRequest, out func(*Execution) (sink, error)) (exit api.Exit, err error) {
	req.Env = append(slices.Clone(r.env), req.Env...)
	req.User = r.req.User
	if !r.due.IsZero() {
		req.Timeout = time.Until(r.due).Seconds()
		if req.Timeout < 0.001 {
			return overdue, nil
		}
	}
	x, err := r.s.startFed(ctx, r.sandbox, req, r.whole)
	if err != nil {
		if errors.Is(err, class.ErrProgramMissing) && (r.place.Dir == "" || !strings.HasPrefix(req.Argv[0], r.place.Dir)) {
			return exit, errNoToolchain
		}
		return exit, err
	}
	defer x.Close()
	to, err := out(x)
	if err != nil {
		return exit, err
	}
	exit, usage, err := x.Stream(ctx, to)
	r.usage.WallMS += usage.WallMS
	r.usage.CPUMS += usage.CPUMS
	r.usage.MemoryPeak = max(r.usage.MemoryPeak, usage.MemoryPeak)
	return exit, err
}

// tail keeps the end of a text.
type tail struct {
	limit int // zero: maxFailureText
	buf   []byte
}

func (t *tail) write(p []byte) {
	limit := cmp.Or(t.limit, maxFailureText)
	if len(p) > limit {
		p = p[len(p)-limit:]
	}
	if t.buf = append(t.buf, p...); len(t.buf) > 2*limit {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-limit:]...)
	}
}

func (t *tail) String() string {
	limit := cmp.Or(t.limit, maxFailureText)
	return strings.ToValidUTF8(string(t.buf[max(0, len(t.buf)-limit):]), "\uFFFD")
}

// install installs the libraries with the first way that the sandbox has.
func (r *codeRun) install(ctx context.Context, client *host.Client, lease *runtime.Lease) error {
	var local *interpreter.Local
	if dir := r.req.LibraryDir; dir != "" {
		local = &interpreter.Local{Dir: dir}
		more, err := client.List(ctx, dir, 1, func(e host.Entry) error {
			if len(local.Files) == maxLocalFiles {
				return class.Invalidf("library_dir %q has more than %d files", class.Clip(dir), maxLocalFiles)
			}
			local.Files = append(local.Files, e.Path)
			return nil
		})
		if err != nil {
			return r.s.fail(ctx, lease, dir, err)
		}
		_ = more // only of directories below it
	}
	manager := r.lang.Libraries
	var missing []string
	for _, steps := range manager.Ways(r.req.Libraries, local) {
		err := r.installSteps(ctx, steps)
		if !errors.Is(err, errNoToolchain) {
			return err
		}
		if name := steps[0].Argv[0]; !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
	}
	return class.Mark(class.ErrLibraries, fmt.Errorf("install libraries with %s: the sandbox has no %s", manager.Manager, strings.Join(missing, " or ")))
}

func (r *codeRun) installSteps(ctx context.Context, steps []interpreter.Step) error {
	for _, step := range steps {
		req := api.ExecRequest{Argv: step.Argv, Env: step.Env, Cwd: r.req.Cwd}
		if step.Private {
			req.Cwd = r.place.Dir
		}
		said := tail{limit: maxInstallText}
		exit, err := r.program(ctx, req, func(*Execution) (sink, error) {
			return func(_ string, p []byte) error { said.write(p); return nil }, nil
		})
		switch {
		case err != nil:
			return err
		case exit.Timeout:
			return class.Mark(class.ErrLibraries, fmt.Errorf("install libraries with %s: the timeout of the run has ended: %s", step.Argv[0], said.String()))
		case exit.Code != 0:
			return class.Mark(class.ErrLibraries, fmt.Errorf("install libraries with %s: exit code %d: %s", step.Argv[0], exit.Code, strings.TrimSpace(said.String())))
		}
	}
	return nil
}
