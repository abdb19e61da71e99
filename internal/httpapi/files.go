package httpapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func (s *Server) getStat(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "follow")
	if err != nil {
		return err
	}
	follow, err := boolParam("follow", q.Get("follow"))
	if err != nil {
		return err
	}
	e, err := s.as(r).Stat(r.Context(), r.PathValue("id"), q.Get("path"), follow)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, e)
}

func (s *Server) getList(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "depth", "limit")
	if err != nil {
		return err
	}
	opts := service.ListOptions{Depth: 1}
	for name, n := range map[string]*int{"depth": &opts.Depth, "limit": &opts.Limit} {
		if s := q.Get(name); s != "" {
			if *n, err = strconv.Atoi(s); err != nil || *n < 1 {
				return class.Invalidf("%s %q: must be a positive number", name, class.Clip(s))
			}
		}
	}
	id, dir := r.PathValue("id"), q.Get("path")
	if !wants(r, api.TypeNDJSON) {
		list, err := s.as(r).List(r.Context(), id, dir, opts)
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, list)
	}
	emit, began := linesTo[api.ListEvent](w, false), false
	more, err := s.as(r).ListEach(r.Context(), id, dir, opts, func(e api.FileEntry) error {
		began = true
		return emit(api.ListEvent{Entry: &e})
	})
	switch {
	case err == nil:
		return emit(api.ListEvent{Done: true, More: more})
	case began:
		return emit(api.ListEvent{Error: ProblemOf(err)})
	}
	return err
}

func (s *Server) postMkdir(w http.ResponseWriter, r *http.Request) error {
	var req api.MakeDirectory
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	dir, err := eitherPath("path", req.Path, req.PathBytes)
	if err != nil {
		return err
	}
	mode, err := parseMode(req.Mode)
	if err != nil {
		return err
	}
	if err := s.as(r).Mkdir(r.Context(), r.PathValue("id"), dir, req.Parents, service.WriteOptions{Mode: mode, User: req.User}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postMove(w http.ResponseWriter, r *http.Request) error {
	var req api.MoveFile
	if err := readJSON(w, r, maxBody, &req); err != nil {
		return err
	}
	from, err := eitherPath("from", req.From, req.FromBytes)
	if err != nil {
		return err
	}
	to, err := eitherPath("to", req.To, req.ToBytes)
	if err != nil {
		return err
	}
	if err := s.as(r).Move(r.Context(), r.PathValue("id"), from, to, req.Overwrite); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) deleteFile(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "recursive")
	if err != nil {
		return err
	}
	recursive, err := boolParam("recursive", q.Get("recursive"))
	if err != nil {
		return err
	}
	if err := s.as(r).RemoveFile(r.Context(), r.PathValue("id"), q.Get("path"), recursive); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// getWatch answers until the client goes, or the daemon: a watch has no end for which a shutdown
// could wait.
func (s *Server) getWatch(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "recursive")
	if err != nil {
		return err
	}
	recursive, err := boolParam("recursive", q.Get("recursive"))
	if err != nil {
		return err
	}
	ctx, end := s.untilStopping(r.Context())
	defer end()
	err = answerEvents(w, func(p *api.Problem) api.FileChange { return api.FileChange{Error: p} }, func(emit func(api.FileChange) error) error {
		return s.as(r).Watch(ctx, r.PathValue("id"), q.Get("path"), recursive, emit)
	})
	if errors.Is(context.Cause(r.Context()), context.Canceled) {
		return nil // the client has gone, which is how a watch ends
	}
	return err
}

// parseMode reads permissions as chmod takes them; none are 0.
func parseMode(s string) (fs.FileMode, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 16)
	if err != nil || mode > 0o777 || mode == 0 {
		return 0, class.Invalidf("mode %q: must be octal, 1 to 777", class.Clip(s))
	}
	return fs.FileMode(mode), nil
}

// eitherPath is the path of a body, which is text unless that would lose something.
func eitherPath(what, text string, b []byte) (string, error) {
	if text != "" && len(b) > 0 {
		return "", class.Invalidf("%s: give either %s or %s_bytes", what, what, what)
	}
	return cmp.Or(text, string(b)), nil
}

// getFile answers with the file's bytes, which the kernel moves from the sandbox's file to the
// client's socket.
func (s *Server) getFile(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path")
	if err != nil {
		return err
	}
	f, err := s.as(r).ReadFile(r.Context(), r.PathValue("id"), q.Get("path"))
	if err != nil {
		return err
	}
	defer f.Close() // only read
	st, err := f.Stat()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", api.TypeBytes)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-File-Mode", strconv.FormatUint(uint64(st.Mode().Perm()), 8))
	a, ok := w.(*answer)
	if !ok {
		return errors.New("answer with a file: not an answer of ours")
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTimeout)) // of the header; what follows sets its own
	out := &fileAnswer{answer: a}
	// It knows ranges, HEAD and the length.
	http.ServeContent(out, r, "", st.ModTime(), f)
	if out.unsatisfiable {
		return class.Mark(errRange, fmt.Errorf("range %q: %q has %d bytes", class.Clip(r.Header.Get("Range")), q.Get("path"), st.Size()))
	}
	return nil
}

// fileAnswer leaves it to us to say in our way that there is no such range.
type fileAnswer struct {
	*answer

	unsatisfiable bool
}

func (a *fileAnswer) WriteHeader(status int) {
	if status == http.StatusRequestedRangeNotSatisfiable {
		a.unsatisfiable = true
		return
	}
	a.answer.WriteHeader(status)
}

func (a *fileAnswer) Write(p []byte) (int, error) {
	if a.unsatisfiable {
		return len(p), nil
	}
	return a.answer.Write(p)
}

func (s *Server) putFile(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "mode", "user", "append")
	if err != nil {
		return err
	}
	opts := service.WriteOptions{User: q.Get("user")}
	if opts.Mode, err = parseMode(q.Get("mode")); err != nil {
		return err
	}
	atEnd, err := boolParam("append", q.Get("append"))
	if err != nil {
		return err
	}
	write := s.as(r).WriteFile
	if atEnd {
		write = s.as(r).AppendFile
	}
	if err := write(r.Context(), r.PathValue("id"), q.Get("path"), opts, requestBody(w, r)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) getArchive(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path")
	if err != nil {
		return err
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeTar}
	return s.as(r).ArchiveOut(r.Context(), r.PathValue("id"), q.Get("path"), out)
}

func (s *Server) putArchive(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "path", "user", "owners")
	if err != nil {
		return err
	}
	owners, err := boolParam("owners", q.Get("owners"))
	if err != nil {
		return err
	}
	opts := service.WriteOptions{User: q.Get("user"), Owners: owners}
	err = s.as(r).ArchiveIn(r.Context(), r.PathValue("id"), q.Get("path"), opts, requestBody(w, r))
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
