package boot

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

// told is a service that remembers its retention.
type told struct {
	got      []service.RetentionLimits
	defaults runtime.Defaults
}

func (s *told) SetDefaults(d runtime.Defaults) { s.defaults = d }

func (s *told) SetRetention(r service.RetentionLimits) { s.got = append(s.got, r) }

func TestReloadAppliesWhatItCan(t *testing.T) {
	var out bytes.Buffer
	var level slog.LevelVar
	s := new(told)
	next, changed, fault := Options{EndedAge: 2 * time.Hour, AgentLimit: 5, LogLevel: slog.LevelDebug, LogSize: 9, DefaultTimeout: 2, DefaultIdleTimeout: 3}, []string{"ended-age", "log-level", "log-size", "default-timeout"}, error(nil)
	r := reloader{
		options: Options{EndedAge: time.Hour, AgentLimit: 4, LogSize: 8, DefaultTimeout: 8, DefaultIdleTimeout: 9}, level: &level, service: s, log: slog.New(slog.NewTextHandler(&out, nil)),
		read: func(context.Context) (map[string][]byte, error) { return map[string][]byte{"f": []byte("text")}, nil },
	}
	r.options.Reload = func(contents map[string][]byte) (Options, []string, error) {
		if string(contents["f"]) != "text" {
			t.Errorf("contents %q", contents)
		}
		return next, changed, fault
	}
	r.reload(t.Context())
	// agent-limit is not said to have changed: a flag may hold it.
	if len(s.got) != 1 || s.got[0] != (service.RetentionLimits{EndedAge: 2 * time.Hour, AgentLimit: 4}) || level.Level() != slog.LevelDebug || r.options.LogSize != 8 {
		t.Errorf("%+v, %v, %+v", s.got, level.Level(), r.options)
	}
	if s.defaults != (runtime.Defaults{Timeout: 2, IdleTimeout: 9}) {
		t.Errorf("defaults %+v", s.defaults)
	}
	if log := out.String(); !strings.Contains(log, `changed="[ended-age log-level default-timeout]"`) || !strings.Contains(log, "settings=[log-size]") {
		t.Errorf("log: %s", log)
	}
	out.Reset()
	fault = errors.New("f:1:1: a mistake")
	r.reload(t.Context())
	if log := out.String(); len(s.got) != 1 || !strings.Contains(log, "level=ERROR") || !strings.Contains(log, "f:1:1: a mistake") {
		t.Errorf("after a mistake: %v, log: %s", s.got, log)
	}
}

func TestWatchReloadsAtEachHangup(t *testing.T) {
	hangup, reloaded := make(chan struct{}), make(chan struct{})
	r := reloader{
		options: Options{Hangup: hangup}, level: new(slog.LevelVar), service: new(told), log: slog.New(slog.DiscardHandler),
		read: func(context.Context) (map[string][]byte, error) { return nil, nil },
	}
	r.options.Reload = func(map[string][]byte) (Options, []string, error) {
		reloaded <- struct{}{}
		return Options{}, nil, nil
	}
	stop := r.watch(t.Context())
	for range 2 {
		hangup <- struct{}{}
		<-reloaded
	}
	stop()
}
