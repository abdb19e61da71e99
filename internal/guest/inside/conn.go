package inside

import (
	"github.com/sandboxd/sandboxd/internal/guest"
)

// A conn is init's end of a connection with the daemon.
type conn struct {
	*guest.Conn

	ids uint32 // number of uids of the sandbox, from 0 on
	own uint32 // init's real uid
}

// newConn takes over fd, which must be non-blocking.
func (s *server) newConn(fd int) (*conn, error) {
	c, err := guest.NewConnOf(s.poller.open(fd, "guest"))
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, ids: s.ids, own: s.own}, nil
}
