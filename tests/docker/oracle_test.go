package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/api/pkg/stdcopy"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// ask is a request of the oracle's table. In path and body $name stands for the ID that the answer
// to an earlier request had, whose save is that name.
type ask struct {
	request string // method and path; version 1.41 is put before a path without one
	body    string
	save    string
	typ     string // of the body; JSON if empty
	tar     bool   // the answer is an archive, or the body is one of the test's
	tty     bool   // the answer is a terminal's output
	upgrade bool   // the client asks for the connection
	shape   bool   // values are the host's or the moment's: types alone are compared
	until   string // words that the answer has sooner or later: the request is repeated
	unsort  bool   // the order of a list in the answer means nothing
}

// answer is one answer as a document: status, headers and body.
type answer map[string]any

// difference is a row of the table of expected differences.
type difference struct {
	at           string // the request, or the words of the command line, and the place; * stands for anything
	theirs, ours string // values in JSON; * stands for anything
	times        int    // it occurs
	why          string
}

// daemon is one of the two daemons that are compared.
type daemon struct {
	name, socket, dir string
	http              *http.Client
	ids               map[string]string
	out               []answer
}

func newDaemon(t *testing.T, name, socket, dir string) *daemon {
	t.Helper()
	for name, text := range map[string]string{
		"file": "a file\n", "dir/inner": "inner\n", "context/word": "built\n", "roots/hello": "from the host\n",
		"context/Dockerfile": "FROM tool:1\nCOPY word /word\nRUN cat /word > /copy\nCMD [\"cat\", \"/copy\"]\n",
		"context/Failing":    "FROM tool:1\nRUN exit 3\n",
	} {
		name = filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	d := &daemon{name: name, socket: socket, dir: dir, ids: make(map[string]string)}
	d.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	t.Cleanup(d.http.CloseIdleConnections)
	return d
}

// TestOracle sends the same requests and runs the same command lines with a daemon of Docker's and
// with ours. Every difference of status, headers, body, exit code and output must be in a row
// of [differences], and must occur as often as the row says.
func TestOracle(t *testing.T) {
	testenv.RequireRoot(t)
	f := serve(t)
	peer := harness.Docker(t)
	theirs, ours := newDaemon(t, "dockerd", peer.Socket, t.TempDir()), newDaemon(t, "sandboxd", f.socket, f.roots)
	archive := harness.Tar(t, harness.Busybox(t)...)
	lines := make([][]string, len(oracleLines))
	for i, l := range oracleLines {
		lines[i] = split(t, l, func(name string) string { return "$" + name })
	}
	var both sync.WaitGroup
	for _, d := range []*daemon{theirs, ours} {
		both.Go(func() {
			for i := range asks {
				d.out = append(d.out, d.ask(t.Context(), &asks[i], archive))
			}
			for i := range lines {
				d.out = append(d.out, d.line(t.Context(), peer.CLI, lines[i]))
			}
		})
	}
	both.Wait()
	c := &comparison{times: make([]int, len(differences))}
	for i := range theirs.out {
		if i < len(asks) {
			c.at, c.shape = asks[i].request, asks[i].shape
		} else {
			c.at, c.shape = "docker "+oracleLines[i-len(asks)], false
		}
		c.compare("", map[string]any(theirs.out[i]), map[string]any(ours.out[i]))
	}
	for _, text := range c.unexplained {
		t.Error(text)
	}
	for i, times := range c.times {
		if d := &differences[i]; times != d.times {
			t.Errorf("row %d: the difference at %q (dockerd %s, sandboxd %s) occurs %d times, and not %d", i, d.at, d.theirs, d.ours, times, d.times)
		}
	}
	if len(asks) < 250 || len(oracleLines) < 100 {
		t.Errorf("%d requests and %d lines", len(asks), len(oracleLines))
	}
	t.Logf("%d requests, %d lines, %d differences in %d rows", len(asks), len(oracleLines), c.found, len(differences))
}

// headers are those that clients read.
var headers = []string{
	"Api-Version", "Builder-Version", "Cache-Control", "Content-Type", "Docker-Experimental", "Ostype", "Pragma", "Server", "Swarm", "Upgrade", "X-Docker-Container-Path-Stat",
}

func (d *daemon) expand(text string) string {
	return os.Expand(text, func(name string) string {
		switch name {
		case "DIR":
			return d.dir
		case "$":
			return "$"
		case "now":
			return strconv.FormatInt(time.Now().Unix()+1, 10)
		}
		return d.ids[name]
	})
}

// ask sends a request until its answer has the words that are awaited.
func (d *daemon) ask(ctx context.Context, a *ask, archive []byte) answer {
	hung := time.After(testenv.HungAfter)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		out := d.send(ctx, a, archive)
		body := text(out["body"])
		if !slices.ContainsFunc(strings.Fields(a.until), func(word string) bool { return !strings.Contains(body, word) }) {
			return out
		}
		select {
		case <-tick.C:
		case <-hung:
			return answer{"error": fmt.Sprintf("no %q in %s", a.until, body)}
		}
	}
}

