package cmdline

import (
	"fmt"
	"strconv"

	"github.com/docker/go-units"
)

// Count is a flag for a number of things: "100k" is 100000, "2m" two million.
type Count struct{ N int64 }

func (c *Count) String() string {
	if c.N == 0 {
		return "" // pflag then shows no default
	}
	return strconv.FormatInt(c.N, 10)
}

// Type implements pflag.Value.
func (c *Count) Type() string { return "number" }

// Set implements pflag.Value.
func (c *Count) Set(text string) error {
	n, err := units.FromHumanSize(text)
	if err != nil {
		return fmt.Errorf("%q is no number such as 5000 or 100k", text)
	}
	c.N = n
	return nil
}
