package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
)

// DialPort connects to a server that listens on a port of a sandbox's loopback. The context bounds
// the connecting only. The connection has CloseWrite; the caller closes it.
func (c *Client) DialPort(ctx context.Context, id string, port uint16) (_ net.Conn, err error) {
	target, err := request{path: []string{"v1", "sandboxes", id, "ports", strconv.Itoa(int(port))}}.url()
	if err != nil {
		return nil, err
	}
	conn, err := dial(ctx, c.socket)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			err = errors.Join(fmt.Errorf("connect to port %d of the sandbox: %w", port, err), ignoreClosed(conn.Close()))
		}
	}()
	req, err := http.NewRequest(http.MethodPost, target, http.NoBody) //nolint:noctx // see above
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", api.UpgradeTCP)
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	buffered := bufio.NewReader(conn)
	resp, err := http.ReadResponse(buffered, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, problem(resp)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%T is no Unix socket", conn)
	}
	return &portConn{unix, buffered}, nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// portConn reads first what came together with the answer.
type portConn struct {
	*net.UnixConn
	buffered *bufio.Reader
}

func (c *portConn) Read(p []byte) (int, error) { return c.buffered.Read(p) }
