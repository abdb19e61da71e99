package sniff

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
)

func u16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func extension(kind int, data []byte) []byte { return join(u16(kind), u16(len(data)), data) }

func sniEntry(kind byte, name string) []byte {
	return join([]byte{kind}, u16(len(name)), []byte(name))
}

func sni(entries ...[]byte) []byte {
	list := join(entries...)
	return extension(0, join(u16(len(list)), list))
}

// helloBody is the body of a ClientHello with these extensions.
func helloBody(extensions ...[]byte) []byte {
	all := join(extensions...)
	return join([]byte{3, 3}, make([]byte, 32), []byte{0}, u16(2), []byte{0x13, 0x01}, []byte{1, 0}, u16(len(all)), all)
}

func message(body []byte) []byte {
	return join([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body)
}

func record(data []byte) []byte { return join([]byte{22, 3, 1}, u16(len(data)), data) }

func hello(extensions ...[]byte) []byte { return record(message(helloBody(extensions...))) }

// fragmented puts each n bytes of a message in a record of their own.
func fragmented(m []byte, n int) []byte {
	var all []byte
	for len(m) > 0 {
		k := min(n, len(m))
		all = append(all, record(m[:k])...)
		m = m[k:]
	}
	return all
}

// goHello returns the first flight of a client of crypto/tls.
func goHello(t testing.TB, config *tls.Config) []byte {
	t.Helper()
	client, server := net.Pipe()
	defer server.Close()
	go func() {
		_ = tls.Client(client, config).Handshake() // the server reads one record and hangs up
		_ = client.Close()
	}()
	header := make([]byte, 5)
	if _, err := io.ReadFull(server, header); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, binary.BigEndian.Uint16(header[3:]))
	if _, err := io.ReadFull(server, body); err != nil {
		t.Fatal(err)
	}
	return join(header, body)
}

