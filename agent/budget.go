package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// Budget bounds the resources of a run. The first part that is used up ends the run and gives its
// exit reason; the output is collected all the same. A zero part has no ceiling, except those with
// a default in [Options].
//
// Turns, conversation, tokens and cost are checked before a model call, whose answer is bounded by
// the remainder. The size of a prompt is an estimate, so the last call may miss its ceiling. Time
// and CPU are also checked while tools run, CPU twice a second.
type Budget struct {
	Turns        int           `json:"turns"`
	Conversation int           `json:"conversation_tokens"` // ceiling of one conversation, checked before each model call
	Tokens       int           `json:"tokens,omitempty"`    // sum over all model calls, in and out
	Cost         float64       `json:"cost_usd,omitempty"`  // sum over all model calls
	Time         time.Duration `json:"time_ns"`             // working time; the time between a crash and a resume is not counted
	CPU          time.Duration `json:"cpu_ns,omitempty"`    // all processes of the sandbox, as counted by the kernel
}

// Spent is the used part of a budget.
type Spent struct {
	Turns  int           `json:"turns"`
	Tokens int           `json:"tokens"` // counted by the provider, otherwise estimated at four bytes a token
	Cost   float64       `json:"cost_usd,omitempty"`
	Time   time.Duration `json:"time_ns"`
	CPU    time.Duration `json:"cpu_ns,omitempty"`
}

// over returns the first part that is used up, or "".
func (b Budget) over(s Spent) (ExitReason, string) {
	switch {
	case b.Time > 0 && s.Time >= b.Time:
		return ExitTimeLimit, fmt.Sprintf("%v of time are used up", b.Time)
	case b.Cost > 0 && s.Cost >= b.Cost:
		return ExitCostLimit, fmt.Sprintf("the model has cost $%.4f of $%.4f", s.Cost, b.Cost)
	case b.CPU > 0 && s.CPU >= b.CPU:
		return ExitCPULimit, fmt.Sprintf("the sandbox has used %v of %v processor time", s.CPU.Round(time.Millisecond), b.CPU)
	case b.Tokens > 0 && s.Tokens >= b.Tokens:
		return ExitTokenLimit, fmt.Sprintf("all model calls together have taken %d tokens of %d", s.Tokens, b.Tokens)
	case b.Turns > 0 && s.Turns >= b.Turns:
		return ExitMaxSteps, fmt.Sprintf("no submit within %d steps", b.Turns)
	}
	return "", ""
}

// minAnswer is the smallest useful ceiling of an answer, in tokens.
const minAnswer = 16

// answerTokens returns the ceiling of the next answer: perCall, or less if the budget leaves less
// beside a prompt of the given size.
func (b Budget) answerTokens(s Spent, prompt, perCall int, price *llm.Price) (int, ExitReason, string) {
	if b.Conversation > 0 && prompt > b.Conversation {
		return 0, ExitTokenLimit, fmt.Sprintf("the conversation has about %d tokens, more than the limit of %d", prompt, b.Conversation)
	}
	if b.Tokens > 0 {
		left := b.Tokens - s.Tokens - prompt
		if left < minAnswer {
			return 0, ExitTokenLimit, fmt.Sprintf("all model calls together have taken %d tokens of %d, and the next needs %d for its question alone", s.Tokens, b.Tokens, prompt)
		}
		perCall = min(perCall, left)
	}
	if b.Cost > 0 && price != nil {
		question, answer := price.Cost(llm.Usage{PromptTokens: prompt}), price.Cost(llm.Usage{PromptTokens: prompt, CompletionTokens: 1})
		left := b.Cost - s.Cost - question
		if each := answer - question; each > 0 && left < each*float64(perCall) {
			perCall = int(left/each + 1e-6) // compensates for rounding
		}
		if left < 0 || perCall < minAnswer {
			return 0, ExitCostLimit, fmt.Sprintf("the model has cost $%.4f of $%.4f, and the next call's question alone costs $%.4f", s.Cost, b.Cost, question)
		}
	}
	return perCall, "", ""
}

func (b Budget) check() error {
	if b.Turns < 0 || b.Conversation < 0 || b.Tokens < 0 || !(b.Cost >= 0) || b.Time < 0 || b.CPU < 0 {
		return errors.New("a limit is negative")
	}
	return nil
}

// facts returns the budget as a policy sees it.
func (b Budget) facts() map[string]float64 {
	return map[string]float64{
		"turns": float64(b.Turns), "tokens": float64(b.Tokens), "cost": b.Cost, "seconds": b.Time.Seconds(), "cpu_seconds": b.CPU.Seconds(),
	}
}

func (s Spent) facts() map[string]float64 {
	return map[string]float64{
		"turns": float64(s.Turns), "tokens": float64(s.Tokens), "cost": s.Cost, "seconds": s.Time.Seconds(), "cpu_seconds": s.CPU.Seconds(),
	}
}
