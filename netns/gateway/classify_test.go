package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
)

func TestClassify(t *testing.T) {
	for in, want := range map[string]kind{
		"\x16\x03\x01":                           kindTLS,
		"GET / HTTP/1.1\r\n":                     kindHTTP,
		"POST / HTTP/1.0\r\n":                    kindHTTP,
		"get / http/1.1\n":                       kindHTTP,
		"PRI * HTTP/2.0\r\n":                     kindHTTP,
		"\r\nGET / HTTP/1.1\r\n":                 kindHTTP,
		"\n":                                     kindHTTP,
		"  GET / HTTP/1.1\r\n":                   kindHTTP,
		"\tGET / HTTP/1.1\r\n":                   kindHTTP,
		"GET\t/ HTTP/1.1\r\n":                    kindHTTP,
		"GET /\x00\xff HTTP/1.1\n":               kindHTTP,
		"G(T / HTTP/1.1\r\n":                     kindHTTP,
		"GET / HTTP/1.1\rHost: x\n":              kindHTTP,
		"PROXY TCP4 ":                            kindHTTP,
		"\r\n\r\n\x00\r\nQUIT\n":                 kindHTTP,
		"GET " + strings.Repeat("a", 5000):       kindHTTP,
		"SSH-2.0-OpenSSH_9.6 Debian-1\r\n":       kindOther,
		"EHLO client.test\r\n":                   kindOther,
		"*1\r\n$4\r\nPING\r\n":                   kindOther,
		"PING\r\n":                               kindOther,
		"0032git-upload-pack /a.git\x00host=a\n": kindOther,
		"\x00\x00\x00\x08\x04\xd2\x16\x2f":       kindOther,
		"AMQP\x00\x00\x09\x01":                   kindOther,
		"\x20\x00\x00\x01":                       kindOther,
		"\x80\x2e\x01\x03\x01":                   kindOther,
		"!\x01\x00\x00":                          kindOther,
	} {
		r := bufio.NewReader(strings.NewReader(in))
		got, err := classify(r)
		if err != nil || got != want {
			t.Errorf("%.40q: %d, %v", in, got, err)
		}
		if b, _ := io.ReadAll(r); string(b) != in {
			t.Errorf("%.40q: bytes are consumed", in)
		}
	}
	for _, in := range []string{"", "G", "GET", "GET / HTTP/1.", "hello"} {
		if kind, err := classify(bufio.NewReader(strings.NewReader(in))); !errors.Is(err, io.EOF) {
			t.Errorf("%q, cut: %d, %v", in, kind, err)
		}
	}
}

// FuzzClassify looks for bytes that pass as another protocol and that net/http, which is lenient in
// its own way, reads as a request. The split of the bytes over packets must not matter.
func FuzzClassify(f *testing.F) {
	for _, s := range []string{"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", "\r\nGET / HTTP/1.1\r\n", "SSH-2.0-x\r\n", "\x16\x03", "PROXY TCP4\r\n", "G\x00T / HTTP/1.1\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := classify(bufio.NewReader(bytes.NewReader(data)))
		slow, slowErr := classify(bufio.NewReader(iotest.OneByteReader(bytes.NewReader(data))))
		if got != slow || (err == nil) != (slowErr == nil) {
			t.Errorf("%q: %d, %v at once and %d, %v byte by byte", data, got, err, slow, slowErr)
		}
		if err != nil || got != kindOther {
			return
		}
		if q, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(data))); err == nil {
			t.Errorf("%q passes as another protocol and is a request for %s", data, q.Host)
		}
	})
}