func TestReadClientHello(t *testing.T) {
	named := sni(sniEntry(0, "api.example.com"))
	for name, tc := range map[string]struct {
		in   []byte
		want string
	}{
		"crypto/tls":           {goHello(t, &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2"}}), "api.example.com"},
		"crypto/tls 1.2":       {goHello(t, &tls.Config{ServerName: "api.example.com", MaxVersion: tls.VersionTLS12}), "api.example.com"},
		"crypto/tls, no name":  {goHello(t, &tls.Config{InsecureSkipVerify: true}), ""},
		"upper case":           {hello(sni(sniEntry(0, "API.Example.COM"))), "api.example.com"},
		"three records":        {fragmented(message(helloBody(named)), 30), "api.example.com"},
		"cut in the header":    {join(record([]byte{1}), record(message(helloBody(named))[1:])), "api.example.com"},
		"other extensions":     {hello(extension(10, u16(0)), named, extension(0x0a0a, nil)), "api.example.com"},
		"no extensions at all": {record(message(helloBody()[:41])), ""},
		"empty extensions":     {hello(), ""},
		"large":                {fragmented(message(helloBody(named, extension(21, make([]byte, 30000)))), 16384), "api.example.com"},
	} {
		// The bytes that follow are the server's.
		r := bytes.NewReader(join(tc.in, []byte("rest")))
		got, raw, err := ReadClientHello(r)
		if err != nil || got.Name.String() != tc.want || !bytes.Equal(raw, tc.in) || r.Len() != 4 {
			t.Errorf("%s: name %q, %v; %d of %d bytes read", name, got.Name, err, len(raw), len(tc.in))
		}
		// Those made by hand lack extensions that crypto/tls needs.
		if theirs, read := serverReads(tc.in); !strings.EqualFold(theirs, tc.want) && (read || strings.HasPrefix(name, "crypto/tls")) {
			t.Errorf("%s: crypto/tls reads %q", name, theirs)
		}
	}
}

func TestReadClientHelloRefuses(t *testing.T) {
	named := sni(sniEntry(0, "api.example.com"))
	whole := helloBody(named)
	sslv2 := join([]byte{0x80, 46, 1, 3, 3}, u16(3), u16(0), u16(32), make([]byte, 35))
	for name, in := range map[string][]byte{
		"ECH":                            hello(named, extension(0xfe0d, []byte{0})),
		"ECH, inner":                     hello(named, extension(0xfe0d, []byte{1})),
		"ECH before the name":            hello(extension(0xfe0d, nil), named),
		"ESNI":                           hello(named, extension(0xffce, nil)),
		"outer extensions":               hello(named, extension(0xfd00, nil)),
		"two names":                      hello(sni(sniEntry(0, "api.example.com"), sniEntry(0, "evil.test"))),
		"a name of another type beside":  hello(sni(sniEntry(0, "api.example.com"), sniEntry(1, "evil.test"))),
		"a name of another type":         hello(sni(sniEntry(1, "api.example.com"))),
		"two extensions for the name":    hello(named, sni(sniEntry(0, "evil.test"))),
		"the same name twice":            hello(named, named),
		"another extension twice":        hello(named, extension(10, nil), extension(10, nil)),
		"empty name":                     hello(sni(sniEntry(0, ""))),
		"empty list":                     hello(sni()),
		"empty extension":                hello(extension(0, nil)),
		"NUL":                            hello(sni(sniEntry(0, "api.example.com\x00.evil.test"))),
		"NUL at the end":                 hello(sni(sniEntry(0, "api.example.com\x00"))),
		"trailing dot":                   hello(sni(sniEntry(0, "api.example.com."))),
		"space":                          hello(sni(sniEntry(0, "api.example.com "))),
		"underscore":                     hello(sni(sniEntry(0, "a_b.example.com"))),
		"UTF-8":                          hello(sni(sniEntry(0, "apì.example.com"))),
		"IPv4":                           hello(sni(sniEntry(0, "93.184.215.14"))),
		"IPv6":                           hello(sni(sniEntry(0, "2606:4700::1111"))),
		"numeric":                        hello(sni(sniEntry(0, "0x5db8d70e"))),
		"port":                           hello(sni(sniEntry(0, "api.example.com:443"))),
		"list shorter than its entry":    hello(extension(0, join(u16(10), sniEntry(0, "api.example.com")))),
		"list longer than the extension": hello(extension(0, join(u16(99), sniEntry(0, "api.example.com")))),
		"byte after the list":            hello(extension(0, join(u16(18), sniEntry(0, "api.example.com"), []byte{0}))),
		"name longer than its list":      hello(extension(0, join(u16(4), []byte{0, 0, 200, 'a'}))),
		"extension longer than all":      hello(named, u16(10), u16(200)),
		"half an extension":              hello(named, []byte{0}),
		"extensions shorter than said":   record(message(join(helloBody()[:41], u16(99), named))),
		"bytes after the extensions":     record(message(join(whole, []byte{0}))),
		"a second message in the record": record(join(message(whole), message(whole))),
		"a byte after in the record":     record(join(message(whole), []byte{0})),
		"odd cipher suites":              record(message(join([]byte{3, 3}, make([]byte, 32), []byte{0}, u16(3), make([]byte, 3), []byte{1, 0}))),
		"no cipher suites":               record(message(join([]byte{3, 3}, make([]byte, 32), []byte{0}, u16(0), []byte{1, 0}))),
		"no compression":                 record(message(join([]byte{3, 3}, make([]byte, 32), []byte{0}, u16(2), make([]byte, 2), []byte{0}))),
		"long session":                   record(message(join([]byte{3, 3}, make([]byte, 32), []byte{33}, make([]byte, 33), u16(2), make([]byte, 2), []byte{1, 0}))),
		"session beyond the end":         record(message(join([]byte{3, 3}, make([]byte, 32), []byte{200}))),
		"SSL 3.0":                        record(message(join([]byte{3, 0}, whole[2:]))),
		"a version to come":              record(message(join([]byte{3, 4}, whole[2:]))),
		"server hello":                   record(join([]byte{2}, message(whole)[1:])),
		"hello request":                  record([]byte{0, 0, 0, 0}),
		"empty":                          record([]byte{1, 0, 0, 0}),
		"alert":                          join([]byte{21, 3, 1}, u16(2), []byte{1, 0}),
		"an alert between":               join(record(message(whole)[:9]), []byte{21, 3, 1}, u16(2), []byte{1, 0}, record(message(whole)[9:])),
		"application data":               join([]byte{23, 3, 3}, u16(2), []byte{1, 0}),
		"record of SSL 3.0":              join([]byte{22, 3, 0}, record(message(whole))[3:]),
		"record of version 4":            join([]byte{22, 4, 1}, record(message(whole))[3:]),
		"SSLv2":                          sslv2,
		"empty record":                   join(record(nil), record(message(whole))),
		"large record":                   join([]byte{22, 3, 1}, u16(16385), make([]byte, 16385)),
		"large hello":                    record([]byte{1, 0xff, 0xff, 0xff}),
		"larger than allowed":            fragmented(message(helloBody(named, extension(21, make([]byte, 40000)))), 16384),
		"many records":                   fragmented(message(whole), 1),
		"HTTP":                           []byte("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"),
	} {
		got, raw, err := ReadClientHello(bytes.NewReader(in))
		if m := (*MalformedError)(nil); !errors.As(err, &m) {
			t.Errorf("%s: name %q, %v", name, got.Name, err)
		}
		if got != (ClientHello{}) {
			t.Errorf("%s: a name %q beside the error %v", name, got.Name, err)
		}
		if !bytes.HasPrefix(in, raw) {
			t.Errorf("%s: other bytes are returned than read", name)
		}
	}
}

func TestReadClientHelloCut(t *testing.T) {
	whole := fragmented(message(helloBody(sni(sniEntry(0, "api.example.com")))), 40)
	for n := range len(whole) {
		_, raw, err := ReadClientHello(bytes.NewReader(whole[:n]))
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) || len(raw) != n {
			t.Errorf("%d bytes: %v, %d returned", n, err, len(raw))
		}
	}
}

// FuzzClientHello compares with the server of crypto/tls: a hello that is accepted here has the
// name that a server reads.
func FuzzClientHello(f *testing.F) {
	f.Add(goHello(f, &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2", "http/1.1"}}))
	f.Add(goHello(f, &tls.Config{ServerName: "a.test", MaxVersion: tls.VersionTLS12}))
	f.Add(fragmented(message(helloBody(sni(sniEntry(0, "a.test")))), 40))
	f.Add(hello(sni(sniEntry(0, "a.test"), sniEntry(0, "b.test"))))
	f.Add(hello(sni(sniEntry(0, "a.test")), extension(0xfe0d, []byte{0})))
	f.Fuzz(func(t *testing.T, data []byte) {
		ours, raw, err := ReadClientHello(bytes.NewReader(data))
		if !bytes.HasPrefix(data, raw) {
			t.Fatal("other bytes are returned than read")
		}
		theirs, read := serverReads(raw)
		if err == nil && read && !strings.EqualFold(theirs, ours.Name.String()) {
			t.Errorf("%x is for %q, and for %q to crypto/tls", raw, ours.Name, theirs)
		}
	})
}

// serverReads returns the name that a server of crypto/tls reads, and whether it reads one at all.
func serverReads(raw []byte) (name string, read bool) {
	stop := errors.New("stop")
	conn := &oneWay{Reader: bytes.NewReader(raw)}
	server := tls.Server(conn, &tls.Config{GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
		name, read = info.ServerName, true
		return nil, stop
	}})
	_ = server.Handshake() // it stops at the hello
	return name, read
}

// oneWay is a connection whose client sends and never listens.
type oneWay struct {
	net.Conn
	io.Reader
}

func (c *oneWay) Read(b []byte) (int, error)  { return c.Reader.Read(b) }
func (c *oneWay) Write(b []byte) (int, error) { return len(b), nil }
func (c *oneWay) Close() error                { return nil }
