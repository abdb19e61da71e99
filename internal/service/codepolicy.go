package service

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/codehook"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/internal/service/output"
	"github.com/sandboxd/sandboxd/interpreter"
	"github.com/sandboxd/sandboxd/interpreter/codepolicy"
)

const (
	// readerTimeout bounds the program that reads the imports of Python code in the sandbox.
	readerTimeout = 30 * time.Second
	// maxFreeCheck and maxCheck bound the steps, of some 9 ns each, that patterns of a request may
	// cost. Checks of a tenant beyond the first take turns, so that it occupies one thread of the
	// daemon with them. Checks beyond the second are refused: an expression cannot be interrupted.
	maxFreeCheck = 1 << 26
	maxCheck     = 1 << 29
	// maxTold is the maximum number of findings in the text of a refusal.
	maxTold = 5
)

// judgedRun is a run whose code is to be judged.
type judgedRun struct {
	sandbox string // its id
	lang    *interpreter.Language
	context string    // its id; empty: the code runs by itself
	user    string    // of the run, as in requests
	due     time.Time // end of the run's time; zero: never
	preload bool      // the code is the daemon's: it imports modules, and cannot be another
	cost    int       // steps that the patterns of the request may take; judge sets it
}

// verdict is the outcome for code that may run.
type verdict struct {
	code     string // to run
	findings []api.CodeFinding
	more     int  // number of findings that are left out
	amended  bool // by the hook: code is not the client's
}

// judge decides whether code may run: by the operator's policy and the request's, and then by the
// operator's hook. Code that the hook has changed must pass the policies again.
func (s *API) judge(ctx context.Context, run *judgedRun, req *api.CodeRequest) (v verdict, err error) {
	v.code = req.Code
	var policies []*codepolicy.Policy
	if s.opts.CodePolicy != nil {
		policies = append(policies, s.opts.CodePolicy)
	}
	if req.Policy != "" {
		p, err := codepolicy.Parse([]byte(req.Policy))
		if err != nil {
			return v, class.Invalidf("policy: %w", err)
		}
		policies = append(policies, p)
		run.cost = p.Cost(len(v.code))
	}
	if run.cost > maxCheck {
		return v, class.Mark(class.ErrTooLarge, fmt.Errorf("policy: its patterns are too large for code of %d bytes", len(v.code)))
	}
	v.findings, v.more, err = s.check(ctx, run, policies, v.code, req.Libraries)
	if err == nil && s.opts.CodeHook != nil {
		var changed *string
		switch changed, err = s.askHook(ctx, run, v); {
		case err != nil || changed == nil || *changed == v.code:
		case run.preload:
			err = refuse(v.findings, "the operator's hook gives other code for modules of preload")
		default:
			v.code, v.amended = *changed, true // as long as the client's or not: the hook is trusted
			v.findings, v.more, err = s.check(ctx, run, policies, v.code, req.Libraries)
		}
	}
	s.recordVerdict(run, req, &v, err)
	return v, err
}

// judgePreload judges the modules that a context imports before it takes code.
func (s *API) judgePreload(ctx context.Context, sandbox string, req *api.CreateContext) error {
	if len(req.Preload) == 0 || s.opts.CodePolicy == nil && s.opts.CodeHook == nil {
		return nil
	}
	run := &judgedRun{sandbox: sandbox, lang: interpreter.Find(req.Language), user: req.User, preload: true}
	if _, err := s.judge(ctx, run, &api.CodeRequest{Code: "import " + strings.Join(req.Preload, ", ")}); err != nil {
		return fmt.Errorf("preload: %w", err)
	}
	return nil
}

// check returns the findings of policies that refuse nothing, and the number of those left out.
func (s *API) check(ctx context.Context, run *judgedRun, policies []*codepolicy.Policy, text string, libraries []string) (found []api.CodeFinding, more int, err error) {
	if len(policies) == 0 {
		return nil, 0, nil
	}
	code := &codepolicy.Code{Language: run.lang.Name, Text: text, Cell: run.context != "", Libraries: libraries}
	reads := func(p *codepolicy.Policy) bool { return p.Reads(code.Language) }
	if code.Language == "python" && !run.preload && slices.ContainsFunc(policies, reads) {
		if code.Imports, err = s.pythonImports(ctx, run, text); err != nil {
			return nil, 0, err
		}
	}
	if run.cost > maxFreeCheck {
		release, err := s.checks.take(ctx, s.caller.Tenant)
		if err != nil {
			return nil, 0, err
		}
		defer release()
	}
	r := codepolicy.Check(policies, code)
	if r.Refused {
		return r.Findings, r.More, refuse(r.Findings, "%s", tell(r.Findings, r.More))
	}
	return r.Findings, r.More, nil
}

func refuse(findings []api.CodeFinding, format string, args ...any) error {
	return class.Mark(class.ErrRefused, &class.Refusal{Findings: findings, Reason: fmt.Sprintf(format, args...)})
}

