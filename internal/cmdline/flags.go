package cmdline

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
)

// Seconds is a flag for a time span: "90s", "1h30m", or a bare number of seconds.
type Seconds float64

func (s *Seconds) String() string {
	if *s == 0 {
		return "" // pflag then shows no default
	}
	return time.Duration(float64(*s) * float64(time.Second)).String()
}

// Type implements pflag.Value.
func (s *Seconds) Type() string { return "duration" }

// Set implements pflag.Value.
func (s *Seconds) Set(text string) error {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		d, derr := time.ParseDuration(text)
		if derr != nil {
			return fmt.Errorf("%q is no time span such as 90s or 1h30m", text)
		}
		v = d.Seconds()
	}
	// A tenth of the largest time.Duration is thirty years.
	if !(v > 0) || v > math.MaxInt64/1e10 {
		return fmt.Errorf("%q is not a time span greater than zero", text)
	}
	*s = Seconds(v)
	return nil
}

// Size is a flag for bytes: "512m", "2GiB", or a bare number.
type Size struct {
	Given bool // false if the flag has no value, not even a default
	Bytes int64
	Least int64 // smallest value that Set accepts
}

func (s *Size) String() string {
	if !s.Given {
		return ""
	}
	return units.BytesSize(float64(s.Bytes))
}

// Type implements pflag.Value.
func (s *Size) Type() string { return "size" }

// Set implements pflag.Value.
func (s *Size) Set(text string) error {
	n, err := units.RAMInBytes(text)
	if err != nil {
		return fmt.Errorf("%q is no size such as 512m or 2g", text)
	}
	if n < s.Least {
		return fmt.Errorf("%q is less than %d bytes", text, s.Least)
	}
	s.Given, s.Bytes = true, n
	return nil
}

// wanted are the values of the flag types of pflag, whose own errors are those of strconv.
var wanted = map[string]string{
	"bool": "true or false", "duration": "a time span such as 90s or 1h30m",
	"int": "a whole number", "int32": "a whole number", "int64": "a whole number",
	"uint": "a whole number, not negative", "uint16": "a whole number from 0 to 65535",
	"uint32": "a whole number, not negative", "uint64": "a whole number, not negative",
	"float64": "a number such as 0.5",
}

// FlagMistake explains a wrong value of a flag: by cause, or by the type's own words where pflag
// has read it and cause is an error of strconv.
func FlagMistake(f *pflag.Flag, value string, cause error) string {
	if want := wanted[f.Value.Type()]; want != "" && strings.HasPrefix(fmt.Sprintf("%T", f.Value), "*pflag.") {
		if errors.Is(cause, strconv.ErrRange) {
			return fmt.Sprintf("%q is too large", value)
		}
		return fmt.Sprintf("%q: want %s", value, want)
	}
	return cause.Error()
}

// FlagError rewrites the errors of pflag about values, and returns others as they are.
func FlagError(err error) error {
	invalid, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	f := invalid.GetFlag()
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	return fmt.Errorf("%s: %s", name, FlagMistake(f, invalid.GetValue(), errors.Unwrap(invalid)))
}
