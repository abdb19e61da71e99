package llm

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
)

// chatStream assembles a streamed chat completion.
type chatStream struct {
	show func(DeltaKind, string)

	id, model string
	fields    map[string]json.RawMessage // of the message; last value of each field that is not joined
	texts     map[string]*jsonText       // of the message
	details   []*reasoningDetail
	calls     []*chatCall
	finish    string
	usage     json.RawMessage
	begun     bool // whether a choice was received
}

// textFields are the fields of a message whose pieces are joined.
var textFields = map[string]DeltaKind{
	"content": DeltaContent, "refusal": DeltaContent, "reasoning_content": DeltaReasoning, "reasoning": DeltaReasoning,
}

// maxCalls bounds the tool calls of one answer. The search for a call is linear, so a hostile
// server could otherwise make it slow.
const maxCalls = 1000

// chatCall is an unfinished tool call.
type chatCall struct {
	index     int
	id, name  string
	fields    map[string]json.RawMessage // other than the fields below
	function  map[string]json.RawMessage
	arguments jsonText
	object    json.RawMessage // arguments that are not a string, from a few servers
}

// reasoningDetail is an element of OpenRouter's reasoning_details.
type reasoningDetail struct {
	fields map[string]json.RawMessage
	texts  map[string]*jsonText
}

func (s *chatStream) event(data []byte) (bool, error) {
	if string(data) == "[DONE]" {
		return true, nil
	}
	if len(data) == 0 {
		return false, nil
	}
	var chunk struct {
		ID      string `json:"id"`
		Model   string `json:"model"`
		Choices []struct {
			Index        int                        `json:"index"`
			Delta        map[string]json.RawMessage `json:"delta"`
			FinishReason string                     `json:"finish_reason"`
		} `json:"choices"`
		Usage json.RawMessage `json:"usage"`
		Error json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(data, &chunk); err != nil {
		return false, badResponse("a piece of the answer cannot be read: %v: %s", err, clip(string(data), 200))
	}
	if present(chunk.Error) {
		return false, streamError(chunk.Error)
	}
	if chunk.ID != "" {
		s.id = chunk.ID
	}
	if chunk.Model != "" {
		s.model = chunk.Model
	}
	if present(chunk.Usage) {
		s.usage = chunk.Usage
	}
	for _, c := range chunk.Choices {
		if c.Index != 0 {
			continue
		}
		s.begun = true
		if c.FinishReason != "" {
			s.finish = c.FinishReason
		}
		if err := s.delta(c.Delta); err != nil {
			return false, err
		}
	}
	return false, nil
}

func (s *chatStream) delta(fields map[string]json.RawMessage) error {
	if s.fields == nil {
		s.fields, s.texts = map[string]json.RawMessage{}, map[string]*jsonText{}
	}
	for name, value := range fields {
		if !present(value) {
			continue
		}
		kind, isText := textFields[name]
		switch {
		case name == "role":
		case name == "tool_calls":
		case name == "reasoning_details":
			var list []map[string]json.RawMessage
			if json.Unmarshal(value, &list) != nil {
				s.fields[name] = value
				continue
			}
			for _, d := range list {
				s.detail(d)
			}
		case isText && value[0] == '"':
			if s.texts[name] == nil {
				s.texts[name] = &jsonText{}
			}
			text := s.texts[name].add(value)
			// A gateway may send the reasoning under two names: show it once.
			if name != "reasoning" || s.texts["reasoning_content"] == nil && fields["reasoning_content"] == nil {
				s.show(kind, text)
			}
		default:
			s.fields[name] = value
		}
	}
	// Tool calls follow the text, in reading order.
	if raw := fields["tool_calls"]; present(raw) {
		return s.toolCalls(raw)
	}
	return nil
}

func (s *chatStream) toolCalls(raw json.RawMessage) error {
	var list []map[string]json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return badResponse("a piece of the answer's tool calls cannot be read: %v: %s", err, clip(string(raw), 200))
	}
	for _, fields := range list {
		var id string
		_ = json.Unmarshal(fields["id"], &id) // any other type counts as no ID
		var function map[string]json.RawMessage
		_ = json.Unmarshal(fields["function"], &function)
		if len(s.calls) > maxCalls {
			return badResponse("the answer has more than %d tool calls", maxCalls)
		}
		call := s.call(fields["index"], id)
		if id != "" {
			call.id = id
		}
		for name, value := range fields {
			if name != "index" && name != "id" && name != "function" && present(value) {
				call.fields[name] = value
			}
		}
		for name, value := range function {
			switch {
			case !present(value):
			case name == "name":
				var text string
				_ = json.Unmarshal(value, &text)
				if text != call.name { // some servers repeat the name; none splits it into equal pieces
					call.name += text
					s.show(DeltaCall, text)
				}
			case name != "arguments":
				call.function[name] = value
			case value[0] == '"':
				s.show(DeltaArguments, call.arguments.add(value))
			default:
				call.object = value
			}
		}
	}
	return nil
}

