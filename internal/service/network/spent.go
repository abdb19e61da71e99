package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/sandboxd/sandboxd/netns/gateway"
)

// used is what one life of a sandbox has used of its budgets, in ID.spent.json. The file is not
// synced: no life outlives the host.
type used struct {
	Life  int           `json:"life"` // [runtime.Record.Life]
	Spent gateway.Spent `json:"spent"`
}

// spent is the file of the sandbox's use.
func (l *flowLog) spent() string { return l.path + ".spent.json" }

// keepSpent writes the gateway's report of the present life.
func (l *flowLog) keepSpent(s *gateway.Spent) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s == nil || l.removed || !l.live {
		return nil
	}
	data, err := json.Marshal(used{l.life, *s})
	if err == nil {
		err = errors.Join(os.WriteFile(l.spent()+".new", data, 0o600), os.Rename(l.spent()+".new", l.spent()))
	}
	if err != nil {
		return fmt.Errorf("keep the use of a budget: %w", err)
	}
	return nil
}

// readSpent returns the use of a life under earlier daemons.
func (l *flowLog) readSpent(life int) (gateway.Spent, error) {
	data, err := os.ReadFile(l.spent())
	if errors.Is(err, fs.ErrNotExist) {
		return gateway.Spent{}, nil
	}
	var u used
	if err == nil {
		err = json.Unmarshal(data, &u)
	}
	if err != nil {
		return gateway.Spent{}, fmt.Errorf("read the use of a budget: %w", err)
	}
	if u.Life != life {
		return gateway.Spent{}, nil
	}
	return u.Spent, nil
}
