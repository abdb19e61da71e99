package build

import (
	"strings"
	"testing"
)

// TestGrowthIsNeverLessThanWhatComesOut keeps a Dockerfile of a few lines from becoming gigabytes.
func TestGrowthIsNeverLessThanWhatComesOut(t *testing.T) {
	env := newScope()
	for k, v := range map[string]string{"A": strings.Repeat("x", 50), "B_1": strings.Repeat("y", 70), "1": "one", "@": strings.Repeat("z", 30), "Ä": strings.Repeat("u", 20)} {
		env.set(k, k+"="+v)
	}
	p := &Plan{file: &File{escape: '\\'}}
	for _, word := range []string{
		"", "plain", "$A", "${A}$A", "$B_1-$A", "$1abc", "$@", "${@}", "$$A", "$Ä", "${NOPE:-$A$A}", "${A:+$B_1}", "${A//x/yy}", "${A//x/${B_1//y/zzz}}", "${A/x/$B_1$B_1}",
		"${A#x*}", "\"$A$A\"", "'$A'", "a${A}b//${A}",
	} {
		out, err := p.expand(word, env)
		if err != nil {
			t.Errorf("%q: %v", word, err)
			continue
		}
		if g := growth(word, env); g < len(out) {
			t.Errorf("%q becomes %d bytes, the bound is %d", word, len(out), g)
		}
	}
}
