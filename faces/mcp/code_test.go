package mcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// code runs code and returns the answer, its output and its text.
func code(t *testing.T, cs *mcp.ClientSession, args map[string]any) (*mcp.CallToolResult, map[string]any, string) {
	t.Helper()
	res, err := cs.CallTool(t.Context(), &mcp.CallToolParams{Name: "run_code", Arguments: args})
	if err != nil {
		t.Fatal(err)
	}
	text := ""
	if c, ok := res.Content[0].(*mcp.TextContent); ok {
		text = c.Text
	}
	out, _ := res.StructuredContent.(map[string]any)
	return res, out, text
}

// Variables stay for the session in the context of a language, or of a name; runs of their own
// neither see them nor leave any. An error of the program is one of the tool.
func TestCodeKeepsVariables(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	s, c := face(t, Options{})
	cs := connect(t, s)
	for _, tc := range []struct {
		args map[string]any
		text string
		fail bool
	}{
		{map[string]any{"code": "x = 6; print('set', end='')"}, "set\n[exit code 0]", false},
		{map[string]any{"code": "print('printed', end='')\nx * 7", "language": "py"}, "printed\n42\n[exit code 0]", false},
		{map[string]any{"code": "x", "context": "other"}, "NameError", true},
		{map[string]any{"code": "x = 1", "context": "other"}, "[exit code 0]", false},
		{map[string]any{"code": "print(x)", "fresh": true}, "NameError", true},
		{map[string]any{"code": "import sys; print(sys.stdin.read())", "fresh": true, "stdin": "given"}, "given\n[exit code 0]", false},
		{map[string]any{"code": "import os; os.environ['NEW']", "env": map[string]string{"NEW": "1"}}, "1\n[exit code 0]", false},
		{map[string]any{"code": "n = 1\n1 / 0"}, "line 2", true},
		{map[string]any{"code": "(x, n)"}, "(6, 1)\n[exit code 0]", false},
		{map[string]any{"code": "y=5; exit 3", "language": "bash"}, "[exit code 3]", true},
		{map[string]any{"code": "echo $y", "language": "sh"}, "5\n[exit code 0]", false},
	} {
		res, out, text := code(t, cs, tc.args)
		if res.IsError != tc.fail || !strings.Contains(text, tc.text) || !tc.fail && text != tc.text {
			t.Errorf("%v: %q, %v", tc.args, text, out)
		}
	}
	sb := must(t, cs, "sandbox_list", nil)["sandboxes"].([]any)[0].(map[string]any)["id"].(string)
	if all, err := c.ListContexts(t.Context(), sb); err != nil || len(all) != 3 {
		t.Errorf("contexts: %+v, %v", all, err)
	} else if err := c.DeleteContext(t.Context(), sb, all[0].ID); err != nil {
		t.Error(err)
	}
	_, out, text := code(t, cs, map[string]any{"code": "'x' in globals()"})
	if out["context_renewed"] != true || !strings.HasPrefix(text, "False\n") {
		t.Errorf("after the context is gone: %q, %v", text, out)
	}
	all := must(t, cs, "languages", nil)["languages"].([]any)
	if len(all) != 10 {
		t.Errorf("languages: %v", all)
	}
}

// Wrong arguments make no sandbox.
func TestCodeArguments(t *testing.T) {
	s, c := face(t, Options{})
	cs := connect(t, s)
	for _, tc := range []struct {
		args map[string]any
		why  string
	}{
		{map[string]any{"code": ""}, "missing"},
		{map[string]any{"code": "1", "language": "cobol"}, "no language"},
		{map[string]any{"code": "1", "context": "a", "fresh": true}, "exclude"},
		{map[string]any{"code": "1", "context": "a", "language": "go"}, "keeps no variables"},
		{map[string]any{"code": "1", "context": strings.Repeat("a", 65)}, "at most"},
		{map[string]any{"code": "1", "stdin": "x"}, "fresh"},
		{map[string]any{"code": "1", "timeout": -1}, "no time"},
		{map[string]any{"code": "1", "timeout": 1e6}, "at most"},
		{map[string]any{"code": "1", "env": map[string]string{"A=": ""}}, "env"},
		{map[string]any{"code": "1", "sandbox": "other"}, "no sandbox"},
		{map[string]any{"code": strings.Repeat("#", maxCode+1)}, "more than"},
	} {
		if res, _, text := code(t, cs, tc.args); !res.IsError || !strings.Contains(text, tc.why) {
			t.Errorf("%.100v: %q", tc.args, text)
		}
	}
	gone(t, c)
}

