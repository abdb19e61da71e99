package llmtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/agent/llm"
)

// Conversation is a scripted conversation from a file: the model's turns and the expected outcome.
// It is played in every format and mode that it names.
type Conversation struct {
	Name    string   `yaml:"-"`
	About   string   `yaml:"about"`   // promise that the conversation tests
	Formats []string `yaml:"formats"` // chat, responses, anthropic; default: all
	Modes   []string `yaml:"modes"`   // whole, stream; default: both

	Model       string         `yaml:"model"` // default "scripted"
	MaxSteps    int            `yaml:"max_steps"`
	TokenLimit  int            `yaml:"token_limit"`
	CallTokens  int            `yaml:"call_tokens"` // of one answer
	Temperature *float64       `yaml:"temperature"`
	ExtraBody   map[string]any `yaml:"extra_body"`
	CallTimeout time.Duration  `yaml:"call_timeout"` // for turns that hang
	Retries     *int           `yaml:"retries"`      // default 5

	Pieces Pieces       `yaml:"pieces"` // of every turn
	Chunk  int          `yaml:"chunk"`
	Turns  []ScriptTurn `yaml:"turns"`
	Expect Expectation  `yaml:"expect"`
}

// ScriptTurn is one answer, with the expected content of the request that it answers.
type ScriptTurn struct {
	Say    string `yaml:"say"`
	Think  string `yaml:"think"`
	Refuse string `yaml:"refuse"`
	Calls  []struct {
		Tool string         `yaml:"tool"`
		Args map[string]any `yaml:"args"`
		Raw  *string        `yaml:"raw"` // arguments as raw text, JSON or not; replaces args
		ID   string         `yaml:"id"`
	} `yaml:"calls"`
	Finish string         `yaml:"finish"`
	Extra  map[string]any `yaml:"extra"` // of a chat completion's message
	Usage  struct {
		Input     int `yaml:"input"`
		Cached    int `yaml:"cached"`
		Written   int `yaml:"written"`
		Output    int `yaml:"output"`
		Reasoning int `yaml:"reasoning"`
	} `yaml:"usage"`

	Status  int               `yaml:"status"`
	Headers map[string]string `yaml:"headers"`
	Error   string            `yaml:"error"` // message in the format's own error body; Kind is its type
	Kind    string            `yaml:"kind"`
	Body    *string           `yaml:"body"`  // raw body; replaces all of these
	Event   string            `yaml:"event"` // type of an error in the middle of a stream, with the message Error
	Drop    Drop              `yaml:"drop"`
	Hang    string            `yaml:"hang"` // "at once" or "first"

	Request struct {
		Last        []string       `yaml:"last"`     // texts in the last message, in this order
		Results     [][]string     `yaml:"results"`  // texts in each answer to the tool calls of the previous turn
		Messages    string         `yaml:"messages"` // roles: "system user assistant tool"
		MaxTokens   int            `yaml:"max_tokens"`
		Temperature *float64       `yaml:"temperature"`
		NoTemp      bool           `yaml:"no_temperature"`
		Fields      map[string]any `yaml:"fields"`    // raw fields of the body
		Arguments   []string       `yaml:"arguments"` // arguments of the tool calls of the last assistant message, as sent back
		Holds       []string       `yaml:"holds"`     // texts anywhere in the body
		Lacks       []string       `yaml:"lacks"`
	} `yaml:"request"`
}

// Expectation is the expected outcome of a conversation. Zero fields are not checked.
type Expectation struct {
	Exit     string     `yaml:"exit"`
	Detail   string     `yaml:"detail"` // a part of it
	Steps    int        `yaml:"steps"`
	Notices  []string   `yaml:"notices"` // a part of each notice, in order; no others may occur
	Thoughts []string   `yaml:"thoughts"`
	Thinking []string   `yaml:"thinking"`
	Finish   []string   `yaml:"finish"`
	Results  [][]string `yaml:"results"`  // texts in each step's observation, in order
	Restarts *int       `yaml:"restarts"` // number of voided streams
	Counts   *struct {
		Input     int     `yaml:"input"`
		Output    int     `yaml:"output"`
		Cached    int     `yaml:"cached"`
		Written   int     `yaml:"written"`
		Reasoning int     `yaml:"reasoning"`
		Cost      float64 `yaml:"cost"` // with the prices of the test
		Unpriced  int     `yaml:"unpriced"`
		Estimated bool    `yaml:"estimated"` // the cost is not zero; its amount depends on the format
	} `yaml:"usage"`
	Answer string `yaml:"answer"`
}

// LoadConversations reads every .yaml file of a directory.
func LoadConversations(tb testing.TB, dir string) []Conversation {
	tb.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(names) == 0 {
		tb.Fatalf("no conversations in %s: %v", dir, err)
	}
	var list []Conversation
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			tb.Fatal(err)
		}
		var c Conversation
		dec := yaml.NewDecoder(bytes.NewReader(data))
		dec.KnownFields(true)
		if err := dec.Decode(&c); err != nil {
			tb.Fatalf("%s: %v", name, err)
		}
		if c.About == "" || len(c.Turns) == 0 {
			tb.Fatalf("%s: neither about nor turns may be missing", name)
		}
		c.Name = strings.TrimSuffix(filepath.Base(name), ".yaml")
		list = append(list, c)
	}
	return list
}

