package harness

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// Build builds an image of a context through the API and returns it with all events, or the
// problem that ended the build. See, which may be nil, is called for every event as it arrives.
func (d *Daemon) Build(ctx context.Context, buildContext []byte, options api.Build, see func(api.BuildEvent)) (*api.Image, []api.BuildEvent, error) {
	text, err := json.Marshal(options)
	if err != nil {
		return nil, nil, err
	}
	response, err := d.Do(ctx, "POST", "/v1/builds?options="+url.QueryEscape(string(text)), buildContext)
	if err != nil {
		return nil, nil, err
	}
	defer response.Body.Close()
	if response.StatusCode >= 300 {
		return nil, nil, problem(response)
	}
	var events []api.BuildEvent
	dec := json.NewDecoder(response.Body)
	for {
		var e api.BuildEvent
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			return nil, events, errors.New("the events end without an image or an error")
		} else if err != nil {
			return nil, events, err
		}
		if see != nil {
			see(e)
		}
		events = append(events, e)
		switch {
		case e.Error != nil:
			return nil, events, e.Error
		case e.Image != nil:
			return e.Image, events, nil
		}
	}
}

// MustBuild is Build for one that must succeed.
func (d *Daemon) MustBuild(t testing.TB, buildContext []byte, options api.Build) (*api.Image, []api.BuildEvent) {
	t.Helper()
	image, events, err := d.Build(t.Context(), buildContext, options, nil)
	if err != nil {
		for _, e := range events {
			if e.Stream != "" || e.Status == api.BuildStarted {
				t.Logf("%d %s%s%s", e.Step, e.Text, e.Output, e.Data)
			}
		}
		t.Fatalf("build: %v", err)
	}
	return image, events
}
