package host

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
)

const (
	// maxID is the highest uid and gid that a sandbox's user namespace maps.
	maxID = 65535
	// maxUser bounds a user: two names of 64 bytes and a colon.
	maxUser = 129
)

// An Account is a user of the sandbox, by init's word: the ids are within those of a sandbox.
type Account struct {
	UID, GID uint32
	Groups   []uint32 // supplementary groups, at most 1024
	Home     string   // not empty; any bytes
}

// Account finds a user in the sandbox's /etc/passwd and /etc/group: a name or a uid, and perhaps a colon
// and a group or a gid. A number needs no entry; without one its group is 0. Refusals have
// [guest.StageUser]. NonRoot refuses every user that turns out to be uid 0.
func (c *Client) Account(ctx context.Context, user string, nonRoot bool) (Account, error) {
	if user == "" || len(user) > maxUser {
		return Account{}, &guest.Error{Stage: guest.StageUser, Errno: unix.EINVAL, Path: user[:min(len(user), maxUser)]}
	}
	req, err := guest.Encode(guest.KindUser, guest.UserRequest{NonRoot: nonRoot}, user)
	if err != nil {
		return Account{}, err
	}
	conn, pkt, _, err := c.request(ctx, replyTimeout, req, nil, guest.KindAccount, 0)
	if err != nil {
		return Account{}, err
	}
	_ = conn.Close()
	a, err := accountOf(pkt)
	if err == nil && nonRoot && a.UID == 0 {
		err = fmt.Errorf("root for %q", user)
	}
	if err != nil {
		return Account{}, fmt.Errorf("find user: %w: %w", ErrLost, err)
	}
	return a, nil
}

// accountOf validates an account of init's.
func accountOf(p guest.Packet) (Account, error) {
	var a guest.AccountAnswer
	if err := p.Into(&a, 1); err != nil {
		return Account{}, err
	}
	home := p.Strs[0]
	if a.UID > maxID || a.GID > maxID || len(a.Groups) > guest.MaxGroups || home == "" || len(home) >= guest.MaxPath {
		return Account{}, fmt.Errorf("an impossible account with uid %d", a.UID)
	}
	for _, g := range a.Groups {
		if g > maxID {
			return Account{}, fmt.Errorf("an impossible group %d", g)
		}
	}
	return Account{UID: a.UID, GID: a.GID, Groups: a.Groups, Home: home}, nil
}
