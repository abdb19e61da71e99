package simplesandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

const noSandbox = "Sandbox not found"

// health answers for the daemon too: without it nothing here works.
func (f *Face) health(c *call) error {
	if _, err := f.api.System(c.r.Context()); err != nil {
		return err
	}
	f.reply(c.w, http.StatusOK, map[string]string{"status": "healthy"})
	return nil
}

func (f *Face) list(c *call) error {
	all, err := f.made(c.r.Context())
	if err != nil {
		return err
	}
	type entry struct {
		CreatedAt float64 `json:"created_at"` // seconds since 1970
	}
	out := make(map[string]entry, len(all))
	for _, sb := range all {
		out[sb.ID] = entry{float64(sb.CreatedAt.UnixMicro()) / 1e6}
	}
	f.reply(c.w, http.StatusOK, out)
	return nil
}

// own reports whether a face has made a sandbox.
func own(sb *api.Sandbox) bool { return sb.Labels[labelFace] == sb.ID }

// made returns the sandboxes that faces have made.
func (f *Face) made(ctx context.Context) ([]api.Sandbox, error) {
	all, err := f.api.ListSandboxes(ctx, client.ListOptions{}) // it compares labels to one value only
	return slices.DeleteFunc(all, func(sb api.Sandbox) bool { return !own(&sb) }), err
}

// create makes a sandbox with its context, so that an image without Python is an error of creation.
func (f *Face) create(c *call) (err error) {
	if _, err := io.Copy(io.Discard, http.MaxBytesReader(c.w, c.r.Body, maxBody)); err != nil {
		return bodyError(err) // nothing is asked for, but clients send an empty object
	}
	c.deadline(0)
	ctx := c.r.Context()
	// Those being made count before the list is read, so that none is missed between.
	creating := f.creating.Add(1)
	defer f.creating.Add(-1)
	all, err := f.made(ctx)
	if err != nil {
		return err
	}
	if len(all)+int(creating) > maxSandboxes {
		return refuse(http.StatusTooManyRequests, "there are %d sandboxes, and no more are possible: close one", maxSandboxes)
	}
	sb, err := f.api.CreateSandbox(ctx, f.opts.Sandbox)
	if p, ok := errors.AsType[*api.Problem](err); ok && p.Code == api.CodeNotFound {
		return refuse(http.StatusInternalServerError, "%s", p.Detail) // the operator's image
	}
	if err != nil {
		return err
	}
	if _, err := f.makeContext(ctx, sb); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
		defer cancel()
		return errors.Join(err, f.api.DeleteSandbox(ctx, sb.ID))
	}
	f.reply(c.w, http.StatusOK, map[string]string{"sandbox_id": sb.ID})
	return nil
}

// sandbox returns the sandbox that a request is about. Others than those of faces do not exist
// here, and names are no ids.
func (f *Face) sandbox(c *call) (*api.Sandbox, error) {
	if c.id == "" || strings.Trim(c.id, "0123456789abcdefghijklmnopqrstuvwxyz") != "" {
		return nil, refuse(http.StatusNotFound, noSandbox)
	}
	sb, err := f.api.GetSandbox(c.r.Context(), c.id)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || err == nil && (sb.ID != c.id || !own(sb)) {
		return nil, refuse(http.StatusNotFound, noSandbox)
	}
	return sb, err
}

// makeContext makes a context of a sandbox, and writes the ids of both into the sandbox's labels.
func (f *Face) makeContext(ctx context.Context, sb *api.Sandbox) (string, error) {
	made, err := f.api.CreateContext(ctx, sb.ID, api.CreateContext{Language: "python"})
	if err != nil {
		return "", err
	}
	_, err = f.api.UpdateSandbox(ctx, sb.ID, api.UpdateSandbox{Labels: map[string]*string{labelFace: &sb.ID, labelContext: &made.ID}})
	return made.ID, err
}

// newContext returns a context in the place of lost, which does not exist. Requests that ask at the
// same time get the same one.
func (f *Face) newContext(ctx context.Context, id, lost string) (string, error) {
	made, err, _ := f.contexts.Do(id, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout) // others wait for it
		defer cancel()
		sb, err := f.api.GetSandbox(ctx, id)
		if err != nil {
			return "", err
		}
		if now := sb.Labels[labelContext]; now != lost {
			return now, nil // a request before this one has made it
		}
		return f.makeContext(ctx, sb)
	})
	name, _ := made.(string) // "" with an error
	return name, err
}

// execution is the answer to a run.
type execution struct {
	Stdout  []string `json:"stdout"`
	Stderr  []string `json:"stderr"`
	Error   *raised  `json:"error"`
	Results []form   `json:"results"`
	// Truncated: output beyond 4 MiB of a stream was dropped.
	Truncated bool `json:"truncated,omitempty"`
}

