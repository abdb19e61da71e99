package host

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/internal/guest"
)

// A Process describes one process of a sandbox. Init is the source; the host has only checked that
// the values are possible.
type Process struct {
	PID, PPID int // inside the sandbox
	UID       uint32
	State     string // one letter, as ps(1) explains it
	Age       time.Duration
	CPU       time.Duration // user and system
	RSS       int64         // bytes
	Name      string        // kernel's name for it; valid UTF-8
	Argv      []string      // at most 4 KiB, and 1 MiB for all processes; any bytes. Nil of a zombie
	Cut       bool          // there are more arguments
	Main      int           // pid of the main process of its exec; 0 if that has ended
}

// Processes lists the processes of the sandbox without init, 4096 at most.
func (c *Client) Processes(ctx context.Context) (_ []Process, err error) {
	req, err := guest.Encode(guest.KindProcesses, guest.None{})
	if err != nil {
		return nil, err
	}
	conn, pkt, _, err := c.request(ctx, replyTimeout, req, nil, guest.KindListing, 0)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer func() { _ = conn.Close() }()
	defer conn.endsWith(ctx)()
	if err := pkt.Into(&guest.None{}, 0); err != nil {
		return nil, fmt.Errorf("list processes: %w: %w", ErrLost, err)
	}
	list := []Process{}
	room := guest.MaxListedArgs
	patience := c.processesFor
	for {
		pkt, err := c.next(ctx, conn, replyTimeout, &patience, guest.KindProcess, guest.KindDone)
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		switch {
		case len(list) == guest.MaxProcesses && pkt.Kind == guest.KindProcess:
			return nil, fmt.Errorf("list processes: %w: more than %d", ErrLost, guest.MaxProcesses)
		case pkt.Kind == guest.KindDone:
			if err := pkt.Into(&guest.None{}, 0); err != nil {
				return nil, fmt.Errorf("list processes: %w: %w", ErrLost, err)
			}
			return list, nil
		}
		p, err := processOf(pkt)
		if err != nil {
			return nil, fmt.Errorf("list processes: %w: one that cannot be: %w", ErrLost, err)
		}
		for _, a := range p.Argv {
			room -= len(a) + 1
		}
		if room < 0 {
			p.Argv, p.Cut = nil, true
		}
		list = append(list, p)
	}
}

// Holder describes a process of the sandbox that has a socket, by the inode. Without one it fails
// with ESRCH; an init of an earlier version fails with ENOSYS.
func (c *Client) Holder(ctx context.Context, socket uint32) (Process, error) {
	req, err := guest.Encode(guest.KindHolder, guest.HolderRequest{Socket: socket})
	if err != nil {
		return Process{}, err
	}
	conn, pkt, _, err := c.request(ctx, replyTimeout, req, nil, guest.KindProcess, 0)
	if err != nil {
		return Process{}, fmt.Errorf("find the holder of a socket: %w", err)
	}
	_ = conn.Close()
	p, err := processOf(pkt)
	if err != nil {
		return Process{}, fmt.Errorf("find the holder of a socket: %w: one that cannot be: %w", ErrLost, err)
	}
	return p, nil
}

// processOf validates init's description of a process.
func processOf(p guest.Packet) (Process, error) {
	var a guest.ProcessAnswer
	if err := p.Into(&a, -1); err != nil {
		return Process{}, err
	}
	size := 0
	for _, s := range p.Strs {
		size += len(s) + 1
	}
	const century = int64(100 * 365 * 24 * time.Hour)
	switch {
	case a.PID < 2 || a.PID > 1<<22, a.PPID < 0 || a.PPID > 1<<22, a.Main < 0 || a.Main == 1 || a.Main > 1<<22,
		len(a.State) != 1 || strings.Trim(a.State, "RSDZTtWXxKPI") != "",
		a.Age < 0 || a.Age > century, a.CPU < 0 || a.CPU > math.MaxInt64/2, a.RSS < 0 || a.RSS > 1<<50,
		len(a.Name) > 256 || !utf8.ValidString(a.Name),
		size > guest.MaxProcessArgs+1:
		return Process{}, fmt.Errorf("process %d", a.PID)
	}
	return Process{
		PID: a.PID, PPID: a.PPID, UID: a.UID, State: a.State, Age: time.Duration(a.Age), CPU: time.Duration(a.CPU), RSS: a.RSS,
		Name: a.Name, Argv: p.Strs, Cut: a.Cut, Main: a.Main,
	}, nil
}
