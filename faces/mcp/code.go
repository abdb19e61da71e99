package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
)

// Bounds of code runs, in bytes unless they say otherwise.
const (
	maxCode        = 1 << 20
	maxLibraries   = 32        // number of libraries of a run
	maxContextName = 64        // of the model's own names
	maxPictures    = 8 << 20   // images and documents of a result, together
	maxForms       = 256 << 10 // texts of displayed values, together
)

type codeIn struct {
	which

	Code      string            `json:"code" jsonschema:"source text"`
	Language  string            `json:"language,omitempty" jsonschema:"name of the tool languages, such as python, the default"`
	Context   string            `json:"context,omitempty" jsonschema:"name of your choice for separate variables; default: one context for each language"`
	Fresh     bool              `json:"fresh,omitempty" jsonschema:"run in a process of its own: it sees no variables of earlier runs and leaves none"`
	Libraries []string          `json:"libraries,omitempty" jsonschema:"packages that are installed before, such as numpy or lodash@4; the sandbox needs a network"`
	Env       map[string]string `json:"env,omitempty" jsonschema:"environment variables for this run"`
	Stdin     string            `json:"stdin,omitempty" jsonschema:"whole input; of runs that keep no variables"`
	Timeout   float64           `json:"timeout,omitempty" jsonschema:"seconds after which the run is ended; variables of its context stay"`
}

// codeOut is the result of a run. Images are content of the answer, and not here.
type codeOut struct {
	Language  string           `json:"language"`
	Context   string           `json:"context,omitempty" jsonschema:"the context's name; absent if the run has kept no variables"`
	Stdout    string           `json:"stdout"`
	Stderr    string           `json:"stderr"`
	Results   []valueOut       `json:"results,omitempty" jsonschema:"displayed values"`
	Failure   *api.CodeFailure `json:"error,omitempty" jsonschema:"exception or compiler message that ended the run"`
	Count     int              `json:"execution_count,omitempty" jsonschema:"number of the run in its context"`
	ExitCode  int              `json:"exit_code"`
	Signal    string           `json:"signal,omitempty" jsonschema:"signal that ended it"`
	TimedOut  bool             `json:"timed_out,omitempty"`
	OOM       bool             `json:"out_of_memory,omitempty"`
	Truncated bool             `json:"truncated,omitempty" jsonschema:"output or values are missing"`
	WallMS    int64            `json:"duration_ms,omitempty"`
	Renewed   bool             `json:"context_renewed,omitempty" jsonschema:"the context was gone: variables of earlier runs are lost"`
	Restarted bool             `json:"sandbox_restarted,omitempty" jsonschema:"the sandbox had been stopped for being idle: its files are there, its processes are not"`
}

// valueOut has the forms of a displayed value that are text or data.
type valueOut struct {
	Text       string   `json:"text,omitempty"`
	HTML       string   `json:"html,omitempty"`
	Markdown   string   `json:"markdown,omitempty"`
	SVG        string   `json:"svg,omitempty"`
	LaTeX      string   `json:"latex,omitempty"`
	JavaScript string   `json:"javascript,omitempty"`
	JSON       any      `json:"json,omitempty"`
	Data       any      `json:"data,omitempty" jsonschema:"a table: columns and their values"`
	Chart      any      `json:"chart,omitempty" jsonschema:"a chart as data"`
	Extra      any      `json:"extra,omitempty" jsonschema:"forms of other media types, by type"`
	Images     []string `json:"images,omitempty" jsonschema:"media types of its forms in the answer's content"`
	Omitted    []string `json:"omitted,omitempty" jsonschema:"forms that the answer has no room for"`
	Main       bool     `json:"is_main_result,omitempty" jsonschema:"value of the last expression"`
}

// codeRun collects the answer to a run.
type codeRun struct {
	out            codeOut
	stdout, stderr middle
	texts          strings.Builder // of the values, as a model reads them
	pictures       []mcp.Content
	forms, bytes   int // used of maxForms and maxPictures
}

