package llm

import (
	"fmt"
	"path"
	"strings"
)

// Provider says who is called and how, as the prefix of a model's name does.
type Provider struct {
	Format  Format
	BaseURL string // where it is served when nothing else is said; "" means that it has to be said
	KeyName string // the environment variable that holds its key by custom
}

// anthropicURL is where Anthropic serves its models.
const anthropicURL = "https://api.anthropic.com"

// ParseName splits the name that a user gave a model into who serves it and the name that is sent there. The prefixes are those
// that other tools know; one is taken off, so "openai/openai/gpt-oss-20b" reaches a server as "openai/gpt-oss-20b":
//
//	anthropic/NAME          Anthropic's Messages
//	openai/responses/NAME   OpenAI's Responses
//	openai/NAME, hosted_vllm/NAME, azure/NAME, or no prefix    chat completions
func ParseName(name string) (provider Provider, wireName string, err error) {
	provider = Provider{BaseURL: "http://localhost:8000/v1", KeyName: "OPENAI_API_KEY"}
	prefix, rest, found := strings.Cut(name, "/")
	wireName = name
	if found {
		switch prefix {
		case "openai":
			wireName = rest
			if inner, ok := strings.CutPrefix(rest, "responses/"); ok {
				wireName, provider.Format = inner, FormatResponses
			}
		case "hosted_vllm":
			wireName = rest
		case "azure":
			wireName, provider.BaseURL, provider.KeyName = rest, "", "AZURE_API_KEY"
		case "anthropic":
			wireName = rest
			provider = Provider{Format: FormatAnthropic, BaseURL: anthropicURL, KeyName: "ANTHROPIC_API_KEY"}
		}
	}
	if wireName == "" {
		return Provider{}, "", &Error{Kind: KindUnsupported, Message: fmt.Sprintf("model name %q: nothing after the provider", name)}
	}
	return provider, wireName, nil
}

// Server is a model behind HTTP.
type Server interface {
	Model
	BaseURL() string // without what may be secret in it
}

// Open prepares calls in the given format; nothing is sent yet. Wrap what it gives in [Retry].
func Open(format Format, opts ServerOptions) (Server, error) {
	switch format {
	case FormatChat:
		return NewOpenAI(opts)
	case FormatResponses:
		return NewResponses(opts)
	case FormatAnthropic:
		return NewAnthropic(opts)
	}
	return nil, &Error{Kind: KindUnsupported, Message: fmt.Sprintf("no wire format %q", format)}
}

// reasoningModel reports whether a name is one of OpenAI's models that refuse max_tokens and a temperature.
func reasoningModel(name string) bool {
	base := strings.ToLower(path.Base(name))
	for _, prefix := range []string{"o1", "o3", "o4", "gpt-5", "gpt-6"} {
		if base == prefix || strings.HasPrefix(base, prefix+"-") || strings.HasPrefix(base, prefix+".") {
			return true
		}
	}
	return false
}

// AcceptsTemperature reports whether a temperature may be sent to the model of this name. [Retry] learns the rest from the
// refusals.
func AcceptsTemperature(name string) bool { return !reasoningModel(name) }
