package secrets

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// MaxStored is the maximum number of stored secrets of one tenant.
const MaxStored = 256

const (
	// keyFile is the name of the key in the store's directory. Directories of tenants are longer.
	keyFile = "key"
	keySize = 32
	// maxSealed bounds a file of the store, in bytes.
	maxSealed = 64 << 10
	// sealedVersion is the first byte of a file of the store.
	sealedVersion = 1
)

// Errors of a [Store].
var (
	ErrNotFound = errors.New("no such secret")
	ErrTooMany  = errors.New("too many secrets")
)

// Stored is a secret that a client has set.
type Stored struct {
	Secret

	Created, Changed time.Time
	// Unreadable is the reason for which a secret of a list has nothing but its name; nil for others.
	Unreadable error
}

// Store keeps the secrets that clients set, a file each. A file is sealed with AES-256-GCM under a
// key that lies beside, and good only for its tenant and name. Its methods are safe for concurrent
// use. One process at a time uses a directory.
type Store struct {
	dir string
	now func() time.Time

	making sync.Mutex // serializes the making of the key and of directories

	mu      sync.Mutex // guards tenants
	tenants map[string]*sync.Mutex
}

// lock serializes the changes of one tenant's secrets. Reading needs no turn: files are replaced
// whole.
func (s *Store) lock(tenant string) (unlock func()) {
	s.mu.Lock()
	if s.tenants == nil {
		s.tenants = make(map[string]*sync.Mutex)
	}
	turn := s.tenants[tenant]
	if turn == nil {
		turn = new(sync.Mutex)
		s.tenants[tenant] = turn
	}
	s.mu.Unlock()
	turn.Lock()
	return turn.Unlock
}

// NewStore returns the store of a directory, which the first secret makes.
func NewStore(dir string) *Store { return &Store{dir: dir, now: time.Now} }

// sealed is the content of a file. It keeps tenant and name in the associated data only.
type sealed struct {
	Created  time.Time `json:"created"`
	Changed  time.Time `json:"changed"`
	Variable string    `json:"variable,omitempty"`
	Host     string    `json:"host"`
	Port     uint16    `json:"port,omitempty"`
	Methods  []string  `json:"methods,omitempty"`
	Paths    []string  `json:"paths,omitempty"`
	Always   bool      `json:"always,omitempty"`
	Kind     Kind      `json:"kind"`
	Field    string    `json:"field,omitempty"`
	Value    string    `json:"value"`
	Token    string    `json:"token,omitempty"`
}

// Set stores a secret of a tenant, in the place of one that has its name.
func (s *Store) Set(tenant string, secret Secret) (Stored, error) {
	fail := func(err error) (Stored, error) {
		return Stored{}, fmt.Errorf("store secret %q: %w", secret.Name, err)
	}
	if err := secret.Check(); err != nil {
		return fail(err)
	}
	defer s.lock(tenant)()
	now := s.now().UTC().Truncate(time.Second)
	stored := Stored{Secret: secret, Created: now, Changed: now}
	names, err := s.names(tenant)
	if err != nil {
		return fail(err)
	}
	switch exists := slices.Contains(names, secret.Name); {
	case exists:
		// One that cannot be read is replaced: to set it again is the remedy.
		if before, err := s.read(tenant, secret.Name); err == nil {
			stored.Created = before.Created
		}
	case len(names) >= MaxStored:
		return fail(fmt.Errorf("%w: there are %d, at most %d are possible", ErrTooMany, len(names), MaxStored))
	}
	if err := s.write(tenant, &stored); err != nil {
		return fail(err)
	}
	return stored, nil
}

// Get returns a secret of a tenant, or ErrNotFound.
func (s *Store) Get(tenant, name string) (Stored, error) { return s.read(tenant, name) }

// List returns the secrets of a tenant in the order of their names, unreadable ones too.
func (s *Store) List(tenant string) ([]Stored, error) {
	names, err := s.names(tenant)
	if err != nil {
		return nil, fmt.Errorf("list secrets: %w", err)
	}
	var all []Stored
	for _, name := range names {
		stored, err := s.read(tenant, name)
		switch {
		case errors.Is(err, ErrNotFound): // removed meanwhile
			continue
		case err != nil:
			stored = Stored{Secret: Secret{Name: name}, Unreadable: err}
		}
		all = append(all, stored)
	}
	return all, nil
}

// Remove removes a secret of a tenant, readable or not, or returns ErrNotFound.
func (s *Store) Remove(tenant, name string) error {
	defer s.lock(tenant)()
	if !isName(name) {
		return fmt.Errorf("remove secret %.80q: %w", name, ErrNotFound)
	}
	err := os.Remove(s.file(tenant, name))
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	if err == nil {
		err = syncDir(s.tenantDir(tenant))
	}
	if err != nil {
		return fmt.Errorf("remove secret %q: %w", name, err)
	}
	return nil
}

// tenantDir returns a directory name that any tenant's name can have.
func (s *Store) tenantDir(tenant string) string {
	sum := sha256.Sum256([]byte(tenant))
	return filepath.Join(s.dir, hex.EncodeToString(sum[:16]))
}

func (s *Store) file(tenant, name string) string { return filepath.Join(s.tenantDir(tenant), name) }

// names returns the sorted names of a tenant's secrets. Files whose names no secret can have are of
// writes that a crash has cut off.
func (s *Store) names(tenant string) (names []string, err error) {
	files, err := os.ReadDir(s.tenantDir(tenant))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range files {
		if isName(f.Name()) {
			names = append(names, f.Name())
		}
	}
	return names, nil
}

