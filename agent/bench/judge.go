package bench

import (
	"context"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// Defaults of a judge, as in LLM-in-Sandbox.
const (
	judgeRepeats   = 4
	judgeTokens    = 16384
	judgeHeat      = 0.7
	judgeMaxAnswer = 1 << 20
)

// judgePrompt is the question to a judge. The last verdict in the answer counts.
const judgePrompt = `Decide whether an answer to a question is right. It is right if it says the same as the reference answer, in whatever words or form; what it says beside that does not matter unless it contradicts.

<question>
{question}
</question>

<reference_answer>
{expected}
</reference_answer>

<answer>
{answer}
</answer>

End with one word: CORRECT if the answer is right, INCORRECT if it is not.`

// Judge is a model that scores answers.
type Judge struct {
	Model   llm.Model
	Name    string     // sent to the model
	LLMName string     // as the user named it
	BaseURL string     // for the record
	Price   *llm.Price // nil if unknown
}

// verdict returns the judge's last verdict.
func verdict(text string) (correct, known bool) {
	const right = "CORRECT"
	text = strings.ToUpper(text)
	at := strings.LastIndex(text, right)
	return at >= 0 && !strings.HasSuffix(text[:at], "IN"), at >= 0
}

// judged asks the judge several times and returns the share of positive verdicts.
func (b *bench) judged(ctx context.Context, p *Problem, answer string) (score float64, used llm.Usage, err error) {
	if _, after, found := strings.Cut(answer, "</think>"); found {
		answer = trim(after)
	}
	answer = strings.ToValidUTF8(answer[:min(len(answer), judgeMaxAnswer)], "\uFFFD")
	prompt, repeats := b.Task.Scoring.Prompt, b.Task.Scoring.Repeats
	if prompt == "" {
		prompt = judgePrompt
	}
	if repeats == 0 {
		repeats = judgeRepeats
	}
	prompt = strings.NewReplacer("{question}", p.Statement, "{expected}", p.Truth, "{answer}", answer).Replace(prompt)
	req := llm.Request{Model: b.Judge.Name, Messages: []llm.Message{{Role: llm.RoleUser, Content: prompt}}, MaxTokens: judgeTokens}
	if heat := judgeHeat; llm.AcceptsTemperature(b.Judge.Name) {
		req.Temperature = &heat
	}
	right := 0
	for range repeats {
		resp, err := b.Judge.Model.Complete(ctx, req)
		if err != nil {
			if ctx.Err() != nil {
				return 0, used, context.Cause(ctx)
			}
			return 0, used, fmt.Errorf("ask the judge: %s", b.clean(err.Error()))
		}
		used.Add(priced(resp.Usage, b.Judge.Price))
		if correct, _ := verdict(resp.Content); correct {
			right++
		}
	}
	return float64(right) / float64(repeats), used, nil
}

// priced returns a call's usage with its cost.
func priced(u llm.Usage, price *llm.Price) llm.Usage {
	if price == nil {
		u.UnpricedCalls = 1
	} else {
		u.CostUSD = price.Cost(u)
	}
	return u
}
