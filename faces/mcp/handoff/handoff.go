// Package handoff hands the request of an MCP face from the command line to the program that serves
// it: only sandboxd-agent links the protocol's SDK.
package handoff

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

// Command is the name of sandboxd-agent's command that serves a [Request]. Its argument is the
// number of the descriptor that has it.
const Command = "mcp"

// Request describes a face, after all flags are checked.
type Request struct {
	Version string            `json:"version"` // of sandboxd
	Socket  string            `json:"socket"`  // of the daemon, an absolute path
	Sandbox api.CreateSandbox `json:"sandbox"` // as in the face's options, as are the next two
	Images  []string          `json:"images,omitempty"`
	Timeout time.Duration     `json:"timeout,omitempty"`
	Listen  []string          `json:"listen,omitempty"` // addresses, or unix:PATH; none: stdin and stdout
	// Tied means that the daemon has started the face, which ends with its descriptor 3.
	Tied bool `json:"tied,omitempty"`
}

// File returns an anonymous file with the request. Arguments would not do: other users can read
// them, and variables may be secret.
func (r *Request) File() (*os.File, error) {
	data, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("mcp", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "request")
	if _, err := f.WriteAt(data, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Exec executes sandboxd-agent in the place of this process. It returns only on error.
func (r *Request) Exec() (err error) {
	defer func() { err = fmt.Errorf("start the MCP face: %w", err) }()
	path, err := dirs.Program(dirs.AgentProgram)
	if err != nil {
		return err
	}
	f, err := r.File()
	if err != nil {
		return err
	}
	fd := int(f.Fd())
	if _, err = unix.FcntlInt(f.Fd(), unix.F_SETFD, 0); err == nil {
		args := []string{path, Command, strconv.Itoa(fd)}
		err = &os.PathError{Op: "execute", Path: path, Err: syscall.Exec(path, args, os.Environ())} //nolint:gosec // G204: our own program
	}
	return errors.Join(err, f.Close())
}

// Read reads the request from the descriptor with the number, and closes it.
func Read(number string) (r Request, err error) {
	fd, err := strconv.Atoi(number)
	if err != nil || fd < 3 {
		return r, fmt.Errorf("%q is no descriptor of a request; sandboxd mcp makes one", number)
	}
	f := os.NewFile(uintptr(fd), "request")
	err = json.NewDecoder(f).Decode(&r)
	return r, errors.Join(err, f.Close())
}
