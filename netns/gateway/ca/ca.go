// Package ca makes the certificates by which a gateway reads the TLS connections of one sandbox.
//
// An Authority is trusted by its sandbox only: its certificate is put into that sandbox's trust
// stores and nowhere else. The daemon makes it and keeps its key (Authority.Key), because it lives
// as long as the sandbox, and the process that signs certificates may be replaced (Load).
package ca

import (
	"bytes"
	"container/list"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/netip"
	"sync"
	"time"
)

const (
	// maxLeaves bounds the certificates that are kept. A rule for *.example.com lets a sandbox ask for
	// any number of names.
	maxLeaves = 256
	// MaxLife is the longest life of an authority. Some clients accept no longer one of a server's
	// certificate (398 days).
	MaxLife = 397 * 24 * time.Hour
	// early is the time by which the validity of a certificate begins before it is made: the clocks of
	// two processes of one host may be read in another order.
	early = time.Hour
)

// Authority signs certificates for names on demand. Its methods are safe for concurrent use.
type Authority struct {
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
	// leaf is the key of all certificates: they have one holder.
	leaf *ecdsa.PrivateKey

	mu     sync.Mutex // guards those below
	leaves map[string]*list.Element
	order  *list.List // of *leaf, the least recently used first
}

type leaf struct {
	host string
	cert *tls.Certificate
}

// New makes an authority whose certificates are valid from now on for the given life. The life is
// at least that of the sandbox; when it is over, connections that are inspected fail. Zero stands
// for [MaxLife], which is also the longest.
func New(now time.Time, life time.Duration) (*Authority, error) {
	if life < 0 || life > MaxLife {
		return nil, fmt.Errorf("make a certificate authority: a life of %s is not between 0 and %s", life, MaxLife)
	}
	if life == 0 {
		life = MaxLife
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of a certificate authority: %w", err)
	}
	number, err := serial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: number,
		// Trust stores that hold several of ours tell them apart by the name.
		Subject:   pkix.Name{Organization: []string{"sandboxd"}, CommonName: "sandboxd inspection " + hex.EncodeToString(number.Bytes()[:4])},
		NotBefore: now.Add(-early), NotAfter: now.Add(life),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of the authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the authority back: %w", err)
	}
	return authority(cert, key)
}

// Load returns an authority of a certificate in PEM, as [Authority.Certificate] returns it, and the
// key of [Authority.Key].
func Load(certificate, key []byte) (*Authority, error) {
	block, rest := pem.Decode(certificate)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("load a certificate authority: no single certificate")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("load a certificate authority: %w", err)
	}
	parsed, err := x509.ParseECPrivateKey(key)
	if err != nil {
		return nil, errors.New("load a certificate authority: malformed key") // the reason may quote it
	}
	public, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok || !public.Equal(parsed.Public()) || !cert.IsCA {
		return nil, errors.New("load a certificate authority: the key is not that of the certificate")
	}
	return authority(cert, parsed)
}

func authority(cert *x509.Certificate, key *ecdsa.PrivateKey) (*Authority, error) {
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of certificates: %w", err)
	}
	return &Authority{
		cert: cert, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}), key: key, leaf: leafKey,
		leaves: make(map[string]*list.Element), order: list.New(),
	}, nil
}

// Key returns the private key, as SEC 1 has it. Who has it can be every server to the sandbox, and
// to no other program.
func (a *Authority) Key() ([]byte, error) { return x509.MarshalECPrivateKey(a.key) }

// serial returns a number of 127 random bits, of which the first byte is never zero.
func serial() (*big.Int, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	b[0] = b[0]&0x7f | 0x40 // positive, and always of 16 bytes
	return new(big.Int).SetBytes(b), nil
}

// Certificate returns the certificate for the trust stores of the sandbox, in PEM.
func (a *Authority) Certificate() []byte { return append([]byte(nil), a.pem...) }

// String names the authority in logs.
func (a *Authority) String() string { return a.cert.Subject.CommonName }

// Leaf returns a certificate for a host, which is a name or an address. It ends with the authority.
func (a *Authority) Leaf(host string) (*tls.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.leaves[host]; ok {
		a.order.MoveToBack(e)
		return e.Value.(*leaf).cert, nil //nolint:forcetypeassert // the list holds nothing else
	}
	cert, err := a.mint(host)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for %s: %w", host, err)
	}
	for a.order.Len() >= maxLeaves {
		delete(a.leaves, a.order.Remove(a.order.Front()).(*leaf).host) //nolint:forcetypeassert // the list holds nothing else
	}
	a.leaves[host] = a.order.PushBack(&leaf{host, cert})
	return cert, nil
}

func (a *Authority) mint(host string) (*tls.Certificate, error) {
	number, err := serial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: number,
		// The name stands in the alternative names only: a common name has at most 64 bytes.
		Subject:   pkix.Name{Organization: []string{a.cert.Subject.CommonName}},
		NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		template.IPAddresses = append(template.IPAddresses, addr.AsSlice())
	} else {
		template.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, a.leaf.Public(), a.key)
	if err != nil {
		return nil, err
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leaf, Leaf: parsed}, nil
}