// add takes one event.
func (r *codeRun) add(c *call, e api.CodeEvent) {
	data := e.Data
	if len(data) == 0 {
		data = []byte(e.Text)
	}
	switch e.Type {
	case api.CodeStarted:
		r.out.Count = e.ExecutionCount
	case api.CodeStdout:
		r.stdout.add(data)
		c.stream(data)
	case api.CodeStderr:
		r.stderr.add(data)
		c.stream(data)
	case api.CodeValued:
		if e.Result != nil {
			r.value(e.Result)
		}
	case api.CodeFailed:
		r.out.Failure = e.Failure
	case api.CodeEnded:
		r.out.ExitCode, r.out.Signal, r.out.TimedOut, r.out.OOM = e.Exit.Code, e.Exit.Signal, e.Exit.Timeout, e.Exit.OOM
		if e.Usage != nil {
			r.out.WallMS = int64(e.Usage.WallMS)
		}
	}
}

// value adds a displayed value. Forms that there is no room for are named. The main result comes
// last: its text has room of its own, and so has it among the values.
func (r *codeRun) value(v *api.CodeValue) {
	most, room := maxValues-1, maxForms
	if v.Main {
		most, room = maxValues, maxForms+2*maxOutput
	}
	if len(r.out.Results) >= most {
		r.out.Truncated = true
		return
	}
	out := valueOut{Main: v.Main}
	omit := func(form string) {
		out.Omitted = append(out.Omitted, form)
		r.out.Truncated = true
	}
	picture := func(typ string, data []byte) {
		switch {
		case len(data) == 0:
			return
		case len(data) > maxImage || r.bytes+len(data) > maxPictures:
			omit(fmt.Sprintf("%s, %d bytes", typ, len(data)))
			return
		case isImage(typ):
			r.pictures = append(r.pictures, &mcp.ImageContent{Data: data, MIMEType: typ})
		default:
			r.pictures = append(r.pictures, &mcp.EmbeddedResource{Resource: &mcp.ResourceContents{
				URI: fmt.Sprintf("result://%d/%d", r.out.Count, len(r.pictures)), MIMEType: typ, Blob: data,
			}})
		}
		r.bytes += len(data)
		out.Images = append(out.Images, typ)
	}
	picture("image/png", v.PNG)
	if len(v.PNG) == 0 {
		picture("image/jpeg", v.JPEG)
	}
	picture("application/pdf", v.PDF)

	var text middle
	text.add([]byte(v.Text))
	out.Text = strings.ToValidUTF8(text.String(), "\uFFFD")
	r.out.Truncated = r.out.Truncated || text.omitted() > 0
	switch n := len(out.Text); {
	case n == 0:
	case r.forms+n > room:
		out.Text = ""
		omit(fmt.Sprintf("text, %d bytes", len(v.Text)))
	default:
		r.forms += n
		if len(out.Images) == 0 {
			r.texts.WriteString(out.Text + "\n")
		}
	}
	for _, f := range []struct {
		name, from string
		to         *string
	}{{"html", v.HTML, &out.HTML}, {"markdown", v.Markdown, &out.Markdown}, {"svg", v.SVG, &out.SVG}, {"latex", v.LaTeX, &out.LaTeX}, {"javascript", v.JavaScript, &out.JavaScript}} {
		if f.from == "" {
			continue
		}
		if r.forms+len(f.from) > maxForms {
			omit(fmt.Sprintf("%s, %d bytes", f.name, len(f.from)))
			continue
		}
		r.forms += len(f.from)
		*f.to = f.from
	}
	for _, f := range []struct {
		name string
		from any
		to   *any
	}{{"json", v.JSON, &out.JSON}, {"data", v.Data, &out.Data}, {"chart", v.Chart, &out.Chart}, {"extra", v.Extra, &out.Extra}} {
		if f.from == nil {
			continue
		}
		data, err := json.Marshal(f.from)
		if err != nil || r.forms+len(data) > maxForms {
			omit(fmt.Sprintf("%s, %d bytes", f.name, len(data)))
			continue
		}
		r.forms += len(data)
		*f.to = f.from
	}
	r.out.Results = append(r.out.Results, out)
}

