package network

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/tests/network/op"
)

// allowed is the policy of the sandboxes whose programs work.
const allowed = `
version: 1
rules:
- {name: site, allow: [site.test, "*.site.test"], ports: [80, 443, 8080, 8443]}
- {name: raw, allow: [raw.site.test, "*.raw.site.test"], ports: [22, 5432, 9000]}
- {name: read, allow: read.test, ports: 80, inspect: true, methods: [GET, HEAD], paths: [/echo/*, /redirect]}
- {name: lan, allow: 10.1.0.0/16, ports: [80, 9000]}
`

// allowedInspected allows the same, and has the gateway read the requests.
var allowedInspected = strings.Replace(allowed, "8443]}", "8443], inspect: true}", 1)

// siteAddr and siteAddr6 have the servers of the clients of package op.
const (
	siteAddr  = "93.184.215.80"
	siteAddr6 = "2606:2800:21f::80"
	lanAddr   = op.LAN
)

var allowedHosts = map[string]*host{
	op.Site:              {addrs: []string{siteAddr, siteAddr6}},
	"www.site.test":      {cname: []string{"cdn.example"}, addrs: []string{siteAddr}},
	op.Site6:             {addrs: []string{siteAddr6}},
	op.Raw:               {addrs: []string{siteAddr}},
	"six." + op.Raw:      {addrs: []string{siteAddr6}},
	"read.test":          {addrs: []string{siteAddr}},
	"down.site.test":     {addrs: []string{"93.184.215.81"}},
	"resets.site.test":   {addrs: []string{"93.184.215.82"}},
	"servfail.site.test": {code: 2},
}

// site serves everything that the clients of package op ask for, and further paths. It returns the
// certificate of the authority of its servers, which programs of the world trust.
func site(t *testing.T, w *world, further map[string]http.Handler) (ca []byte) {
	t.Helper()
	w.names.set(allowedHosts)
	mux := http.NewServeMux()
	for path, h := range further {
		mux.Handle(path, h)
	}
	pages(mux)
	certificate := w.authority.server(t)
	serve := func(to string, withTLS bool) {
		s := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0), TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}}
		l := w.listen(t, to)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if withTLS {
				_ = s.ServeTLS(l, "", "") // until it is closed
			} else {
				_ = s.Serve(l)
			}
		}()
		t.Cleanup(func() {
			_ = s.Close() // its connections are of this test
			<-done
		})
	}
	for _, addr := range []string{siteAddr, "[" + siteAddr6 + "]"} {
		serve(addr+":80", false)
		serve(addr+":8080", false)
		serve(addr+":443", true)
		serve(addr+":8443", true)
		w.serve(t, addr+":9000", echo)
		w.serve(t, addr+":22", func(c net.Conn) {
			_, _ = io.WriteString(c, "SSH-2.0-server\r\n") // the client looks, here and below
			line, _ := bufio.NewReader(c).ReadString('\n')
			_, _ = io.WriteString(c, "hello "+line)
		})
		w.serve(t, addr+":5432", func(c net.Conn) {
			_, _ = io.ReadFull(c, make([]byte, 8))
			_, _ = io.WriteString(c, "N")
			_ = c.(*recorded).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		})
	}
	serve(lanAddr+":80", false)
	w.serve(t, lanAddr+":9000", echo)
	w.serve(t, "93.184.215.82:80", func(c net.Conn) {
		_, _ = io.ReadFull(c, make([]byte, 10))
		_ = c.(*recorded).SetLinger(0) // a reset in the place of the answer
	})
	return w.authority.pem
}

func echo(c net.Conn) {
	_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) // the client looks
	_ = c.(*recorded).CloseWrite()
}

