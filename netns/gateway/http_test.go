package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"testing"
)

func TestHTTPKeepsConnections(t *testing.T) {
	w := newWorld(t, `{version: 1, rules: [{name: web, allow: web.test}]}`)
	w.host("web.test", "93.184.215.14")
	w.http("93.184.215.14:80", func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(rw, "%s %s %s", r.Method, r.URL.Path, body)
	})
	w.resolve("web.test", 1)
	c := w.dial("93.184.215.14:80")
	r := bufio.NewReader(c)
	for i := range 3 {
		if _, body := get(t, c, r, "GET", "GET /a HTTP/1.1\r\nHost: web.test\r\n\r\n"); body != "GET /a " {
			t.Errorf("request %d: %q", i, body)
		}
	}
	if _, body := get(t, c, r, "POST", "POST /b HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3\r\n\r\nabc"); body != "POST /b abc" {
		t.Errorf("post: %q", body)
	}
	p, body := get(t, c, r, "GET", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
	if p.StatusCode != 403 {
		t.Errorf("another host: %d %s", p.StatusCode, body)
	}
	t.Log(body)
	if _, err := r.ReadByte(); err != io.EOF {
		t.Errorf("after a refusal: %v", err)
	}
	c.Close()
	for _, e := range w.all() {
		t.Logf("%+v", e)
	}
}
