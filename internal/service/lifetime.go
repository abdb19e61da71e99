package service

import (
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// forever is the lifetime of sandboxes that have no end: a deadline that no host sees. Clocks,
// timers and JSON can express it.
const forever = 200 * 365 * 24 * time.Hour

// validateLifetime checks a lifetime that a request asks for, but for the right to it.
func validateLifetime(timeout float64) error {
	if timeout == api.Never {
		return nil
	}
	_, err := seconds("timeout", timeout)
	return err
}

// lifetime returns the time after which a sandbox is stopped. Only the operator may ask for none at
// all: other tenants have a maximum.
func (s *API) lifetime(timeout float64) (time.Duration, error) {
	if timeout != api.Never {
		return seconds("timeout", timeout)
	}
	if err := s.administers(); err != nil {
		return 0, fmt.Errorf("timeout %d (never): only the operator's sandboxes have no end: %w", api.Never, err)
	}
	return forever, nil
}
