package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/faces/mcp/handoff"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/doctor"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// brokerArg is the first argument of the daemon's own program when it runs as a broker.
const brokerArg = "broker"

// Main runs a broker if the arguments ask for one. Every program that calls [Start] calls Main
// first.
func Main(args []string) (code int, handled bool) {
	if slices.Equal(args, launcher.WorkspaceArgs) {
		return launcher.WorkspaceMain(os.Stdin, os.Stderr), true
	}
	if len(args) != 1 || args[0] != brokerArg {
		return 0, false
	}
	// A terminal or a service manager signals the daemon too, and its orderly end is ours. The signals
	// are caught, not ignored, because children inherit ignored ones.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	b := new(broker)
	err := serve(context.Background(), b.handlers(), drainTimeout)
	b.end()
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		return 1, true
	}
	return 0, true
}

// broker holds the state of a broker process.
type broker struct {
	mu         sync.Mutex
	configured bool
	cfg        Config
	log        *slog.Logger
	adopted    cgroup.Subtree      // of the adopted launcher
	program    *os.File            // sandboxd-agent, as it was when the daemon started
	programErr error               // the reason if it could not be opened
	agents     map[int]*os.Process // running processes of agent runs, by pid
	mounted    int                 // answered requests for mounts, since the last launcher was started

	gateway, docker, mcp child
}

// child is a process of which there is one at a time.
type child struct {
	starting sync.Mutex    // held while it is started
	process  *os.Process   // the last one; nil if none was started. Guarded by starting
	ended    chan struct{} // closed when it has ended. Guarded by starting
}

func (b *broker) handlers() map[string]handler {
	return map[string]handler{
		requestConfigure:     handle(b.configure),
		requestAdoptLauncher: handle(b.adoptLauncher),
		requestStartLauncher: handle(func(ctx context.Context, _ none) (none, error) {
			cfg, _ := b.config()
			if err := launcher.Start(ctx, cfg.Launcher); err != nil {
				return none{}, err
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.mounted = 0
			return none{}, nil
		}),
		requestLeaveCgroups: handle(func(ctx context.Context, _ none) (none, error) {
			cfg, adopted := b.config()
			return none{}, errors.Join(adopted.Leave(ctx), cfg.Launcher.Cgroup.Leave(ctx))
		}),
		requestAbandonCgroups: handle(func(context.Context, none) (none, error) {
			cfg, _ := b.config()
			return none{}, cfg.Launcher.Cgroup.Abandon()
		}),
		requestChecks: handle(func(ctx context.Context, _ none) ([]api.Check, error) {
			cfg, _ := b.config()
			return doctor.Run(ctx, cfg.Launcher.DataDir), nil
		}),
		requestCredentials:  handle(credentials),
		requestLookup:       handle(lookup),
		requestHostLayer:    writeHostLayer,
		requestStartAgent:   b.startAgent,
		requestSignalAgent:  handle(b.signalAgent),
		requestStartGateway: b.startGateway,
		requestStartFace:    b.startFace,
		requestOpenMount:    b.openMount,
		requestCheckMount:   b.checkMount,
		requestMountRange:   b.mountRange,
		requestDialService:  b.dialService,

		requestMountWorkspace: b.mountWorkspace,
		requestReadConfig:     handle(b.readConfig),
	}
}

// config returns the configuration, and the cgroups of an adopted launcher.
func (b *broker) config() (Config, cgroup.Subtree) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cfg, b.adopted
}

func (b *broker) configure(_ context.Context, cfg Config) (none, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.configured {
		return none{}, errors.New("the broker is configured already")
	}
	b.configured, b.cfg, b.log = true, cfg, slog.New(slog.NewTextHandler(os.Stderr, nil))
	// The program that lies there now is the one to execute: a daemon that was taken over may replace
	// files, and an upgrade must not mix versions.
	b.program, b.programErr = os.OpenFile(cfg.Agents.Program, unix.O_PATH|unix.O_CLOEXEC, 0)
	return none{}, nil
}

