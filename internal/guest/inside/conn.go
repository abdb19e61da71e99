package inside

import (
	"github.com/sandboxd/sandboxd/internal/guest"
)

// A conn is init's end of a connection with the daemon.
type conn struct {
	*guest.Conn

	ids uint32 // number of uids of the sandbox, from 0 on
}

// newConn takes over fd, which must be non-blocking.
func newConn(fd int) (*conn, error) {
	c, err := guest.NewConn(fd)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c}, nil
}
