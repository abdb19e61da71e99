package llm

import (
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"
)

// Provider is the service that the prefix of a model name selects.
type Provider struct {
	Format  Format
	BaseURL string // default address; "" if the user must name one
	KeyName string // environment variable that holds the key by convention
}

// anthropicURL is the address of Anthropic's own service.
const anthropicURL = "https://api.anthropic.com"

// ParseName splits a model name into its provider and the name that is sent to it. The prefixes are
// those of other tools. Only the first one is removed: "openai/openai/gpt-oss-20b" reaches a server
// as "openai/gpt-oss-20b":
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

// keyedHosts are the public services that answer no call without a key. A leading dot matches all
// names below a domain.
var keyedHosts = []string{
	"api.openai.com", "api.anthropic.com", ".openai.azure.com", ".services.ai.azure.com", "generativelanguage.googleapis.com", "openrouter.ai",
	"api.mistral.ai", "api.deepseek.com", "api.groq.com", "api.together.xyz", "api.x.ai", "api.fireworks.ai",
}

// RequiresKey reports whether the server at an address is known to refuse calls without a key.
// Other servers, local ones above all, may accept them.
func RequiresKey(baseURL string) bool {
	u, err := url.Parse(baseURL)
	if err != nil {
		return false
	}
	host := strings.ToLower(u.Hostname())
	return slices.ContainsFunc(keyedHosts, func(known string) bool {
		return host == known || strings.HasPrefix(known, ".") && strings.HasSuffix(host, known)
	})
}

// Server is a model behind HTTP.
type Server interface {
	Model
	BaseURL() string // without parts that may be secret
}

// Open returns a model that speaks the given format; it sends nothing yet. Wrap the model in
// [Retry].
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

// reasoningModel reports whether name is an OpenAI model that refuses max_tokens and temperature.
func reasoningModel(name string) bool {
	base := strings.ToLower(path.Base(name))
	for _, prefix := range []string{"o1", "o3", "o4", "gpt-5", "gpt-6"} {
		if base == prefix || strings.HasPrefix(base, prefix+"-") || strings.HasPrefix(base, prefix+".") {
			return true
		}
	}
	return false
}

// AcceptsTemperature reports whether a temperature may be sent to the named model. [Retry] learns
// further exceptions from refusals.
func AcceptsTemperature(name string) bool { return !reasoningModel(name) }