// associated returns the data that a file is authenticated with. A name has no NUL.
func associated(tenant, name string) []byte {
	return []byte("sandboxd secret\x00" + name + "\x00" + tenant)
}

func (s *Store) read(tenant, name string) (Stored, error) {
	if !isName(name) {
		return Stored{}, fmt.Errorf("read secret %.80q: %w", name, ErrNotFound)
	}
	data, err := readBounded(s.file(tenant, name), maxSealed)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	var aead cipher.AEAD
	if err == nil {
		aead, err = s.key(false)
	}
	var stored Stored
	if err == nil {
		stored, err = open(aead, tenant, name, data)
	}
	if err != nil {
		return Stored{}, fmt.Errorf("read secret %q: %w", name, err)
	}
	return stored, nil
}

// open unseals the content of a file.
func open(aead cipher.AEAD, tenant, name string, data []byte) (Stored, error) {
	if len(data) == 0 || data[0] != sealedVersion {
		return Stored{}, errors.New("the file has another format; set the secret again")
	}
	text, err := aead.Open(nil, nil, data[1:], associated(tenant, name))
	if err != nil {
		return Stored{}, errors.New("the file was changed, or sealed with another key; set the secret again")
	}
	var c sealed
	if err := json.Unmarshal(text, &c); err != nil {
		return Stored{}, errors.New("the file has another format; set the secret again") // an error of JSON could quote a value
	}
	stored := Stored{
		Secret: Secret{
			Name: name, Variable: c.Variable, Kind: c.Kind, Field: c.Field, Value: c.Value, Token: c.Token,
			Binding: gateway.Binding{Name: name, Host: c.Host, Port: c.Port, Methods: c.Methods, Paths: c.Paths, Always: c.Always},
		},
		Created: c.Created, Changed: c.Changed,
	}
	return stored, stored.Check()
}

func (s *Store) write(tenant string, stored *Stored) error {
	aead, err := s.key(true)
	if err != nil {
		return err
	}
	b := &stored.Binding
	text, err := json.Marshal(sealed{
		Created: stored.Created, Changed: stored.Changed, Variable: stored.Variable, Host: b.Host, Port: b.Port, Methods: b.Methods, Paths: b.Paths,
		Always: b.Always, Kind: stored.Kind, Field: stored.Field, Value: stored.Value, Token: stored.Token,
	})
	if err != nil {
		return err
	}
	data := aead.Seal([]byte{sealedVersion}, nil, text, associated(tenant, stored.Name)) //nolint:gosec // G407: the cipher makes a nonce of its own
	if len(data) > maxSealed {
		return fmt.Errorf("it has %d bytes, at most %d are possible", len(data), maxSealed)
	}
	dir := s.tenantDir(tenant)
	s.making.Lock()
	err = makeDir(dir)
	s.making.Unlock()
	if err != nil {
		return err
	}
	return writeFile(dir, stored.Name, data)
}

// key returns the cipher of the store. With create it makes a key where there is none.
func (s *Store) key(create bool) (cipher.AEAD, error) {
	path := filepath.Join(s.dir, keyFile)
	if create {
		s.making.Lock()
		defer s.making.Unlock()
	}
	key, err := readKey(path)
	if create && errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, keySize)
		_, _ = rand.Read(key) // never fails
		if err = makeDir(s.dir); err == nil {
			err = writeFile(s.dir, keyFile, key)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open the key of secrets: %w", err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, fmt.Errorf("open the key of secrets: %w", err)
	}
	// A random nonce of 96 bits suffices for 2^32 writes.
	return cipher.NewGCMWithRandomNonce(block)
}

func readKey(path string) ([]byte, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s has mode %v: it must be a file that others cannot read; chmod 600, and set the secrets anew if others may have read it", path, fi.Mode())
	}
	key, err := readBounded(path, keySize)
	if err == nil && len(key) != keySize {
		err = fmt.Errorf("%s has %d bytes, want %d", path, len(key), keySize)
	}
	return key, err
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return data, err
}

// writeFile replaces a file: it appears whole or not at all, and is on disk then.
func writeFile(dir, name string, data []byte) error {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+".new"))
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	return syncDir(dir)
}

// makeDir makes a directory where there is none, and those above it. They are on disk then: a power
// failure must not take the directory of a secret that was stored.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	switch {
	case err == nil:
		return syncDir(filepath.Dir(dir))
	case errors.Is(err, fs.ErrExist):
		return nil
	case !errors.Is(err, fs.ErrNotExist) || filepath.Dir(dir) == dir:
		return err
	}
	if err := makeDir(filepath.Dir(dir)); err != nil {
		return err
	}
	return makeDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Check reports a secret that no gateway would take.
func (s Secret) Check() error {
	switch {
	case !isName(s.Name):
		return fmt.Errorf("name %.80q: 1 to %d letters, digits, \"_\" and \"-\"", s.Name, maxName)
	case s.Variable != "" && !isVariable(s.Variable):
		return fmt.Errorf("variable %.80q is no name of an environment variable", s.Variable)
	case s.Token != "" && s.Kind != AWS:
		return fmt.Errorf("a session token is for kind %q", AWS)
	case s.Field != "" && s.Kind == Bearer:
		return fmt.Errorf("kind %q has no other field", Bearer)
	}
	_, err := s.Placed().Gateway()
	return err
}

func isVariable(s string) bool {
	return len(s) <= maxVariable && strings.IndexByte("0123456789", s[0]) < 0 &&
		strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == ""
}
