package bench

import (
	"math"
	"strings"
	"testing"
)

func score(t *testing.T, s Scoring, answer, truth string) float64 {
	t.Helper()
	got, err := s.scoreText(answer, truth)
	if err != nil {
		t.Fatalf("%s of %q against %q: %v", s.Method, answer, truth, err)
	}
	return got
}

// Scores of each method. The rules of exact, letter, choices, rouge_l and the box are those that
// LLM-in-Sandbox's benchmarks document; the cases were derived from them by hand.
func TestScores(t *testing.T) {
	for _, tc := range []struct {
		method        Method
		answer, truth string
		want          float64
	}{
		// Equal except for case and surrounding space; empty texts never are.
		{MethodExact, "Paris", "paris", 1},
		{MethodExact, "  PARIS\n", "Paris", 1},
		{MethodExact, "Paris.", "Paris", 0},
		{MethodExact, "the answer is Paris", "Paris", 0},
		{MethodExact, "", "", 0},
		{MethodExact, "", "Paris", 0},
		{MethodExact, "x", "", 0},
		{MethodExact, "a  b", "a b", 0},
		{MethodExact, "ÉCOLE\u00a0", "école", 1},
		{MethodExact, "1. Airline (12)\n2. Hotel (4)\n", "1. airline (12)\n2. hotel (4)", 1},

		// The first matching way to name a letter counts.
		{MethodLetter, "C", "C", 1},
		{MethodLetter, " c\n", "C", 1},
		{MethodLetter, `{"answer": "B"}`, "B", 1},
		{MethodLetter, `the "Answer" : "b", not C`, "B", 1},
		{MethodLetter, `A then "answer": "C"`, "C", 1},
		{MethodLetter, "Answer: D", "D", 1},
		{MethodLetter, "ANSWER：D", "D", 1},
		{MethodLetter, "answer:D)", "D", 1},
		{MethodLetter, "Answer: Dog. B", "B", 1}, // a word follows "Answer:", not a letter
		{MethodLetter, "The answer is B, I think. C is not.", "B", 1},
		{MethodLetter, "My choice is a", "A", 1},
		{MethodLetter, "the answer is both A and B", "B", 1}, // the last standalone letter
		{MethodLetter, `so it is \boxed{C}. A`, "C", 1},
		{MethodLetter, `\boxed{B) the second}`, "B", 1},
		{MethodLetter, `\boxed{\text{A}}`, "A", 1}, // the box begins with no letter; the last standalone one
		{MethodLetter, `\boxed{B`, "B", 1},         // the box is not closed
		{MethodLetter, "(B)", "B", 1},
		{MethodLetter, "A. first\nB. second", "B", 1},
		{MethodLetter, "I would say C", "C", 1},
		{MethodLetter, "C, I would say", "C", 0}, // "I" is the last standalone letter
		{MethodLetter, "Because of this", "B", 1},
		{MethodLetter, "42", "B", 0},
		{MethodLetter, "", "B", 0},
		{MethodLetter, "B", "", 0},
		{MethodLetter, "éA", "A", 0}, // a single word
		{MethodLetter, "A_", "A", 1}, // no standalone letter; begins with one
		{MethodLetter, "J", "J", 1},

		{MethodChoices, "A,B", "A,B", 1},
		{MethodChoices, "b , a", "A,B", 1},
		{MethodChoices, "A", "A,B", 2.0 / 3},
		{MethodChoices, "A,B,C", "A,B", 0.8},
		{MethodChoices, "C", "A,B", 0},
		{MethodChoices, "", "A,B", 0},
		{MethodChoices, ",,", "A,B", 0},
		{MethodChoices, "A,A", "A", 1},

		{MethodNumeric, "588", "588", 1},
		{MethodNumeric, `\boxed{588}`, "588", 1},
		{MethodNumeric, `first \boxed{1}, then \boxed{588}`, "588", 1},
		{MethodNumeric, `\boxed{\frac{1}{2}}`, "0.5", 1},
		{MethodNumeric, `\boxed{\dfrac{3}{4}}`, `\frac{3}{4}`, 1},
		{MethodNumeric, `\boxed{-\frac{1}{3}}`, "-1/3", 1},
		{MethodNumeric, "0.3333333333", "1/3", 1},
		{MethodNumeric, "0.34", "1/3", 0},
		{MethodNumeric, "1000000", "1000001", 0},
		{MethodNumeric, "1,234", "1234", 1},
		{MethodNumeric, `1{,}234`, "1234", 1},
		{MethodNumeric, "1, 2, 3", "123", 0},
		{MethodNumeric, "$42$", "42", 1},
		{MethodNumeric, "849.", "849", 1},
		{MethodNumeric, "50%", "1/2", 1},
		{MethodNumeric, `50\%`, "0.5", 1},
		{MethodNumeric, `6.02 \times 10^{23}`, "6.02e23", 1},
		{MethodNumeric, "The speed comes to 12.5", "12.5", 1},
		{MethodNumeric, "There are 3 of 12", "12", 1},
		{MethodNumeric, "There are 3 of 12", "3", 0},
		{MethodNumeric, `\boxed{there are 12}`, "12", 0}, // a box holds the result alone
		{MethodNumeric, "−7", "-7", 1},
		{MethodNumeric, "+7", "7", 1},
		{MethodNumeric, "1/0", "1", 0},
		{MethodNumeric, "", "1", 0},
		{MethodNumeric, "1", "", 0},
		{MethodNumeric, "1e999", "1", 0},
		{MethodNumeric, "1e400", "1e400", 1},
		{MethodNumeric, `\boxed{\frac{1}{k} m g \sin \alpha + d}`, `\frac{1}{k}mg\sin\alpha+d`, 1},
		{MethodNumeric, `\boxed{\left( x, y \right)}`, "(x,y)", 1},
		{MethodNumeric, `\boxed{x+1}`, "1+x", 0}, // formulas are not evaluated
		{MethodNumeric, `\boxed{12\text{ cm}}`, `12\,\mathrm{cm}`, 1},
		{MethodNumeric, `30^\circ`, "30", 1},

		{MethodF1, "the cat sat", "The cat sat.", 1},
		{MethodF1, "a cat", "the dog", 0},
		{MethodF1, "cat dog", "cat", 2.0 / 3},
		{MethodF1, "cat cat", "cat", 2.0 / 3},
		{MethodF1, "", "the", 1}, // neither has a word
		{MethodF1, "", "cat", 0},

		// The longest common subsequence of stems.
		{MethodRougeL, "the cat sat on the mat", "the cat sat on the mat", 1},
		{MethodRougeL, "police killed the gunman", "police kill the gunman", 1},
		{MethodRougeL, "the gunman kill police", "police kill the gunman", 0.5},
		{MethodRougeL, "police ended the gunman", "police kill the gunman", 0.75},
		{MethodRougeL, "the gunman", "police kill the gunman", 2 * 0.5 / 1.5},
		{MethodRougeL, "", "police", 0},
		{MethodRougeL, "Über", "ber", 1}, // words are ASCII only
		{MethodRougeL, "running dogs", "run dog", 1},
		{MethodRougeL, "dogs", "dog", 1},
		{MethodRougeL, "hes", "he", 0}, // three letters are not stemmed
	} {
		if got := score(t, Scoring{Method: tc.method}, tc.answer, tc.truth); math.Abs(got-tc.want) > 1e-12 {
			t.Errorf("%s of %q against %q is %v, want %v", tc.method, tc.answer, tc.truth, got, tc.want)
		}
	}
}

