package faults

import (
	"context"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// mainProcess runs a sandbox with a main process twice. Its exit and its log must be as
// acknowledged.
func mainProcess(ctx context.Context, u *user, _ *box) error {
	b := u.w.newBox(false)
	b.doomed = true // it ends by itself
	said, code := fmt.Sprintf("begun %d\nended\n", u.r.Uint32()), u.r.IntN(256)
	script := fmt.Sprintf("printf %q; sleep 0.%d; echo ended; exit %d", strings.TrimSuffix(said, "ended\n"), u.r.IntN(3), code)
	if err := u.w.create(ctx, b, "sh", "-c", script); err != nil {
		return err
	}
	for life := range 2 {
		s, err := u.c.WaitSandbox(ctx, b.id)
		if err != nil {
			return err
		}
		if s.State == api.StateLost || s.Exit != nil && s.Exit.Signal == "SIGKILL" { // whether it may be, the round knows
			return &api.Problem{Code: api.CodeGone, Detail: fmt.Sprintf("sandbox %s is %s: %s", b.name, s.State, s.Reason)}
		}
		if s.State != api.StateStopped || s.Exit == nil || s.Exit.Code != code {
			return wrongf("sandbox %s is %s (%s) and its main process ended with %+v, not %d", b.name, s.State, s.Reason, s.Exit, code)
		}
		log := ""
		if err := u.c.Logs(ctx, b.id, client.LogOptions{Follow: true}, func(e api.LogEntry) error {
			log += string(client.Output(api.ExecEvent{Text: e.Text, Data: e.Data}))
			return nil
		}); err != nil {
			return err
		}
		if want := strings.Repeat(said, life+1); log != want {
			return wrongf("the log of sandbox %s is %q, not %q", b.name, log, want)
		}
		if life == 0 {
			if _, err := u.c.StartSandbox(ctx, b.id, api.StartSandbox{}); err != nil {
				return err
			}
		}
	}
	return remove(ctx, u, b)
}
