package httpapi

import (
	"encoding/json"
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// answerFrames runs a program and answers with frames: its output as it stands, and events.
func (s *Server) answerFrames(w http.ResponseWriter, r *http.Request, req api.ExecRequest) error {
	x, err := s.as(r).StartExec(r.Context(), r.PathValue("id"), req)
	if err != nil {
		return err
	}
	defer x.Close()
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeStream, flush: true}
	tell := func(e api.ExecEvent) error {
		frame, err := eventFrame(nil, e)
		if err == nil {
			_, err = out.Write(frame)
		}
		return err
	}
	if err := tell(api.ExecEvent{PID: x.PID, Exec: x.ID()}); err != nil {
		return nil // the client is gone
	}
	var frame []byte // reused: one call at a time, and Write keeps nothing
	exit, usage, err := x.Stream(r.Context(), func(stream string, p []byte) error {
		frame = api.AppendFrame(frame[:0], channelOf(stream), p)
		_, err := out.Write(frame)
		return err
	})
	last := api.ExecEvent{Exit: &exit, Usage: &usage}
	if err != nil {
		last = execError(ProblemOf(err))
	}
	_ = tell(last) // the client may be gone
	return nil
}

// channelOf returns the channel of a stream of output.
func channelOf(stream string) byte {
	if stream == "stderr" {
		return api.ChannelStderr
	}
	return api.ChannelStdout
}

// eventFrame appends the frame of an event.
func eventFrame(b []byte, e api.ExecEvent) ([]byte, error) {
	data, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	return api.AppendFrame(b, api.ChannelEvent, data), nil
}
