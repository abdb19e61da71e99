package policy

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
)

// Question describes one call to an [Asker]. It is the body of a hook's request.
type Question struct {
	Run       string             `json:"run"`
	Turn      int                `json:"turn"`
	Call      int                `json:"call"` // number within the turn, from 1
	Tool      string             `json:"tool"`
	Arguments map[string]any     `json:"arguments"`
	Rule      string             `json:"rule,omitempty"` // name of the rule that asks
	Reason    string             `json:"reason,omitempty"`
	Programs  []string           `json:"programs,omitempty"`
	Paths     []string           `json:"paths,omitempty"`
	Writes    []string           `json:"writes,omitempty"` // those of Paths that the call visibly writes to
	Hosts     []string           `json:"hosts,omitempty"`
	Opaque    bool               `json:"opaque,omitempty"`
	Spent     map[string]float64 `json:"spent"`
}

// Answer is the reply to a [Question], and the body of a hook's response.
type Answer struct {
	Allow  bool   `json:"allow"`
	Reason string `json:"reason,omitempty"`
	// Command, if set, runs in place of the model's shell line. Rules that deny hold for it too. Hooks
	// cannot set it.
	Command string `json:"-"`
}

// Asker answers questions: a person at a terminal, or a [Hook]. An error counts as a denial.
type Asker interface {
	Ask(ctx context.Context, q Question) (Answer, error)
	// By names the one that answers, for the record.
	By() string
}

const (
	hookTime   = 5 * time.Minute // a person may have to answer
	hookAnswer = 64 << 10
)

// Hook asks a service over HTTP: POST with a [Question], 200 with an [Answer]. Any other response
// is an error, and so a denial.
type Hook struct {
	url  string
	host string
	http *http.Client
}

// NewHook returns a hook for an http or https address.
func NewHook(address string) (*Hook, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("the hook's address must begin with http:// or https:// and name a host") // not the address itself: it may hold a token
	}
	client := &http.Client{Timeout: hookTime, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return &Hook{url: address, host: u.Host, http: client}, nil
}

// By names the host only: the rest of the address may be a secret.
func (h *Hook) By() string { return "hook at " + h.host }

// Ask sends the question once; a hook is not retried.
func (h *Hook) Ask(ctx context.Context, q Question) (Answer, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return Answer{}, fmt.Errorf("ask the hook: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return Answer{}, errors.New("ask the hook: its address cannot be used")
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := h.http.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // url.Error prints the whole address
		}
		return Answer{}, fmt.Errorf("ask the hook at %s: %w", h.host, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, hookAnswer+1))
	switch {
	case err != nil:
		return Answer{}, fmt.Errorf("ask the hook at %s: %w", h.host, err)
	case resp.StatusCode != http.StatusOK:
		return Answer{}, fmt.Errorf("ask the hook at %s: HTTP %d", h.host, resp.StatusCode)
	case len(data) > hookAnswer:
		return Answer{}, fmt.Errorf("ask the hook at %s: the answer is longer than %d bytes", h.host, hookAnswer)
	}
	var a struct {
		Allow  *bool  `json:"allow"`
		Reason string `json:"reason"`
	}
	if err := json.Unmarshal(data, &a); err != nil || a.Allow == nil {
		return Answer{}, fmt.Errorf(`ask the hook at %s: want {"allow": true or false, "reason": "..."}`, h.host)
	}
	return Answer{Allow: *a.Allow, Reason: a.Reason}, nil
}
