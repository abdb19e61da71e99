package httpapi

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/internal/service/class"
)

// checkOrigin refuses requests that a web page of another site makes. No browser reaches a Unix
// socket, but programs that forward a port to it are common, and every page that their user opens
// can send requests to a port. Such requests tell by one of these:
//
//   - Origin, which is of another host than the one that is asked, or "null";
//   - Sec-Fetch-Site, which browsers add and pages cannot set;
//   - Host, a name in the DNS: a page whose name is made to lead to this machine (DNS rebinding) has
//     one. Clients of a Unix socket send a word, the socket's path, or an address.
func checkOrigin(req *http.Request) error {
	if site := req.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return class.Mark(class.ErrForbidden, errors.New("a web page of another site has sent this request (Sec-Fetch-Site)"))
	}
	if isDNSName(req.Host) {
		return class.Mark(class.ErrForbidden, fmt.Errorf("host %q: a name of the DNS does not lead here; send a word, such as sandboxd, or an address", class.Clip(req.Host)))
	}
	for _, origin := range req.Header.Values("Origin") {
		if from, err := url.Parse(origin); err != nil || from.Host == "" || !strings.EqualFold(from.Host, req.Host) {
			return class.Mark(class.ErrForbidden, fmt.Errorf("origin %q: a web page of another site has sent this request", class.Clip(origin)))
		}
	}
	return nil
}

// isDNSName reports whether a Host header names a host by more than one label, outside of
// "localhost".
func isDNSName(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return false
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	return strings.Contains(host, ".") && !strings.HasSuffix(host, ".localhost") &&
		strings.Trim(host, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == "" // else a path, with its slashes escaped
}