// readConfig reads the config files that the first request named. A daemon that was taken over
// learns what it was started with, or will be.
func (b *broker) readConfig(context.Context, none) (map[string][]byte, error) {
	cfg, _ := b.config()
	return config.ReadAll(cfg.ConfigFiles)
}

func (b *broker) adoptLauncher(_ context.Context, pid int) (_ none, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.adopted, err = cgroup.Of(pid, b.cfg.Name)
	return none{}, err
}

// credentials reads a registry's credentials, which may run a credential helper of the user. It
// returns nil if there are none.
func credentials(ctx context.Context, r registry) (*authn.AuthConfig, error) {
	auth, err := authn.Resolve(ctx, authn.DefaultKeychain, r)
	if err != nil || auth == authn.Anonymous {
		return nil, err
	}
	return authn.Authorization(ctx, auth)
}

func lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	for i := range found {
		found[i] = found[i].Unmap()
	}
	return found, err
}

func writeHostLayer(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
	if len(files) != 1 {
		return nil, fmt.Errorf("want one file to write to, got %d", len(files))
	}
	return image.WriteHostLayer("/", files[0])
}

// startAgent starts sandboxd-agent to work on an agent run. The process outlives the broker,
// because runs outlive a daemon that is killed.
func (b *broker) startAgent(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
	if len(files) != 2 {
		return nil, fmt.Errorf("want two files, for stdin and stdout, got %d", len(files))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.cfg.Agents
	if !b.configured || len(b.agents) >= a.Max {
		return nil, fmt.Errorf("start an agent process: %d are running, which is the limit", len(b.agents))
	}
	if b.programErr != nil {
		return nil, fmt.Errorf("start an agent process: %w", b.programErr)
	}
	path := fmt.Sprintf("/proc/self/fd/%d", b.program.Fd())
	cmd := exec.Command(path, a.arguments()...) //nolint:noctx,gosec // our own program; it outlives the request
	cmd.Args[0] = a.Program
	cmd.Stdin, cmd.Stdout, cmd.Stderr = files[0], files[1], os.Stderr // stderr gets panics
	// A session of its own keeps Ctrl-C at the terminal of a foreground daemon from the process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start an agent process: %w", err)
	}
	if b.agents == nil {
		b.agents = map[int]*os.Process{}
	}
	pid := cmd.Process.Pid
	b.agents[pid] = cmd.Process
	go func() {
		err := cmd.Wait()
		b.mu.Lock()
		delete(b.agents, pid)
		log := b.log
		b.mu.Unlock()
		if err != nil {
			log.Warn("an agent process has ended", "pid", pid, "error", err)
		}
	}()
	return pid, nil
}

// arguments returns the arguments of sandboxd-agent for a hosted run.
func (a Agents) arguments() []string {
	args := []string{"--socket", a.Socket, "agent", "worker", "--runs", a.Runs}
	for _, dir := range a.Inputs {
		args = append(args, "--inputs", dir)
	}
	return args
}

// startGateway starts the process that relays the connections of sandboxes, as this program with an
// empty environment. There is one at a time: the one before is killed, so that the daemon, which
// cannot signal, gets rid of a gateway that does not answer.
func (b *broker) startGateway(_ context.Context, _ json.RawMessage, files []*os.File) (any, error) {
	if len(files) != 1 {
		return nil, fmt.Errorf("want one file, the gateway's socket, got %d", len(files))
	}
	return none{}, b.startChild(&b.gateway, "gateway", itself(egress.Argument), files)
}

// startFace starts a face as the first request has described it, with an empty environment.
func (b *broker) startFace(_ context.Context, args json.RawMessage, files []*os.File) (any, error) {
	if len(files) != 1 {
		return nil, fmt.Errorf("want one file, the face's socket, got %d", len(files))
	}
	var face Face
	if err := json.Unmarshal(args, &face); err != nil {
		return nil, err
	}
	cfg, _ := b.config()
	switch {
	case face == Docker && len(cfg.Docker) > 0:
		return none{}, b.startChild(&b.docker, "Docker face", itself(cfg.Docker...), files)
	case face == MCP && cfg.MCP != nil:
		return none{}, b.startMCP(cfg, files[0])
	}
	return nil, fmt.Errorf("start face %q: the daemon was not started with one", face)
}