type raised struct {
	Name      string   `json:"name"`
	Value     string   `json:"value"`
	Traceback []string `json:"traceback"` // lines
}

// form is one form of a value that code displayed. Binary ones are base64.
type form struct {
	Type string `json:"type"`
	Data any    `json:"data"`
}

func (f *Face) execute(c *call) error {
	var in struct {
		Code *string `json:"code"`
	}
	if err := c.body(&in); err != nil {
		return err
	}
	if in.Code == nil {
		return invalid("missing", "code", "Field required")
	}
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	ctx := c.r.Context()
	req := api.CodeRequest{Code: *in.Code, Context: sb.Labels[labelContext], Timeout: f.opts.Timeout.Seconds(), OutputLimit: maxOutput}
	var res *api.CodeResult
	for again := true; ; again = false {
		if req.Context == "" {
			if req.Context, err = f.newContext(ctx, sb.ID, sb.Labels[labelContext]); err != nil {
				return err
			}
		}
		res, err = f.api.RunCode(ctx, sb.ID, req)
		if !again || !errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			break
		}
		req.Context = "" // it was deleted, or the sandbox was started anew
	}
	if err != nil {
		return err
	}
	f.reply(c.w, http.StatusOK, translate(res))
	return nil
}

// translate returns the answer to a run.
func translate(res *api.CodeResult) execution {
	out := execution{Stdout: stream(res.Logs.Stdout), Stderr: stream(res.Logs.Stderr), Results: []form{}, Truncated: res.Truncated}
	if e := res.Failure; e != nil {
		out.Error = &raised{e.Name, e.Value, stream(strings.TrimSuffix(e.Traceback, "\n"))}
		if len(out.Error.Traceback) > 0 {
			out.Error.Traceback = strings.Split(out.Error.Traceback[0], "\n")
		}
	}
	for i := range res.Results {
		out.Results = append(out.Results, forms(&res.Results[i])...)
	}
	return out
}

// stream returns the output of a stream, of which clients expect a list of pieces.
func stream(text string) []string {
	if text == "" {
		return []string{}
	}
	return []string{text}
}

// forms returns the forms of a value by media type, the text first, as Jupyter has them.
func forms(v *api.CodeValue) []form {
	var out []form
	for _, text := range []form{
		{"text/plain", v.Text},
		{"text/html", v.HTML},
		{"text/markdown", v.Markdown},
		{"image/svg+xml", v.SVG},
		{"text/latex", v.LaTeX},
		{"application/javascript", v.JavaScript},
	} {
		if text.Data != "" {
			out = append(out, text)
		}
	}
	for _, binary := range []struct {
		kind string
		data []byte
	}{{"image/png", v.PNG}, {"image/jpeg", v.JPEG}, {"application/pdf", v.PDF}} {
		if len(binary.data) > 0 {
			out = append(out, form{binary.kind, binary.data})
		}
	}
	if v.JSON != nil {
		out = append(out, form{"application/json", v.JSON})
	}
	extra, _ := v.Extra.(map[string]any) // a kernel that sends another type has no further forms
	for _, kind := range slices.Sorted(maps.Keys(extra)) {
		out = append(out, form{kind, extra[kind]})
	}
	return out
}

// installation is the answer to install.
type installation struct {
	Success bool   `json:"success"`
	Stdout  string `json:"stdout"`
	Stderr  string `json:"stderr"`
	Message string `json:"message"`
}

// install has a run of no code install a package. A failure is an answer, not an error.
func (f *Face) install(c *call) error {
	var in struct {
		Package *string `json:"package_name"`
	}
	if err := c.body(&in); err != nil {
		return err
	}
	if in.Package == nil {
		return invalid("missing", "package_name", "Field required")
	}
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	res, err := f.api.RunCode(c.r.Context(), sb.ID, api.CodeRequest{
		Code: "\n", Language: "python", Libraries: []string{*in.Package}, Timeout: installTimeout, OutputLimit: maxOutput,
	})
	out := installation{Message: "installed " + *in.Package}
	if p, ok := errors.AsType[*api.Problem](err); ok && (p.Code == api.CodeLibraries || p.Code == api.CodeInvalid || p.Code == api.CodeNoLanguage) {
		out.Stderr, err = p.Detail, nil
	} else if err == nil {
		out.Success, out.Stdout, out.Stderr = res.Exit.Code == 0, res.Logs.Stdout, res.Logs.Stderr
	}
	if err != nil {
		return err
	}
	if !out.Success {
		out.Message = fmt.Sprintf("install %s: no success", *in.Package)
	}
	f.reply(c.w, http.StatusOK, out)
	return nil
}

