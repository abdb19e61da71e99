package agent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// lineTexts returns different lines in short.
func lineTexts(lines []DifferentLine) (out []string) {
	for _, l := range lines {
		sign := "-"
		if l.Observed {
			sign = "+"
		}
		out = append(out, fmt.Sprintf("%s%d %s", sign, l.Line, l.Text))
	}
	return out
}

// A replay reports the lines that differ. Times that mean the moment of the call are no difference,
// and other dates are.
func TestCompareLines(t *testing.T) {
	then, now := time.Date(2026, 1, 16, 14, 30, 0, 0, time.UTC), time.Date(2026, 11, 23, 9, 5, 0, 0, time.UTC)
	for _, tc := range []struct {
		name, recorded, observed string
		want                     []string
	}{
		{"equal", "a\nb", "a\nb", nil},
		{"one line", "a\nb\nc", "a\nx\nc", []string{"-2 b", "+2 x"}},
		{"a line more", "a\nc", "a\nb\nc", []string{"+2 b"}},
		{"a line less", "a\nb\nc\nd", "a\nc\nd", []string{"-2 b"}},
		{"moved", "a\nb\nc", "b\nc\na", []string{"-1 a", "+3 a"}},
		{"at the end", "a", "a\n", []string{"+2 "}},
		{"twice", "a\na", "a\na\na", []string{"+3 a"}},
		{"all", "a", "b", []string{"-1 a", "+1 b"}},
		{"date", "Fri Jan 16 14:30:12 UTC 2026", "Mon Nov 23 09:05:01 UTC 2026", nil},
		{"ISO", "at 2026-01-16T14:30:12.123Z ok", "at 2026-11-23T10:05:01.5+01:00 ok", nil},
		{"a log", "2026-01-16 14:30:12,001 INFO x", "2026-11-23 09:05:01,999 INFO x", nil},
		{"day", "backup-2026-01-16", "backup-2026-11-23", nil},
		{"ls -l", "-rw-r--r-- 1 u u 5 Jan 16 14:30 f", "-rw-r--r-- 1 u u 5 Nov 23 09:05 f", nil},
		{"HTTP", "Date: Fri, 16 Jan 2026 14:30:12 GMT", "Date: Mon, 23 Nov 2026 09:05:01 GMT", nil},
		{"seconds since 1970", "1768573812 1768573812.25", "1795424701 1795424701.5", nil},
		{"durations", "3 passed in 0.12s, real\t0m1.002s, 15 ms", "3 passed in 0.34s, real\t0m0.998s, 9 ms", nil},
		{"time of day", "[14:30:12] x", "[09:05:01] x", nil},
		{"a text beside a time", "2026-01-16 yes", "2026-11-23 no", []string{"-1 2026-01-16 yes", "+1 2026-11-23 no"}},
		{"another date", "born 1999-12-31", "born 1999-12-30", []string{"-1 born 1999-12-31", "+1 born 1999-12-30"}},
		{"a date that became now", "last 2020-01-01", "last 2026-11-23", []string{"-1 last 2020-01-01", "+1 last 2026-11-23"}},
		{"the moment that stayed", "last 2026-01-16\nx", "last 2026-01-16\ny", []string{"-2 x", "+2 y"}},
		{"a number", "1768573812345", "1795424701345", []string{"-1 1768573812345", "+1 1795424701345"}},
		{"another number of ten digits", "1234567890", "1234567891", []string{"-1 1234567890", "+1 1234567891"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, lineTexts(compareLines(tc.recorded, tc.observed, then, now))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	// Texts that are too large for a table.
	a, b := strings.Repeat("a\n", 3000)+"x\n", strings.Repeat("b\n", 3000)+"x\n"
	if got := compareLines(a, b, then, now); len(got) != 6000 {
		t.Errorf("%d lines of large texts", len(got))
	}
	var shown strings.Builder
	if err := PrintDifference(&shown, Difference{Turn: 2, Call: 1, Function: "execute_bash", Lines: compareLines("a\nb\x1b\nc", "a\nc\nd", then, now)}); err != nil ||
		shown.String() != "turn 2, call 1, execute_bash:\n  - 2: b\\x1b\n  + 3: d\n" {
		t.Errorf("%v\n%q", err, shown.String())
	}
}

// Whatever programs print, the lines of a comparison rebuild both observations.
func FuzzCompareLines(f *testing.F) {
	f.Add("a\nb\nc", "c\nb\na")
	f.Add("2026-01-16 14:30:12 x\n", "Jan 16 14:30 x 1768573812 3s")
	f.Fuzz(func(t *testing.T, a, b string) {
		if len(a)+len(b) > 2000 {
			return
		}
		at := time.Date(2026, 1, 16, 14, 30, 0, 0, time.UTC)
		left, right := strings.Split(maskTimes(a, at), "\n"), strings.Split(maskTimes(b, at), "\n") // equal lines have equal masks, at one moment
		if len(left) != strings.Count(a, "\n")+1 || len(right) != strings.Count(b, "\n")+1 {
			t.Fatal("a mask spans lines")
		}
		onlyLeft, onlyRight := map[int]bool{}, map[int]bool{}
		for _, l := range compareLines(a, b, at, at) {
			if l.Observed {
				onlyRight[l.Line-1] = true
			} else {
				onlyLeft[l.Line-1] = true
			}
		}
		keep := func(lines []string, without map[int]bool) (out []string) {
			for i, line := range lines {
				if !without[i] {
					out = append(out, line)
				}
			}
			return out
		}
		if diff := cmp.Diff(keep(left, onlyLeft), keep(right, onlyRight)); diff != "" {
			t.Errorf("the common lines differ:\n%s", diff)
		}
	})
}
