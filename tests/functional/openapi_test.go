package functional

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/openapi"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/contract"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// walk sends the example requests of the OpenAPI document. The harness validates the
// responses.
type walk struct {
	t     *testing.T
	d     *harness.Daemon
	names map[string]string // of the path's parameters
	host  string            // of the registry that examples call localhost:5000
	done  map[string]bool
}

// step sends the example of an operation. Each of change may alter the request.
func (w *walk) step(id string, change ...func(*http.Request)) []byte {
	w.t.Helper()
	response := w.ask(id, change...)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		w.t.Fatalf("%s: %v", id, err)
	}
	return body
}

func (w *walk) ask(id string, change ...func(*http.Request)) *http.Response {
	w.t.Helper()
	i := slices.IndexFunc(openapi.Operations, func(o openapi.Operation) bool { return o.ID == id })
	if i < 0 {
		w.t.Fatalf("%s: no such operation", id)
	}
	o := openapi.Operations[i]
	var body io.Reader
	if o.Body != nil {
		text, plain := o.Body.Value.(string)
		if !plain {
			data, err := json.Marshal(o.Body.Value)
			if err != nil {
				w.t.Fatal(err)
			}
			text = string(data)
		}
		body = strings.NewReader(w.here(text))
	}
	r, err := http.NewRequestWithContext(w.t.Context(), o.Method, "http://sandboxd"+w.here(o.Target(w.names)), body)
	if err != nil {
		w.t.Fatal(err)
	}
	if o.Body != nil {
		r.Header.Set("Content-Type", o.Body.Type)
	}
	for _, c := range change {
		c(r)
	}
	response, err := w.d.HTTP.Do(r)
	if err != nil {
		w.t.Fatalf("%s: %v", id, err)
	}
	if response.StatusCode >= 300 {
		data, _ := io.ReadAll(response.Body)
		w.t.Fatalf("%s: %s: %s", id, response.Status, data)
	}
	w.done[id] = true
	return response
}

func (w *walk) here(s string) string { return strings.ReplaceAll(s, "localhost:5000", w.host) }

func accept(mediaType string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Accept", mediaType) }
}

func body(data []byte) func(*http.Request) {
	return func(r *http.Request) {
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(data)), int64(len(data))
	}
}

func jsonOf(t *testing.T, v any) func(*http.Request) {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return body(data)
}

func and(query string) func(*http.Request) {
	return func(r *http.Request) {
		if r.URL.RawQuery != "" {
			query = r.URL.RawQuery + "&" + query
		}
		r.URL.RawQuery = query
	}
}

func decoded[T any](t *testing.T, data []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatalf("%v: %s", err, data)
	}
	return v
}

// workspace sends the example that needs a sandbox with a workspace.
func (w *walk) workspace() {
	w.t.Helper()
	s := w.d.Create(w.t, api.CreateSandbox{Settings: api.Settings{Workspace: workspaceOf(w.t, w.t.TempDir())}})
	work := w.names["id"]
	defer func() { w.names["id"] = work }()
	w.names["id"] = s.ID
	w.step("changes")
}

// code sends the examples that need a sandbox with Python.
func (w *walk) code() {
	w.t.Helper()
	s := w.d.Create(w.t, api.CreateSandbox{})
	work := w.names["id"]
	defer func() { w.names["id"] = work }()
	w.names["id"] = s.ID
	w.step("code")
	w.step("code", accept(api.TypeNDJSON))
	w.step("languages")
	c := decoded[api.Context](w.t, w.step("createContext"))
	known := w.names["context"]
	defer func() { w.names["context"] = known }()
	w.names["context"] = c.ID
	w.step("listContexts")
	w.step("context")
	w.step("interruptContext")
	w.step("restartContext")
	w.step("deleteContext")
}

// network sends the examples that need a sandbox with a network.
func (w *walk) network() {
	w.t.Helper()
	const echo = `
import socket
l = socket.create_server(("127.0.0.1", 8000))
while True:
    c, _ = l.accept()
    while data := c.recv(4096):
        c.sendall(data)
    c.close()
`
	s := w.d.Create(w.t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkFull}, Command: []string{"python3", "-c", echo}})
	work := w.names["id"]
	defer func() { w.names["id"] = work }()
	w.names["id"] = s.ID
	w.step("flows")
	if _, err := w.d.Client(w.t).DialPort(w.t.Context(), s.ID, 8001); !errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
		w.t.Errorf("a port that nothing listens on: %v", err)
	}
	var c net.Conn
	harness.Eventually(w.t, func() (err error) {
		c, err = w.d.Client(w.t).DialPort(w.t.Context(), s.ID, 8000)
		return err
	})
	defer c.Close()
	if _, err := io.WriteString(c, "hi"); err != nil {
		w.t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		w.t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || string(answer) != "hi" {
		w.t.Errorf("through the port came %q, %v", answer, err)
	}
	w.done["connectPort"] = true
}

