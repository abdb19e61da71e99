package boot

import (
	"context"
	"log/slog"
	"sync"

	"github.com/sandboxd/sandboxd/internal/service"
	"github.com/sandboxd/sandboxd/runtime"
)

// reloadable are the settings that a running daemon takes on, by the names of their flags. Other
// ones were handed to the launcher, the broker or the kernel, or belong to running sandboxes.
var reloadable = map[string]func(to, from *Options){
	"log-level":    func(to, from *Options) { to.LogLevel = from.LogLevel },
	"ended-age":    func(to, from *Options) { to.EndedAge = from.EndedAge },
	"ended-limit":  func(to, from *Options) { to.EndedLimit = from.EndedLimit },
	"snapshot-age": func(to, from *Options) { to.SnapshotAge = from.SnapshotAge },
	"agent-age":    func(to, from *Options) { to.AgentAge = from.AgentAge },
	"agent-limit":  func(to, from *Options) { to.AgentLimit = from.AgentLimit },

	"default-timeout":      func(to, from *Options) { to.DefaultTimeout = from.DefaultTimeout },
	"default-idle-timeout": func(to, from *Options) { to.DefaultIdleTimeout = from.DefaultIdleTimeout },
}

// Reloadable reports whether a running daemon takes on a new value of the setting.
func Reloadable(name string) bool { return reloadable[name] != nil }

func (o *Options) retention() service.RetentionLimits {
	return service.RetentionLimits{
		EndedAge: o.EndedAge, EndedLimit: o.EndedLimit, SnapshotAge: o.SnapshotAge, AgentAge: o.AgentAge, AgentLimit: o.AgentLimit,
	}
}

// reloader applies what config files say by now.
type reloader struct {
	options Options // in effect
	level   *slog.LevelVar
	read    func(ctx context.Context) (map[string][]byte, error)
	service interface {
		SetRetention(service.RetentionLimits)
		SetDefaults(runtime.Defaults)
	}
	log *slog.Logger
}

// watch reloads at each message on Hangup, unless stop is called before.
func (r *reloader) watch(ctx context.Context) (stop func()) {
	if r.options.Reload == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			select {
			case <-r.options.Hangup:
				r.reload(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// reload reads the files once. A mistake in them changes nothing.
func (r *reloader) reload(ctx context.Context) {
	contents, err := r.read(ctx)
	var next Options
	var changed []string
	if err == nil {
		next, changed, err = r.options.Reload(contents)
	}
	if err != nil {
		r.log.Error("config is not read again, the old values stay", "error", err)
		return
	}
	var applied, restart []string
	for _, name := range changed {
		if apply := reloadable[name]; apply != nil {
			apply(&r.options, &next)
			applied = append(applied, name)
		} else {
			restart = append(restart, name)
		}
	}
	r.level.Set(r.options.LogLevel)
	r.service.SetRetention(r.options.retention())
	r.service.SetDefaults(runtime.Defaults{Timeout: r.options.DefaultTimeout, IdleTimeout: r.options.DefaultIdleTimeout})
	r.log.Info("config was read again", "changed", applied)
	if len(restart) > 0 {
		r.log.Warn("settings have changed that need a restart of the daemon", "settings", restart)
	}
}
