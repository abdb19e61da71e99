package api

// Code is the machine-readable kind of an error: a closed list.
type Code string

// The codes, each with the status in [Code.Status].
const (
	CodeInvalid        Code = "invalid_argument"    // the request itself is wrong; repeating it cannot help
	CodeTooLarge       Code = "too_large"           // the body exceeds its bound
	CodeForbidden      Code = "forbidden"           // the peer's uid may not do this
	CodeNotFound       Code = "not_found"           // no such sandbox, image, file or route
	CodeExists         Code = "already_exists"      // the name is taken
	CodeConflict       Code = "conflict"            // the sandbox is in a state that does not allow it, or there is no room for more
	CodeGone           Code = "gone"                // the sandbox ended while the request was under way
	CodeProgramMissing Code = "program_not_found"   // exec: no such program in the sandbox (shells say 127)
	CodeProgramDenied  Code = "program_not_allowed" // exec: found but not executable (shells say 126)
	CodeUnenforceable  Code = "unenforceable"       // a limit or layer was asked for that this host cannot apply
	CodeRegistry       Code = "registry_error"      // the registry refused, is unreachable or sent something wrong
	CodeImage          Code = "image_invalid"       // digest, size, manifest or layer is not what it must be
	CodeBuild          Code = "build_failed"        // a program that a Dockerfile runs has failed
	CodeUnavailable    Code = "unavailable"         // the daemon is stopping, or the launcher cannot be reached
	CodeInternal       Code = "internal"            // a defect of ours
)

// Status is the HTTP status that carries the code. The numbers stand here as such because net/http would come along into
// the launcher, which is executed anew at every start of a sandbox.
func (c Code) Status() int {
	switch c {
	case CodeInvalid:
		return 400
	case CodeTooLarge:
		return 413
	case CodeForbidden:
		return 403
	case CodeNotFound:
		return 404
	case CodeExists, CodeConflict:
		return 409
	case CodeGone:
		return 410
	case CodeProgramMissing, CodeProgramDenied, CodeUnenforceable, CodeImage, CodeBuild:
		return 422
	case CodeRegistry:
		return 502
	case CodeUnavailable:
		return 503
	case CodeInternal:
		return 500
	}
	return 500
}

// Problem is an error as RFC 9457 writes it. It is a Go error: the client returns the one that it received, so that
// errors.As works across the socket.
type Problem struct {
	Code   Code   `json:"code"`
	Title  string `json:"title"`          // the code in words
	Status int    `json:"status"`         // as in the response
	Detail string `json:"detail"`         // what was being done and what went wrong, with the names involved
	Hint   string `json:"hint,omitempty"` // what to do about it
}

// Error returns the detail, followed by the hint in parentheses where there is one.
func (p *Problem) Error() string {
	if p.Hint == "" {
		return p.Detail
	}
	return p.Detail + " (" + p.Hint + ")"
}

// Is reports whether target is a *Problem of the same code: errors.Is(err, &Problem{Code: CodeNotFound}).
func (p *Problem) Is(target error) bool {
	t, ok := target.(*Problem)
	return ok && t.Code == p.Code && t.Detail == ""
}
