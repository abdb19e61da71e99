package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// confirmed asks at the terminal, and reports whether the answer is yes. A signal ends it with an
// error.
func confirmed(ctx context.Context, d deps, question string) (bool, error) {
	in, err := newInterruptible(d.Stdin)
	if err != nil {
		return false, err
	}
	defer in.interrupt()
	defer context.AfterFunc(ctx, in.interrupt)()
	if _, err := fmt.Fprint(d.Stderr, question+" [y/N] "); err != nil {
		return false, err
	}
	answer, err := bufio.NewReader(in).ReadString('\n')
	if ctx.Err() != nil {
		fmt.Fprintln(d.Stderr)
		return false, context.Cause(ctx)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("read the answer: %w", err)
	}
	return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer))), nil
}