func TestScoresBySettings(t *testing.T) {
	for _, tc := range []struct {
		s             Scoring
		answer, truth string
		want          float64
	}{
		{Scoring{Method: MethodExact, CaseSensitive: true}, "Paris", "paris", 0},
		{Scoring{Method: MethodExact, CaseSensitive: true}, "Paris ", "Paris", 1},
		{Scoring{Method: MethodNumeric, Tolerance: 0.5}, "10.4", "10", 1},
		{Scoring{Method: MethodNumeric, Tolerance: 0.5}, "10.6", "10", 0},
		{Scoring{Method: MethodNumeric, Tolerance: 0.5}, "11", "10", 0}, // integers
		{Scoring{Method: MethodNumeric, Relative: 0.01}, "101.0", "100", 1},
		{Scoring{Method: MethodNumeric, Relative: 0.01}, "-101.0", "-100", 1},
		{Scoring{Method: MethodNumeric, Relative: 0.01}, "102.0", "100", 0},
		{Scoring{Method: MethodRegex, Pattern: `total: (\w+)`}, "total: Seven!", "seven", 1},
		{Scoring{Method: MethodRegex, Pattern: `total: (\w+)`}, "sum: seven", "seven", 0},
		{Scoring{Method: MethodRegex, Pattern: `\d+`}, "it is 42 or so", "42", 1},
		{Scoring{Method: MethodRegex}, "2024-05-06", `^\d{4}-\d\d-\d\d$`, 1},
		{Scoring{Method: MethodRegex}, "x2024-05-06", `^\d{4}-\d\d-\d\d$`, 0},
		{Scoring{Method: MethodRegex}, "anything", "", 0},
		{Scoring{Method: MethodRougeL, NoStemmer: true}, "dogs", "dog", 0},
	} {
		if got := score(t, tc.s, tc.answer, tc.truth); got != tc.want {
			t.Errorf("%+v of %q against %q is %v, want %v", tc.s, tc.answer, tc.truth, got, tc.want)
		}
	}
	for _, s := range []Scoring{{Method: MethodRegex}, {Method: MethodJudge}, {Method: MethodCommand}} {
		if _, err := s.scoreText("x", "("); err == nil {
			t.Errorf("%s says nothing of what it cannot score", s.Method)
		}
	}
	if _, err := (&Scoring{Method: MethodRougeL}).scoreText(strings.Repeat("a ", maxRougeWords+1), "a"); err == nil {
		t.Error("too many words are compared")
	}
}

