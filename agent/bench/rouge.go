package bench

import (
	"fmt"
	"slices"
	"strings"
)

// maxRougeWords bounds the words of each side: the time of the comparison grows with their product.
const maxRougeWords = 20_000

// maxStemmed exceeds the length of any word that has a stem.
const maxStemmed = 100

// rougeL returns the F-measure of ROUGE-L, by the longest common subsequence of words. Words are
// runs of ASCII letters and digits, case ignored; those with more than three characters are
// stemmed.
func rougeL(answer, truth string, stemmed bool) (float64, error) {
	got, want := rougeWords(answer, stemmed), rougeWords(truth, stemmed)
	if len(got) > maxRougeWords || len(want) > maxRougeWords {
		return 0, fmt.Errorf("rouge_l: more than %d words", maxRougeWords)
	}
	return f1(commonSubsequence(got, want), len(got), len(want)), nil
}

func rougeWords(text string, stemmed bool) []string {
	list := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') })
	if stemmed {
		for i, w := range list {
			if len(w) > 3 && len(w) <= maxStemmed {
				list[i] = stem(w)
			}
		}
	}
	return list
}

func commonSubsequence(a, b []string) int {
	row := make([]int, len(b)+1)
	for _, x := range a {
		above := 0 // value at j-1 of the row above
		for j, y := range b {
			kept := row[j+1]
			if x == y {
				row[j+1] = above + 1
			} else {
				row[j+1] = max(kept, row[j])
			}
			above = kept
		}
	}
	return row[len(b)]
}

// stem is Porter's stemmer with NLTK's extensions, as used by ROUGE's scorers. Words consist of
// lower-case ASCII letters and digits.
func stem(w string) string {
	if s, ok := irregular[w]; ok {
		return s
	}
	if len(w) <= 2 {
		return w
	}
	w = step1a(w)
	w = step1b(w)
	if s, ok := strings.CutSuffix(w, "y"); ok && len(s) > 1 && consonant(s, len(s)-1) {
		w = s + "i"
	}
	w = step2(w)
	w = replaceEnd(w, step3, func(s string) bool { return measure(s) > 0 })
	w = replaceEnd(w, step4, func(s string) bool { return measure(s) > 1 })
	if s, ok := strings.CutSuffix(w, "e"); ok && (measure(s) > 1 || measure(s) == 1 && !shortEnd(s)) {
		w = s
	}
	if strings.HasSuffix(w, "ll") && measure(w[:len(w)-1]) > 1 {
		w = w[:len(w)-1]
	}
	return w
}

var irregular = map[string]string{
	"sky": "sky", "skies": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news", "innings": "inning", "inning": "inning",
	"outings": "outing", "outing": "outing", "cannings": "canning", "canning": "canning", "howe": "howe", "proceed": "proceed",
	"exceed": "exceed", "succeed": "succeed",
}

type ending struct{ from, to string }

var (
	step2List = []ending{
		{"ational", "ate"},
		{"tional", "tion"},
		{"enci", "ence"},
		{"anci", "ance"},
		{"izer", "ize"},
		{"bli", "ble"},
		{"alli", "al"},
		{"entli", "ent"},
		{"eli", "e"},
		{"ousli", "ous"},
		{"ization", "ize"},
		{"ation", "ate"},
		{"ator", "ate"},
		{"alism", "al"},
		{"iveness", "ive"},
		{"fulness", "ful"},
		{"ousness", "ous"},
		{"aliti", "al"},
		{"iviti", "ive"},
		{"biliti", "ble"},
		{"fulli", "ful"},
	}
	step3 = []ending{{"icate", "ic"}, {"ative", ""}, {"alize", "al"}, {"iciti", "ic"}, {"ical", "ic"}, {"ful", ""}, {"ness", ""}}
	step4 = []ending{
		{"al", ""},
		{"ance", ""},
		{"ence", ""},
		{"er", ""},
		{"ic", ""},
		{"able", ""},
		{"ible", ""},
		{"ant", ""},
		{"ement", ""},
		{"ment", ""},
		{"ent", ""},
		{"ion", ""},
		{"ou", ""},
		{"ism", ""},
		{"ate", ""},
		{"iti", ""},
		{"ous", ""},
		{"ive", ""},
		{"ize", ""},
	}
)

