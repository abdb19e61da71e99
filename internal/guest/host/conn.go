package host

import (
	"github.com/sandboxd/sandboxd/internal/guest"
)

// A conn is the daemon's end of a connection to init.
type conn struct {
	*guest.Conn
	late *patience // of all packets of one answer; nil before the first of them is late
}

// newConn takes over fd, which must be non-blocking.
func newConn(fd int) (*conn, error) {
	c, err := guest.NewConn(fd)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c}, nil
}
