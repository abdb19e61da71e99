// Package llm makes provider-neutral calls to language models that can use tools.
//
// A [Model] takes a [Request], which holds the whole conversation so far, and returns a [Response].
// [OpenAI] speaks chat completions, the format that OpenAI, vLLM, SGLang, llama.cpp and most
// gateways share. [Responses] speaks OpenAI's newer format, [Anthropic] Anthropic's Messages.
// [ParseName] and [Open] choose among them, and [Replay] plays the model turns of a recorded run.
//
// [Retry] wraps any model. It waits and repeats calls whose failure may be temporary, shrinks
// requests that exceed the model's context, and remembers limits that a model's refusals name.
// [Price] computes the cost of a call.
//
// Some fields of an answer are for the provider alone and must return in the next request:
// reasoning signatures, extra fields of a gateway. They travel in [Message.Raw], so that callers of
// this package know no provider. A stored conversation has to keep Raw and [Message.RawFormat].
//
// # Reading answers
//
// The official SDKs encode and send the requests. This package decodes the answers itself, because
// the SDKs' types drop fields that their own provider does not use. A streamed answer is first
// assembled into the answer that the server would have sent whole, and then decoded like it.
// Everything in an answer is untrusted and bounded: header, line, body and number of calls.
package llm
