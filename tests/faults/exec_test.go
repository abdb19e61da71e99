package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// A mode is a way to run a program and to receive its output.
type mode int

// The modes: see the media types of package api.
const (
	buffered mode = iota
	streamed
	interactive
)

// modes is how many there are.
const modes = int(interactive) + 1

func (m mode) String() string { return [...]string{"buffered", "streamed", "interactive"}[m] }

// wrong is an untrue answer, the failure that these tests look for. Nothing excuses it, unlike an
// error that was answered.
type wrong struct{ error }

func wrongf(format string, args ...any) error { return wrong{fmt.Errorf(format, args...)} }

// echoes copies its input to stdout, and each byte of it plus one to stderr, both at once.
const echoes = `f=/tmp/echo.$$; cat >$f; tr '\000-\377' '\001-\377\000' <$f >&2 & cat $f; wait $!; rm $f; exit `

// echo runs a program that reads input, writes as much to each stream and exits with a code, and
// compares every byte.
func echo(ctx context.Context, c *client.Client, id string, m mode, input []byte, code int) error {
	req := api.ExecRequest{Argv: []string{"sh", "-c", echoes + strconv.Itoa(code)}}
	out, errs, exit, err := execute(ctx, c, id, m, req, input)
	if err != nil {
		return err
	}
	want := bytes.Clone(input)
	for i := range want {
		want[i]++
	}
	switch {
	case exit.Code != code || exit.Signal != "":
		return wrongf("%s exec with %d bytes ended with %+v, not %d; it wrote %d bytes and to stderr %.200q", m, len(input), exit, code, len(out), errs)
	case !bytes.Equal(out, input):
		return wrongf("%s exec: stdout differs: %s", m, difference(out, input))
	case !bytes.Equal(errs, want):
		return wrongf("%s exec: stderr differs: %s", m, difference(errs, want))
	}
	return nil
}

func difference(got, want []byte) string {
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	return fmt.Sprintf("%d bytes, not %d; equal up to byte %d", len(got), len(want), i)
}

// execute runs a program in one of the modes.
func execute(ctx context.Context, c *client.Client, id string, m mode, req api.ExecRequest, stdin []byte) (out, errs []byte, exit api.Exit, err error) {
	switch m {
	case buffered:
		req.Stdin = stdin
		r, err := c.Exec(ctx, id, req)
		if err != nil {
			return nil, nil, exit, err
		}
		if r.Truncated {
			return nil, nil, exit, wrongf("an output of %d bytes is truncated", len(r.Stdout))
		}
		out, errs = r.StdoutBytes, r.StderrBytes
		if out == nil {
			out = []byte(r.Stdout)
		}
		if errs == nil {
			errs = []byte(r.Stderr)
		}
		return out, errs, r.Exit, nil
	case streamed:
		req.Stdin = stdin
		end, err := c.ExecStream(ctx, id, req, func(e api.ExecEvent) error {
			switch e.Stream {
			case "stdout":
				out = append(out, client.Output(e)...)
			case "stderr":
				errs = append(errs, client.Output(e)...)
			}
			return nil
		})
		if err != nil {
			return nil, nil, exit, err
		}
		return out, errs, end.Exit, nil
	case interactive:
		var o, e bytes.Buffer
		end, err := c.ExecInteractive(ctx, id, req, client.Streams{Stdin: bytes.NewReader(stdin), Stdout: &o, Stderr: &e})
		if err != nil {
			return nil, nil, exit, err
		}
		return o.Bytes(), e.Bytes(), end.Exit, nil
	}
	return nil, nil, exit, errors.New("no such mode")
}

// someBytes makes up to n bytes, few more often than many.
func someBytes(r *rand.Rand, n int) []byte {
	b := make([]byte, r.IntN(1+r.IntN(1+n)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}