// send sends a request and returns its answer. An error of the connection is one, too.
func (d *daemon) send(ctx context.Context, a *ask, archive []byte) answer {
	ctx, cancel := context.WithTimeout(ctx, testenv.HungAfter)
	defer cancel()
	method, path, _ := strings.Cut(d.expand(a.request), " ")
	if !strings.HasPrefix(path, "/v1.") && !strings.HasPrefix(path, "//") {
		path = "/v1.41" + path
	}
	path = strings.Replace(path, "//", "/", 1)
	body := []byte(d.expand(a.body))
	if a.tar && method != http.MethodGet {
		if body = archive; a.body != "" {
			body = small(a.body)
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, bytes.NewReader(body))
	if err != nil {
		return answer{"error": err.Error()}
	}
	switch {
	case a.typ != "":
		req.Header.Set("Content-Type", strings.TrimPrefix(a.typ, "none"))
	case a.tar:
		req.Header.Set("Content-Type", "application/x-tar")
	case a.body != "":
		req.Header.Set("Content-Type", "application/json")
	}
	if a.upgrade {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "tcp")
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return answer{"error": err.Error()}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{"error": err.Error()}
	}
	out := answer{"status": float64(resp.StatusCode)}
	head := map[string]any{}
	for _, name := range headers {
		if v := resp.Header.Get(name); v != "" {
			head[name] = d.plain(v)
			if stat, err := base64.StdEncoding.DecodeString(v); err == nil && strings.HasPrefix(name, "X-Docker") {
				head[name] = d.document(stat)
			}
		}
	}
	out["header"] = head
	if a.save != "" {
		var doc struct{ ID string }
		if err := json.Unmarshal(data, &doc); err != nil || doc.ID == "" {
			out["error"] = fmt.Sprintf("no ID in %q", data)
		}
		d.ids[a.save] = doc.ID
	}
	stream := resp.Header.Get("Content-Type")
	switch {
	case len(data) == 0:
	case a.tar && method == http.MethodGet && resp.StatusCode == http.StatusOK:
		out["body"] = entries(data)
	case a.tty && resp.StatusCode < 300:
		out["body"] = d.plain(string(data))
	case strings.HasSuffix(stream, "-stream") || resp.StatusCode == http.StatusOK && strings.HasPrefix(path, "/v1.41/containers/") && strings.Contains(path, "/logs?"):
		var stdout, stderr bytes.Buffer
		if _, err := stdcopy.StdCopy(&stdout, &stderr, bytes.NewReader(data)); err != nil {
			out["error"] = err.Error()
		}
		out["body"] = map[string]any{"stdout": d.plain(stdout.String()), "stderr": d.plain(stderr.String())}
	default:
		out["body"] = d.document(data)
	}
	if list, ok := out["body"].([]any); ok && d.name == "dockerd" && strings.HasPrefix(a.request, "GET /events?") {
		out["body"] = pausedOnce(list)
	}
	if list, ok := out["body"].([]any); ok && a.unsort {
		slices.SortFunc(list, byName)
	}
	return out
}

