package cmdline

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// The exit codes of commands. Those of run and exec leave room for the program's own, as env(1) and
// timeout(1) do.
const (
	CodeError      = 1
	CodeUsage      = 2
	CodeTimeout    = 124
	CodeOurs       = 125 // run, exec: sandboxd failed, not the program
	CodeNotAllowed = 126 // run, exec: the program cannot be executed
	CodeNotFound   = 127 // run, exec: the program does not exist
)

// ExitError ends the command with a code. If Err is nil, nothing more is printed.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return "exit status " + strconv.Itoa(e.Code)
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// UsageError reports a wrong command line.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }
func (e *UsageError) Unwrap() error { return e.Err }

// Usagef returns a [UsageError]. It wraps the operands of %w, like [fmt.Errorf].
func Usagef(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// Signalled is the cause of a context that a signal has ended.
type Signalled struct{ sig syscall.Signal }

func (s Signalled) Error() string { return s.sig.String() }

// hangups is the key of a context's *atomic.Bool: SIGHUP does not end the command, see [Hangups].
type hangups struct{}

// withSignals returns a context that SIGINT, SIGTERM or SIGHUP ends. A second signal has its
// default action, so that users can skip the clean-up.
func withSignals(ctx context.Context) (context.Context, context.CancelFunc) {
	diverted, to := new(atomic.Bool), new(forwarder)
	ctx, cancel := context.WithCancelCause(context.WithValue(context.WithValue(ctx, hangups{}, diverted), forwards{}, to))
	ch := make(chan os.Signal, 8)
	to.from = ch
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) { // respect nohup, and a shell's background jobs
			signal.Notify(ch, sig)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer signal.Stop(ch)
		for {
			select {
			case sig := <-ch:
				if sig == syscall.SIGHUP && diverted.Load() {
					continue
				}
				if s, ok := sig.(syscall.Signal); ok {
					if to.take(s, time.Now()) {
						continue
					}
					cancel(Signalled{s})
				}
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
	}
}

// forwards is the key of a context's *forwarder, see [Forward].
type forwards struct{}

// Hangups makes SIGHUP an order to the command instead of its end, and returns a channel that gets
// each. It is for a daemon, once in its life. A daemon whose terminal has gone, one of files, ends
// as before.
func Hangups(ctx context.Context, files ...*os.File) <-chan struct{} {
	diverted, ok := ctx.Value(hangups{}).(*atomic.Bool)
	orders := make(chan struct{}, 1)
	if !ok { // it is not [Run] that handles signals
		return orders
	}
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGHUP)
	diverted.Store(true)
	go func() {
		for range ch {
			if slices.ContainsFunc(files, hungUp) {
				diverted.Store(false)
				signal.Stop(ch)
				_ = syscall.Kill(os.Getpid(), syscall.SIGHUP) // to withSignals
				return
			}
			select {
			case orders <- struct{}{}:
			default: // one that is due reads all there is
			}
		}
	}()
	return orders
}

// hungUp reports whether a file is a terminal that has gone.
func hungUp(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return errors.Is(err, unix.EIO)
}

// Run runs one command line and returns the exit code.
func Run(ctx context.Context, args []string, root *cobra.Command, stderr io.Writer) int {
	// With a handler, a write to a closed pipe is an error like any other, and `sandboxd run … | head`
	// leaves no sandbox behind.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := withSignals(ctx)
	defer stop()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	return report(ctx, stderr, cmd, err)
}

// report prints the error and returns the exit code.
func report(ctx context.Context, stderr io.Writer, cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[*ExitError](err); ok {
		if exit.Err != nil {
			Explain(stderr, exit.Err)
		}
		return exit.Code
	}
	if s, ok := errors.AsType[Signalled](context.Cause(ctx)); ok {
		return 128 + int(s.sig)
	}
	if errors.Is(err, syscall.EPIPE) {
		return 128 + int(syscall.SIGPIPE)
	}
	codes := cmd.Annotations[annotationCodes]
	ours := codes == ExitProgram || codes == ExitCode
	_, usage := errors.AsType[*UsageError](err)
	if usage = usage || !cmd.HasParent(); usage { // the root command finds unknown commands
		err = errors.New(strings.Join(strings.Fields(err.Error()), " ")) // cobra's suggestions have several lines
	}
	Explain(stderr, err)
	if usage {
		fmt.Fprintf(stderr, "hint: %s --help\n", cmd.CommandPath())
	}
	switch {
	case (errors.Is(err, &api.Problem{Code: api.CodeProgramMissing}) || errors.Is(err, &api.Problem{Code: api.CodeNoLanguage})) && ours:
		return CodeNotFound
	case (errors.Is(err, &api.Problem{Code: api.CodeProgramDenied}) || errors.Is(err, &api.Problem{Code: api.CodeRefused})) && ours:
		return CodeNotAllowed
	case ours:
		return CodeOurs
	case usage:
		return CodeUsage
	}
	return CodeError
}

// Explain prints an error on one line, and its hint, if any, on a second.
func Explain(w io.Writer, err error) {
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
	fmt.Fprintf(w, "sandboxd: %s\n", Printable(text))
	if hint != "" {
		fmt.Fprintf(w, "hint: %s\n", Printable(hint))
	}
}

// Printable escapes text for a terminal. Names and messages may come from a registry, an image or a
// sandbox, and their escape sequences would act on the user's terminal.
func Printable(s string) string {
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

// annotationCodes is the annotation of a command with its exit codes, which end its help.
const annotationCodes = "exit status"

const exitStatusTemplate = `{{with .Annotations}}{{with index . "` + annotationCodes + `"}}
EXIT STATUS
{{.}}
{{end}}{{end}}`

// ExitPlain and ExitProgram are the exit codes of a command, as its help shows them: for commands
// that run no program, and for run and exec, whose own errors have the codes from 124 on.
const (
	ExitPlain = `  0    success
  1    error; stderr says which and what to do
  2    the command line is wrong`
	ExitProgram = `  The program's own, or 128+n where signal n ended it, and:
  124  the program was stopped at the end of its --timeout
  125  sandboxd itself failed; stderr says how and what to do
  126  the program was found but cannot be executed
  127  there is no such program in the sandbox`
	// ExitCode is [ExitProgram] for source code.
	ExitCode = `  The program's own, or 128+n where signal n ended it, and:
  124  the program was stopped at the end of its --timeout
  125  sandboxd itself failed; stderr says how and what to do
  126  a code policy or the operator's hook refuses the code
  127  the sandbox does not have the language`
)

// ExitStatus sets the exit codes in the help of a command.
func ExitStatus(cmd *cobra.Command, codes string) {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[annotationCodes] = codes
}

// UsageArgs turns the errors of an argument check into usage errors. Where cobra counts arguments,
// they show those of the command.
func UsageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		if err == nil {
			return nil
		}
		counts := strings.Contains(err.Error(), "arg(s)") || !cmd.HasSubCommands() && strings.HasPrefix(err.Error(), "unknown command ")
		if counts {
			usage, _, _ := strings.Cut(cmd.UseLine(), "\n")
			given := []string{"no argument is", "1 argument is"}
			if n := len(args); n >= len(given) {
				err = fmt.Errorf("%d arguments are given; as in: %s", n, usage)
			} else {
				err = fmt.Errorf("%s given; as in: %s", given[n], usage)
			}
		}
		return &UsageError{err}
	}
}

// ExitStatusOf returns the exit codes of a command that [ExitStatus] has set; else nothing.
func ExitStatusOf(cmd *cobra.Command) string { return cmd.Annotations[annotationCodes] }