// Stems from Porter's paper, and of the extensions.
func TestStems(t *testing.T) {
	for word, want := range map[string]string{
		"caresses": "caress", "ponies": "poni", "ties": "tie", "caress": "caress", "cats": "cat", "feed": "feed", "agreement": "agreement", "plastered": "plaster",
		"bled": "bled", "motoring": "motor", "sing": "sing", "conflated": "conflat", "troubled": "troubl", "sized": "size", "hopping": "hop", "tanned": "tan",
		"falling": "fall", "hissing": "hiss", "fizzed": "fizz", "failing": "fail", "filing": "file", "happy": "happi", "sky": "sky", "relational": "relat",
		"conditional": "condit", "rational": "ration", "valenci": "valenc", "digitizer": "digit", "conformabli": "conform", "radicalli": "radic",
		"differentli": "differ", "vileli": "vile", "analogousli": "analog", "vietnamization": "vietnam", "predication": "predic", "operator": "oper",
		"feudalism": "feudal", "decisiveness": "decis", "hopefulness": "hope", "callousness": "callous", "formaliti": "formal", "sensitiviti": "sensit",
		"sensibiliti": "sensibl", "triplicate": "triplic", "formative": "form", "formalize": "formal", "electriciti": "electr", "electrical": "electr",
		"hopeful": "hope", "goodness": "good", "revival": "reviv", "allowance": "allow", "inference": "infer", "airliner": "airlin", "adjustable": "adjust",
		"defensible": "defens", "irritant": "irrit", "replacement": "replac", "adjustment": "adjust", "dependent": "depend", "adoption": "adopt",
		"homologou": "homolog", "communism": "commun", "activate": "activ", "angulariti": "angular", "homologous": "homolog", "effective": "effect",
		"bowdlerize": "bowdler", "probate": "probat", "rate": "rate", "cease": "ceas", "roll": "roll", "skies": "sky", "dying": "die",
		"news": "news", "proceed": "proceed", "geologi": "geolog", "died": "die", "spied": "spi", "enjoy": "enjoy", "by": "by", "generalli": "gener",
	} {
		if got := stem(word); got != want {
			t.Errorf("the stem of %s is %s, want %s", word, got, want)
		}
	}
}

func TestVerdict(t *testing.T) {
	for text, want := range map[string][2]bool{
		"CORRECT": {true, true}, "INCORRECT": {false, true}, "It is incorrect... no, correct.": {true, true}, "correct? INCORRECT": {false, true},
		"I cannot say": {false, false}, "": {false, false}, "in CORRECT": {true, true},
	} {
		if correct, known := verdict(text); correct != want[0] || known != want[1] {
			t.Errorf("%q: %v, %v", text, correct, known)
		}
	}
}

// Wilson's interval, compared with published values.
func TestInterval(t *testing.T) {
	for _, tc := range []struct {
		mean      float64
		n         int
		low, high float64
	}{{0, 10, 0, 0.2775}, {1, 10, 0.7225, 1}, {0.5, 10, 0.2366, 0.7634}, {0.15, 20, 0.0524, 0.3604}, {0.9, 1000, 0.8799, 0.9171}, {0, 0, 0, 1}} {
		if low, high := interval(tc.mean, tc.n); math.Abs(low-tc.low) > 2e-4 || math.Abs(high-tc.high) > 2e-4 {
			t.Errorf("%v of %d: %.4f to %.4f, want %.4f to %.4f", tc.mean, tc.n, low, high, tc.low, tc.high)
		}
	}
}