// within returns the absolute path of a file of the directory that code works in. Beyond it, and
// for the directory itself, access is denied. The host's files are out of reach in any case: every
// path is looked up inside the sandbox.
func within(sb *api.Sandbox, name string) (string, error) {
	full := path.Clean(name)
	if !path.IsAbs(name) {
		full = path.Join(sb.Cwd, name)
	}
	root := strings.TrimSuffix(path.Clean(sb.Cwd), "/") + "/"
	if name == "" || strings.ContainsRune(name, 0) || !strings.HasPrefix(full, root) || full == root {
		return "", refuse(http.StatusForbidden, "File access denied")
	}
	return full, nil
}

// source is a body, or a part of one. It keeps its error, which the client of the daemon would wrap
// beyond recognition.
type source struct {
	io.Reader
	before func() // called before each read
	err    error
}

func (s *source) Read(p []byte) (int, error) {
	s.before()
	n, err := s.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// Close implements [io.ReadCloser]. The server closes what it has read from.
func (s *source) Close() error { return nil }

func (f *Face) upload(c *call) error {
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	arrives := func() { c.deadline(f.patience) } // each piece has its time
	body := &source{Reader: http.MaxBytesReader(c.w, c.r.Body, maxUpload), before: arrives}
	c.r.Body = body
	parts, err := c.r.MultipartReader()
	if err != nil {
		return invalid("missing", "file", "Field required: %v", err)
	}
	for {
		part, err := parts.NextPart()
		switch {
		case body.err != nil:
			return bodyError(body.err)
		case errors.Is(err, io.EOF):
			return invalid("missing", "file", "Field required")
		case err != nil:
			return invalid("multipart", "file", "read the form: %v", err)
		}
		if part.FormName() != "file" {
			continue
		}
		name := c.r.URL.Query().Get("file_path")
		if name == "" {
			// part.FileName drops directories, which clients put there.
			_, params, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			name = params["filename"]
		}
		full, err := within(sb, name)
		if err != nil {
			return err
		}
		data := &source{Reader: part, before: func() {}}
		err = f.api.WriteFile(c.r.Context(), sb.ID, full, data, 0, "")
		if bad := cmp.Or(body.err, data.err); bad != nil {
			return bodyError(bad)
		}
		if err != nil {
			return err
		}
		c.deadline(0)
		f.reply(c.w, http.StatusOK, map[string]string{"file_path": full})
		return nil
	}
}

func (f *Face) files(c *call) error {
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	type entry struct {
		Path string `json:"path"` // relative
		Size int64  `json:"size"`
	}
	list, err := f.api.ListFiles(c.r.Context(), sb.ID, sb.Cwd, 200)
	if err != nil {
		return err
	}
	out := []entry{}
	root := strings.TrimSuffix(path.Clean(sb.Cwd), "/") + "/"
	for i := range list.Entries {
		if e := &list.Entries[i]; e.Type == api.TypeFile {
			out = append(out, entry{strings.TrimPrefix(e.Path, root), e.Size})
		}
	}
	if list.More {
		c.w.Header().Set("X-Sandboxd-More", "true") // a list has no place for it
	}
	f.reply(c.w, http.StatusOK, out)
	return nil
}

func (f *Face) download(c *call) error {
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	full, err := within(sb, c.file)
	if err != nil {
		return err
	}
	ctx := c.r.Context()
	st, err := f.api.StatFile(ctx, sb.ID, full, true)
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) || err == nil && st.Type != api.TypeFile {
		return refuse(http.StatusNotFound, "File not found")
	}
	if err != nil {
		return err
	}
	file, err := f.api.ReadFile(ctx, sb.ID, full)
	if err != nil {
		return err
	}
	defer file.Close()
	kind := mime.TypeByExtension(path.Ext(full))
	if kind == "" {
		kind = "application/octet-stream"
	}
	h := c.w.Header()
	h.Set("Content-Type", kind)
	if as := mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(full)}); as != "" {
		h.Set("Content-Disposition", as)
	}
	h.Set("Last-Modified", st.MTime.UTC().Format(http.TimeFormat))
	if _, err := io.Copy(c.w, file); err != nil {
		panic(http.ErrAbortHandler) // the client sees that the file is not whole
	}
	return nil
}

func (f *Face) close(c *call) error {
	sb, err := f.sandbox(c)
	if err != nil {
		return err
	}
	// A client that does not wait for the end has closed it all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.r.Context()), stepTimeout)
	defer cancel()
	if err := f.api.DeleteSandbox(ctx, sb.ID); err != nil {
		return err
	}
	f.reply(c.w, http.StatusOK, map[string]string{"status": "success", "message": "Sandbox closed"})
	return nil
}
