package libct

import (
	"crypto/sha1" //nolint:gosec // G505: the format's checksum
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"unicode/utf16"
)

// Java's stores of certificates have one of two forms; Java recognizes which. An entry is put
// before the entries of the image's store. Those are copied unread: the image answers for them.

const (
	// storeAlias names the entry.
	storeAlias = "sandboxd"
	// storePassword is the password that every cacerts comes with. Java reads certificates without a
	// password; some programs pass this one, so the checksum has to fit it.
	storePassword = "changeit"
)

// withTrusted returns a Java store with one more trusted certificate; nil if it is in neither form.
func withTrusted(store, certificate []byte) []byte {
	if len(store) >= jksHead+sha1.Size && binary.BigEndian.Uint64(store) == jksMagic<<32|jksVersion {
		return withTrustedJKS(store, certificate)
	}
	out, err := withTrustedPKCS12(store, certificate)
	if err != nil {
		return nil
	}
	return out
}

const (
	jksMagic, jksVersion = 0xfeedfeed, 2
	jksTrusted           = 2 // tag of an entry
	jksCertificate       = "X.509"
	jksHead              = 12 // bytes
)

// withTrustedJKS inserts an entry into a JKS: magic, version, number of entries, entries, and a
// checksum.
func withTrustedJKS(store, certificate []byte) []byte {
	out := append([]byte(nil), store[:8]...)
	out = binary.BigEndian.AppendUint32(out, binary.BigEndian.Uint32(store[8:])+1)
	out = binary.BigEndian.AppendUint32(out, jksTrusted)
	out = append(append(out, 0, byte(len(storeAlias))), storeAlias...)
	out = binary.BigEndian.AppendUint64(out, 0) // when it was made
	out = append(append(out, 0, byte(len(jksCertificate))), jksCertificate...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(certificate))) //nolint:gosec // G115: it is of our own authority
	out = append(out, certificate...)
	out = append(out, store[jksHead:len(store)-sha1.Size]...)
	sum := sha1.New()                          //nolint:gosec // G401: the format's checksum
	_, _ = sum.Write(bigEndian(storePassword)) // a hash takes all, here and below
	_, _ = sum.Write([]byte("Mighty Aphrodite"))
	_, _ = sum.Write(out)
	return sum.Sum(out)
}

// bigEndian returns a text in UTF-16.
func bigEndian(s string) (out []byte) {
	for _, c := range utf16.Encode([]rune(s)) {
		out = binary.BigEndian.AppendUint16(out, c)
	}
	return out
}

// Object identifiers of PKCS #12 (RFC 7292), and Java's mark of trusted certificates.
var (
	oidData         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag      = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidFriendlyName = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	oidTrusted      = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1}
	oidAnyUsage     = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

// errNoStore reports a file that is not in the form of PKCS #12.
var errNoStore = errors.New("no PKCS #12 file")

type (
	contentInfo struct {
		Type    asn1.ObjectIdentifier
		Content []byte `asn1:"tag:0,explicit"`
	}
	// pfx is a store without the checksum at its end. To make that takes a password that we do not
	// know, and Java accepts a store without it.
	pfx struct {
		Version  int
		AuthSafe contentInfo
	}
	safeBag struct {
		ID         asn1.ObjectIdentifier
		Value      certBag     `asn1:"tag:0,explicit"`
		Attributes []attribute `asn1:"set"`
	}
	certBag struct {
		ID    asn1.ObjectIdentifier
		Value []byte `asn1:"tag:0,explicit"`
	}
	attribute struct {
		ID     asn1.ObjectIdentifier
		Values []asn1.RawValue `asn1:"set"`
	}
)

// withTrustedPKCS12 inserts a bag that is not encrypted before those of a PKCS #12 file.
func withTrustedPKCS12(store, certificate []byte) ([]byte, error) {
	var p struct {
		Version  int
		AuthSafe contentInfo
		Mac      asn1.RawValue `asn1:"optional"`
	}
	var safe asn1.RawValue // a sequence of ContentInfo
	if rest, err := asn1.Unmarshal(store, &p); err != nil || len(rest) > 0 || p.Version != 3 || !p.AuthSafe.Type.Equal(oidData) {
		return nil, errNoStore
	}
	if rest, err := asn1.Unmarshal(p.AuthSafe.Content, &safe); err != nil || len(rest) > 0 || safe.Tag != asn1.TagSequence || !safe.IsCompound {
		return nil, errNoStore
	}
	usage, err := asn1.Marshal(oidAnyUsage)
	if err != nil {
		return nil, err
	}
	bags, err := asn1.Marshal([]safeBag{{ID: oidCertBag, Value: certBag{ID: oidX509, Value: certificate}, Attributes: []attribute{
		{ID: oidFriendlyName, Values: []asn1.RawValue{{Tag: asn1.TagBMPString, Bytes: bigEndian(storeAlias)}}},
		{ID: oidTrusted, Values: []asn1.RawValue{{FullBytes: usage}}},
	}}})
	if err != nil {
		return nil, err
	}
	ours, err := asn1.Marshal(contentInfo{Type: oidData, Content: bags})
	if err != nil {
		return nil, err
	}
	all, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: append(ours, safe.Bytes...)})
	if err != nil {
		return nil, err
	}
	return asn1.Marshal(pfx{Version: 3, AuthSafe: contentInfo{Type: oidData, Content: all}})
}
