// Package interpreter describes the programming languages of code runs: their files, programs,
// package managers and error messages. A language is a value in a file of its own; nothing here
// runs a program.
package interpreter

import (
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// Placeholders in arguments, variables and links of a language, which [Place.Fill] replaces.
const (
	dir = "{dir}" // private directory of the run, which has the source
	cwd = "{cwd}" // working directory of the program
)

// A Language is the description of a programming language.
type Language struct {
	Name    string
	Aliases []string
	// File is the name of the source in the private directory. It is short, because error messages
	// repeat it.
	File       string
	Extensions []string // of files in this language, with the dot
	Image      string   // directory of images/ whose Dockerfile has it
	Contexts   bool     // a context can keep its state between runs

	// Toolchains are the ways to run a source, best first. The first one that an image has is used.
	Toolchains []Toolchain

	Files  map[string]string // content of more files beside the source, by name
	Links  map[string]string // targets of symbolic links beside the source, by name
	Search string            // variable with a list of directories, in which the working directory comes first

	Libraries *Libraries // nil: the language has no package manager

	// Failure finds the exception that ended a program in its standard error; nil: there is none, or
	// the text is not clear. A nil function finds none.
	Failure func(stderr string) *api.CodeFailure
}

// A Toolchain is one way to run a source. An image has it if the first program of each step can be
// started, and Probe says so.
type Toolchain struct {
	Probe   *Probe     // nil: the programs are enough
	Compile [][]string // run one after the other in the private directory; nil: the source is interpreted
	Run     []string   // in the working directory of the request, with its arguments behind
}

// A Probe is a program whose output tells whether a toolchain can be used.
type Probe struct {
	Argv []string
	Want []string // one of these is its whole output, without space around it
}

// Fits reports whether the probe with this exit code and output found the toolchain.
func (p *Probe) Fits(code int, stdout string) bool {
	return code == 0 && slices.Contains(p.Want, strings.TrimSpace(stdout))
}

// Programs returns the programs that the toolchain needs, each once.
func (t *Toolchain) Programs() []string {
	var names []string
	for _, argv := range append(slices.Clone(t.Compile), t.Run) {
		if name := argv[0]; !strings.HasPrefix(name, dir) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// A Place holds the directories of one run.
type Place struct {
	Dir string // private directory
	Cwd string // working directory of the program
}

// Fill replaces the placeholders of a text.
func (p Place) Fill(s string) string {
	return strings.NewReplacer(dir, p.Dir, cwd, p.Cwd).Replace(s)
}

// FillAll is [Place.Fill] for each element of a list.
func (p Place) FillAll(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = p.Fill(s)
	}
	return out
}

// languages is sorted by name.
var languages = []*Language{bash, c, cpp, golang, java, javascript, python, r, ruby, typescript}

// All returns the languages, by name. They are not to be changed.
func All() []*Language { return languages }

// Find returns the language with this name or alias, in any case; nil if there is none.
func Find(name string) *Language {
	name = strings.ToLower(name)
	for _, l := range languages {
		if l.Name == name || slices.Contains(l.Aliases, name) {
			return l
		}
	}
	return nil
}

// OfFile returns the language of a file by the extension of its name; nil if there is none.
func OfFile(name string) *Language {
	for _, l := range languages {
		for _, ext := range l.Extensions {
			if strings.HasSuffix(name, ext) {
				return l
			}
		}
	}
	return nil
}

// Names returns the names of all languages, sorted.
func Names() []string {
	var names []string
	for _, l := range languages {
		names = append(names, l.Name)
	}
	return names
}

// Describe returns the language as the API shows it.
func (l *Language) Describe() api.Language {
	out := api.Language{Name: l.Name, Aliases: l.Aliases, FileName: l.File, Contexts: l.Contexts, Image: l.Image}
	if l.Libraries != nil {
		out.Libraries = l.Libraries.Manager
	}
	return out
}
