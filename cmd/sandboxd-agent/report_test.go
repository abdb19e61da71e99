package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html"
	"image/png"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/policy"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// hostileTexts are texts with which models and sandboxes could attack the reader of a report. %s is
// an address that must not be requested.
var hostileTexts = []string{
	`<script>document.title = "owned"</script>`,
	`</pre></div><img src="%s/img" onerror="document.title = 'owned'">`,
	`</style><style>body { background: url(%s/css) }</style>`,
	`<a href="javascript:document.title='owned'">click</a> javascript:alert(1)`,
	`"><iframe src="%s/frame"></iframe><meta http-equiv="refresh" content="0;url=%s/go"><base href="%s/">`,
	`<link rel="stylesheet" href="%s/link"><object data="%s/object"></object><svg onload="document.title='owned'"/>`,
	`{{.Summary}} ${document.title='owned'} <!-- --> ]]> <![CDATA[`,
	"\x1b]0;title\x07\x1b[2J\x1b[31mred",
	"\u202egnp.exe\u202c \u2066isolated\u2069 \u200fmark",
	"not UTF-8: \xff\xfe\x80 and \x00 nul",
	"</textarea></title></html>\u2028<body onload=document.title='owned'>",
}

// hostileRun returns a run in which every text from outside is hostile.
func hostileRun(address string) (*agent.Summary, *agent.Trajectory) {
	var all strings.Builder
	for _, text := range hostileTexts {
		all.WriteString(strings.ReplaceAll(text, "%s", address) + "\n")
	}
	bad := all.String()
	began := time.Date(2026, 1, 16, 14, 30, 0, 0, time.UTC)
	steps := []agent.Step{{
		Thought: "thought " + bad, ReasoningContent: "reasoning " + bad, Observation: "observation " + bad,
		ToolCalls: []agent.ToolRecord{
			{Function: "execute_bash", Arguments: string(quotedJSON(map[string]string{"command": "command " + bad})), Observation: "result " + bad, Verdict: &policy.Verdict{
				Action: policy.Deny, Rule: "rule " + bad, Reason: "reason " + bad, By: "by " + bad,
			}, NotRun: true},
			{Function: bad, Arguments: "arguments " + bad, Observation: strings.Repeat("endless ", 1<<20), Unknown: true, Exit: &api.Exit{Code: 3, Signal: bad}},
			{Function: "str_replace_editor", Arguments: string(quotedJSON(map[string]string{"command": "create", "path": bad, "file_text": "file " + bad})), Observation: "ok"},
		},
		Metadata: agent.StepMetadata{Step: 1, ExecTime: 1.5, FinishReason: bad},
	}, {Thought: "idle " + bad, Observation: bad, Metadata: agent.StepMetadata{Step: 2}}}
	s := &agent.Summary{ID: bad, Dir: bad, State: agent.RunEnded, ExitReason: agent.ExitMaxSteps, Model: bad, Query: "query " + bad, Turns: 2, StartedAt: began}
	t := &agent.Trajectory{ProblemStatement: bad, Steps: steps, Metadata: agent.RunMetadata{
		ExitReason: agent.ExitMaxSteps, ExitDetail: "detail " + bad, Model: bad, ModelSource: bad, Image: bad, SandboxID: bad, StartedAt: began, FinishedAt: &began,
		Budget: agent.Budget{Turns: 10, Time: time.Hour, Cost: 1}, Spent: agent.Spent{Turns: 2, Tokens: 1234, Cost: 0.25, Time: time.Minute}, ToolCalls: 2, Denied: 1,
		Fork:    &agent.ForkOrigin{Dir: bad, Turn: 1},
		Outputs: &agent.Outputs{Entries: 1, Bytes: 7, Files: []agent.Output{{Path: "output " + bad, Type: api.FileType(bad), Size: 7, Stays: bad}}, Elsewhere: []agent.Output{{Path: "elsewhere " + bad, Type: api.FileType(bad), Stays: bad}}, ElsewhereEntries: 1},
		Output:  &agent.Collected{Entries: 1, Bytes: 7, Files: []agent.CollectedFile{{Path: "came " + bad, Size: 7, Media: bad, Digest: bad}}, Skipped: []string{"skipped " + bad}},
	}}
	return s, t
}

func quotedJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// browser opens a page in a headless browser and returns its document, text and picture. Every
// connection that the page could make goes to a listener of ours, which counts them.
type browser struct {
	t       *testing.T
	program string
	address string
	mu      sync.Mutex
	asked   []string
}

func newBrowser(t *testing.T) *browser {
	t.Helper()
	b := &browser{t: t, program: testenv.RequirePeer(t, "chromium-headless-shell")}
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.address = l.Addr().String()
	var serving sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); serving.Wait() })
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			// Serve each connection on its own: a browser may open one without sending a request.
			serving.Go(func() {
				_ = c.SetReadDeadline(time.Now().Add(testenv.HungAfter))
				line := make([]byte, 300)
				n, _ := c.Read(line)
				b.mu.Lock()
				b.asked = append(b.asked, string(line[:n]))
				b.mu.Unlock()
				_ = c.Close()
			})
		}
	})
	return b
}

func (b *browser) requests() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.asked...)
}

// run starts the browser once, with a profile of its own.
func (b *browser) run(args ...string) string {
	b.t.Helper()
	profile := b.t.TempDir()
	args = append([]string{
		"--user-data-dir=" + profile, "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-sync",
		"--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--timeout=120000", "--window-size=900,1400",
		"--proxy-server=http://" + b.address, "--proxy-bypass-list=<-loopback>",
	}, args...)
	if os.Geteuid() == 0 { // the browser's own sandbox refuses root
		args = append([]string{"--no-sandbox"}, args...)
	}
	cmd := exec.CommandContext(b.t.Context(), b.program, args...)
	cmd.Env = []string{"HOME=" + profile, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + profile, "LANG=C.UTF-8"}
	cmd.WaitDelay = testenv.HungAfter
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		b.t.Fatalf("%s: %v\n%s", b.program, err, stderr.String())
	}
	return stdout.String()
}

// open loads a page and returns its document.
func (b *browser) open(page []byte) (dom, path string) {
	b.t.Helper()
	path = filepath.Join(b.t.TempDir(), "page.html")
	if err := os.WriteFile(path, page, 0o600); err != nil {
		b.t.Fatal(err)
	}
	return b.run("--dump-dom", "file://"+path), path
}

