package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/faces/mcp/handoff"
	"github.com/sandboxd/sandboxd/internal/hostdir"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
)

// ErrGone is the error of every request to a broker that has ended.
var ErrGone = errors.New("the broker process is gone; restart the daemon")

// The consequences of a lost broker, and the remedy, as log and doctor report them.
const (
	GoneMeans = "launchers and gateways that die are not replaced, agent runs do not start, credentials and addresses of registries are not found, " +
		"and the host is not examined"
	GoneRemedy = "restart the daemon, sandboxes keep running: sandboxd shutdown --keep-sandboxes, then sandboxd serve"
)

// peerGone lists the errors of a write to a socket whose peer, or our end, is closed. Other errors,
// such as a lack of memory, are transient.
var peerGone = []error{unix.EPIPE, unix.ECONNRESET, unix.ECONNREFUSED, unix.ENOTCONN, net.ErrClosed}

// Config fixes what a broker acts on, before the daemon reads anything hostile.
type Config struct {
	Launcher launcher.Options `json:"launcher"`
	// Name is the name of the daemon's cgroups.
	Name   string `json:"name"`
	Agents Agents `json:"agents"`
	// Services are the paths of the host's Unix sockets that sandboxes may reach, by name.
	Services map[string]string `json:"services,omitempty"`
	// Docker are the arguments of the program for the Docker face; empty: there is none.
	Docker []string `json:"docker,omitempty"`
	// MCP is the request of the MCP face; nil: there is none.
	MCP *handoff.Request `json:"mcp,omitempty"`
	// ConfigFiles are the files that the daemon may have read again.
	ConfigFiles []string `json:"config_files,omitempty"`
}

// Face names a face that the broker starts.
type Face string

// The faces that are processes of their own.
const (
	Docker Face = "docker"
	MCP    Face = "mcp"
)

// Agents describes the processes of hosted agent runs.
type Agents struct {
	// Program is the path of sandboxd-agent.
	Program string   `json:"program"`
	Socket  string   `json:"socket"`
	Runs    string   `json:"runs"`
	Inputs  []string `json:"inputs,omitempty"`
	// Max limits the processes, so that a daemon that was taken over starts no more.
	Max int `json:"max"`
}

// Client is the daemon's handle on its broker process.
type Client struct {
	conn      *net.UnixConn
	ended     chan struct{}
	dials     chan struct{} // places of requests to connect to services: sandboxes make these
	hookDials chan struct{} // places of requests to connect to the code hook

	mu     sync.Mutex
	closed bool
}

// Start starts the calling program a second time, as a broker with the configuration. Close ends
// it.
func Start(ctx context.Context, cfg Config) (*Client, error) {
	c, err := start(brokerArg)
	if err != nil {
		return nil, err
	}
	if err := c.send(ctx, requestConfigure, &cfg, nil); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func start(args ...string) (*Client, error) {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		return nil, fmt.Errorf("start broker: %w", err)
	}
	defer theirs.Close()
	conn, err := unixConn(ours)
	if err != nil {
		return nil, fmt.Errorf("start broker: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", args...) //nolint:noctx,gosec // our own program; it ends when its socket does
	cmd.Args[0] = os.Args[0]
	cmd.ExtraFiles = []*os.File{theirs} // fdRequests
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start broker: %w", err), conn.Close())
	}
	c := &Client{conn: conn, ended: make(chan struct{}), dials: make(chan struct{}, maxDials), hookDials: make(chan struct{}, maxDials)}
	go func() {
		_ = cmd.Wait() // each later request reports the end
		close(c.ended)
	}()
	return c, nil
}

// Close cancels all requests and returns when the broker has ended. A second call does nothing.
// Close does not kill the broker, because a confined daemon may not be able to.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	err := c.conn.Close()
	timer := time.NewTimer(endTimeout)
	defer timer.Stop()
	select {
	case <-c.ended:
		return err
	case <-timer.C:
		return errors.Join(err, fmt.Errorf("the broker did not end within %v", endTimeout))
	}
}

// Gone returns a channel that is closed when the broker has ended.
func (c *Client) Gone() <-chan struct{} { return c.ended }

// IsGone reports whether the broker has ended.
func (c *Client) IsGone() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// StartLauncher starts a launcher.
func (c *Client) StartLauncher(ctx context.Context) error {
	return c.call(ctx, requestStartLauncher, none{}, nil)
}

// AdoptLauncher names a launcher that an earlier daemon has started, perhaps in other cgroups,
// which LeaveCgroups then removes too.
func (c *Client) AdoptLauncher(ctx context.Context, pid int) error {
	return c.call(ctx, requestAdoptLauncher, pid, nil)
}