// pausedOnce leaves out the events of a pause that dockerd tells twice: on a busy machine it hears
// of the pause from containerd when the container already goes on, and takes that for another one.
func pausedOnce(list []any) []any {
	seen := map[any]bool{}
	return slices.DeleteFunc(list, func(e any) bool {
		event, ok := e.(map[string]any)
		if !ok {
			return false
		}
		action := event["Action"]
		again := seen[action] && (action == "pause" || action == "unpause")
		seen[action] = true
		return again
	})
}

// byName compares entries of a list by the field that has their name.
func byName(a, b any) int {
	key := func(v any) string {
		m, _ := v.(map[string]any)
		return text(m["RepoTags"]) + text(m["Destination"]) + text(m["Path"]) + text(m["Name"])
	}
	return strings.Compare(key(a), key(b))
}

// small returns an archive that a row of the table describes: names, each with its content.
func small(spec string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for file := range strings.SplitSeq(spec, ";") {
		name, content, _ := strings.Cut(file, "=")
		h := &tar.Header{Name: name, Mode: 0o640, Uid: 7, Gid: 8, Size: int64(len(content)), ModTime: time.Unix(1_700_000_000, 0), Typeflag: tar.TypeReg}
		_ = w.WriteHeader(h) // a buffer takes everything
		_, _ = io.WriteString(w, content)
	}
	_ = w.Close()
	return b.Bytes()
}

// entries describes an archive, sorted by name.
func entries(data []byte) any {
	out := map[string]any{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			return err.Error()
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return err.Error()
		}
		if len(content) > 100 {
			content = strconv.AppendInt(nil, int64(len(content)), 10)
		}
		out[h.Name] = fmt.Sprintf("%c %o %d:%d %s%s", h.Typeflag, h.Mode&0o7777, h.Uid, h.Gid, h.Linkname, content)
	}
}

// line runs a command line.
func (d *daemon) line(ctx context.Context, docker string, words []string) answer {
	argv := []string{docker}
	for _, word := range words {
		argv = append(argv, strings.ReplaceAll(word, "$DIR", d.dir))
	}
	stdin := ""
	if i := slices.Index(argv, "<"); i >= 0 {
		argv, stdin = argv[:i], strings.Join(argv[i+1:], " ")
	}
	code, stdout, stderr, err := program(ctx, d.socket, d.dir, stdin, argv)
	if err != nil {
		return answer{"error": err.Error()}
	}
	return answer{"code": float64(code), "stdout": d.plain(stdout), "stderr": d.plain(stderr)}
}

// Texts that differ from run to run.
var (
	textIDs    = regexp.MustCompile(`\b[0-9a-f]{64}\b|\b[0-9a-f]{12}\b`)
	textTimes  = regexp.MustCompile(`20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|[+-][0-9:]+)|20[0-9]{2}-[0-9]{2}-[0-9]{2} [0-9:.]+ [+-][0-9]{4} UTC`)
	textSpans  = regexp.MustCompile(`(Less than a second|About a minute|[0-9]+ (second|minute)s?)( ago)?`)
	textIPs    = regexp.MustCompile(`\b(172\.1[67]|198\.1[89])\.[0-9]+\.[0-9]+\b`)
	textBlanks = regexp.MustCompile(` {2,}`)
)

func (d *daemon) plain(s string) string {
	s = strings.ReplaceAll(s, d.dir, "$DIR")
	s = textTimes.ReplaceAllString(s, "<time>")
	s = textIDs.ReplaceAllString(s, "<id>")
	s = textSpans.ReplaceAllString(s, "<span>")
	s = textIPs.ReplaceAllString(s, "<ip>")
	return textBlanks.ReplaceAllString(s, "  ")
}

// document decodes one document of JSON or several.
func (d *daemon) document(data []byte) any {
	var all []any
	for r := json.NewDecoder(bytes.NewReader(data)); ; {
		var v any
		err := r.Decode(&v)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return d.plain(string(data))
		}
		all = append(all, d.normal("", v))
	}
	if len(all) == 1 {
		return all[0]
	}
	return all
}