// colours returns the number of colours in a picture of the page.
func (b *browser) colours(path string) int {
	b.t.Helper()
	shot := filepath.Join(b.t.TempDir(), "shot.png")
	b.run("--screenshot="+shot, "file://"+path)
	f, err := os.Open(shot)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	picture, err := png.Decode(f)
	if err != nil {
		b.t.Fatal(err)
	}
	if keep := os.Getenv("REPORT_SHOT"); keep != "" { // for a look at the picture
		data, err := os.ReadFile(shot)
		if err == nil {
			err = os.WriteFile(keep, data, 0o600)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
	seen := map[[3]uint32]bool{}
	for y := picture.Bounds().Min.Y; y < picture.Bounds().Max.Y; y++ {
		for x := picture.Bounds().Min.X; x < picture.Bounds().Max.X; x++ {
			r, g, bl, _ := picture.At(x, y).RGBA()
			seen[[3]uint32{r, g, bl}] = true
		}
	}
	return len(seen)
}

var (
	tags  = regexp.MustCompile(`(?s)<style>.*?</style>|<[a-zA-Z/!][^>]*>`)
	title = regexp.MustCompile(`(?s)<title>(.*?)</title>`)
)

// textOf returns the text of a document, without its markup.
func textOf(dom string) string { return html.UnescapeString(tags.ReplaceAllString(dom, "")) }

// A report of a run in which every text is hostile, in a real browser: all texts are readable, none
// of them runs, and no address is requested. A page without escaping is the control.
func TestReportInBrowser(t *testing.T) {
	b := newBrowser(t)
	address := "http://" + b.address

	control := fmt.Sprintf(`<!DOCTYPE html><title>control</title><script>document.title = "owned"</script><img src="%s/control">`, address)
	dom, _ := b.open([]byte(control))
	if got := title.FindStringSubmatch(dom); got == nil || got[1] != "owned" {
		t.Fatalf("a script does not run in this browser, so the test says nothing: %q", dom)
	}
	if asked := b.requests(); !strings.Contains(strings.Join(asked, " "), "/control") {
		t.Fatalf("a picture is not asked for by this browser, so the test says nothing: %q", asked)
	}
	if _, path := b.open([]byte("<!DOCTYPE html><title>blank</title>")); b.colours(path) > 1 {
		t.Fatal("a blank page has colours")
	}
	b.mu.Lock()
	b.asked = nil
	b.mu.Unlock()

	var page bytes.Buffer
	s, tr := hostileRun(address)
	if err := agent.WriteReport(&page, s, tr); err != nil {
		t.Fatal(err)
	}
	if page.Len() > 2<<20 {
		t.Errorf("the report of an endless output has %d bytes", page.Len())
	}
	dom, path := b.open(page.Bytes())
	if got := title.FindStringSubmatch(dom); got == nil || !strings.HasPrefix(got[1], "Run ") || got[1] == "owned" {
		t.Errorf("title %q", got)
	}
	text := textOf(dom)
	for _, want := range []string{
		"max_steps", "query <script>", "thought <script>", "reasoning <script>", "command <script>", "result <script>", "rule <script>", "reason <script>", "by <script>",
		"arguments <script>", "file <script>", "detail <script>", "output <script>", "came <script>", "skipped <script>", "idle <script>",
		`javascript:document.title='owned'`, `\x1b]0;title\x07\x1b[2J`, `\u202egnp.exe\u202c`, `\u200fmark`, `not UTF-8: `, `\x00 nul`,
		"bytes left out", "unknown whether it was done", "not run", "2 of 10", "$0.2500 of $1.0000", "1m0s of 1h0m0s", "no tool call",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not to be read in the report", want)
		}
	}
	for _, forbidden := range []string{"<script", "<img", "<iframe", "<object", "<svg", "<link", "<base", "href=", "src=", "onerror=\"", "\x1b", "\u202e", "\x00"} {
		// A document has text with its < as &lt;.
		if i := strings.Index(dom, forbidden); i >= 0 && (strings.HasPrefix(forbidden, "<") || !strings.Contains(text, forbidden)) {
			t.Errorf("%q has come through: ...%q", forbidden, dom[max(0, i-100):min(len(dom), i+100)])
		}
	}
	if strings.Count(dom, "<section") != 2 || strings.Count(dom, "<meter") != 3 {
		t.Errorf("the report has %d turns and %d bars", strings.Count(dom, "<section"), strings.Count(dom, "<meter"))
	}
	if n := b.colours(path); n < 20 {
		t.Errorf("the picture of the report has %d colours: it is as good as blank", n)
	}
	if asked := b.requests(); len(asked) != 0 {
		t.Errorf("the report asked for something: %q", asked)
	}

	// If markup came through one day, the page's own content policy would still hold.
	broken := bytes.Replace(page.Bytes(), []byte("<body>"), []byte("<body>"+control), 1)
	dom, _ = b.open(broken)
	if got := title.FindStringSubmatch(dom); got == nil || got[1] == "owned" {
		t.Errorf("title %q: a script has run in spite of the policy", got)
	}
	if asked := b.requests(); len(asked) != 0 {
		t.Errorf("in spite of the policy, there was asked: %q", asked)
	}
}
