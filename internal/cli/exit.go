package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
)

// Exit codes of ours. Those of run and exec leave room for the program's, as env(1) and timeout(1) do.
const (
	codeError      = 1
	codeUsage      = 2
	codeTimeout    = 124
	codeOurs       = 125 // run, exec: not the program failed, we did
	codeNotAllowed = 126 // run, exec: the program was found and could not be executed
	codeNotFound   = 127 // run, exec: there is no such program
)

// exitError ends the command with a code. A nil err says that everything has been said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return "exit status " + strconv.Itoa(e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError is a command line that cannot be meant as it stands.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// signalled is the cause of a context that a signal ended.
type signalled struct{ sig syscall.Signal }

func (s signalled) Error() string { return s.sig.String() }

// withSignals returns a context that SIGINT, SIGTERM or SIGHUP ends. Only the first one does: a second finds the default
// action again, for the user who does not want to wait for the cleaning up.
func withSignals(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	ch := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) { // nohup, and a shell's background jobs, mean it
			signal.Notify(ch, sig)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer signal.Stop(ch)
		select {
		case sig := <-ch:
			if s, ok := sig.(syscall.Signal); ok {
				cancel(signalled{s})
			}
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
	}
}

// run runs one command line and returns the exit code.
func run(ctx context.Context, args []string, d deps) int {
	// With a handler in place, writing to a closed pipe is an error like any other, and a sandbox is not left behind
	// because of `sandboxd run … | head`.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := withSignals(ctx)
	defer stop()
	root := newRoot(d)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	return report(ctx, d.stderr, cmd, err)
}

// report says on stderr what went wrong and picks the exit code.
func report(ctx context.Context, stderr io.Writer, cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[*exitError](err); ok {
		if exit.err != nil {
			explain(stderr, exit.err)
		}
		return exit.code
	}
	if s, ok := errors.AsType[signalled](context.Cause(ctx)); ok {
		return 128 + int(s.sig)
	}
	if errors.Is(err, syscall.EPIPE) {
		return 128 + int(syscall.SIGPIPE)
	}
	ours := cmd.Annotations[annotationCodes] == exitProgram
	_, usage := errors.AsType[*usageError](err)
	if usage = usage || !cmd.HasParent(); usage { // an unknown command is found by the root
		err = errors.New(strings.Join(strings.Fields(err.Error()), " ")) // cobra's suggestions take lines of their own
	}
	explain(stderr, err)
	if usage {
		fmt.Fprintf(stderr, "hint: %s --help\n", cmd.CommandPath())
	}
	switch {
	case errors.Is(err, &api.Problem{Code: api.CodeProgramMissing}) && ours:
		return codeNotFound
	case errors.Is(err, &api.Problem{Code: api.CodeProgramDenied}) && ours:
		return codeNotAllowed
	case ours:
		return codeOurs
	case usage:
		return codeUsage
	}
	return codeError
}

// explain writes an error as one line, and the way out, where there is one, as a second.
func explain(w io.Writer, err error) {
	text, hint := err.Error(), ""
	if p, ok := errors.AsType[*api.Problem](err); ok {
		if p.Detail == "" {
			text = strings.TrimSpace(text + " " + string(p.Code))
		}
		if p.Hint != "" {
			hint = p.Hint
			text = strings.TrimSuffix(text, " ("+hint+")")
		}
	}
	fmt.Fprintf(w, "sandboxd: %s\n", printable(text))
	if hint != "" {
		fmt.Fprintf(w, "hint: %s\n", printable(hint))
	}
}

// printable makes text fit for a terminal. Names and messages may come from a registry, an image or a sandbox, and an
// escape sequence in them would act on the user's terminal.
func printable(s string) string {
	clean := true
	for _, r := range s {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			clean = false
			break
		}
	}
	if clean {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		s = s[n:]
	}
	return b.String()
}

// annotationCodes is the key of a command's exit codes, which end its help.
const annotationCodes = "exit status"

const exitStatusTemplate = `{{with .Annotations}}{{with index . "` + annotationCodes + `"}}
EXIT STATUS
{{.}}
{{end}}{{end}}`

const (
	exitPlain = `  0    success
  1    error; stderr says which and what to do
  2    the command line is wrong`
	exitProgram = `  The program's own, or 128+n where signal n ended it, and:
  124  the program was stopped at the end of its --timeout
  125  sandboxd itself failed; stderr says how and what to do
  126  the program was found but cannot be executed
  127  there is no such program in the sandbox`
)

// exitStatus gives a command its codes.
func exitStatus(cmd *cobra.Command, codes string) {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[annotationCodes] = codes
}

// usageArgs makes what an argument check of cobra finds a usage error.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &usageError{err}
		}
		return nil
	}
}
