package confine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Face is the input of the plan for the process of a face, which reads the requests of programs and
// has the rights of the daemon's user at the daemon's socket. It needs that socket, and connections
// that it accepts.
type Face struct {
	ABI     int    // as in [Daemon]; 0 if the kernel's Landlock cannot enforce the plan
	Signals bool   // as in [Daemon]
	Socket  string // path of the daemon's socket
}

// Probe is like [Daemon.Probe].
func (f *Face) Probe() (ok bool) {
	f.ABI, f.Signals, ok = probe()
	return ok
}

// Plan returns the plan of a face. It is a pure function.
func (f Face) Plan() Plan {
	p := denyAll(f.ABI, f.Signals)
	p.allow(filepath.Dir(f.Socket), sockets) // the directory, because the next daemon makes a new socket
	return p
}

// Missing lists actions that only a later kernel would deny a confined face. The filter denies
// sockets other than Unix sockets, signals, and all changes of files on every kernel.
func (f Face) Missing() []string {
	if f.ABI == 0 {
		return []string{"a face can read files of its user (Linux 5.19 with Landlock keeps it from that)"}
	}
	return nil
}

// Apply takes everything from this process that a face does not need, irrevocably, on every thread,
// and verifies it. It listens already. The caller keeps the result.
func (f Face) Apply() (_ *Held, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("confine the face: %w", err)
		}
	}()
	_, _ = time.Now().Zone() // reads the host's time zone, once
	if _, err := RaiseDescriptors(); err != nil {
		return nil, err
	}
	if err := hide(); err != nil {
		return nil, err
	}
	if err := dropPrivileges(); err != nil {
		return nil, err
	}
	held := new(Held)
	if f.ABI > 0 {
		if held, err = f.Plan().Apply(); err != nil {
			return nil, err
		}
	}
	if err := faceFilter(os.Getpid()).apply(refuseInternet); err != nil {
		return nil, errors.Join(err, held.Close())
	}
	return held, nil
}
