package llm

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPrices(t *testing.T) {
	own := filepath.Join(t.TempDir(), "prices.yaml")
	content := "models:\n  gpt-5: {input: 7, output: 8}\n  mine: {input: 1, cached: 0, output: 2, long: {above: 100, input: 10, output: 20}}\n  free: {input: 0, output: 0}\n"
	if err := os.WriteFile(own, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	prices, err := LoadPrices(own)
	if err != nil {
		t.Fatal(err)
	}
	million := Usage{PromptTokens: 1_000_000, CompletionTokens: 1_000_000}
	for _, tc := range []struct {
		model string
		usage Usage
		want  float64
	}{
		{"claude-opus-4-5", million, 30},
		{"claude-opus-4-5-20251101", million, 30},
		{"gpt-5-mini-2025-08-07", million, 2.25},
		{"claude-sonnet-4-6", Usage{PromptTokens: 1_000_000, CachedTokens: 400_000, CacheWriteTokens: 500_000}, 0.1*3 + 0.4*0.3 + 0.5*3.75},
		{"gpt-4o", Usage{PromptTokens: 1_000_000, CacheWriteTokens: 500_000}, 2.5}, // no price for cache writes
		{"gpt-4o", Usage{PromptTokens: 1_000_000, CachedTokens: 9_000_000}, 1.25},  // more cached tokens than tokens
		{"claude-haiku-5-5", Usage{PromptTokens: 100_000, CompletionTokens: 1000}, 0.0105},
		{"claude-haiku-5-5", Usage{PromptTokens: 100_001, CompletionTokens: 1000}, 0.0525005},
		{"gpt-5", million, 15}, // from the user's file
		{"mine", Usage{PromptTokens: 100, CachedTokens: 50, CompletionTokens: 1}, 52e-6},
		{"mine", Usage{PromptTokens: 101, CompletionTokens: 1}, 1030e-6},
		{"free", million, 0},
	} {
		p, ok := prices.Of(tc.model)
		if got := p.Cost(tc.usage); !ok || math.Abs(got-tc.want) > 1e-9 {
			t.Errorf("%s, %+v: %v, %v, want %v", tc.model, tc.usage, got, ok, tc.want)
		}
	}
	for _, name := range []string{"", "gpt", "gpt-5-pro", "gpt-5-2025", "-20251101", "gpt-5-dddddddd", "x/gpt-4o"} {
		if p, ok := prices.Of(name); ok {
			t.Errorf("%q costs %+v", name, p)
		}
	}
	if list, err := LoadPrices(""); err != nil || list["gpt-5"].Input != 1.25 {
		t.Errorf("the user's file changed the built-in list: %+v, %v", list["gpt-5"], err)
	}
}

func TestBadPricesAreRefused(t *testing.T) {
	for content, want := range map[string]string{
		"models: {m: {input: -1}}":                                    "-1 is no price",
		"models: {m: {input: .nan}}":                                  "NaN is no price",
		"models: {m: {input: .inf}}":                                  "is no price",
		"models: {m: {inptu: 1}}":                                     "inptu",
		"prices: {}":                                                  "prices",
		"models: {m: {input: 1, long: {input: 2}}}":                   `wants "above"`,
		"models: {m: {input: 1, long: {above: 5, output: -2}}}":       "-2 is no price",
		"models: {m: {input: 1, long: {above: 5, long: {above: 7}}}}": "long",
		"models: [":                         "",
		strings.Repeat("#", maxPriceFile+1): "more than",
	} {
		path := filepath.Join(t.TempDir(), "prices.yaml")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadPrices(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want ...%s...", content, err, want)
		}
	}
}