// maxValues bounds the number of displayed values in an answer.
const maxValues = 200

// result returns the answer. An error of the program is an error of the tool, with all that the run
// has printed before.
func (r *codeRun) result() (*mcp.CallToolResult, codeOut, error) {
	out := &r.out
	out.Stdout, out.Stderr = strings.ToValidUTF8(r.stdout.String(), "\uFFFD"), strings.ToValidUTF8(r.stderr.String(), "\uFFFD")
	out.Truncated = out.Truncated || r.stdout.omitted() > 0 || r.stderr.omitted() > 0
	command := commandOut{Stdout: onLines(out.Stdout, r.texts.String()), Stderr: out.Stderr, ExitCode: &out.ExitCode, TimedOut: out.TimedOut, OOM: out.OOM, Restarted: out.Restarted}
	if f := out.Failure; f != nil {
		f.Name, f.Value, f.Traceback = bounded(f.Name), bounded(f.Value), bounded(f.Traceback)
		if said := failureText(f); !strings.Contains(out.Stderr, said) {
			command.Stderr = onLines(out.Stderr, said)
		}
	}
	text := command.text()
	if out.Renewed {
		text += "\n[the context was gone: variables of earlier runs are lost]"
	}
	res := &mcp.CallToolResult{
		Content: append([]mcp.Content{&mcp.TextContent{Text: text}}, r.pictures...),
		IsError: out.Failure != nil || out.ExitCode != 0 || out.TimedOut || out.OOM,
	}
	return res, *out, nil
}

// onLines joins two texts, which begin on a line each.
func onLines(a, b string) string {
	if a != "" && b != "" && !strings.HasSuffix(a, "\n") {
		a += "\n"
	}
	return a + b
}

// failureText returns what a model reads of a failure.
func failureText(f *api.CodeFailure) string {
	if f.Traceback != "" {
		return strings.TrimRight(f.Traceback, "\n")
	}
	return f.Name + ": " + f.Value
}

// bounded returns a text of the program with at most [maxOutput] bytes and a note.
func bounded(text string) string {
	var m middle
	m.add([]byte(text))
	return strings.ToValidUTF8(m.String(), "\uFFFD")
}

// request returns the request of a run, without its context.
func (in *codeIn) request(s *Server, lang *api.Language) (api.CodeRequest, error) {
	req := api.CodeRequest{Code: in.Code, Language: lang.Name, Libraries: in.Libraries, Stdin: []byte(in.Stdin), Timeout: in.Timeout}
	most := s.opts.Timeout.Seconds()
	switch {
	case in.Code == "":
		return req, errors.New("code is missing")
	case len(in.Code) > maxCode:
		return req, fmt.Errorf("the code has more than %d bytes", maxCode)
	case len(in.Stdin) > maxStdin:
		return req, fmt.Errorf("stdin has more than %d bytes; write it to a file", maxStdin)
	case len(in.Libraries) > maxLibraries:
		return req, fmt.Errorf("libraries: more than %d", maxLibraries)
	case in.Context != "" && in.Fresh:
		return req, errors.New("context and fresh exclude each other")
	case in.Context != "" && !lang.Contexts:
		return req, fmt.Errorf("context: %s keeps no variables between runs", lang.Name)
	case len(in.Context) > maxContextName:
		return req, fmt.Errorf("context: a name has at most %d bytes", maxContextName)
	case in.Stdin != "" && lang.Contexts && !in.Fresh:
		return req, errors.New("stdin is of runs that keep no variables; give fresh")
	case !(in.Timeout >= 0): // NaN too
		return req, fmt.Errorf("timeout %v: no time", in.Timeout)
	case in.Timeout > most:
		return req, fmt.Errorf("timeout %v: at most %v seconds are allowed", in.Timeout, most)
	case in.Timeout == 0:
		req.Timeout = most
	}
	var err error
	req.Env, err = environment(in.Env)
	return req, err
}