// startMCP starts sandboxd-agent as the MCP face.
func (b *broker) startMCP(cfg Config, socket *os.File) error {
	if b.programErr != nil {
		return fmt.Errorf("start the MCP face: %w", b.programErr)
	}
	request, err := cfg.MCP.File()
	if err != nil {
		return fmt.Errorf("start the MCP face: %w", err)
	}
	defer request.Close()
	// The child has the files at descriptors 3 and 4 before it executes the program.
	program, err := unix.FcntlInt(b.program.Fd(), unix.F_DUPFD_CLOEXEC, 5)
	if err != nil {
		return fmt.Errorf("start the MCP face: %w", os.NewSyscallError("fcntl", err))
	}
	defer unix.Close(program)
	cmd := exec.Command(fmt.Sprintf("/proc/self/fd/%d", program), handoff.Command, "4") //nolint:noctx,gosec // our own program; it outlives the request
	cmd.Args[0] = cfg.Agents.Program
	return b.startChild(&b.mcp, "MCP face", cmd, []*os.File{socket, request})
}

// itself returns the command of this program.
func itself(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...) //nolint:noctx,gosec // our own program; it outlives the request
	cmd.Args[0] = os.Args[0]
	return cmd
}

// startChild starts a child of which there is one, with files from descriptor 3 on, and kills the
// one before.
func (b *broker) startChild(c *child, what string, cmd *exec.Cmd, files []*os.File) error {
	b.mu.Lock()
	configured, log := b.configured, b.log
	b.mu.Unlock()
	if !configured {
		return fmt.Errorf("start the %s: the broker is not configured", what)
	}
	c.starting.Lock()
	defer c.starting.Unlock()
	c.kill()
	cmd.ExtraFiles = files
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr // panics
	cmd.Env = []string{}                          // ours may have secrets
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // as for an agent process; also it gets no terminal
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the %s: %w", what, err)
	}
	ended := make(chan struct{})
	c.process, c.ended = cmd.Process, ended
	go func() {
		defer close(ended)
		if err := cmd.Wait(); err != nil {
			log.Warn("the "+what+" process has ended", "error", err)
		}
	}()
	return nil
}

// end kills the children for the end of the broker.
func (b *broker) end() {
	for _, c := range []*child{&b.gateway, &b.docker, &b.mcp} {
		c.starting.Lock()
		c.kill()
		c.starting.Unlock()
	}
}

// kill kills the child, if there is one, and waits for its end. The caller holds starting.
func (c *child) kill() {
	if c.process == nil {
		return
	}
	_ = c.process.Kill() // it may have ended
	<-c.ended
	c.process = nil
}

// signalAgent signals a process that this broker has started, and no other: the daemon may have
// been taken over.
func (b *broker) signalAgent(_ context.Context, s agentSignal) (none, error) {
	b.mu.Lock()
	process := b.agents[s.PID]
	b.mu.Unlock()
	if process == nil {
		return none{}, fmt.Errorf("no agent process has the pid %d", s.PID)
	}
	sig := syscall.SIGTERM
	if s.Kill {
		sig = syscall.SIGKILL
	}
	if err := process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return none{}, fmt.Errorf("signal agent process %d: %w", s.PID, err)
	}
	return none{}, nil
}