// volatile are the fields whose numbers and texts are the moment's: whether they are zero is
// compared.
var volatile = []string{
	"Created", "CreatedAt", "Pid", "Size", "SizeRootFs", "SizeRw", "VirtualSize", "LayersSize", "time", "timeNano", "SpaceReclaimed", "LastTagTime", "size", "mtime",
}

// places are the fields that say where the host has a file or a network of a container's.
var places = []string{"EndpointID", "SandboxID", "SandboxKey", "HostnamePath", "HostsPath", "ResolvConfPath", "LogPath", "Mountpoint"}

// normal replaces all that differs from run to run.
func (d *daemon) normal(name string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		if name == "Networks" { // they have tests of its own
			return slices.Sorted(maps.Keys(v))
		}
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[d.plain(k)] = d.normal(k, e)
		}
		return out
	case []any:
		if name == "ExecIDs" { // those that run at the moment
			return nil
		}
		for i := range v {
			v[i] = d.normal(name, v[i])
		}
		if name == "Mounts" { // Docker's order is that of a map
			slices.SortFunc(v, byName)
		}
	case string:
		if v != "" && v != "0001-01-01T00:00:00Z" && slices.Contains(volatile, name) {
			return "<text>"
		}
		if slices.Contains(places, name) {
			return "<text>"
		}
		return d.plain(v)
	case float64:
		if v > 0 && slices.Contains(volatile, name) {
			return "<number>"
		}
	}
	return v
}

// comparison is the comparison of all answers.
type comparison struct {
	at          string // the request
	shape       bool
	found       int
	unexplained []string
	times       []int // by row of the table
}

func text(v any) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // it came from JSON
	return strings.TrimSpace(b.String())
}

// compare compares two values at a place.
func (c *comparison) compare(place string, theirs, ours any) {
	switch a := theirs.(type) {
	case map[string]any:
		b, ok := ours.(map[string]any)
		if !ok {
			break
		}
		keys := maps.Clone(a)
		maps.Copy(keys, b)
		for _, k := range slices.Sorted(maps.Keys(keys)) {
			x, in := a[k]
			y, also := b[k]
			switch {
			case !in:
				c.differ(place+"."+k, "absent", text(y))
			case !also:
				c.differ(place+"."+k, text(x), "absent")
			default:
				c.compare(place+"."+k, x, y)
			}
		}
		return
	case []any:
		b, ok := ours.([]any)
		if !ok {
			break
		}
		if len(a) != len(b) && !c.shape {
			c.differ(place, text(a), text(b))
			return
		}
		for i := range min(len(a), len(b)) {
			c.compare(fmt.Sprintf("%s[%d]", place, i), a[i], b[i])
		}
		return
	}
	x, y := text(theirs), text(ours)
	same := fmt.Sprintf("%T", theirs) == fmt.Sprintf("%T", ours) || theirs == nil || ours == nil
	if c.shape && same || x == y {
		return
	}
	c.differ(place, x, y)
}

// differ looks a difference up in the table.
func (c *comparison) differ(place, theirs, ours string) {
	c.found++
	at := c.at + " " + strings.TrimPrefix(place, ".")
	for i := range differences {
		row := &differences[i]
		if fits(row.at, at) && fits(row.theirs, theirs) && fits(row.ours, ours) {
			c.times[i]++
			return
		}
	}
	c.unexplained = append(c.unexplained, fmt.Sprintf("%s\n\tdockerd:  %s\n\tsandboxd: %s", at, clip(theirs), clip(ours)))
}

// fits reports whether a text fits a pattern, in which * stands for anything.
func fits(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == text
	}
	if !strings.HasPrefix(text, parts[0]) {
		return false
	}
	text = text[len(parts[0]):]
	last := parts[len(parts)-1]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(text, part)
		if i < 0 {
			return false
		}
		text = text[i+len(part):]
	}
	return strings.HasSuffix(text, last)
}
