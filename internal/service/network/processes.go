package network

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/runtime"
)

const (
	// processTime bounds the search for a process.
	processTime = time.Second
	// processRate, a second, and processBurst bound the searches for all sandboxes: a gateway that was
	// taken over knows no bound. One reads the links of a sandbox's descriptors, 16384 at most.
	processRate, processBurst = 100, 400
)

// ErrNoHolder is the error of a socket that no process has, or of which that is not known.
var ErrNoHolder = errors.New("no process has the socket")

// processes finds the processes that have the program's end of a connection.
type processes struct {
	// holder returns the process of a sandbox, or of one that shares its network, that has a socket.
	holder func(ctx context.Context, id string, inode uint32) (api.FlowProcess, error)
	limit  *rate.Limiter
	// asking serializes the questions about sockets: those of a sandbox share one netlink socket. Each
	// takes some microseconds.
	asking sync.Mutex
}

func newProcesses(holder func(context.Context, string, uint32) (api.FlowProcess, error)) *processes {
	return &processes{holder: holder, limit: rate.NewLimiter(processRate, processBurst)}
}

// process implements [egress.Config.Process]. The kernel tells the inode of the program's socket by
// the two ends of its connection; the sandbox's init tells which process has it.
func (n *Networks) process(ctx context.Context, id string, of gateway.Ends) *gateway.Process {
	p := n.processes
	if p.holder == nil || n.opts.Engine == nil || !p.limit.Allow() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, processTime)
	defer cancel()
	diag, err := n.opts.Engine.NetworkSocket(ctx, id, runtime.SocketDiag)
	if err != nil {
		return nil // the sandbox has ended, or the kernel does not tell
	}
	p.asking.Lock()
	inode, err := netns.Inode(diag, of.Protocol, of.Program, of.Server)
	p.asking.Unlock()
	if err = errors.Join(err, diag.Close()); err != nil {
		n.opts.Log.Debug("the process of a flow is not known", "id", id, "error", err)
		return nil
	}
	if inode == 0 {
		return nil
	}
	found, err := p.holder(ctx, id, inode)
	if err != nil {
		if !errors.Is(err, ErrNoHolder) {
			n.opts.Log.Debug("the process of a flow is not known", "id", id, "error", err)
		}
		return nil
	}
	return (*gateway.Process)(&found)
}
