package libct

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// storesOf are stores with one certificate, in both forms, made by keytool of Java 17. The last has
// no checksum, like those of Java itself since 18.
var storesOf = []string{"testdata/cacerts.jks", "testdata/cacerts.p12", "testdata/cacerts-plain.p12"}

// Java reads a store with one more certificate, with the password of all such stores, and trusts
// both.
func TestJavaReadsAStoreWithTheAuthority(t *testing.T) {
	keytool := testenv.RequirePeer(t, "keytool")
	certificate := selfSigned(t)
	for _, name := range storesOf {
		t.Run(filepath.Base(name), func(t *testing.T) {
			store, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "cacerts")
			if err := os.WriteFile(file, withTrusted(store, certificate), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), keytool, "-list", "-keystore", file, "-storepass", storePassword)
			cmd.Env = append(os.Environ(), "LC_ALL=C")
			out, err := cmd.CombinedOutput()
			if err != nil || strings.Count(string(out), "trustedCertEntry") != 2 || !strings.Contains(string(out), "\n"+storeAlias+", ") {
				t.Errorf("keytool: %v: %s", err, out)
			}
		})
	}
}

// What is no store is left alone.
func TestOtherFilesAreNoStores(t *testing.T) {
	jks, err := os.ReadFile(storesOf[0])
	if err != nil {
		t.Fatal(err)
	}
	p12, err := os.ReadFile(storesOf[1])
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"empty": nil, "PEM": []byte("-----BEGIN CERTIFICATE-----\n"), "a short JKS": jks[:jksHead+19], "a JKS of version 1": append([]byte{0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 1}, jks[8:]...),
		"a short PKCS #12": p12[:len(p12)-1], "a long PKCS #12": append(bytes.Clone(p12), 0),
	} {
		if out := withTrusted(data, []byte{1}); out != nil {
			t.Errorf("%s: %d bytes", name, len(out))
		}
	}
}

func FuzzStores(f *testing.F) {
	for _, name := range storesOf {
		store, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(store)
	}
	f.Fuzz(func(t *testing.T, store []byte) {
		certificate := bytes.Repeat([]byte{7}, 500)
		out := withTrusted(store, certificate)
		if out == nil {
			return
		}
		if n := bytes.Count(out, certificate) - bytes.Count(store, certificate); n != 1 || len(out) > len(store)+len(certificate)+300 {
			t.Fatalf("the certificate is there %d times more, and %d bytes became %d", n, len(store), len(out))
		}
		if again := withTrusted(out, certificate); again == nil {
			t.Fatal("the result is no store")
		}
	})
}

func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}
