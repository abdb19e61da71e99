package cli

import (
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// lifetime is a flag for the seconds that a sandbox lives, or "never" for no end.
type lifetime float64

func (l *lifetime) String() string {
	if *l == api.Never {
		return "never"
	}
	return (*cmdline.Seconds)(l).String()
}

// Type implements pflag.Value.
func (l *lifetime) Type() string { return "duration" }

// Set implements pflag.Value.
func (l *lifetime) Set(text string) error {
	if text == "never" {
		*l = api.Never
		return nil
	}
	return (*cmdline.Seconds)(l).Set(text)
}
