package llm

import (
	"bytes"
	_ "embed" // the prices
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
)

//go:embed prices.yaml
var listPrices []byte

// maxPriceFile is the maximum size of a price file in bytes.
const maxPriceFile = 1 << 20

// Price holds the prices of one model, in US dollars per million tokens.
type Price struct {
	Input      float64  `yaml:"input"`
	Cached     *float64 `yaml:"cached"`      // nil means Input
	CacheWrite *float64 `yaml:"cache_write"` // nil means Input
	Output     float64  `yaml:"output"`
	Long       *struct {
		Above int `yaml:"above"`
		Price `yaml:",inline"`
	} `yaml:"long"` // for a call whose request exceeds Above tokens
}

// Prices maps the names that are sent to providers to the prices of the models.
type Prices map[string]Price

var builtIn = sync.OnceValues(func() (Prices, error) { return parsePrices(listPrices) })

// LoadPrices returns the built-in list, overridden by the file at path unless path is empty.
func LoadPrices(path string) (Prices, error) {
	list, err := builtIn()
	if err != nil {
		return nil, fmt.Errorf("built-in prices: %w", err)
	}
	prices := maps.Clone(list)
	if path == "" {
		return prices, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open prices: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPriceFile+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read prices: %w", err)
	case len(data) > maxPriceFile:
		return nil, fmt.Errorf("prices %s: more than %d bytes", path, maxPriceFile)
	}
	own, err := parsePrices(data)
	if err != nil {
		return nil, fmt.Errorf("prices %s: %w", path, err)
	}
	maps.Copy(prices, own)
	return prices, nil
}

func parsePrices(data []byte) (Prices, error) {
	var file struct {
		Models Prices `yaml:"models"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true) // a mistyped key would give a wrong bill
	if err := dec.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for name, p := range file.Models {
		if err := p.check(); err != nil {
			return nil, fmt.Errorf("model %s: %w", name, err)
		}
	}
	return file.Models, nil
}

func (p Price) check() error {
	for _, v := range []float64{p.Input, orInput(p.Cached, p), orInput(p.CacheWrite, p), p.Output} {
		if !(v >= 0) || math.IsInf(v, 0) { // !(v >= 0) covers NaN
			return fmt.Errorf("%v is no price", v)
		}
	}
	if p.Long == nil {
		return nil
	}
	if p.Long.Above < 1 || p.Long.Long != nil {
		return errors.New(`"long" wants "above", a number of tokens, and no "long" of its own`)
	}
	return p.Long.check()
}

func orInput(v *float64, p Price) float64 {
	if v == nil {
		return p.Input
	}
	return *v
}

// Of returns the price of a model by its name, or by its name without a trailing date.
func (p Prices) Of(model string) (Price, bool) {
	if price, ok := p[model]; ok {
		return price, true
	}
	price, ok := p[undated(model)]
	return price, ok
}

// undated removes a trailing date: -20251101 or -2025-08-07.
func undated(model string) string {
	for _, form := range []string{"-dddddddd", "-dddd-dd-dd"} {
		if at := len(model) - len(form); at > 0 && strings.Map(digitsToD, model[at:]) == form {
			return model[:at]
		}
	}
	return model
}

func digitsToD(r rune) rune {
	switch {
	case r >= '0' && r <= '9':
		return 'd'
	case r == 'd':
		return -1
	}
	return r
}

// Cost returns the price of a call of this usage, in US dollars. The caller stores it in
// Usage.CostUSD.
func (p Price) Cost(u Usage) float64 {
	if p.Long != nil && u.PromptTokens > p.Long.Above {
		p = p.Long.Price
	}
	// A provider's counts may not add up.
	cached := min(u.CachedTokens, u.PromptTokens)
	written := min(u.CacheWriteTokens, u.PromptTokens-cached)
	plain := u.PromptTokens - cached - written
	return (float64(plain)*p.Input + float64(cached)*orInput(p.Cached, p) + float64(written)*orInput(p.CacheWrite, p) + float64(u.CompletionTokens)*p.Output) / 1e6
}
