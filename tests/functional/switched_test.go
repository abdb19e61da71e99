package functional

import (
	"net/http"
	"sync/atomic"
)

// switched lets a registry be honest while an image is pushed and lie afterwards.
type switched struct{ on atomic.Bool }

// wrap makes the middleware; without a lie it changes nothing.
func (s *switched) wrap(lie func(http.Handler) http.Handler) func(http.Handler) http.Handler {
	return func(honest http.Handler) http.Handler {
		if lie == nil {
			return honest
		}
		lying := lie(honest)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if s.on.Load() {
				lying.ServeHTTP(w, r)
				return
			}
			honest.ServeHTTP(w, r)
		})
	}
}
