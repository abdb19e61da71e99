package api

// Code is the machine-readable class of an error, from a closed list.
type Code string

// Error codes. [Code.Status] holds the status of each.
const (
	CodeInvalid        Code = "invalid_argument"    // the request is wrong; repeating it does not help
	CodeTooLarge       Code = "too_large"           // the body exceeds its bound
	CodeForbidden      Code = "forbidden"           // the peer's uid may not do this
	CodeNotFound       Code = "not_found"           // no such sandbox, image, file or route
	CodeExists         Code = "already_exists"      // the name is taken
	CodeConflict       Code = "conflict"            // the sandbox's state does not allow it, or no room is left
	CodeGone           Code = "gone"                // the sandbox ended during the request
	CodeProgramMissing Code = "program_not_found"   // exec: no such program in the sandbox (127 in shells)
	CodeProgramDenied  Code = "program_not_allowed" // exec: the program is not executable (126 in shells)
	CodeUnenforceable  Code = "unenforceable"       // this host cannot apply a requested limit or layer
	CodeRegistry       Code = "registry_error"      // the registry refused, is unreachable or sent invalid data
	CodeImage          Code = "image_invalid"       // digest, size, manifest or layer is invalid
	CodeBuild          Code = "build_failed"        // a program of a RUN instruction failed
	CodeNoLanguage     Code = "language_not_found"  // code: the sandbox has no program that runs the language
	CodeLibraries      Code = "install_failed"      // code: a package manager failed; the detail ends with its output
	CodeRefused        Code = "code_refused"        // code: a policy or the operator's hook refuses it
	CodeUnavailable    Code = "unavailable"         // the daemon is stopping, or the launcher cannot be reached
	CodeInternal       Code = "internal"            // defect of the daemon
)

// Status returns the HTTP status of the code. It uses numbers, because an import of net/http would
// reach the launcher, which is executed at every start of a sandbox.
func (c Code) Status() int {
	switch c {
	case CodeInvalid:
		return 400
	case CodeTooLarge:
		return 413
	case CodeForbidden, CodeRefused:
		return 403
	case CodeNotFound:
		return 404
	case CodeExists, CodeConflict:
		return 409
	case CodeGone:
		return 410
	case CodeProgramMissing, CodeProgramDenied, CodeUnenforceable, CodeImage, CodeBuild, CodeNoLanguage, CodeLibraries:
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

// Problem is an error in the form of RFC 9457. The client returns the Problem that it received as a
// Go error, so that errors.As works across the socket.
type Problem struct {
	Code   Code   `json:"code"`
	Title  string `json:"title"`          // the code in words
	Status int    `json:"status"`         // status of the response
	Detail string `json:"detail"`         // operation and cause, with the names involved
	Hint   string `json:"hint,omitempty"` // remedy
	// Findings are those of the code policies, by line; only of [CodeRefused].
	Findings []CodeFinding `json:"findings,omitempty"`
}

// Error returns the detail, followed by the hint in parentheses if there is one.
func (p *Problem) Error() string {
	if p.Hint == "" {
		return p.Detail
	}
	return p.Detail + " (" + p.Hint + ")"
}

// Is reports whether target is a *Problem with this code and no detail: errors.Is(err,
// &Problem{Code: CodeNotFound}).
func (p *Problem) Is(target error) bool {
	t, ok := target.(*Problem)
	return ok && t.Code == p.Code && t.Detail == ""
}