// A cancelled run is interrupted, and its context keeps its variables.
func TestCancelledCodeKeepsItsContext(t *testing.T) {
	testenv.RequirePeer(t, "python3")
	s, _ := face(t, Options{})
	cs, dir := connect(t, s), t.TempDir()
	code(t, cs, map[string]any{"code": "x = 1; import pathlib, time"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := cs.CallTool(ctx, &mcp.CallToolParams{Name: "run_code", Arguments: map[string]any{
			"code": "x = 2\ntry:\n  pathlib.Path('" + dir + "/begun').touch()\n  time.sleep(31536000)\nexcept KeyboardInterrupt: x = 3",
		}})
		ended <- err
	}()
	for !strings.Contains(fmt.Sprint(must(t, cs, "file_list", map[string]any{"path": dir})), "begun") {
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("a cancelled call has succeeded")
	}
	if _, _, text := code(t, cs, map[string]any{"code": "x"}); text != "3\n[exit code 0]" {
		t.Errorf("afterwards: %q", text)
	}
}

// Each form of a value is in the answer, or named there. Images are content.
func TestValues(t *testing.T) {
	png := bytes.Repeat([]byte{1}, maxImage)
	var r codeRun
	r.value(&api.CodeValue{Text: "<Figure>", PNG: png, JPEG: []byte("j"), PDF: []byte("%PDF")})
	r.value(&api.CodeValue{JPEG: []byte("j"), Chart: map[string]any{"type": "line"}, SVG: "<svg/>"})
	r.value(&api.CodeValue{PNG: png})
	r.value(&api.CodeValue{PNG: append(png, 1)})
	r.value(&api.CodeValue{Text: "t", HTML: strings.Repeat("h", maxForms), Data: strings.Repeat("d", maxForms), Main: true})
	r.value(&api.CodeValue{Text: strings.Repeat("x", 2*maxOutput)})
	res, out, err := r.result()
	if err != nil || len(out.Results) != 6 || !out.Truncated || res.IsError {
		t.Fatalf("%d values, %v", len(out.Results), err)
	}
	for i, want := range []string{
		"<Figure> [image/png application/pdf] []", " [image/jpeg] []", " [] [image/png, 4194304 bytes]", " [] [image/png, 4194305 bytes]",
		"t [] [html, 262144 bytes data, 262146 bytes]",
	} {
		v := out.Results[i]
		if got := fmt.Sprint(v.Text, " ", v.Images, " ", v.Omitted); got != want {
			t.Errorf("%d: %s, want %s", i, got, want)
		}
	}
	if v := out.Results[1]; v.SVG != "<svg/>" || v.Chart == nil || !out.Results[4].Main {
		t.Errorf("%+v", v)
	}
	if len(res.Content) != 4 || strings.Contains(res.Content[0].(*mcp.TextContent).Text, "<Figure>") {
		t.Errorf("%d parts: %.200v", len(res.Content), res.Content[0])
	}
	for range 2 * maxValues {
		r.value(&api.CodeValue{Text: strings.Repeat("x", maxOutput), PNG: []byte("p"), PDF: []byte("%PDF")})
	}
	for range maxValues {
		r.value(&api.CodeValue{Text: strings.Repeat("m", maxOutput), Main: true})
	}
	res, out, _ = r.result()
	text, last := res.Content[0].(*mcp.TextContent).Text, out.Results[maxValues-1]
	if len(out.Results) != maxValues || len(text) > 2*maxForms || len(res.Content) > 2*maxValues || !last.Main || len(last.Text) != maxOutput {
		t.Errorf("a flood: %d values, %d bytes, %d parts, last %v", len(out.Results), len(text), len(res.Content), last.Omitted)
	}
}

// A form without room takes no room, and one that a value does not have is not missing.
func TestFormsThatHaveNoRoom(t *testing.T) {
	var r codeRun
	for range maxForms / maxOutput {
		r.value(&api.CodeValue{Text: strings.Repeat("x", maxOutput-1)})
	}
	for range 2 {
		r.value(&api.CodeValue{Text: strings.Repeat("x", maxOutput), SVG: "s"})
	}
	r.value(&api.CodeValue{Text: "xx"})
	for i, want := range map[int]string{3: "", 4: "text, 65536 bytes", 5: "text, 65536 bytes", 6: ""} {
		if v := r.out.Results[i]; strings.Join(v.Omitted, " ") != want {
			t.Errorf("%d: %q, want %q", i, v.Omitted, want)
		}
	}
	r.value(&api.CodeValue{Text: "x"})
	if v := r.out.Results[7]; strings.Join(v.Omitted, " ") != "text, 1 bytes" {
		t.Errorf("no room is left, and %q is omitted", v.Omitted)
	}
}

// A cancelled call does not wait for the context that another one makes.
func TestCancelledCallDoesNotWaitForAContext(t *testing.T) {
	b := &box{making: newTurn()}
	if err := b.making.take(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := b.context(ctx, nil, contextKey{"python", "x"}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b.forget(contextKey{"python", "x"}, "id")
}

// Progress has the output since the last notification, or the end of much.
func TestProgressHasOutput(t *testing.T) {
	c := call{progress: func(time.Duration, string) {}}
	c.note("noted")
	c.stream([]byte("one\n"))
	c.stream([]byte("two"))
	for _, want := range []string{"one\ntwo", "noted"} {
		if got := c.message(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	c.stream(bytes.Repeat([]byte("x"), 2*maxUnsent))
	c.stream([]byte("end"))
	if got := c.message(); len(got) != maxUnsent || !strings.HasSuffix(got, "xend") {
		t.Errorf("%d bytes", len(got))
	}
}

// early calls do before the first byte of an answer.
type early struct {
	*httptest.ResponseRecorder

	do func(session string)
}

func (e *early) Write(p []byte) (int, error) {
	if e.do != nil {
		e.do(e.Header().Get(sessionHeader))
		e.do = nil
	}
	return e.ResponseRecorder.Write(p)
}

// A client may listen before the request that has opened its session ends: that one counts.
func TestFirstRequestsOfASession(t *testing.T) {
	s, _ := face(t, Options{})
	e := s.endpoint("", time.Hour, time.Hour).(*endpoint)
	id := ""
	w := &early{httptest.NewRecorder(), func(session string) {
		id = session
		if _, ok := e.begin(session, true); !ok {
			t.Error("the second request is refused")
		}
	}}
	req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, Path, strings.NewReader(hello))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	e.ServeHTTP(w, req)
	if p := e.clients[id]; p == nil || p.open != 1 || !p.listened {
		t.Errorf("session %q: %+v", id, p)
	}
}
