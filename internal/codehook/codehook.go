// Package codehook asks the operator's service about code runs, over HTTP.
package codehook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// maxAnswer is the maximum size in bytes of an answer: code of 1 MiB, escaped.
	maxAnswer = 7 << 20
	maxReason = 1000

	// MaxCode is the maximum length in bytes of code that the hook gives.
	MaxCode = 1 << 20
)

// Hook is the operator's service.
type Hook struct {
	url  string
	http *http.Client
}

// New returns a hook at an address that the transport connects to. Timeout bounds a question, from
// the connection to the end of the answer.
func New(address string, transport http.RoundTripper, timeout time.Duration) *Hook {
	return &Hook{address, &http.Client{
		Transport: transport, Timeout: timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Question is the body of a request to the hook.
type Question struct {
	Tenant   string            `json:"tenant"` // empty: the daemon's own user
	Sandbox  string            `json:"sandbox"`
	Context  string            `json:"context,omitempty"`
	Language string            `json:"language"`
	Code     string            `json:"code"`
	Findings []api.CodeFinding `json:"findings"` // that refuse nothing
}

// Decisions of an [Answer].
const (
	Allow = "allow"
	Deny  = "deny"
)

// Answer is the body of its response.
type Answer struct {
	Decision string  `json:"decision"` // [Allow] or [Deny]
	Reason   string  `json:"reason"`
	Code     *string `json:"code"` // to run instead; nil: that of the question
}

// Ask asks once. Errors name no address.
func (h *Hook) Ask(ctx context.Context, q Question) (a Answer, err error) {
	body, err := json.Marshal(q)
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return a, errors.New("the address of the hook cannot be used")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := h.http.Do(req)
	if err != nil {
		return a, bare(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return a, bare(err)
	case resp.StatusCode != http.StatusOK:
		return a, fmt.Errorf("HTTP %d", resp.StatusCode)
	case len(data) > maxAnswer:
		return a, fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&a); err != nil || !errors.Is(d.Decode(new(any)), io.EOF) {
		return a, errors.New("the answer is not one JSON object of decision, reason and code")
	}
	switch {
	case a.Decision != Allow && a.Decision != Deny:
		return a, fmt.Errorf("decision %.20q: neither allow nor deny", a.Decision)
	case len(a.Reason) > maxReason:
		return a, fmt.Errorf("the reason is longer than %d bytes", maxReason)
	case a.Code != nil && (*a.Code == "" || len(*a.Code) > MaxCode):
		return a, fmt.Errorf("the code is empty, or longer than %d bytes", MaxCode)
	}
	return a, nil
}

// bare returns an error without the addresses of a connection, which tenants need not know.
func bare(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("%s: %w", e.Op, e.Err)
	}
	return err
}
