package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// printImage writes an image's reference and digest.
func printImage(w io.Writer, image *api.Image) error {
	_, err := fmt.Fprintf(w, "%s %s\n", cmdline.Printable(image.Reference), cmdline.Printable(image.Digest))
	return err
}

// since returns the time passed since t, in words.
func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return units.HumanDuration(time.Since(t)) + " ago"
}

// until returns the time left until t, in words.
func until(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := time.Until(t)
	if d > 100*365*24*time.Hour {
		return "never" // see api.Never
	}
	if d < 0 {
		return "over"
	}
	return "in " + units.HumanDuration(d)
}
