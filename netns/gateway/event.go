package gateway

import (
	"errors"
	"net/netip"
	"sync"
	"time"
)

// Kind is the kind of thing that an event is about.
type Kind string

// The kinds of events.
const (
	// Connection is a TCP connection, recorded at its end, or when it is refused.
	Connection Kind = "connection"
	// Request is an HTTP request, recorded when the response has ended, or when it is refused.
	Request Kind = "request"
	// Query is a DNS question that the host's resolver was asked, or that was refused. Questions that
	// were answered from memory or without addresses are not recorded.
	Query Kind = "query"
)

// Event is one entry of the record.
type Event struct {
	Network string
	Kind    Kind
	// Time is the begin.
	Time     time.Time
	Duration time.Duration
	// Protocol is tcp, tls, http, websocket or dns, as far as it was understood; https (HTTP/1) and h2
	// (HTTP/2) if TLS was ended here, so that requests were read.
	Protocol string
	// Name is the name that decided; empty if a rule for the address did. In a refusal it is the name
	// that the client sent.
	Name string
	Addr netip.Addr
	Port uint16
	// Process has sent it; nil if that is not known. Of allowed requests it is often not known yet, and
	// of allowed questions never.
	Process *Process
	// Method and Path of a request are without its query; Path is also empty if it is malformed.
	// Method of a query is its type.
	Method, Path string
	// Status is the status of a response; 0 if none came.
	Status int
	// Allow is false if it was refused, at its begin or later.
	Allow bool
	Rule  string
	// Secret is the name of the secret that was put into a request, or whose placeholder was refused.
	Secret string
	// Reason explains a refusal, or an end that was not orderly.
	Reason string
	// Out and In are bytes from and to the sandbox, within TLS where that was ended here. A request of
	// HTTP/2 counts the bytes of its body only.
	Out, In int64
	// Lost is the number of events that were dropped before this one because the queue was full.
	Lost uint64
	// Spent is the used part of the budget when the event was recorded, and what has changed of those
	// of rules; nil without a budget.
	Spent *Spent
}

// note adds the error that something ended with.
func (e *Event) note(err error) {
	var refused *refusal
	switch {
	case errors.As(err, &refused):
		e.Allow, e.Rule, e.Reason = false, refused.Rule, refused.Reason
		if refused.secret != "" {
			e.Secret = refused.secret
		}
	case err != nil:
		e.Reason = err.Error()
	}
}

const (
	maxEvents = 1024
	// together is the time between two deliveries of events, so that those of a burst go as one. A
	// wakeup of this process and of the daemon for each event took a fifth of the time of a small
	// request.
	together = 10 * time.Millisecond
)

// A recorder hands events to a function that may be slow. A full queue drops the newest events, so
// that the begin of a flood is kept.
type recorder struct {
	queue   chan Event
	closing chan struct{} // closed with queue
	done    chan struct{}

	mu   sync.Mutex // guards lost
	lost uint64
}

func startRecorder(record func([]Event)) *recorder {
	r := &recorder{queue: make(chan Event, maxEvents), closing: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		for e := range r.queue {
			record(r.rest([]Event{e}))
			select {
			case <-r.closing:
			case <-time.After(together):
			}
		}
	}()
	return r
}

// rest adds the events that are queued.
func (r *recorder) rest(all []Event) []Event {
	for len(all) < maxEvents {
		select {
		case e, ok := <-r.queue:
			if !ok {
				return all
			}
			all = append(all, e)
		default:
			return all
		}
	}
	return all
}

// add queues an event and reports whether there was room. It must not be called after close.
func (r *recorder) add(e Event) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Lost = r.lost
	select {
	case r.queue <- e:
		r.lost = 0
		return true
	default:
		r.lost++
		return false
	}
}

// close waits until the queue is empty. One caller is the first.
func (r *recorder) close(first bool) {
	if first {
		close(r.queue)
		close(r.closing)
	}
	<-r.done
}
