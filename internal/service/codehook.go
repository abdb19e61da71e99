package service

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// hookTimeout bounds a question to the hook, from the connection to the end of the answer.
	hookTimeout = 10 * time.Second
	// maxHookAnswer is the maximum size in bytes of an answer: code of 1 MiB, escaped.
	maxHookAnswer = 7 << 20
	maxHookReason = 1000
)

// CodeHook is the operator's service that judges code runs. It is asked over HTTP.
type CodeHook struct {
	url  string
	http *http.Client
}

// NewCodeHook returns a hook at an address that the transport connects to.
func NewCodeHook(address string, transport http.RoundTripper) *CodeHook {
	return &CodeHook{address, &http.Client{
		Transport: transport, Timeout: hookTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// hookQuestion is the body of a request to the hook.
type hookQuestion struct {
	Tenant   string            `json:"tenant"` // empty: the daemon's own user
	Sandbox  string            `json:"sandbox"`
	Context  string            `json:"context,omitempty"`
	Language string            `json:"language"`
	Code     string            `json:"code"`
	Findings []api.CodeFinding `json:"findings"` // that refuse nothing
}

// hookAnswer is the body of its response.
type hookAnswer struct {
	Decision string  `json:"decision"`
	Reason   string  `json:"reason"`
	Code     *string `json:"code"` // to run instead; nil: that of the question
}

// askHook asks once. A failure of the hook is a refusal.
func (s *API) askHook(ctx context.Context, run *judgedRun, v verdict) (code *string, err error) {
	findings := v.findings
	if findings == nil {
		findings = []api.CodeFinding{}
	}
	a, err := s.opts.CodeHook.ask(ctx, hookQuestion{s.caller.Tenant, run.sandbox, run.context, run.lang.Name, v.code, findings})
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		s.log.Warn("the hook for code has not answered", "id", run.sandbox, "error", err)
		return nil, refuse(v.findings, "the operator's hook gave no decision: %v", err)
	case a.Decision == "deny":
		reason := a.Reason
		if reason == "" {
			reason = "it gives no reason"
		}
		return nil, refuse(v.findings, "the operator's hook denies it: %s", reason)
	}
	return a.Code, nil
}

func (h *CodeHook) ask(ctx context.Context, q hookQuestion) (a hookAnswer, err error) {
	body, err := json.Marshal(q)
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return a, errors.New("its address cannot be used")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := h.http.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // without the address, which tenants need not know
		}
		return a, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxHookAnswer+1))
	switch {
	case err != nil:
		return a, err
	case resp.StatusCode != http.StatusOK:
		return a, fmt.Errorf("HTTP %d", resp.StatusCode)
	case len(data) > maxHookAnswer:
		return a, fmt.Errorf("the answer is longer than %d bytes", maxHookAnswer)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&a); err != nil || !errors.Is(d.Decode(new(any)), io.EOF) {
		return a, errors.New("the answer is not one JSON object of decision, reason and code")
	}
	switch {
	case a.Decision != "allow" && a.Decision != "deny":
		return a, errors.New("its decision is neither allow nor deny")
	case len(a.Reason) > maxHookReason:
		return a, fmt.Errorf("its reason is longer than %d bytes", maxHookReason)
	case a.Code != nil && (*a.Code == "" || len(*a.Code) > maxCode):
		return a, fmt.Errorf("its code is empty, or longer than %d bytes", maxCode)
	}
	return a, nil
}
