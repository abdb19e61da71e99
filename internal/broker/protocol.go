package broker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxRequest and maxAnswer limit the size of messages, in bytes.
	maxRequest = 64 << 10
	maxAnswer  = 1 << 20
	// maxFiles limits the files of a request, without the answer socket.
	maxFiles = 2
	// maxRequests limits the requests in progress; the broker refuses more.
	maxRequests = 64
	// maxDials limits those of them that sandboxes cause, and those to the code hook.
	maxDials = 8
	// fdRequests is the broker's end of the request socket.
	fdRequests = 3
	// drainTimeout limits how long a broker waits for cancelled requests: some run programs that
	// ignore cancellation.
	drainTimeout = 5 * time.Second
	// endTimeout limits how long a broker may take to end.
	endTimeout = 2 * drainTimeout
)

// The names of requests.
const (
	requestConfigure      = "configure" // once, before any other; takes a [Config]
	requestStartLauncher  = "start-launcher"
	requestAdoptLauncher  = "adopt-launcher"  // takes the pid of a running launcher
	requestLeaveCgroups   = "leave-cgroups"   // removes the cgroups of the daemon and its launcher
	requestAbandonCgroups = "abandon-cgroups" // undoes the preparation of cgroups
	requestChecks         = "checks"
	requestCredentials    = "credentials" // takes a registry
	requestLookup         = "lookup"      // takes a host name
	requestHostLayer      = "host-layer"  // takes the file to write to
	requestStartAgent     = "start-agent" // takes the files for stdin and stdout; returns the pid
	requestSignalAgent    = "signal-agent"
	requestStartGateway   = "start-gateway"   // takes the socket that the gateway serves
	requestStartFace      = "start-face"      // takes a [Face], and the socket that ends it when the daemon's end is closed
	requestReadConfig     = "read-config"     // returns the contents of the config files, by path
	requestMountRange     = "mount-range"     // takes the number of a range of ids, and the socket to send its mounts to
	requestMountWorkspace = "mount-workspace" // takes a [launcher.WorkspaceMount], and the socket to send its mount to
	requestOpenMount      = "open-mount"      // takes a [launcher.MountRequest], and the socket to send the mount to
	requestCheckMount     = "check-mount"     // takes a [mountCheck]
	requestDialService    = "dial-service"    // takes the name of a service, and the socket to send the connection to
)

type request struct {
	Request string          `json:"request"`
	Args    json.RawMessage `json:"args,omitempty"`
}

type answer struct {
	Error  string          `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
}

// mountCheck is the argument of requestCheckMount.
type mountCheck struct {
	Source string `json:"source"`
	Create bool   `json:"create,omitempty"` // missing directories of it
}

// mounted is the result of requestCheckMount, requestOpenMount and requestMountWorkspace.
type mounted struct {
	Refused string `json:"refused,omitempty"` // the reason why that may not be mounted
}

// none is an empty argument or result.
type none struct{}

// registry identifies the registry that credentials are for: an authn.Resource on the wire.
type registry struct {
	Repository string `json:"repository"`
	Address    string `json:"address"`
}

func (r registry) String() string      { return r.Repository }
func (r registry) RegistryStr() string { return r.Address }

// agentSignal is the argument of requestSignalAgent.
type agentSignal struct {
	PID  int  `json:"pid"`
	Kill bool `json:"kill"`
}

// receive reads the next valid request. It drops an invalid one, which closes its answer socket.
func receive(conn *net.UnixConn) (*request, *net.UnixConn, []*os.File, error) {
	for {
		data := make([]byte, maxRequest+1)
		oob := make([]byte, unix.CmsgSpace((1+maxFiles)*4))
		n, oobn, flags, _, err := conn.ReadMsgUnix(data, oob)
		if err != nil {
			return nil, nil, nil, err
		}
		files := rights(oob[:oobn])
		if n == 0 && len(files) == 0 {
			return nil, nil, nil, io.EOF
		}
		req := new(request)
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || n > maxRequest || len(files) == 0 || decodeStrict(data[:n], req) != nil {
			closeAll(files)
			continue
		}
		to, err := unixConn(files[0])
		if err != nil {
			closeAll(files[1:])
			continue
		}
		return req, to, files[1:], nil
	}
}

// rights returns the descriptors of a control message.
func rights(oob []byte) (files []*os.File) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // another kind of message
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "broker request"))
		}
	}
	return files
}

// decodeStrict decodes data that is exactly one value without unknown fields.
func decodeStrict(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if d.More() {
		return errors.New("data after the value")
	}
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// unixConn returns the connection of a socket's file, and closes the file.
func unixConn(f *os.File) (*net.UnixConn, error) {
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T is no Unix socket", conn), conn.Close(), syscall.ENOTSOCK)
	}
	return c, nil
}
