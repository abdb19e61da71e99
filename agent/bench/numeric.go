package bench

import (
	"math/big"
	"regexp"
	"strings"
	"sync"
)

// defaultTolerance is the largest difference between equal decimals.
const defaultTolerance = 1e-6

// maxNumber bounds the text of a number, and maxExponent its exponent: a rational has that many
// digits.
const (
	maxNumber   = 1000
	maxExponent = 400
)

var numberPatterns = sync.OnceValue(func() (p struct{ plain, fraction, power, last, thousands, unit *regexp.Regexp }) {
	const decimal = `[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?`
	p.plain = regexp.MustCompile(`^` + decimal + `$`)
	p.fraction = regexp.MustCompile(`^([+-]?)\\frac\{(` + decimal + `)\}\{(` + decimal + `)\}$|^(` + decimal + `)/(` + decimal + `)$`)
	p.power = regexp.MustCompile(`^(` + decimal + `)(?:\\times|\\cdot|×|\*)10(?:\^|\*\*)\{?([+-]?\d{1,3})\}?$`)
	p.last = regexp.MustCompile(`[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:/\d+)?|\.\d+)(?:[eE][+-]?\d{1,3})?%?`)
	p.thousands = regexp.MustCompile(`^[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?%?$`)
	p.unit = regexp.MustCompile(`\\(?:text|mathrm|operatorname)\{([^{}]*)\}`)
	return p
})

// numeric compares the boxed text, else the whole answer, else its last number with the expected
// answer: as numbers if both are numbers, otherwise as formulas.
func numeric(answer, truth string, tolerance, relative float64) bool {
	given, isBoxed := boxed(answer)
	if !isBoxed {
		given = trim(answer)
	}
	if inner, ok := boxed(truth); ok {
		truth = inner
	}
	a, b := formula(given), formula(truth)
	if a == "" || b == "" {
		return false
	}
	if a == b {
		return true
	}
	want, wantExact, ok := number(b)
	if !ok {
		return false
	}
	got, gotExact, ok := number(a)
	if !ok && !isBoxed {
		// In a sentence the last number is the result.
		if all := numberPatterns().last.FindAllString(given, -1); len(all) > 0 {
			got, gotExact, ok = number(formula(all[len(all)-1]))
		}
	}
	if !ok {
		return false
	}
	diff := new(big.Rat).Sub(got, want)
	diff.Abs(diff)
	if diff.Sign() == 0 || gotExact && wantExact {
		return diff.Sign() == 0
	}
	if tolerance == 0 && relative == 0 {
		tolerance = defaultTolerance
	}
	return within(diff, tolerance, new(big.Rat).SetInt64(1)) || within(diff, relative, want)
}

// within reports whether diff is at most share of whole.
func within(diff *big.Rat, share float64, whole *big.Rat) bool {
	most := new(big.Rat).SetFloat64(share)
	if most == nil || share == 0 {
		return false
	}
	most.Mul(most, new(big.Rat).Abs(whole))
	return diff.Cmp(most) <= 0
}

// formula removes the purely visual parts of a LaTeX formula.
func formula(text string) string {
	if len(text) > 100*maxNumber {
		return ""
	}
	text = numberPatterns().unit.ReplaceAllString(text, "$1")
	text = strings.NewReplacer(
		`\left`, "", `\right`, "", `\,`, "", `\!`, "", `\;`, "", `\:`, "", `\ `, "", `\quad`, "", `~`, "", `$`, "", `\(`, "", `\)`, "", `\[`, "", `\]`, "",
		`\dfrac`, `\frac`, `\tfrac`, `\frac`, `^{\circ}`, "", `^\circ`, "", `°`, "", `\%`, "%", "−", "-",
	).Replace(text)
	text = strings.Join(strings.FieldsFunc(text, space), "")
	text = strings.TrimSuffix(text, ".")
	if numberPatterns().thousands.MatchString(text) {
		text = strings.NewReplacer(",", "", "{", "", "}", "").Replace(text)
	}
	return text
}

// number parses an integer, a decimal, a fraction, a multiple of a power of ten, or a percentage of
// these. The value is exact if the text has no decimal.
func number(text string) (value *big.Rat, exact, ok bool) {
	if len(text) > maxNumber {
		return nil, false, false
	}
	text, percent := strings.CutSuffix(text, "%")
	p := numberPatterns()
	if m := p.fraction.FindStringSubmatch(text); m != nil {
		over, under := m[2]+m[4], m[3]+m[5]
		a, exactA, okA := decimal(over)
		b, exactB, okB := decimal(under)
		if !okA || !okB || b.Sign() == 0 {
			return nil, false, false
		}
		value, exact = new(big.Rat).Quo(a, b), exactA && exactB
		if m[1] == "-" {
			value.Neg(value)
		}
	} else if m := p.power.FindStringSubmatch(text); m != nil {
		if value, exact, ok = decimal(m[1] + "e" + m[2]); !ok {
			return nil, false, false
		}
	} else if value, exact, ok = decimal(text); !ok {
		return nil, false, false
	}
	if percent {
		value.Quo(value, new(big.Rat).SetInt64(100))
	}
	return value, exact, true
}

func decimal(text string) (value *big.Rat, exact, ok bool) {
	if !numberPatterns().plain.MatchString(text) {
		return nil, false, false
	}
	if _, e, found := strings.Cut(strings.ToLower(text), "e"); found {
		power, valid := new(big.Int).SetString(e, 10)
		if !valid || power.CmpAbs(big.NewInt(maxExponent)) > 0 {
			return nil, false, false
		}
	}
	value, ok = new(big.Rat).SetString(text)
	return value, !strings.ContainsAny(text, ".eE"), ok
}