// language returns a language by its name or alias.
func (s *Server) language(ctx context.Context, name string) (*api.Language, error) {
	all, err := s.api.Languages(ctx)
	if err != nil {
		return nil, err
	}
	if name == "" {
		name = "python"
	}
	names := make([]string, 0, len(all))
	for i := range all {
		if all[i].Name == name || slices.Contains(all[i].Aliases, name) {
			return &all[i], nil
		}
		names = append(names, all[i].Name)
	}
	return nil, fmt.Errorf("there is no language %q; there are %s", clip(name), strings.Join(names, ", "))
}

// contextKey names a context of a box.
type contextKey struct{ language, name string }

// context returns the id of a context, which it makes at the first use, and whether it has.
func (b *box) context(ctx context.Context, s *Server, key contextKey) (id string, made bool, err error) {
	if err := b.making.take(ctx); err != nil {
		return "", false, err
	}
	defer b.making.release()
	b.mu.Lock()
	id, ok := b.contexts[key]
	b.mu.Unlock()
	if ok {
		return id, false, nil
	}
	created, err := s.api.CreateContext(ctx, b.id, api.CreateContext{Language: key.language})
	if err != nil {
		return "", false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.contexts == nil {
		b.contexts = make(map[contextKey]string)
	}
	b.contexts[key] = created.ID
	return created.ID, true, nil
}

// forget forgets a context that is gone, unless there is another in its place.
func (b *box) forget(key contextKey, id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.contexts[key] == id {
		delete(b.contexts, key)
	}
}

func runCode(ctx context.Context, c *call, in codeIn) (*mcp.CallToolResult, codeOut, error) {
	lang, err := c.s.language(ctx, in.Language)
	if err != nil {
		return nil, codeOut{}, err
	}
	req, err := in.request(c.s, lang)
	if err != nil {
		return nil, codeOut{}, err
	}
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, codeOut{}, err
	}
	run := new(codeRun)
	run.out.Language = lang.Name
	restarted, err := c.se.awake(ctx, b, func() error {
		if in.Fresh || !lang.Contexts {
			return c.runOnce(ctx, b, req, run)
		}
		name := in.Context
		if name == "" {
			name = defaultName
		}
		run.out.Context = name
		return c.runIn(ctx, b, contextKey{lang.Name, name}, req, run)
	})
	if err != nil {
		return nil, codeOut{}, err
	}
	run.out.Restarted = restarted
	return run.result()
}

// runOnce does one request. A cancelled one interrupts the run; the context stays.
func (c *call) runOnce(ctx context.Context, b *box, req api.CodeRequest, run *codeRun) error {
	_, err := c.s.api.StreamCode(ctx, b.id, req, func(e api.CodeEvent) error {
		run.add(c, e)
		return nil
	})
	return err
}

// runIn runs code in a context. One that is gone, with its processes when the sandbox was stopped,
// is replaced once.
func (c *call) runIn(ctx context.Context, b *box, key contextKey, req api.CodeRequest, run *codeRun) error {
	req.Language = "" // the context's
	for {
		id, made, err := b.context(ctx, c.s, key)
		if err != nil {
			return err
		}
		req.Context = id
		err = c.runOnce(ctx, b, req, run)
		if made || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			return err
		}
		b.forget(key, id)
		run.out.Renewed = true
	}
}

// languageOut describes a language.
type languageOut struct {
	Name      string   `json:"name"`
	Aliases   []string `json:"aliases,omitempty"`
	State     bool     `json:"keeps_variables" jsonschema:"variables stay between runs"`
	Libraries string   `json:"libraries,omitempty" jsonschema:"package manager of libraries; absent: there is none"`
}

type languagesOut struct {
	Languages []languageOut `json:"languages"`
}

func listLanguages(ctx context.Context, c *call, _ struct{}) (*mcp.CallToolResult, languagesOut, error) {
	all, err := c.s.api.Languages(ctx)
	out := languagesOut{Languages: make([]languageOut, 0, len(all))}
	for _, l := range all {
		out.Languages = append(out.Languages, languageOut{Name: l.Name, Aliases: l.Aliases, State: l.Contexts, Libraries: l.Libraries})
	}
	return nil, out, err
}