// pipes sends the example of a program with pipes, as our client does.
func (w *walk) pipes() {
	w.t.Helper()
	c := client.New(w.d.Socket)
	defer c.Close()
	i := slices.IndexFunc(openapi.Operations, func(o openapi.Operation) bool { return o.ID == "execPipes" })
	p, err := c.ExecPipes(w.t.Context(), w.names["id"], openapi.Operations[i].Body.Value.(api.ExecRequest))
	if err != nil {
		w.t.Fatal(err)
	}
	defer p.Close()
	if out, err := io.ReadAll(p.Stdout); err != nil || string(out) != "hi\n" {
		w.t.Errorf("stdout %q, %v", out, err)
	}
	if end, err := p.Wait(); err != nil || end.Exit.Code != 3 {
		w.t.Errorf("%+v, %v", end, err)
	}
	w.done["execPipes"] = true
}

// Every route of the document answers its example as the document says.
func TestOpenAPIExamples(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	registry.Push(t, "tool:1", busybox(t))
	names := maps.Clone(openapi.Names)
	w := &walk{t: t, d: d, names: names, host: registry.Host, done: map[string]bool{}}

	w.step("health")
	w.step("getSystem")
	w.step("checks")
	w.step("diskUsage")
	w.step("listProfiles")
	w.step("profile")

	w.step("pull")
	w.step("listImages")
	w.step("inspectImage")
	w.step("createSandbox")
	w.step("listSandboxes")
	w.step("sandbox")
	w.step("updateSandbox")
	w.step("stats")
	w.step("allStats")
	w.step("processes")

	w.step("setSecret")
	w.step("listSecrets")
	w.step("deleteSecret")

	w.step("createVolume")
	w.step("listVolumes")
	w.step("volume")
	w.step("importVolume", body(w.step("exportVolume")))
	w.step("deleteVolume")
	w.step("pruneVolumes")

	w.workspace()
	w.network()
	w.step("createNetwork")
	w.step("listNetworks")
	w.step("network")
	w.step("exec")
	w.step("exec", accept(api.TypeNDJSON))
	w.step("exec", accept(api.TypeStream))
	w.code()
	w.pipes()
	w.step("stdin")
	w.step("resizeExec")
	w.step("signalExec")
	x := decoded[api.Exec](t, w.step("exec", jsonOf(t, api.ExecRequest{Argv: []string{"echo", "hi"}, Detach: true})))
	names["exec"] = x.ID
	w.step("attach")
	w.step("listExecs")
	w.step("execRecord")
	w.step("deleteExec")
	names["exec"] = decoded[api.Exec](t, w.step("prepareExec", jsonOf(t, api.ExecRequest{Argv: []string{"echo", "hi"}}))).ID
	w.step("startExec")
	names["exec"] = "main"
	w.websocket("interactiveExec", api.ExecRequest{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 3"}})
	w.websocket("attach", nil)

	w.step("writeFile")
	w.step("readFile")
	w.step("readFile", func(r *http.Request) { r.Header.Set("Range", "bytes=0-0") })
	w.step("stat")
	w.step("list")
	w.step("list", accept(api.TypeNDJSON))
	w.watch()
	w.step("mkdir")
	w.step("move")
	w.step("deleteFile")
	w.step("writeArchive", body(w.step("readArchive")))
	w.step("diff")

	w.step("takeSnapshot")
	w.step("sandboxSnapshots")
	w.step("listSnapshots")
	w.step("snapshot")
	w.step("importSnapshot", body(w.step("exportSnapshot")))
	w.step("fork")
	w.step("commit")
	w.step("tag")
	w.step("push")
	w.step("deleteImage")
	exported := w.step("exportImage")
	w.step("importImages", body(exported))
	w.step("importImages", body(exported), and("progress=true"))
	w.step("build", body(harness.Tar(t, harness.File{Name: "Dockerfile", Type: tar.TypeReg, Body: "FROM " + w.here("localhost:5000/tool:1") + "\nRUN echo hi\n"})))
	w.step("verify")
	w.step("pruneImages")

	w.step("pauseSandbox")
	w.step("resumeSandbox")
	w.step("logs")
	w.step("stopSandbox")
	w.step("connectNetwork")
	w.step("disconnectNetwork")
	w.step("deleteNetwork")
	w.step("pruneNetworks")
	w.step("waitSandbox")
	w.step("renameSandbox")
	w.step("startSandbox")
	w.step("rollback")
	w.step("deleteSandbox")
	w.step("pruneSandboxes")
	w.step("deleteSnapshot")
	w.step("pruneSnapshots")
	w.step("run")
	w.step("run", accept(api.TypeNDJSON))

	w.step("events")
	w.agent()
	w.step("shutdown")
	for _, o := range openapi.Operations {
		if !w.done[o.ID] {
			t.Errorf("%s: its example was not sent", o.ID)
		}
	}
	d.WaitExit(t)
}

// watch reads the first lines of a watch while a file is made.
func (w *walk) watch() {
	w.t.Helper()
	response := w.ask("watch")
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for want := range slices.Values([]api.FileChangeKind{api.WatchReady, api.FileCreated}) {
		if !lines.Scan() {
			w.t.Fatalf("watch: %v", lines.Err())
		}
		if got := decoded[api.FileChange](w.t, lines.Bytes()); got.Kind != want {
			w.t.Errorf("watch: %+v, want %s", got, want)
		}
		if want == api.WatchReady {
			w.step("mkdir")
		}
	}
}

// websocket does the handshake of an operation and reads the text frames, which are events. An exec
// is read to its end.
func (w *walk) websocket(id string, first any) {
	w.t.Helper()
	i := slices.IndexFunc(openapi.Operations, func(o openapi.Operation) bool { return o.ID == id })
	o := openapi.Operations[i]
	c, _, err := websocket.Dial(w.t.Context(), "http://sandboxd"+o.Target(w.names), &websocket.DialOptions{HTTPClient: w.d.HTTP})
	if err != nil {
		w.t.Fatalf("%s: %v", id, err)
	}
	defer c.CloseNow() //nolint:errcheck // all has been read
	if first != nil {
		data, err := json.Marshal(first)
		if err != nil {
			w.t.Fatal(err)
		}
		if err := c.Write(w.t.Context(), websocket.MessageText, data); err != nil {
			w.t.Fatalf("%s: %v", id, err)
		}
	}
	document, err := contract.Load()
	if err != nil {
		w.t.Fatal(err)
	}
	channels := map[byte]bool{}
	for {
		kind, data, err := c.Read(w.t.Context())
		if websocket.CloseStatus(err) == websocket.StatusNormalClosure && first != nil {
			if !channels[api.ChannelStdout] || !channels[api.ChannelStderr] {
				w.t.Errorf("%s: channels %v", id, channels)
			}
			break
		}
		if err != nil {
			w.t.Fatalf("%s: %v", id, err)
		}
		if kind == websocket.MessageBinary {
			channels[data[0]] = true
			continue
		}
		if err := document.Frame(data); err != nil {
			w.t.Errorf("%s: %v", id, err)
		}
		if first == nil {
			break // the main process goes on
		}
	}
	w.done[id] = true
}

// agent hosts a run with a scripted model.
func (w *walk) agent() {
	t := w.t
	testenv.RequirePeer(t, "python3")
	model := llmtest.Start(t, llmtest.Turn{Hang: true}, llmtest.Turn{Calls: []llmtest.Call{llmtest.Submit()}})
	model.Key = plantedKey
	i := slices.IndexFunc(openapi.Operations, func(o openapi.Operation) bool { return o.ID == "startAgentRun" })
	request, _ := openapi.Operations[i].Body.Value.(api.StartAgentRun)
	request.Model = scripted(model)
	run := decoded[api.AgentRun](t, w.step("startAgentRun", jsonOf(t, request)))
	w.names["run"] = run.ID
	w.step("agentRuns")
	w.step("agentRun")
	harness.Eventually(t, func() error {
		if len(model.Requests()) == 0 {
			return io.ErrNoProgress
		}
		return nil
	})
	w.step("cancelAgentRun")
	w.step("agentEvents")
	w.step("resumeAgentRun", jsonOf(t, api.ResumeAgentRun{Model: api.AgentModel{Key: plantedKey}}))
	w.step("agentEvents")
	w.step("deleteAgentRun")
}