// pages serves the paths that the clients of package op ask for.
func pages(mux *http.ServeMux) {
	mux.HandleFunc("/echo/", func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		fmt.Fprintln(rw, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(body)))
	})
	mux.HandleFunc("/echo", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/status/", func(rw http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(strings.TrimLeft(strings.TrimPrefix(r.URL.Path, "/status/"), "/")[:3]) // of our own clients
		rw.WriteHeader(code)
	})
	mux.HandleFunc("/redirect", func(rw http.ResponseWriter, r *http.Request) {
		to := r.URL.Query().Get("to")
		if to == "" {
			to = "/echo/redirected"
		}
		http.Redirect(rw, r, to, http.StatusFound)
	})
	mux.HandleFunc("/hints", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Link", "</x>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.WriteHeader(http.StatusOK)
	})
	mux.HandleFunc("/fields", func(rw http.ResponseWriter, _ *http.Request) {
		for i := range 100 {
			rw.Header().Set(fmt.Sprintf("X-Field-%d", i), strings.Repeat("v", 200))
		}
	})
	mux.HandleFunc("/bytes/", func(rw http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(strings.TrimPrefix(r.URL.Path, "/bytes/"), 10, 64)
		if err != nil {
			return
		}
		body, _ := op.Stream(n)
		_, _ = io.Copy(rw, body) // the client counts
	})
	mux.HandleFunc("/sum", func(rw http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		if _, err := io.Copy(h, r.Body); err == nil {
			fmt.Fprint(rw, hex.EncodeToString(h.Sum(nil)))
		}
	})
	mux.HandleFunc("/trailers", func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the client looks at the end
		rw.Header().Set("Content-Type", "application/grpc")
		rw.Header().Set("Trailer", "Grpc-Status")
		_, _ = rw.Write([]byte{0, 0, 0, 0, 0})
		rw.Header().Set("Grpc-Status", "0")
	})
	mux.HandleFunc("/test.Echo/", rpc)
	mux.HandleFunc("/both", func(rw http.ResponseWriter, r *http.Request) {
		flush := http.NewResponseController(rw)
		_ = flush.EnableFullDuplex() // HTTP/2 always has it
		_ = flush.Flush()            // the client looks, here and below
		for lines := bufio.NewReader(r.Body); ; {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			_, _ = io.WriteString(rw, line)
			_ = flush.Flush()
		}
	})
	mux.HandleFunc("/chat", func(rw http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(rw, r, nil)
		if err != nil {
			return
		}
		c.SetReadLimit(1 << 20)
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil {
				return
			}
			_ = c.Write(r.Context(), kind, append([]byte("echo "), b...)) // the client looks
		}
	})
	var streams sync.Map // id -> chan struct{}
	mux.HandleFunc("/events", func(rw http.ResponseWriter, r *http.Request) {
		own, _ := streams.LoadOrStore(r.URL.RawQuery, make(chan struct{}))
		next := own.(chan struct{})
		if r.Method == http.MethodPost {
			select {
			case next <- struct{}{}:
			case <-r.Context().Done():
			}
			rw.WriteHeader(http.StatusNoContent)
			return
		}
		rw.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(rw, "data: %d\n", i)
			_ = http.NewResponseController(rw).Flush() // the client looks
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})
}

// rpc is a service of gRPC. Its methods answer each message of bytes with the same: Thrice three
// times, and Last only the last one. Refuse ends with an error.
func rpc(rw http.ResponseWriter, r *http.Request) {
	h := rw.Header()
	h.Set("Content-Type", "application/grpc")
	h.Set("Trailer", "Grpc-Status, Grpc-Message")
	method := strings.TrimPrefix(r.URL.Path, "/test.Echo/")
	if method == "Refuse" {
		h.Set("Grpc-Status", "5") // NOT_FOUND
		h.Set("Grpc-Message", "nothing is here")
		return
	}
	times := 1
	if method == "Thrice" {
		times = 3
	}
	flush := http.NewResponseController(rw)
	_ = flush.Flush() // the client looks, here and below
	var message []byte
	for {
		head := make([]byte, 5) // a flag, and the length
		if _, err := io.ReadFull(r.Body, head); err != nil {
			break
		}
		message = slices.Concat(head, make([]byte, min(binary.BigEndian.Uint32(head[1:]), 4<<20)))
		if _, err := io.ReadFull(r.Body, message[len(head):]); err != nil {
			return
		}
		for range times {
			if method != "Last" {
				_, _ = rw.Write(message)
				_ = flush.Flush()
			}
		}
	}
	if method == "Last" {
		_, _ = rw.Write(message)
	}
	h.Set("Grpc-Status", "0")
}

// authority signs the certificates of the world's servers.
type authority struct {
	certificate *x509.Certificate
	pem         []byte // the certificate's
	key         *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, certificate: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of a test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, SubjectKeyId: []byte{1},
	}}
	der, err := x509.CreateCertificate(rand.Reader, a.certificate, a.certificate, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a, nil
}

// server makes the certificate of the servers.
func (a *authority) server(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: op.Site}, NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, SubjectKeyId: []byte{2}, AuthorityKeyId: []byte{1},
		DNSNames: []string{op.Site, "*.site.test", "*.raw.site.test", "read.test"},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
