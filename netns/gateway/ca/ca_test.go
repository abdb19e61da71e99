package ca

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var now = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func newAuthority(t testing.TB) *Authority {
	t.Helper()
	a, err := New(now, 48*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func pool(t testing.TB, a *Authority) (*x509.CertPool, *x509.Certificate) {
	t.Helper()
	block, rest := pem.Decode(a.Certificate())
	if block == nil || len(rest) > 0 {
		t.Fatalf("no single block of PEM: %s", a.Certificate())
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return roots, cert
}

func TestLeaf(t *testing.T) {
	a := newAuthority(t)
	roots, _ := pool(t, a)
	for _, host := range []string{"example.com", "a.b.c.example.com", strings.Repeat("a.", 100) + "test", "10.1.2.3", "2606:4700::1111"} {
		leaf, err := a.Leaf(host)
		if err != nil {
			t.Fatal(err)
		}
		opts := x509.VerifyOptions{DNSName: host, Roots: roots, CurrentTime: now.Add(47 * time.Hour)}
		if _, err := leaf.Leaf.Verify(opts); err != nil {
			t.Errorf("%s: %v", host, err)
		}
		opts.DNSName = "other.test"
		if _, err := leaf.Leaf.Verify(opts); err == nil {
			t.Errorf("%s is valid for other.test", host)
		}
		opts.DNSName, opts.CurrentTime = host, now.Add(49*time.Hour)
		if _, err := leaf.Leaf.Verify(opts); err == nil {
			t.Errorf("%s outlives its authority", host)
		}
		opts.CurrentTime, opts.KeyUsages = now, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		if _, err := leaf.Leaf.Verify(opts); err == nil {
			t.Errorf("%s is valid for a client", host)
		}
		if leaf.Leaf.IsCA || len(leaf.Leaf.AuthorityKeyId) == 0 {
			t.Errorf("%s: %+v", host, leaf.Leaf)
		}
		again, err := a.Leaf(host)
		if err != nil || again != leaf {
			t.Errorf("%s is made twice: %v", host, err)
		}
	}
}

// The authority of one sandbox is worth nothing in another, and signs no authority.
func TestAuthority(t *testing.T) {
	a, b := newAuthority(t), newAuthority(t)
	roots, cert := pool(t, a)
	if !cert.IsCA || !cert.MaxPathLenZero || cert.KeyUsage != x509.KeyUsageCertSign || len(cert.SubjectKeyId) == 0 ||
		!slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) {
		t.Errorf("%+v", cert)
	}
	leaf, err := b.Leaf("example.com")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: "example.com", Roots: roots, CurrentTime: now}); err == nil {
		t.Error("a certificate of another sandbox is trusted")
	}
	if a.String() == b.String() || cert.SerialNumber.Cmp(leaf.Leaf.SerialNumber) == 0 {
		t.Errorf("two authorities are called %s", a)
	}
}

func TestLife(t *testing.T) {
	for _, life := range []time.Duration{-1, MaxLife + 1} {
		if _, err := New(now, life); err == nil {
			t.Errorf("a life of %s", life)
		}
	}
	a, err := New(now, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, cert := pool(t, a); !cert.NotAfter.Equal(now.Add(MaxLife)) {
		t.Errorf("ends at %s", cert.NotAfter)
	}
}

func TestLeavesAreBounded(t *testing.T) {
	a := newAuthority(t)
	first, err := a.Leaf("0.test")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for j := range maxLeaves / 3 {
				if _, err := a.Leaf(fmt.Sprintf("%d.%d.test", i, j)); err != nil {
					t.Error(err)
				}
				if again, err := a.Leaf("0.test"); err != nil || again != first {
					t.Errorf("a certificate in use is made again: %v", err)
				}
			}
		})
	}
	all.Wait()
	if len(a.leaves) != maxLeaves || a.order.Len() != maxLeaves {
		t.Errorf("%d certificates, %d in order", len(a.leaves), a.order.Len())
	}
}

// What is printed or marshalled by mistake has no key.
func TestKeysAreNotPrinted(t *testing.T) {
	a := newAuthority(t)
	key, err := a.key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{fmt.Sprint(a), fmt.Sprintf("%+v", a), fmt.Sprintf("%v", struct{ A *Authority }{a}), string(a.Certificate())} {
		if strings.Contains(s, fmt.Sprint(a.key.D)) || strings.Contains(s, string(key)) { //nolint:staticcheck // the number is how fmt would print it
			t.Errorf("%s", s)
		}
	}
}

func BenchmarkMint(b *testing.B) {
	a := newAuthority(b)
	for b.Loop() {
		if _, err := a.mint("example.com"); err != nil {
			b.Fatal(err)
		}
	}
}
