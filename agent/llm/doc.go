// Package llm makes provider-neutral calls to a language model that can use tools.
//
// A [Model] takes one [Request], the whole conversation so far, and answers with one [Response]. [OpenAI] speaks the
// chat-completions format that OpenAI, vLLM, SGLang, llama.cpp and most gateways share, [Responses] OpenAI's newer one,
// [Anthropic] the Messages of Anthropic; [ParseName] and [Open] choose. [Replay] gives the model's turns of a recorded run
// again. [Retry] wraps any of them: it waits and repeats what may go away by itself, shrinks a request that does not fit into
// the model's context, and heeds what a model's refusals say about all its calls. [Price] says what a call costs.
//
// What a provider needs to see again in the next request but nobody else understands (reasoning signatures, extra fields
// of a gateway) travels in [Message.Raw], so that nothing above this package knows a provider. A conversation that is
// kept for later has to keep it, with [Message.RawFormat].
//
// # How an answer is read
//
// The official SDKs write the requests, as far as we have words for them, and carry them. The answers are read here, as they
// came: the SDKs' types lose what their maker does not have. A streamed answer is first put together to what the server would
// have sent whole, and then read like that one. All of it comes from outside and is bounded: the header, a line, the body,
// the number of calls.
package llm
