package cmdline

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// Messages about values name the flag and tell what it takes, in no words of strconv.
func TestFlagMistakes(t *testing.T) {
	for _, tc := range []struct{ args, want string }{
		{"--count x", `--count: "x": want a whole number`},
		{"--count 1.5", `--count: "1.5": want a whole number`},
		{"--count 99999999999999999999", `--count: "99999999999999999999" is too large`},
		{"--port -1", `--port: "-1": want a whole number from 0 to 65535`},
		{"--ratio lots", `--ratio: "lots": want a number such as 0.5`},
		{"-a 90", `-a, --age: "90": want a time span such as 90s or 1h30m`},
		{"--all=perhaps", `--all: "perhaps": want true or false`},
		{"--span never", `--span: "never" is no time span such as 90s or 1h30m`},
		{"--span -1s", `--span: "-1s" is not a time span greater than zero`},
		{"--size much", `--size: "much" is no size such as 512m or 2g`},
	} {
		d, cmd := NewRoot(Deps{}, &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }})
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		f := cmd.Flags()
		f.Int("count", 0, "")
		f.Uint16("port", 0, "")
		f.Float64("ratio", 0, "")
		f.DurationP("age", "a", time.Hour, "")
		f.Bool("all", false, "")
		f.Var(new(Seconds), "span", "")
		f.Var(new(Size), "size", "")
		cmd.SetArgs(strings.Fields(tc.args))
		if err := cmd.Execute(); err == nil || err.Error() != tc.want || d.SocketFlag() != "" {
			t.Errorf("%s: %v, want %s", tc.args, err, tc.want)
		}
	}
}
