package cli

import (
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// parseFilters returns a function that reports whether an object has one of the values of each key;
// of labels it must have all.
func parseFilters[T any](filters []string, keys map[string]func(*T, string) bool) (func(*T) bool, error) {
	wants := make(map[string][]string)
	for _, f := range filters {
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return nil, cmdline.Usagef("--filter %q is not key=value", f)
		}
		if keys[key] == nil {
			return nil, cmdline.Usagef("--filter %q: the key must be one of %s", f, strings.Join(slices.Sorted(maps.Keys(keys)), ", "))
		}
		wants[key] = append(wants[key], value)
	}
	return func(v *T) bool {
		for key, values := range wants {
			fits := func(value string) bool { return keys[key](v, value) }
			if key == "label" {
				if slices.ContainsFunc(values, func(value string) bool { return !fits(value) }) {
					return false
				}
			} else if !slices.ContainsFunc(values, fits) {
				return false
			}
		}
		return true
	}, nil
}

// matchName reports whether a name is the wanted one, which may have wildcards.
func matchName(name, want string) bool {
	ok, err := path.Match(want, name)
	return name == want || err == nil && ok
}

// matchLabel reports whether there is the wanted label, KEY or KEY=VALUE.
func matchLabel(labels map[string]string, want string) bool {
	key, value, exact := strings.Cut(want, "=")
	got, has := labels[key]
	return has && (!exact || got == value)
}

// matchBool reports whether a fact is as wanted, true or false.
func matchBool(is bool, want string) bool {
	wanted, err := strconv.ParseBool(want)
	return err == nil && wanted == is
}

// matchImage reports whether a reference is the wanted one, which may lack the registry's name and
// the tag: docker.io/library/debian:12 is debian:12, and debian.
func matchImage(reference, want string) bool {
	if matchName(reference, want) {
		return true
	}
	short := strings.TrimPrefix(strings.TrimPrefix(reference, "docker.io/"), "library/")
	name := short
	if at := strings.LastIndexByte(short, ':'); at > strings.LastIndexByte(short, '/') {
		name = short[:at]
	}
	return matchName(short, want) || matchName(name, want)
}
