package mcp

import (
	"context"
	"errors"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// maxError bounds the text of an error, in bytes.
const maxError = 4096

// explain returns an error for a model: the daemon's words about the request, and of the daemon's
// own troubles only their kind. It names no path of the host.
func (s *Server) explain(err error) error {
	if rpc, ok := errors.AsType[*jsonrpc.Error](err); ok {
		return rpc
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errors.New("cancelled")
	}
	text := err.Error()
	if p, ok := errors.AsType[*api.Problem](err); ok {
		switch p.Code {
		case api.CodeInternal, api.CodeUnavailable:
			s.log.Warn("the daemon has refused a request", "error", err)
			text = "the daemon could not do it: " + p.Title
		case api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeNotFound, api.CodeExists, api.CodeConflict, api.CodeGone,
			api.CodeProgramMissing, api.CodeProgramDenied, api.CodeUnenforceable, api.CodeRegistry, api.CodeImage, api.CodeBuild,
			api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused:
			// The hint is about commands for people.
			text = strings.Replace(text, p.Error(), p.Detail, 1)
		}
	} else if _, ok := errors.AsType[*client.NotRunning](err); ok {
		text = "no daemon is running; the user starts one with any command of sandboxd"
	}
	for _, dir := range s.opts.HostPaths {
		if len(dir) > 1 {
			text = strings.ReplaceAll(text, dir, "(a directory of the daemon)")
		}
	}
	if len(text) > maxError {
		text = text[:maxError] + "..."
	}
	return errors.New(strings.ToValidUTF8(text, "\uFFFD"))
}
