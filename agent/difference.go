package agent

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Difference is a call whose observation changed.
type Difference struct {
	Turn     int    `json:"turn"`
	Call     int    `json:"call"`
	Function string `json:"function"`
	Recorded string `json:"recorded"`
	Observed string `json:"observed"`
	// Lines holds the lines that only one of the observations has. Lines that differ in times alone
	// count as equal.
	Lines []DifferentLine `json:"lines,omitempty"`
}

// DifferentLine is a line of one observation that the other lacks.
type DifferentLine struct {
	Line     int    `json:"line"`     // in its observation, from 1
	Observed bool   `json:"observed"` // of the new observation, not of the recorded one
	Text     string `json:"text"`
}

// maxCompared bounds the table of a comparison, in pairs of lines. Beyond it all lines between the
// first and the last difference count as different.
const maxCompared = 4 << 20

// compareLines returns the lines by which two observations differ. then and now are the times at
// which they were made.
func compareLines(recorded, observed string, then, now time.Time) []DifferentLine {
	a, b := strings.Split(recorded, "\n"), strings.Split(observed, "\n")
	x, y := strings.Split(maskTimes(recorded, then), "\n"), strings.Split(maskTimes(observed, now), "\n")
	same := func(i, j int) bool { return a[i] == b[j] || x[i] == y[j] }
	begin := 0
	for begin < len(a) && begin < len(b) && same(begin, begin) {
		begin++
	}
	end := 0
	for end < len(a)-begin && end < len(b)-begin && same(len(a)-1-end, len(b)-1-end) {
		end++
	}
	var out []DifferentLine
	i, j := begin, begin
	only := func(toX, toY int) {
		for ; i < toX; i++ {
			out = append(out, DifferentLine{Line: i + 1, Text: a[i]})
		}
		for ; j < toY; j++ {
			out = append(out, DifferentLine{Line: j + 1, Observed: true, Text: b[j]})
		}
	}
	middle := func(i, j int) bool { return same(begin+i, begin+j) }
	for _, common := range commonLines(len(a)-begin-end, len(b)-begin-end, middle) {
		only(begin+common[0], begin+common[1])
		i, j = i+1, j+1
	}
	only(len(a)-end, len(b)-end)
	return out
}

// commonLines returns the pairs of indices of a longest common subsequence of n and m lines.
func commonLines(n, m int, same func(i, j int) bool) (pairs [][2]int) {
	if n*m > maxCompared {
		return nil
	}
	longest := make([][]int32, n+1) // of the lines from there on
	for i := range longest {
		longest[i] = make([]int32, m+1)
	}
	for i := n - 1; i >= 0; i-- {
		for j := m - 1; j >= 0; j-- {
			if same(i, j) {
				longest[i][j] = longest[i+1][j+1] + 1
			} else {
				longest[i][j] = max(longest[i+1][j], longest[i][j+1])
			}
		}
	}
	for i, j := 0, 0; i < n && j < m; {
		switch {
		case same(i, j):
			pairs = append(pairs, [2]int{i, j})
			i, j = i+1, j+1
		case longest[i+1][j] >= longest[i][j+1]:
			i++
		default:
			j++
		}
	}
	return pairs
}

// nearly bounds the distance of a date from the time of its call. A date has no hour, and the
// sandbox may have another time zone.
const nearly = 48 * time.Hour

// times matches dates, times of day, seconds since 1970, and durations. It is compiled on first
// use: most commands of the binary never need it.
var times = sync.OnceValue(func() *regexp.Regexp {
	const month, day, clock = `(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)`, `(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)`, `\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?`
	return regexp.MustCompile(`\b(?:` + strings.Join([]string{
		`(?P<iso>\d{4}-\d{2}-\d{2})(?:[T ]` + clock + `(?: ?(?:Z|UTC|[+-]\d{2}:?\d{2}))?)?`,
		`(?:` + day + `,? )?(?P<month>` + month + `) (?P<day>[ \d]?\d) ` + clock + `(?: [A-Z]{3,4})?(?: (?P<year>\d{4}))?`, // date, ls -l
		`(?:` + day + `, )?(?P<day2>\d{1,2}) (?P<month2>` + month + `) (?P<year2>\d{4}) ` + clock + `(?: (?:[A-Z]{3}|[+-]\d{4}))?`,
		`(?P<epoch>[1-9]\d{9})(?:\.\d{1,9})?`,
		`(?P<clock>\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?)`,
		`(?P<span>(?:\d+m)?\d+(?:\.\d+)? ?(?:ns|µs|us|ms|s|sec|secs|seconds))`,
	}, "|") + `)\b`)
})

// maskTimes replaces the times in an observation that mean its own moment, and all durations and
// times of day. Other dates stay, since they may be results.
func maskTimes(text string, at time.Time) string {
	re := times()
	var b strings.Builder
	from := 0
	for _, m := range re.FindAllStringSubmatchIndex(text, -1) {
		part := func(name string) string {
			if i := 2 * re.SubexpIndex(name); m[i] >= 0 {
				return text[m[i]:m[i+1]]
			}
			return ""
		}
		mask := ""
		switch iso, epoch, month := part("iso"), part("epoch"), part("month")+part("month2"); {
		case iso != "":
			if day, err := time.Parse(time.DateOnly, iso); err == nil && isNear(day, at) {
				mask = "\x00date"
			}
		case epoch != "":
			if s, err := strconv.ParseInt(epoch, 10, 64); err == nil && isNear(time.Unix(s, 0), at) {
				mask = "\x00epoch"
			}
		case month != "":
			if isNearDay(month, strings.TrimSpace(part("day")+part("day2")), part("year")+part("year2"), at) {
				mask = "\x00day"
			}
		case part("clock") != "":
			mask = "\x00clock"
		default:
			mask = "\x00span"
		}
		if mask != "" {
			b.WriteString(text[from:m[0]] + mask)
			from = m[1]
		}
	}
	return b.String() + text[from:]
}

func isNear(t, at time.Time) bool { return t.Sub(at).Abs() <= nearly }

// isNearDay is isNear for a day whose year may be missing, as in ls -l.
func isNearDay(month, day, year string, at time.Time) bool {
	years := []string{year}
	if year == "" {
		years = []string{strconv.Itoa(at.Year() - 1), strconv.Itoa(at.Year()), strconv.Itoa(at.Year() + 1)}
	}
	return slices.ContainsFunc(years, func(year string) bool {
		t, err := time.Parse("Jan 2 2006", month+" "+day+" "+year)
		return err == nil && isNear(t, at)
	})
}