// replaceEnd applies the first rule whose ending matches, if the rest meets the condition.
func replaceEnd(w string, rules []ending, when func(string) bool) string {
	i := slices.IndexFunc(rules, func(e ending) bool { return strings.HasSuffix(w, e.from) })
	if i < 0 {
		return w
	}
	s := strings.TrimSuffix(w, rules[i].from)
	if rules[i].from == "ion" && !strings.HasSuffix(s, "s") && !strings.HasSuffix(s, "t") || !when(s) {
		return w
	}
	return s + rules[i].to
}

func step1a(w string) string {
	switch {
	case strings.HasSuffix(w, "ies") && len(w) == 4:
		return w[:3]
	case strings.HasSuffix(w, "sses"), strings.HasSuffix(w, "ies"):
		return w[:len(w)-2]
	case strings.HasSuffix(w, "ss"):
		return w
	}
	return strings.TrimSuffix(w, "s")
}

func step1b(w string) string {
	if s, ok := strings.CutSuffix(w, "ied"); ok {
		if len(w) == 4 {
			return s + "ie"
		}
		return s + "i"
	}
	if s, ok := strings.CutSuffix(w, "eed"); ok {
		if measure(s) > 0 {
			return s + "ee"
		}
		return w
	}
	s, ok := strings.CutSuffix(w, "ed")
	if !ok || !hasVowel(s) {
		if s, ok = strings.CutSuffix(w, "ing"); !ok || !hasVowel(s) {
			return w
		}
	}
	switch n := len(s); {
	case strings.HasSuffix(s, "at"), strings.HasSuffix(s, "bl"), strings.HasSuffix(s, "iz"):
		return s + "e"
	case n >= 2 && s[n-1] == s[n-2] && consonant(s, n-1):
		if strings.IndexByte("lsz", s[n-1]) < 0 {
			return s[:n-1]
		}
		return s
	case measure(s) == 1 && shortEnd(s):
		return s + "e"
	}
	return s
}

func step2(w string) string {
	if s, ok := strings.CutSuffix(w, "alli"); ok && measure(s) > 0 {
		return step2(s + "al")
	}
	if strings.HasSuffix(w, "logi") && !slices.ContainsFunc(step2List, func(e ending) bool { return strings.HasSuffix(w, e.from) }) {
		if measure(w[:len(w)-3]) > 0 {
			return w[:len(w)-1]
		}
		return w
	}
	return replaceEnd(w, step2List, func(s string) bool { return measure(s) > 0 })
}

// consonant reports whether the letter at i is one. A y is one at the start of the word or after a
// vowel.
func consonant(w string, i int) bool {
	switch w[i] {
	case 'a', 'e', 'i', 'o', 'u':
		return false
	case 'y':
		return i == 0 || !consonant(w, i-1)
	}
	return true
}

func hasVowel(w string) bool {
	for i := range len(w) {
		if !consonant(w, i) {
			return true
		}
	}
	return false
}

// measure counts the vowel-consonant sequences of a word, Porter's m.
func measure(w string) int {
	n, vowel := 0, false
	for i := range len(w) {
		c := consonant(w, i)
		if c && vowel {
			n++
		}
		vowel = !c
	}
	return n
}

// shortEnd reports whether a word ends like "hop", or is a word of two letters like "at".
func shortEnd(w string) bool {
	n := len(w)
	if n == 2 {
		return !consonant(w, 0) && consonant(w, 1)
	}
	return n >= 3 && consonant(w, n-3) && !consonant(w, n-2) && consonant(w, n-1) && strings.IndexByte("wxy", w[n-1]) < 0
}
