package performance

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// outputSize is the output of one program in [BenchmarkOutput].
const outputSize = 100 << 20

// BenchmarkOutput is a program that prints a file, in a running sandbox and on the host: by the
// command line into a pipe, and to clients that read frames or JSON lines.
func BenchmarkOutput(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	s := d.Create(b, api.CreateSandbox{})
	s.Sh(b, fmt.Sprintf("head -c %d /dev/urandom > /tmp/file", outputSize))
	onHost := filepath.Join(b.TempDir(), "file")
	if out, err := exec.CommandContext(b.Context(), "sh", "-c", fmt.Sprintf("head -c %d /dev/urandom > %s", outputSize, onHost)).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	counted := func(argv ...string) func() error {
		return func() error {
			cmd := exec.CommandContext(b.Context(), "sh", append([]string{"-c", `"$@" | wc -c`, "sh"}, argv...)...)
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err == nil && strings.TrimSpace(string(out)) != fmt.Sprint(outputSize) {
				err = fmt.Errorf("%q bytes", out)
			}
			return err
		}
	}
	c := client.New(d.Socket)
	defer c.Close()
	req := api.ExecRequest{Argv: []string{"cat", "/tmp/file"}}
	compare(b,
		side{name: "sandbox", run: counted(harness.Program(b, "sandboxd"), "--socket", d.Socket, "exec", s.ID, "cat", "/tmp/file")},
		side{name: "host", run: counted("cat", onHost)},
		side{name: "frames", run: func() error {
			var n counter
			_, err := c.ExecOutput(b.Context(), s.ID, req, &n, io.Discard)
			if err == nil && n != outputSize {
				err = fmt.Errorf("%d bytes", n)
			}
			return err
		}},
		side{name: "json", run: func() error {
			var n counter
			_, err := c.ExecStream(b.Context(), s.ID, req, func(e api.ExecEvent) error {
				n += counter(len(client.Output(e)))
				return nil
			})
			if err == nil && n != outputSize {
				err = errors.New("other bytes than the file's")
			}
			return err
		}})
}

// counter counts bytes.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