// tell puts findings into words, those that refuse first. More is the number of further findings.
func tell(findings []api.CodeFinding, more int) string {
	sorted := slices.Clone(findings)
	slices.SortStableFunc(sorted, func(a, b api.CodeFinding) int {
		switch {
		case a.Refused == b.Refused:
			return 0
		case a.Refused:
			return -1
		}
		return 1
	})
	var parts []string
	for _, f := range sorted[:min(len(sorted), maxTold)] {
		text := fmt.Sprintf("%s %s, %s", f.Kind, f.Name, f.Severity)
		if f.Line > 0 {
			text = fmt.Sprintf("line %d: %s", f.Line, text)
		}
		if f.Reason != "" {
			text += ": " + f.Reason
		}
		parts = append(parts, text)
	}
	if more += len(sorted) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, "; ")
}

// pythonImports reads the imports of Python code with the sandbox's own Python. The program and its
// answer are the sandbox's: they add to the imports that the daemon reads itself, and take none
// away.
func (s *API) pythonImports(ctx context.Context, run *judgedRun, text string) ([]codepolicy.Import, error) {
	isCell := run.context != ""
	args := []string{"-I", "-S", "-W", "ignore", "-c", codepolicy.PythonReader}
	if isCell {
		args = append(args, "cell")
	}
	timeout := readerTimeout
	if !run.due.IsZero() {
		timeout = min(timeout, time.Until(run.due))
	}
	if timeout < time.Millisecond {
		return nil, nil // the run does not start either
	}
	for _, name := range []string{"python3", "python"} {
		x, err := s.startFed(ctx, run.sandbox, api.ExecRequest{
			Argv: append([]string{name}, args...), Stdin: codepolicy.PythonInput(text, isCell), User: run.user, Timeout: timeout.Seconds(),
		}, false)
		if errors.Is(err, class.ErrProgramMissing) {
			continue
		}
		if err != nil {
			return nil, err
		}
		defer x.Close()
		stdout, stderr := output.Head{Limit: codepolicy.MaxPythonAnswer}, output.Head{Limit: 256}
		keep := x.KeepIn(&stdout, &stderr)
		exit, _, err := x.Stream(ctx, func(stream string, p []byte) error {
			if err := keep(stream, p); err != nil || !stdout.Truncated {
				return err
			}
			return errLongAnswer // one that never ends would take the reader's time, and a processor
		})
		switch {
		case errors.Is(err, errLongAnswer): // below it is refused
		case err != nil:
			return nil, err
		case exit.Timeout && timeout < readerTimeout:
			return nil, nil // of the run, which does not start either
		case exit.Timeout, exit.Code != 0:
			return nil, refuse(nil, "the imports are not read: the sandbox's %s ended with code %d: %s", name, exit.Code, strings.ToValidUTF8(string(stderr.Bytes()), "\uFFFD"))
		}
		found, err := codepolicy.ReadPython(stdout.Bytes())
		if err != nil {
			return nil, refuse(nil, "the imports are not read: answer of the sandbox's %s: %v", name, err)
		}
		return found, nil
	}
	if isCell {
		return nil, refuse(nil, "the imports are not read: the sandbox has no python3")
	}
	return nil, nil // the run says that the language is missing
}

var errLongAnswer = errors.New("the answer is too long")

// askHook asks once. A failure of the hook is a refusal.
func (s *API) askHook(ctx context.Context, run *judgedRun, v verdict) (code *string, err error) {
	findings := append([]api.CodeFinding{}, v.findings...) // a list, also if it is empty
	a, err := s.opts.CodeHook.Ask(ctx, codehook.Question{
		Tenant: s.caller.Tenant, Sandbox: run.sandbox, Context: run.context, Language: run.lang.Name, Code: v.code, Findings: findings,
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		s.log.Warn("the hook for code has not answered", "id", run.sandbox, "error", err)
		return nil, refuse(v.findings, "the operator's hook gave no decision: %v", err)
	case a.Decision == codehook.Deny:
		return nil, refuse(v.findings, "the operator's hook denies it: %s", cmp.Or(a.Reason, "it gives no reason"))
	}
	return a.Code, nil
}

// recordVerdict records a judgement that is not plain consent.
func (s *API) recordVerdict(run *judgedRun, req *api.CodeRequest, v *verdict, err error) {
	sum := sha256.Sum256([]byte(req.Code))
	e := api.Event{Type: api.EventCode, Object: "sha256:" + hex.EncodeToString(sum[:]), Sandbox: run.sandbox, Program: run.lang.Name}
	refusal, refused := errors.AsType[*class.Refusal](err)
	switch {
	case refused:
		e.Action, e.Reason = api.ActionRefused, refusal.Reason
	case err != nil:
		return
	case v.amended:
		e.Action, e.Reason = api.ActionAmended, tell(v.findings, v.more)
	case len(v.findings) > 0:
		e.Action, e.Reason = api.ActionWarned, tell(v.findings, v.more)
	default:
		return
	}
	e.Reason = class.Clip(e.Reason)
	s.publish(e)
	s.log.Info("code was judged", "outcome", e.Action, "tenant", s.caller.Tenant, "id", run.sandbox, "language", run.lang.Name, "code", e.Object, "reason", e.Reason)
}

// checked emits the events of code that is judged and not run.
func checked(v *verdict, emit func(api.CodeEvent) error) error {
	if err := emit(startedEvent(v)); err != nil {
		return err
	}
	return emit(api.CodeEvent{Type: api.CodeEnded, Time: time.Now().UTC(), Exit: &api.Exit{}, Usage: &api.Usage{}})
}
