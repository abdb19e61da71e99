// Package ociprofiles holds the named profiles of sandboxes as data.
//
// A profile NAME is a document NAME.json and a filter for each architecture,
// NAME.seccomp.ARCH.json. The document is made of fragments of the OCI runtime specification
// (process, root, mounts, linux) and the limits of a sandbox that asks for none. Other OCI
// run-times can load the filters unchanged. A document may name another profile's filter instead.
// The embedded filters are generated from package seccomp; a test compares. The README gives the
// reason for each choice.
//
// Every field of a document has an effect or is an error. Unknown fields are refused, and so is a
// document that would leave a sandbox without a mandatory layer.
package ociprofiles

//go:generate go test . -run TestFilterIsThePlan -update

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/seccomp"
)

// The profiles that are embedded.
const (
	Default  = "default"  // of a sandbox that asks for none
	Hardened = "hardened" // for programs that need no more than to compute
	Build    = "build"    // of the RUN steps of a build
)

// ErrUnknown means that no profile has the requested name.
var ErrUnknown = errors.New("no such profile")

//go:embed *.json
var files embed.FS

// maxFile is the size of the largest file that is read: a filter has some 40 KB.
const maxFile = 1 << 20

// Profile is one, resolved for this machine.
type Profile struct {
	runtime.Profile
	Description string
	Source      string     // the file of the document; empty for an embedded one
	Limits      api.Limits // of a sandbox that asks for none. Its CPUs are 0: no ceiling
}

// Set is the profiles that there are. It is not changed once it is made.
type Set struct {
	byName   map[string]Profile
	borrowed map[string]string // profile to the profile whose filter it has
}

// Open resolves the embedded profiles and those in dir, which may be empty, for this machine's
// architecture. It fails where one is not as it should be or the kernel cannot hold its filter: a
// profile is applied as a whole or not at all.
func Open(dir string, k seccomp.Abilities) (*Set, error) { return open(dir, goruntime.GOARCH, k) }

func open(dir, arch string, k seccomp.Abilities) (*Set, error) {
	s := &Set{byName: make(map[string]Profile), borrowed: make(map[string]string)}
	if err := s.add(files, "", arch, k); err != nil {
		return nil, err
	}
	if dir == "" {
		return s, nil
	}
	if err := s.add(os.DirFS(dir), dir, arch, k); err != nil {
		return nil, fmt.Errorf("profiles in %s: %w", dir, err)
	}
	return s, nil
}

// Names are the profiles there are, sorted.
func (s *Set) Names() []string { return slices.Sorted(maps.Keys(s.byName)) }

// Get returns a profile; an unknown name is [ErrUnknown].
func (s *Set) Get(name string) (Profile, error) {
	p, ok := s.byName[name]
	if !ok {
		return Profile{}, fmt.Errorf("%w; there are %s", ErrUnknown, strings.Join(s.Names(), ", "))
	}
	return p, nil
}

// add reads the documents of one directory, dir or the embedded one.
func (s *Set) add(in fs.FS, dir, arch string, k seccomp.Abilities) error {
	entries, err := fs.ReadDir(in, ".")
	if err != nil {
		return err
	}
	read := make(map[string]bool)
	var borrowers []Profile
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.Contains(name, ".seccomp.") {
			continue
		}
		p, lender, err := s.read(in, name)
		if err == nil && lender == "" {
			p.Seccomp, err = readFilter(in, name, arch, k)
		}
		if err != nil {
			return fmt.Errorf("profile %q: %w", name, err)
		}
		if dir != "" {
			p.Source = filepath.Join(dir, e.Name())
		}
		read[name] = true
		if s.byName[name] = p; lender != "" {
			s.borrowed[name] = lender
			borrowers = append(borrowers, p)
		}
	}
	for _, p := range borrowers {
		lender, ok := s.byName[s.borrowed[p.Name]]
		if !ok || lender.Source != "" || s.borrowed[lender.Name] != "" {
			return fmt.Errorf("profile %q: seccomp %q: no filter of a profile that is embedded", p.Name, s.borrowed[p.Name])
		}
		p.Seccomp = lender.Seccomp
		s.byName[p.Name] = p
	}
	for _, e := range entries { // a filter that nothing reads may be meant for something
		if name, _, ok := strings.Cut(e.Name(), ".seccomp."); ok && (!read[name] || s.borrowed[name] != "") {
			return fmt.Errorf("%s is not used: there is no profile %q with a filter of its own", e.Name(), name)
		}
	}
	return nil
}

// read reads a document. Lender is the profile whose filter it has, if it has none of its own.
func (s *Set) read(in fs.FS, name string) (p Profile, lender string, err error) {
	if _, ok := s.byName[name]; ok {
		return p, "", errors.New("there is an embedded one of this name: choose another")
	}
	if err := checkName(name); err != nil {
		return p, "", err
	}
	var d document
	if err := decode(in, name+".json", &d); err != nil {
		return p, "", err
	}
	p, err = d.resolve(name)
	return p, d.Seccomp, err
}

func readFilter(in fs.FS, name, arch string, k seccomp.Abilities) (*specs.LinuxSeccomp, error) {
	filter, file := new(specs.LinuxSeccomp), filterFile(name, arch)
	if err := decode(in, file, filter); err != nil {
		return nil, err
	}
	if err := seccomp.Check(filter, arch); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return filter, seccomp.Supported(filter, k)
}

func filterFile(name, arch string) string { return name + ".seccomp." + arch + ".json" }

// decode reads one JSON value that has no field that into does not.
func decode(in fs.FS, file string, into any) error {
	f, err := in.Open(file)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return errors.Join(fmt.Errorf("%s is not a plain file", file), err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	if len(text) > maxFile {
		return fmt.Errorf("%s has more than %d bytes", file, maxFile)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: something follows the document", file)
	}
	return nil
}