// mountRange makes the mounts of a range of host ids, for the launcher. A daemon that was taken
// over chooses a number and nothing else: the directories are fixed, and the launcher's root
// reaches no more through the mounts than it reaches anyway. Each range may be asked for twice,
// because a launcher may refuse mounts, or the answer be lost.
func (b *broker) mountRange(ctx context.Context, args json.RawMessage, files []*os.File) (_ any, err error) {
	var number int
	if err := decodeStrict(args, &number); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("want one socket to send the mounts to, got %d files", len(files))
	}
	b.mu.Lock()
	cfg, most := b.cfg.Launcher, 2*b.cfg.Launcher.IDs.Ranges()
	ok := b.configured && b.mounted < most
	if ok {
		b.mounted++
	}
	b.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("mount a range of ids: %d have been mounted for this launcher, which is the limit", most)
	}
	defer func() {
		if err != nil { // nothing was sent
			b.mu.Lock()
			defer b.mu.Unlock()
			b.mounted--
		}
	}()
	mounts, err := launcher.MountRange(ctx, cfg, number)
	if err != nil {
		return nil, err
	}
	defer closeAll(mounts)
	var fds []int
	for _, m := range mounts {
		fds = append(fds, int(m.Fd()))
	}
	if err := unix.Sendmsg(int(files[0].Fd()), []byte{0}, unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return nil, fmt.Errorf("send the mounts of range %d: %w", number, err)
	}
	return none{}, nil
}

// openMount makes a mount of the host's files for a sandbox. A daemon that was taken over gets what
// lies below the roots that the operator named, and nothing else.
func (b *broker) openMount(ctx context.Context, args json.RawMessage, files []*os.File) (any, error) {
	var req launcher.MountRequest
	if err := decodeStrict(args, &req); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	return b.giveMount(files, func(o launcher.Options) (*os.File, error) { return launcher.OpenMount(ctx, o, req) })
}

// checkMount checks the source of a mount, and makes it if it is asked to. A daemon that was taken
// over makes empty directories below the roots that the operator named.
func (b *broker) checkMount(_ context.Context, args json.RawMessage, _ []*os.File) (any, error) {
	var req mountCheck
	if err := decodeStrict(args, &req); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	b.mu.Lock()
	cfg, configured := b.cfg, b.configured
	b.mu.Unlock()
	if !configured {
		return nil, errors.New("check a mount: the broker is not configured")
	}
	err := cfg.Launcher.Mounts.Check(req.Source, req.Create)
	if errors.Is(err, runtime.ErrMount) {
		return mounted{Refused: err.Error()}, nil
	}
	return mounted{}, err
}

// mountWorkspace makes the mount of a workspace, for the launcher. A daemon that was taken over
// names any directory of the user outside sandboxd's own, and reads it in a sandbox: it can change
// nothing there.
func (b *broker) mountWorkspace(ctx context.Context, args json.RawMessage, files []*os.File) (any, error) {
	var w launcher.WorkspaceMount
	if err := decodeStrict(args, &w); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	return b.giveMount(files, func(o launcher.Options) (*os.File, error) { return launcher.MountWorkspace(ctx, o, w) })
}

// giveMount makes a mount and sends it through the one file. That a source may not be mounted is an
// answer.
func (b *broker) giveMount(files []*os.File, open func(o launcher.Options) (*os.File, error)) (any, error) {
	if len(files) != 1 {
		return nil, fmt.Errorf("want one socket to send the mount to, got %d files", len(files))
	}
	b.mu.Lock()
	cfg, configured := b.cfg, b.configured
	b.mu.Unlock()
	if !configured {
		return nil, errors.New("make a mount: the broker is not configured")
	}
	m, err := open(cfg.Launcher)
	if errors.Is(err, runtime.ErrMount) {
		return mounted{Refused: err.Error()}, nil
	}
	if err != nil {
		return nil, err
	}
	defer m.Close()
	if err := unix.Sendmsg(int(files[0].Fd()), []byte{0}, unix.UnixRights(int(m.Fd())), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return nil, fmt.Errorf("send the mount: %w", err)
	}
	return mounted{}, nil
}

// dialService connects to a Unix socket that the operator named. A daemon that was taken over
// chooses a name: the paths are fixed.
func (b *broker) dialService(ctx context.Context, args json.RawMessage, files []*os.File) (any, error) {
	var name string
	if err := decodeStrict(args, &name); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("want one socket to send the connection to, got %d files", len(files))
	}
	cfg, _ := b.config()
	path, ok := cfg.Services[name]
	if !ok {
		return nil, errors.New("the operator has named no such socket")
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, pathless(err)
	}
	defer conn.Close()
	f, err := conn.(*net.UnixConn).File() //nolint:forcetypeassert // of the network unix
	if err != nil {
		return nil, pathless(err)
	}
	defer f.Close()
	if err := unix.Sendmsg(int(files[0].Fd()), []byte{0}, unix.UnixRights(int(f.Fd())), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return nil, fmt.Errorf("send the connection: %w", err)
	}
	return none{}, nil
}

