package testresult

import (
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

// outputLimit bounds what one test says in a JUnit file: readers of them choke on megabytes.
const outputLimit = 64 << 10

// The elements of JUnit XML that its readers agree on.
type (
	junitSuites struct {
		XMLName  xml.Name     `xml:"testsuites"`
		Tests    int          `xml:"tests,attr"`
		Failures int          `xml:"failures,attr"`
		Errors   int          `xml:"errors,attr"`
		Skipped  int          `xml:"skipped,attr"`
		Suites   []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name     string      `xml:"name,attr"`
		Hostname string      `xml:"hostname,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Errors   int         `xml:"errors,attr"`
		Skipped  int         `xml:"skipped,attr"`
		Time     string      `xml:"time,attr"`
		Cases    []junitCase `xml:"testcase"`
	}
	junitCase struct {
		Class   string    `xml:"classname,attr"`
		Name    string    `xml:"name,attr"`
		Time    string    `xml:"time,attr"`
		Failure *junitSay `xml:"failure"`
		Error   *junitSay `xml:"error"`
		Skipped *junitSay `xml:"skipped"`
	}
	junitSay struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// A Lane is what one user's tests did in one place.
type Lane struct {
	Name     string // "rootless", "bed/6.12-systemd/dev"
	Packages []Package
}

// WriteJUnitFile writes the lanes to a file, which is replaced, and makes its directory.
func WriteJUnitFile(path string, lanes ...Lane) (err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
	}()
	return WriteJUnit(f, lanes...)
}

// WriteJUnit writes the lanes as JUnit XML: a suite for each package, with the lane as its host. A
// binary that did not end as it should is a case of its own, named for the package, with an error.
func WriteJUnit(w io.Writer, lanes ...Lane) error {
	var all junitSuites
	for _, lane := range lanes {
		for _, p := range lane.Packages {
			s := junitSuite{Name: p.Path, Hostname: lane.Name, Time: fmt.Sprintf("%.3f", p.Elapsed.Seconds())}
			for _, t := range p.Tests {
				c := junitCase{Class: p.Path, Name: t.Name, Time: fmt.Sprintf("%.3f", t.Elapsed.Seconds())}
				switch t.Outcome {
				case Fail:
					c.Failure = &junitSay{Message: "failed", Text: tail(t.Output)}
					s.Failures++
				case Skip:
					c.Skipped = &junitSay{Message: t.Reason()}
					s.Skipped++
				case Pass:
				}
				s.Cases = append(s.Cases, c)
			}
			if p.Err != nil {
				s.Cases = append(s.Cases, junitCase{Class: p.Path, Name: "(package)", Time: "0", Error: &junitSay{Message: p.Err.Error(), Text: tail(p.Output)}})
				s.Errors++
			}
			s.Tests = len(s.Cases)
			all.Suites = append(all.Suites, s)
			all.Tests, all.Failures, all.Errors, all.Skipped = all.Tests+s.Tests, all.Failures+s.Failures, all.Errors+s.Errors, all.Skipped+s.Skipped
		}
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "\t")
	if err := e.Encode(all); err != nil {
		return fmt.Errorf("write JUnit XML: %w", err)
	}
	_, err := io.WriteString(w, "\n")
	return err
}

// tail keeps the end of a long output, where the reason stands; encoding/xml replaces what XML
// cannot hold.
func tail(s string) string {
	if len(s) <= outputLimit {
		return s
	}
	s = s[len(s)-outputLimit:]
	for len(s) > 0 && !utf8.RuneStart(s[0]) {
		s = s[1:]
	}
	return "[…]" + strings.TrimPrefix(s, "\n")
}
