// Package ociprofiles holds the named profiles of sandboxes as data.
//
// A profile NAME is three files in the forms of the OCI runtime specification: NAME.json says capabilities, paths and
// default limits; NAME.seccomp.ARCH.json is the filter, which other OCI run-times can load as it is. The filters are
// generated from package seccomp; a test compares. The README says why each choice is what it is.
package ociprofiles

//go:generate go test . -run TestFilterIsThePlan -update

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/seccomp"
)

// Default is the profile of a sandbox that asks for none.
const Default = "default"

// ErrUnknown says that no profile has the name asked for.
var ErrUnknown = errors.New("no such profile")

//go:embed *.json
var files embed.FS

// document is NAME.json.
type document struct {
	Name          string     `json:"name"`
	Capabilities  []string   `json:"capabilities"`
	MaskedPaths   []string   `json:"masked_paths"`
	ReadonlyPaths []string   `json:"readonly_paths"`
	Limits        api.Limits `json:"limits"`
}

// Names are the profiles there are, sorted.
func Names() []string { return []string{Default} }

// Load resolves a profile for this machine's architecture. It fails where the kernel cannot hold the profile's filter: a
// profile is applied as a whole or not at all.
func Load(name string, k seccomp.Abilities) (runtime.Profile, error) {
	return load(name, goruntime.GOARCH, k)
}

// Limits are the ceilings that a sandbox with the profile gets where it asks for none. Their CPUs are 0: no ceiling.
func Limits(name string) (api.Limits, error) {
	d, err := read(name)
	return d.Limits, err
}

func load(name, arch string, k seccomp.Abilities) (runtime.Profile, error) {
	d, err := read(name)
	if err != nil {
		return runtime.Profile{}, err
	}
	filter := new(specs.LinuxSeccomp)
	if err := decode(filterFile(name, arch), filter); err != nil {
		return runtime.Profile{}, fmt.Errorf("load profile %q for %s: %w", name, arch, err)
	}
	if err := seccomp.Supported(filter, k); err != nil {
		return runtime.Profile{}, fmt.Errorf("load profile %q: %w", name, err)
	}
	return runtime.Profile{
		Name:          d.Name,
		Capabilities:  d.Capabilities,
		MaskedPaths:   d.MaskedPaths,
		ReadonlyPaths: d.ReadonlyPaths,
		Seccomp:       filter,
	}, nil
}

// read accepts a name only if it is in the list, so a name never becomes part of a path.
func read(name string) (document, error) {
	var d document
	if !slices.Contains(Names(), name) {
		return d, fmt.Errorf("load profile %q: %w; there is %s", name, ErrUnknown, strings.Join(Names(), ", "))
	}
	if err := decode(name+".json", &d); err != nil {
		return d, fmt.Errorf("load profile %q: %w", name, err)
	}
	return d, nil
}

func filterFile(name, arch string) string { return name + ".seccomp." + arch + ".json" }

func decode(file string, into any) error {
	text, err := files.ReadFile(file)
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	return nil
}