// LeaveCgroups removes the daemon's cgroups, once its launcher has ended.
func (c *Client) LeaveCgroups(ctx context.Context) error {
	return c.call(ctx, requestLeaveCgroups, none{}, nil)
}

// AbandonCgroups removes the cgroups of a daemon that has not started a launcher.
func (c *Client) AbandonCgroups(ctx context.Context) error {
	return c.call(ctx, requestAbandonCgroups, none{}, nil)
}

// Checks examines the host, or reports in a check why that was not possible.
func (c *Client) Checks(ctx context.Context) (found []api.Check) {
	switch err := c.send(ctx, requestChecks, none{}, &found); {
	case errors.Is(err, ErrGone):
		return []api.Check{{Name: "broker", Found: ErrGone.Error(), Means: GoneMeans, Remedy: GoneRemedy}}
	case err != nil:
		return []api.Check{{Name: "checks", Found: err.Error(), Means: "the host could not be examined", Remedy: "try again"}}
	}
	return found
}

// Lookup resolves a host name.
func (c *Client) Lookup(ctx context.Context, host string) (found []netip.Addr, err error) {
	err = c.call(ctx, requestLookup, host, &found)
	return found, err
}

// ReadConfig returns the contents of the config files, by path. One that is missing has none.
func (c *Client) ReadConfig(ctx context.Context) (contents map[string][]byte, err error) {
	err = c.call(ctx, requestReadConfig, none{}, &contents)
	return contents, err
}

// WriteHostLayer writes the layer of the host image to a file.
func (c *Client) WriteHostLayer(ctx context.Context, to *os.File) (hostDirs []string, err error) {
	err = c.call(ctx, requestHostLayer, none{}, &hostDirs, to)
	return hostDirs, err
}

// StartAgent starts a process for an agent run.
func (c *Client) StartAgent(ctx context.Context, stdin, stdout *os.File) (pid int, err error) {
	err = c.call(ctx, requestStartAgent, none{}, &pid, stdin, stdout)
	return pid, err
}

// SignalAgent terminates or kills a process that StartAgent has started.
func (c *Client) SignalAgent(ctx context.Context, pid int, kill bool) error {
	return c.call(ctx, requestSignalAgent, agentSignal{pid, kill}, nil)
}

// StartGateway starts a gateway process that serves the socket, and kills the one before.
func (c *Client) StartGateway(ctx context.Context, socket *os.File) error {
	return c.call(ctx, requestStartGateway, none{}, nil, socket)
}

// StartFace starts a face, and kills the one before. The face ends when the other end of the socket
// is closed.
func (c *Client) StartFace(ctx context.Context, face Face, socket *os.File) error {
	return c.call(ctx, requestStartFace, face, nil, socket)
}

// MountRange makes the mounts of a range of host ids.
func (c *Client) MountRange(ctx context.Context, number int) ([]*os.File, error) {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	err = c.call(ctx, requestMountRange, number, nil, theirs)
	_ = theirs.Close() // the broker has a copy
	if err != nil {
		return nil, err
	}
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive the mounts of range %d: %w", number, err)
	}
	return rights(oob[:n]), nil
}

// OpenMount makes a mount of the host's files, attached nowhere. A source that may not be mounted
// is a [hostdir.Refusal].
func (c *Client) OpenMount(ctx context.Context, req launcher.MountRequest) (*os.File, error) {
	return c.mount(ctx, requestOpenMount, req, req.Source)
}

// CheckMount fails with a [hostdir.Refusal] if a source may not be mounted. With create, missing
// directories of it are made.
func (c *Client) CheckMount(ctx context.Context, source string, create bool) error {
	var result mounted
	if err := c.call(ctx, requestCheckMount, mountCheck{source, create}, &result); err != nil {
		return err
	}
	if result.Refused != "" {
		return &hostdir.Refusal{Reason: result.Refused}
	}
	return nil
}

// MountWorkspace makes the mount of a workspace, like [Client.OpenMount].
func (c *Client) MountWorkspace(ctx context.Context, w launcher.WorkspaceMount) (*os.File, error) {
	return c.mount(ctx, requestMountWorkspace, w, w.Source)
}

func (c *Client) mount(ctx context.Context, request string, args any, source string) (*os.File, error) {
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	var result mounted
	err = c.call(ctx, request, args, &result, theirs)
	_ = theirs.Close() // the broker has a copy
	if err != nil {
		return nil, err
	}
	if result.Refused != "" {
		return nil, &hostdir.Refusal{Reason: result.Refused}
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive the mount of %s: %w", source, err)
	}
	files := rights(oob[:n])
	if len(files) != 1 {
		closeAll(files)
		return nil, fmt.Errorf("receive the mount of %s: %d files have come", source, len(files))
	}
	return files[0], nil
}