// pathless returns the kernel's reason for the failure of a connection. Sandboxes read it, and must
// not learn the path.
func pathless(err error) error {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return errors.New("the socket cannot be reached")
}

// handler handles a request. Its files are closed afterwards.
type handler func(ctx context.Context, args json.RawMessage, files []*os.File) (result any, err error)

// handle returns the handler of a function that takes and returns values, and no files.
func handle[A, R any](do func(ctx context.Context, args A) (R, error)) handler {
	return func(ctx context.Context, args json.RawMessage, files []*os.File) (any, error) {
		var a A
		if err := decodeStrict(args, &a); err != nil {
			return nil, fmt.Errorf("decode: %w", err)
		}
		if len(files) > 0 {
			return nil, fmt.Errorf("%d unexpected files", len(files))
		}
		return do(ctx, a)
	}
}

// serve handles requests until the client has ended, then drains those in progress. After an error,
// which includes requests that ignore their cancellation, the program has to end.
func serve(ctx context.Context, handlers map[string]handler, drain time.Duration) (err error) {
	unix.CloseOnExec(fdRequests)
	conn, err := unixConn(os.NewFile(fdRequests, "broker"))
	if err != nil {
		return fmt.Errorf("run broker: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer func() {
		_ = conn.Close()
		cancel()
		err = errors.Join(err, waitFor(&running, drain))
	}()
	slots := make(chan struct{}, maxRequests)
	for {
		req, to, files, err := receive(conn)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("run broker: %w", err)
		}
		select {
		case slots <- struct{}{}:
		default:
			refuse(to)
			closeAll(files)
			continue
		}
		running.Go(func() {
			defer func() { <-slots }()
			defer closeAll(files)
			defer to.Close()
			respond(ctx, req, to, files, handlers)
		})
	}
}

// refuse answers a request over the limit. It must not block, because all other requests wait
// meanwhile. The socket buffer of a client that listens has room. A write deadline does not do: if
// it passes before the write begins, nothing is written, and the client takes the broker for gone.
func refuse(to *net.UnixConn) {
	defer to.Close()
	text, err := json.Marshal(&answer{Error: fmt.Sprintf("%d broker requests are in progress already", maxRequests)})
	if err != nil {
		return
	}
	rc, err := to.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		_ = unix.Sendmsg(int(fd), text, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) // lost if the client does not read
	})
}

// waitFor waits until all cancelled requests have returned, or for the timeout.
func waitFor(running *sync.WaitGroup, timeout time.Duration) error {
	ended := make(chan struct{})
	go func() {
		running.Wait()
		close(ended)
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-ended:
		return nil
	case <-timer.C:
		return fmt.Errorf("cancelled broker requests are still running after %v", timeout)
	}
}

// respond handles one request and answers it. The client may be gone by then.
func respond(ctx context.Context, req *request, to *net.UnixConn, files []*os.File, handlers map[string]handler) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		// The client sends nothing: Read returns when it closes its end, or at the deadline below.
		_, _ = to.Read(make([]byte, 1))
		cancel()
	}()
	var a answer
	handle := handlers[req.Request]
	if handle == nil {
		a.Error = fmt.Sprintf("no broker request is called %q", req.Request)
	} else if result, err := handle(ctx, req.Args, files); err != nil {
		a.Error = err.Error()
	} else if a.Result, err = json.Marshal(result); err != nil {
		a.Error = fmt.Sprintf("encode the result of broker request %s: %v", req.Request, err)
	}
	_ = to.SetReadDeadline(time.Unix(1, 0))
	<-watched
	_ = to.SetWriteDeadline(time.Now().Add(endTimeout)) // a client that does not read must not hold a slot
	_ = json.NewEncoder(to).Encode(&a)
}
