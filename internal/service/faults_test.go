package service_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/httpapi"
	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestWhatInitSaysOfAProgram(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want api.Code
	}{
		"missing":             {&guest.Error{Stage: guest.StageLookup, Errno: syscall.ENOENT}, api.CodeProgramMissing},
		"interpreter missing": {&guest.Error{Stage: guest.StageStart, Errno: syscall.ENOENT}, api.CodeProgramMissing},
		"not executable":      {&guest.Error{Stage: guest.StageLookup, Errno: syscall.EACCES}, api.CodeProgramDenied},
		"not a program":       {&guest.Error{Stage: guest.StageStart, Errno: syscall.ENOEXEC}, api.CodeProgramDenied},
		"no directory":        {&guest.Error{Stage: guest.StageCwd, Errno: syscall.ENOENT}, api.CodeInvalid},
		"too many arguments":  {&guest.Error{Stage: guest.StageStart, Errno: syscall.E2BIG}, api.CodeTooLarge},
		"too many processes":  {&guest.Error{Stage: guest.StageStart, Errno: syscall.EAGAIN}, api.CodeConflict},
		"unmapped user":       {&guest.Error{Stage: guest.StageStart, Errno: syscall.EINVAL}, api.CodeInvalid},
		"no terminal":         {&guest.Error{Stage: guest.StageTTY, Errno: syscall.ENOSPC}, api.CodeConflict},
		"too many in flight":  {&guest.Error{Stage: guest.StageStart, Errno: syscall.ETOOMANYREFS}, api.CodeConflict},
		"ours as well":        {fmt.Errorf("ask init: %w", syscall.ETOOMANYREFS), api.CodeConflict},
		"no room in a socket": {&guest.Error{Stage: guest.StageStart, Errno: syscall.ENOBUFS}, api.CodeConflict},
		"something else":      {&guest.Error{Stage: guest.StageStart, Errno: syscall.EIO}, api.CodeInternal},
		"cancelled":           {context.Canceled, api.CodeUnavailable},
	} {
		got := httpapi.ProblemOf(service.ExecError("prog", "/cwd", fmt.Errorf("exec: %w", tc.err)))
		if got.Code != tc.want {
			t.Errorf("%s: %s, want %s", name, got.Code, tc.want)
		}
		if (name == "too many processes") != strings.Contains(got.Hint, "ulimit -u") {
			t.Errorf("%s: the hint is %q", name, got.Hint)
		}
	}
}

func TestWhatInitSaysOfAFile(t *testing.T) {
	for name, tc := range map[string]struct {
		err  error
		want api.Code
	}{
		"missing":      {&guest.Error{Stage: guest.StageOpen, Errno: syscall.ENOENT}, api.CodeNotFound},
		"fifo":         {&guest.Error{Stage: guest.StageType, Errno: syscall.EINVAL}, api.CodeInvalid},
		"directory":    {&guest.Error{Stage: guest.StageOpen, Errno: syscall.EISDIR}, api.CodeInvalid},
		"no space":     {&guest.Error{Stage: guest.StageWrite, Errno: syscall.ENOSPC}, api.CodeConflict},
		"read-only":    {&guest.Error{Stage: guest.StageOpen, Errno: syscall.EROFS}, api.CodeConflict},
		"hostile tar":  {&guest.Error{Stage: guest.StageArchive, Errno: syscall.EINVAL, Path: "../x"}, api.CodeInvalid},
		"in flight":    {&guest.Error{Stage: guest.StageOpen, Errno: syscall.ETOOMANYREFS}, api.CodeConflict},
		"ours as well": {fmt.Errorf("ask init: %w", syscall.ETOOMANYREFS), api.CodeConflict},
		"sandbox gone": {runtime.ErrState, api.CodeConflict},
	} {
		if got := httpapi.ProblemOf(service.FileError("/f", tc.err)); got.Code != tc.want {
			t.Errorf("%s: %s, want %s", name, got.Code, tc.want)
		}
	}
}

func TestErrorsOfTreesSayWhatToDo(t *testing.T) {
	for _, tc := range []struct {
		stage guest.Stage
		errno syscall.Errno
		at    string
		code  api.Code
	}{
		{guest.StageRemove, syscall.ENOTEMPTY, "/p", api.CodeConflict},
		{guest.StageRemove, syscall.EBUSY, "/p/mount", api.CodeConflict},
		{guest.StageRemove, syscall.ENAMETOOLONG, "/p/d", api.CodeConflict},
		{guest.StageRemove, syscall.ENOENT, "/p", api.CodeNotFound},
		{guest.StageMove, syscall.EXDEV, "/p", api.CodeConflict},
		{guest.StageMove, syscall.EINVAL, "/p", api.CodeInvalid},
		{guest.StageMove, syscall.EBUSY, "/p", api.CodeConflict},
		{guest.StageMove, syscall.EEXIST, "/q", api.CodeExists},
		{guest.StageWrite, syscall.EROFS, "/p", api.CodeConflict},
		{guest.StageWatch, syscall.ENOSPC, "/p", api.CodeConflict},
	} {
		p := httpapi.ProblemOf(service.FileError("/p", &guest.Error{Stage: tc.stage, Errno: tc.errno, Path: tc.at}))
		if p.Code != tc.code {
			t.Errorf("%s %v: %+v", tc.stage, tc.errno, p)
		}
	}
	if p := httpapi.ProblemOf(errors.New("x")); p.Code != api.CodeInternal {
		t.Errorf("%+v", p)
	}
}
