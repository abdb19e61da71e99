package boot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/codehook"
)

// hookSocket is the broker's name for the hook's Unix socket. No policy of a network can have it,
// as their names have no space.
const hookSocket = "code hook"

// hookTimeout bounds a question to the hook.
const hookTimeout = 10 * time.Second

// maxSocketPath is the longest path of a Unix socket: sun_path without its NUL.
const maxSocketPath = 107

// CheckCodeHook checks an address of [Options.CodeHook].
func CheckCodeHook(address string, tenants bool) error {
	if address == "" {
		return nil
	}
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		if !filepath.IsAbs(path) || len(path) > maxSocketPath {
			return fmt.Errorf("want unix: and an absolute path of at most %d bytes", maxSocketPath)
		}
		return nil
	}
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" {
		return errors.New("want unix:PATH or http://127.0.0.1:PORT/PATH")
	}
	addr, err := netip.ParseAddr(u.Hostname())
	switch {
	case err != nil || !addr.IsLoopback() || u.Port() == "":
		return errors.New("want an address of the loopback with a port: code does not leave the host")
	case tenants:
		return errors.New("with --multi-tenant want unix:PATH: when the service is not running, a tenant could listen on its port")
	}
	return nil
}

// brokered returns the Unix sockets that the broker connects to, by name.
func (o *Options) brokered() map[string]string {
	path, ok := strings.CutPrefix(o.CodeHook, "unix:")
	if !ok {
		return o.Services
	}
	all := maps.Clone(o.Services)
	if all == nil {
		all = make(map[string]string)
	}
	all[hookSocket] = path
	return all
}

// codeHook returns the hook, nil if there is none. The broker connects to a Unix socket: the daemon
// is confined, and executes nothing either, so that a hook is no program.
func (o *Options) codeHook(dial func(ctx context.Context, name string) (*net.UnixConn, error)) *codehook.Hook {
	switch {
	case o.CodeHook == "":
		return nil
	case !strings.HasPrefix(o.CodeHook, "unix:"):
		return codehook.New(o.CodeHook, &http.Transport{}, hookTimeout)
	}
	return codehook.New("http://code-hook/", &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, hookSocket) },
	}, hookTimeout)
}