// DialService connects to the Unix socket with this name for a sandbox. Few requests are under way
// at a time, and further ones wait: sandboxes must not take the places of others.
func (c *Client) DialService(ctx context.Context, name string) (*net.UnixConn, error) {
	return c.dial(ctx, c.dials, name)
}

// DialHook is [Client.DialService] for the code hook. It has places of its own: sandboxes, which
// can have services that do not accept, must not keep code from being judged.
func (c *Client) DialHook(ctx context.Context, name string) (*net.UnixConn, error) {
	return c.dial(ctx, c.hookDials, name)
}

func (c *Client) dial(ctx context.Context, places chan struct{}, name string) (*net.UnixConn, error) {
	select {
	case places <- struct{}{}:
		defer func() { <-places }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_SEQPACKET, "broker")
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	err = c.call(ctx, requestDialService, name, nil, theirs)
	_ = theirs.Close() // the broker has a copy
	if err != nil {
		return nil, err
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(ours.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("receive the connection: %w", err)
	}
	files := rights(oob[:n])
	if len(files) != 1 {
		closeAll(files)
		return nil, fmt.Errorf("receive the connection: %d files have come", len(files))
	}
	return unixConn(files[0])
}

// Resolve implements authn.Keychain.
func (c *Client) Resolve(r authn.Resource) (authn.Authenticator, error) {
	return c.ResolveContext(context.Background(), r)
}

// ResolveContext implements authn.ContextKeychain.
func (c *Client) ResolveContext(ctx context.Context, r authn.Resource) (authn.Authenticator, error) {
	var found *authn.AuthConfig
	if err := c.call(ctx, requestCredentials, registry{r.String(), r.RegistryStr()}, &found); err != nil {
		return nil, err
	}
	if found == nil {
		return authn.Anonymous, nil
	}
	return authn.FromConfig(*found), nil
}

// call is send, except that a lost broker is an API problem with the remedy.
func (c *Client) call(ctx context.Context, name string, args, result any, files ...*os.File) error {
	err := c.send(ctx, name, args, result, files...)
	if errors.Is(err, ErrGone) {
		return &api.Problem{
			Code: api.CodeUnavailable, Title: "Unavailable", Status: api.CodeUnavailable.Status(), Detail: err.Error(), Hint: GoneRemedy,
		}
	}
	return err
}

// send sends a request with its files and decodes the result into result, unless that is nil. If
// the request itself fails, the error has the broker's text.
func (c *Client) send(ctx context.Context, name string, args, result any, files ...*os.File) error {
	err := c.exchange(ctx, name, args, result, files)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%s: %w", name, ctx.Err())
	}
	return err
}

func (c *Client) exchange(ctx context.Context, name string, args, result any, files []*os.File) error {
	encoded, err := json.Marshal(args)
	if err != nil {
		return fmt.Errorf("encode broker request %s: %w", name, err)
	}
	packet, err := json.Marshal(request{name, encoded})
	if err != nil {
		return fmt.Errorf("encode broker request %s: %w", name, err)
	}
	if len(packet) > maxRequest || len(files) > maxFiles {
		return fmt.Errorf("broker request %s is too large: %d bytes and %d files", name, len(packet), len(files))
	}
	ours, theirs, err := unixmsg.Pair(unix.SOCK_STREAM, "broker")
	if err != nil {
		return err
	}
	conn, err := unixConn(ours)
	if err != nil {
		return errors.Join(err, theirs.Close())
	}
	defer conn.Close()
	fds := []int{int(theirs.Fd())}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	_, _, err = c.conn.WriteMsgUnix(packet, unix.UnixRights(fds...), nil)
	_ = theirs.Close() // the broker has a copy
	if err != nil {
		if slices.ContainsFunc(peerGone, func(is error) bool { return errors.Is(err, is) }) {
			err = fmt.Errorf("%w (%w)", ErrGone, err)
		}
		return fmt.Errorf("send broker request %s: %w", name, err)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	data, err := io.ReadAll(io.LimitReader(conn, maxAnswer+1))
	if err != nil {
		return fmt.Errorf("wait for broker request %s: %w", name, err)
	}
	var a answer
	switch {
	case len(data) == 0:
		return fmt.Errorf("wait for broker request %s: %w", name, ErrGone)
	case len(data) > maxAnswer:
		return fmt.Errorf("broker request %s: the answer is larger than %d bytes", name, maxAnswer)
	}
	if err := decodeStrict(data, &a); err != nil {
		return fmt.Errorf("decode the answer of broker request %s: %w", name, err)
	}
	if a.Error != "" {
		return errors.New(a.Error)
	}
	if result == nil {
		return nil
	}
	if err := decodeStrict(a.Result, result); err != nil {
		return fmt.Errorf("decode the result of broker request %s: %w", name, err)
	}
	return nil
}
