// Package llm makes provider-neutral calls to a language model that can use tools.
//
// A [Model] takes one [Request], the whole conversation so far, and answers with one [Response]. [OpenAI] speaks the
// chat-completions format that OpenAI, vLLM, SGLang, llama.cpp and most gateways share; [Replay] gives the model's turns
// of a recorded run again. [Retry] wraps either: it waits and repeats what may go away by itself, and shrinks a
// request that does not fit into the model's context.
//
// What a provider needs to see again in the next request but nobody else understands (reasoning signatures, extra fields
// of a gateway) travels in [Message.Raw], so that nothing above this package knows a provider.
package llm
