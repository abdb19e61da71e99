package api

// Run is the body of POST /v1/run: create a sandbox, execute one program in it and delete it, in one call. It is
// answered as an exec is; the sandbox is gone when the answer ends, and also when the client goes away before that.
type Run struct {
	Sandbox CreateSandbox `json:"sandbox"`
	Exec    ExecRequest   `json:"exec"`
}

// CheckList is the answer to GET /v1/system/checks.
type CheckList struct {
	Checks []Check `json:"checks"`
}