// Play returns the turns as the server plays them in a format. {key} in an error is replaced by the
// key.
func (c *Conversation) Play(format llm.Format, key string) []Turn {
	turns := make([]Turn, len(c.Turns))
	for i, s := range c.Turns {
		t := Turn{
			Content: s.Say, Reasoning: s.Think, Refusal: s.Refuse, FinishReason: s.Finish, Extra: s.Extra,
			PromptTokens: s.Usage.Input, CompletionTokens: s.Usage.Output, CachedTokens: s.Usage.Cached,
			CacheWriteTokens: s.Usage.Written, ReasoningTokens: s.Usage.Reasoning,
			Status: s.Status, Hang: s.Hang == "at once", HangAfter: s.Hang == "first", Drop: s.Drop,
			StreamError: s.Event, StreamMessage: strings.ReplaceAll(s.Error, "{key}", key),
			Pieces: c.Pieces, Chunk: c.Chunk, Check: s.check,
		}
		for _, call := range s.Calls {
			args := call.Args
			if args == nil {
				args = map[string]any{}
			}
			made := Tool(call.Tool, args)
			if call.Raw != nil {
				made.Arguments = *call.Raw
			}
			made.ID = call.ID
			if call.ID == "none" {
				made.ID = NoID
			}
			t.Calls = append(t.Calls, made)
		}
		for name, value := range s.Headers {
			if t.Header == nil {
				t.Header = map[string][]string{}
			}
			t.Header.Set(name, value)
		}
		switch {
		case s.Body != nil:
			t.Body = *s.Body
			if t.Status == 0 {
				t.Status = 200
			}
		case s.Status != 0:
			t.Body = string(mustJSON(ErrorBody(format, s.Kind, t.StreamMessage)))
		}
		turns[i] = t
	}
	return turns
}

// check compares a request with the expectations of its turn.
func (s *ScriptTurn) check(req Request) error {
	want := s.Request
	var roles []string
	for _, m := range req.Messages {
		roles = append(roles, m.Role)
	}
	if got := strings.Join(roles, " "); want.Messages != "" && got != want.Messages {
		return fmt.Errorf("the roles are %q, want %q", got, want.Messages)
	}
	if err := HoldsInOrder(req.Last().Text(), want.Last); err != nil {
		return fmt.Errorf("last message: %w", err)
	}
	first := len(req.Messages)
	for first > 0 && req.Messages[first-1].Role == "tool" {
		first--
	}
	results := req.Messages[first:]
	if want.Results != nil && len(want.Results) != len(results) {
		return fmt.Errorf("%d tool calls were answered, want %d", len(results), len(want.Results))
	}
	for i, parts := range want.Results {
		if err := HoldsInOrder(results[i].Text(), parts); err != nil {
			return fmt.Errorf("answer %d: %w", i+1, err)
		}
	}
	if want.Arguments != nil {
		for _, m := range slices.Backward(req.Messages) {
			if m.Role == "assistant" {
				var got []string
				for _, c := range m.ToolCalls {
					got = append(got, c.Function.Arguments)
				}
				if fmt.Sprint(got) != fmt.Sprint(want.Arguments) {
					return fmt.Errorf("the arguments came back as %q, want %q", got, want.Arguments)
				}
				break
			}
		}
	}
	for name, value := range want.Fields {
		if got, want := string(req.Fields[name]), string(mustJSON(value)); got != want {
			return fmt.Errorf("field %s is %s, want %s", name, got, want)
		}
	}
	maxTokens := string(req.Fields["max_tokens"]) + string(req.Fields["max_output_tokens"]) + string(req.Fields["max_completion_tokens"])
	if want.MaxTokens != 0 && maxTokens != fmt.Sprint(want.MaxTokens) {
		return fmt.Errorf("the ceiling of tokens is %s, want %d", maxTokens, want.MaxTokens)
	}
	temperature := string(req.Fields["temperature"])
	if want.Temperature != nil && temperature != fmt.Sprint(*want.Temperature) || want.NoTemp && temperature != "" {
		return fmt.Errorf("the temperature is %q", temperature)
	}
	body, err := json.Marshal(req.Fields)
	if err != nil {
		return err
	}
	for _, text := range want.Holds {
		if !strings.Contains(string(body), text) {
			return fmt.Errorf("the body lacks %q: %s", text, body)
		}
	}
	for _, text := range want.Lacks {
		if strings.Contains(string(body), text) {
			return fmt.Errorf("the body holds %q", text)
		}
	}
	return nil
}

// HoldsInOrder returns an error for the first part that is missing from text or out of order.
func HoldsInOrder(text string, parts []string) error {
	left := text
	for _, part := range parts {
		_, after, found := strings.Cut(left, part)
		if !found {
			return fmt.Errorf("%q is missing, or not in its place, in %q", part, text)
		}
		left = after
	}
	return nil
}
