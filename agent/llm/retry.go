package llm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// Defaults and bounds of [Retry].
const (
	DefaultRetries = 5
	// MinMaxTokens is the lowest answer ceiling to which [Retry] shrinks a request. A lower one
	// would cut most turns in the middle of the reasoning.
	MinMaxTokens = 8192
	// leastOutputLimit is the smallest answer ceiling in a refusal that is believed.
	leastOutputLimit = 256
	// maxWait bounds the wait that a server asks for with Retry-After.
	maxWait = 10 * time.Minute
)

// Retry repeats calls whose failure may be temporary, and shrinks requests that exceed the model's
// context.
type Retry struct {
	Model   Model
	Retries int // attempts after the first
	// Backoff returns the wait before retry n (from 1) if the server asked for none. nil means
	// [Backoff].
	Backoff func(n int, kind Kind) time.Duration
	// Wait sleeps, or returns early with the context's error. nil means the real clock.
	Wait func(ctx context.Context, d time.Duration) error
	// Notice, if set, receives one line about each retry.
	Notice func(text string)

	mu       sync.Mutex
	learned  map[string]learned // by model
	answered bool               // the server has answered a call
}

// learned holds the limits that a model's refusals named for all its calls, so that each is refused
// only once.
type learned struct {
	maxTokens     int // answer ceiling; 0 if unknown
	noTemperature bool
}

// Describe returns the wrapped model's description.
func (r *Retry) Describe() string { return r.Model.Describe() }

// Backoff doubles the wait from 0.5 s to 30 s, or from 4 s to 60 s after a rate limit. Up to a
// quarter of it is random, so that concurrent runs do not return at once.
func Backoff(n int, kind Kind) time.Duration {
	base, top := 500*time.Millisecond, 30*time.Second
	if kind == KindRateLimit {
		base, top = 4*time.Second, time.Minute
	}
	d := top
	if n < 10 {
		d = min(top, base<<(n-1))
	}
	return d - time.Duration(rand.Int64N(int64(d)/4+1)) //nolint:gosec // jitter needs no secrecy
}

// Complete calls the wrapped model until it answers, the error is permanent, or the retries are
// used up.
func (r *Retry) Complete(ctx context.Context, req Request) (*Response, error) {
	backoff, wait := r.Backoff, r.Wait
	if backoff == nil {
		backoff = Backoff
	}
	if wait == nil {
		wait = waitReal
	}
	r.mu.Lock()
	known := r.learned[req.Model]
	r.mu.Unlock()
	known.apply(&req)
	shown := false
	if watch := req.OnDelta; watch != nil {
		req.OnDelta = func(d Delta) {
			shown = true
			watch(d)
		}
	}
	for n := 0; ; {
		if shown {
			req.show(DeltaRestart, "")
			shown = false
		}
		resp, err := r.Model.Complete(ctx, req)
		var e *Error
		isModels := errors.As(err, &e)
		if err == nil || isModels && e.Status != 0 {
			r.mu.Lock()
			r.answered = true
			r.mu.Unlock()
		}
		if err == nil {
			return resp, nil
		}
		if !isModels {
			return nil, err
		}
		fatal := e.Kind == KindContextLength || e.Kind == KindRequest
		if limit := outputLimit(e.Message); fatal && limit >= leastOutputLimit && limit < req.MaxTokens {
			r.notice("the model's answers have %d tokens at most: max_tokens %d -> %d", limit, req.MaxTokens, limit)
			known.maxTokens = limit
			r.learn(known, &req)
			continue
		}
		if fatal && req.Temperature != nil && refusesTemperature(e.Message) {
			r.notice("the model takes no temperature: %v is not sent", *req.Temperature)
			known.noTemperature = true
			r.learn(known, &req)
			continue
		}
		if e.Kind == KindContextLength {
			smaller, ok := shrink(req.MaxTokens, e.Message)
			if !ok {
				return nil, err
			}
			// This terminates: each pass lowers MaxTokens, which has a floor.
			r.notice("the request does not fit the model's context: max_tokens %d -> %d", req.MaxTokens, smaller)
			req.MaxTokens = smaller
			continue
		}
		if !e.Temporary() || e.Kind == KindUnreachable && !r.hasAnswered() {
			return nil, err
		}
		if n >= r.Retries {
			if n == 0 {
				return nil, err
			}
			return nil, fmt.Errorf("gave up after %d attempts: %w", n+1, err)
		}
		n++
		d := e.RetryAfter
		if d == 0 {
			d = backoff(n, e.Kind)
		}
		d = min(d, maxWait)
		r.notice("%v; retry %d of %d in %v", e, n, r.Retries, d.Round(time.Millisecond))
		if err := wait(ctx, d); err != nil {
			return nil, fmt.Errorf("wait to retry the model: %w", err)
		}
	}
}

// hasAnswered reports whether the server has ever answered. Only then an unreachable server is
// worth waiting for: it may be restarting. Otherwise its address is wrong or it was not started.
func (r *Retry) hasAnswered() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.answered
}

// learn stores the limits that a refusal named, and applies them to req.
func (r *Retry) learn(known learned, req *Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.learned == nil {
		r.learned = map[string]learned{}
	}
	r.learned[req.Model] = known
	known.apply(req)
}

func (l learned) apply(req *Request) {
	if l.maxTokens > 0 {
		req.MaxTokens = min(req.MaxTokens, l.maxTokens)
	}
	if l.noTemperature {
		req.Temperature = nil
	}
}

func (r *Retry) notice(format string, args ...any) {
	if r.Notice != nil {
		r.Notice(fmt.Sprintf(format, args...))
	}
}

// shrink returns the next answer ceiling to try after a server's message. If the message names both
// figures, the ceiling is the context less the input, less 100 tokens for differences in counting.
// Otherwise it is half the current one. It is at least MinMaxTokens; ok is false if a request at
// that floor still does not fit.
func shrink(current int, message string) (int, bool) {
	if current <= MinMaxTokens {
		return 0, false
	}
	if _, context, input := contextOverflow(message); context > 0 && input > 0 {
		left := context - input - 100
		if left < MinMaxTokens {
			return 0, false
		}
		if left < current {
			return left, true
		}
		// By the figures the request fits. The refusal counts, not the figures.
	}
	return max(current/2, MinMaxTokens), true
}

func waitReal(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
