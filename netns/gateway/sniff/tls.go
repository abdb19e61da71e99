package sniff

import (
	"encoding/binary"
	"io"

	"github.com/sandboxd/sandboxd/netns/policy"
)

// RecordHandshake is the first byte of a connection that begins with a TLS handshake.
const RecordHandshake = 0x16

const (
	maxHello   = 32 << 10 // a hello with post-quantum shares and a session ticket has 2 to 4 KB
	maxRecords = 32
	maxRecord  = 16 << 10 // RFC 8446 section 5.1
)

// The extensions that are read. The numbers of ECH and of its drafts are those that libraries send.
const (
	extServerName = 0
	extECHOuter   = 0xfd00
	extECH        = 0xfe0d
	extESNI       = 0xffce
)

// ClientHello is the part of a TLS ClientHello that a policy asks for.
type ClientHello struct {
	// Name is the server name; the zero Name if the client sent none.
	Name policy.Name
}

// ReadClientHello reads the records that hold a ClientHello and no byte after them. It returns what
// it read in any case.
//
// An extension for Encrypted ClientHello is refused, also one that only pretends (GREASE): the two
// look alike. So is everything else that leaves the server a choice: an extension that occurs
// twice, a server name beside another or in a form that [policy.ParseName] refuses, a record
// that goes on after the hello.
func ReadClientHello(r io.Reader) (hello ClientHello, raw []byte, err error) {
	var message []byte // handshake header and body, without those of records
	want := 4
	for records := 0; len(message) < want; records++ {
		if records == maxRecords {
			return ClientHello{}, raw, malformed("a ClientHello in more than %d records", maxRecords)
		}
		start := len(raw)
		if raw, err = more(r, raw, 5); err != nil {
			return ClientHello{}, raw, err
		}
		length, err := recordLength(raw[start:])
		if err != nil {
			return ClientHello{}, raw, err
		}
		start = len(raw)
		if raw, err = more(r, raw, length); err != nil {
			return ClientHello{}, raw, err
		}
		message = append(message, raw[start:]...)
		if len(message) < 4 {
			continue
		}
		if message[0] != 1 {
			return ClientHello{}, raw, malformed("handshake message %d in the place of a ClientHello", message[0])
		}
		want = 4 + int(message[1])<<16 + int(message[2])<<8 + int(message[3])
		if want > maxHello {
			return ClientHello{}, raw, malformed("a ClientHello of more than %d bytes", maxHello)
		}
	}
	if len(message) > want {
		return ClientHello{}, raw, malformed("bytes after the ClientHello in its record")
	}
	hello, err = parseClientHello(message[4:])
	return hello, raw, err
}

// more appends the next n bytes of r to b.
func more(r io.Reader, b []byte, n int) ([]byte, error) {
	start := len(b)
	b = append(b, make([]byte, n)...)
	read, err := io.ReadFull(r, b[start:])
	return b[:start+read], err
}

func recordLength(header []byte) (int, error) {
	length := int(binary.BigEndian.Uint16(header[3:]))
	switch {
	case header[0] != RecordHandshake:
		return 0, malformed("a TLS record of type %d in the place of a handshake", header[0])
	case header[1] != 3 || header[2] < 1 || header[2] > 3:
		return 0, malformed("a TLS record of version %d.%d", header[1], header[2])
	case length == 0 || length > maxRecord:
		return 0, malformed("a TLS record of %d bytes", length)
	}
	return length, nil
}

// A cursor takes fields from the front of a message. After a field that is not whole, bad is set
// and the fields are empty.
type cursor struct {
	rest []byte
	bad  bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.rest) {
		c.rest, c.bad = nil, true
		return nil
	}
	field := c.rest[:n]
	c.rest = c.rest[n:]
	return field
}

func (c *cursor) uint8() int {
	if b := c.take(1); b != nil {
		return int(b[0])
	}
	return 0
}

func (c *cursor) uint16() int {
	if b := c.take(2); b != nil {
		return int(binary.BigEndian.Uint16(b))
	}
	return 0
}

func parseClientHello(body []byte) (ClientHello, error) {
	c := cursor{rest: body}
	version := c.uint16()
	c.take(32) // random
	session := c.take(c.uint8())
	suites := c.take(c.uint16())
	compressions := c.take(c.uint8())
	switch {
	case c.bad:
		return ClientHello{}, malformed("a cut ClientHello")
	case version < 0x0301 || version > 0x0303: // TLS 1.3 says 1.2 here
		return ClientHello{}, malformed("a ClientHello of version %#04x", version)
	case len(session) > 32:
		return ClientHello{}, malformed("a session id of %d bytes", len(session))
	case len(suites) == 0 || len(suites)%2 != 0:
		return ClientHello{}, malformed("cipher suites of %d bytes", len(suites))
	case len(compressions) == 0:
		return ClientHello{}, malformed("no compression method")
	case len(c.rest) == 0:
		return ClientHello{}, nil // a client without extensions
	}
	extensions := cursor{rest: c.take(c.uint16())}
	if c.bad || len(c.rest) != 0 {
		return ClientHello{}, malformed("a ClientHello and extensions of different lengths")
	}
	var hello ClientHello
	seen := make(map[int]bool)
	for len(extensions.rest) > 0 {
		kind := extensions.uint16()
		data := extensions.take(extensions.uint16())
		switch {
		case extensions.bad:
			return ClientHello{}, malformed("a cut extension")
		case seen[kind]:
			return ClientHello{}, malformed("extension %d twice", kind)
		}
		seen[kind] = true
		switch kind {
		case extECH, extECHOuter, extESNI:
			return ClientHello{}, malformed("an encrypted ClientHello, whose server name cannot be checked")
		case extServerName:
			name, err := serverName(data)
			if err != nil {
				return ClientHello{}, err
			}
			hello.Name = name
		}
	}
	return hello, nil
}

// serverName reads the extension of RFC 6066 section 3.
func serverName(data []byte) (policy.Name, error) {
	c := cursor{rest: data}
	list := cursor{rest: c.take(c.uint16())}
	kind := list.uint8()
	host := list.take(list.uint16())
	switch {
	case c.bad || list.bad || len(c.rest) != 0:
		return policy.Name{}, malformed("a server name of a wrong length")
	case kind != 0:
		return policy.Name{}, malformed("a server name of type %d", kind)
	case len(list.rest) != 0:
		return policy.Name{}, malformed("two server names")
	}
	name, err := policy.ParseName(string(host))
	if err != nil {
		return policy.Name{}, malformed("a server name that is refused: %v", err)
	}
	return name, nil
}