// call returns the call that a piece belongs to, by its index. If the index is missing or shared by
// all calls, a new ID begins a new call.
func (s *chatStream) call(rawIndex json.RawMessage, id string) *chatCall {
	index := -1
	if n, err := strconv.Atoi(string(rawIndex)); err == nil {
		index = n
	}
	for _, c := range slices.Backward(s.calls) {
		if (index == -1 || c.index == index) && (id == "" || c.id == "" || c.id == id) {
			return c
		}
	}
	c := &chatCall{index: index, fields: map[string]json.RawMessage{}, function: map[string]json.RawMessage{}}
	s.calls = append(s.calls, c)
	return c
}

// detail adds a piece of reasoning_details, joined to the last one if it continues that.
func (s *chatStream) detail(fields map[string]json.RawMessage) {
	if n := len(s.details); n > 0 {
		last := s.details[n-1]
		if string(last.fields["type"]) == string(fields["type"]) && string(last.fields["index"]) == string(fields["index"]) {
			last.add(fields)
			return
		}
	}
	d := &reasoningDetail{fields: map[string]json.RawMessage{}, texts: map[string]*jsonText{}}
	d.add(fields)
	s.details = append(s.details, d)
}

func (d *reasoningDetail) add(fields map[string]json.RawMessage) {
	for name, value := range fields {
		switch {
		case !present(value):
		case (name == "text" || name == "summary") && value[0] == '"':
			if d.texts[name] == nil {
				d.texts[name] = &jsonText{}
			}
			d.texts[name].add(value)
		default:
			d.fields[name] = value
		}
	}
}

func (s *chatStream) complete() bool { return s.finish != "" }

func (s *chatStream) answer() ([]byte, error) {
	if !s.begun {
		return nil, badResponse("the stream held no answer")
	}
	message := map[string]any{"role": RoleAssistant}
	for name, value := range s.fields {
		message[name] = value
	}
	for name, text := range s.texts {
		message[name] = text.String()
	}
	if len(s.details) > 0 {
		list := make([]map[string]any, len(s.details))
		for i, d := range s.details {
			list[i] = map[string]any{}
			for name, value := range d.fields {
				list[i][name] = value
			}
			for name, text := range d.texts {
				list[i][name] = text.String()
			}
		}
		message["reasoning_details"] = list
	}
	if len(s.calls) > 0 {
		list := make([]map[string]json.RawMessage, len(s.calls))
		for i, c := range s.calls {
			arguments := c.object
			if arguments == nil {
				arguments = quoted(c.arguments.String())
			}
			c.function["name"], c.function["arguments"] = quoted(c.name), arguments
			function, err := json.Marshal(c.function)
			if err != nil {
				return nil, badResponse("the answer's tool calls cannot be kept: %v", err)
			}
			list[i] = maps.Clone(c.fields)
			list[i]["id"], list[i]["function"] = quoted(c.id), function
		}
		message["tool_calls"] = list
	}
	completion := map[string]any{
		"id": s.id, "object": "chat.completion", "model": s.model,
		"choices": []any{map[string]any{"index": 0, "message": message, "finish_reason": s.finish}},
	}
	if s.usage != nil {
		completion["usage"] = s.usage
	}
	body, err := json.Marshal(completion)
	if err != nil {
		return nil, badResponse("the answer cannot be kept: %v", err)
	}
	return body, nil
}
