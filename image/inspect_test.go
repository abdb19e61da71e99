package image

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

func TestMomentsCanBeSent(t *testing.T) {
	zone := time.FixedZone("", 3600)
	for _, at := range []time.Time{time.Date(0, 1, 1, 0, 0, 0, 0, zone), time.Date(9999, 12, 31, 23, 59, 0, 0, time.FixedZone("", -3600)), time.Date(2026, 1, 1, 0, 0, 0, 0, zone)} {
		if _, err := json.Marshal(moment(at)); err != nil || moment(at).IsZero() != (at.Year() != 2026) {
			t.Errorf("%v: %v, %v", at, moment(at), err)
		}
	}
}

// What an image is imported with, and what a commit adds, is what Inspect shows.
func TestInspectShowsTheConfiguration(t *testing.T) {
	s, _, _ := service(t)
	check := &api.HealthCheck{Test: []string{"CMD", "true"}, Interval: 60, StartInterval: 1.5, Retries: 2}
	config := api.ImageConfig{
		Cmd: []string{"sh"}, Volumes: []string{"/data"}, Ports: []string{"80/tcp"}, StopSignal: "SIGINT", HealthCheck: check,
	}
	images, err := s.Import(t.Context(), bytes.NewReader(layerTar(t, "content", "base")), ImportOptions{Reference: "team/base:1", Rootfs: true, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Inspect(t.Context(), "team/base:1")
	if diff := cmp.Diff(config, got.Config); err != nil || diff != "" {
		t.Errorf("imported: %v, configuration (-want +got):\n%s", err, diff)
	}
	_, _, err = s.Commit(t.Context(), CommitOptions{
		Base: images[0].Digest, Reference: "team/made:1", Author: "me", Comment: "why", Layer: adding(layerTar(t, "added", "x")),
		Config: api.ImageConfig{Volumes: []string{"/more"}, Ports: []string{"53/udp"}, StopSignal: "SIGQUIT", HealthCheck: &api.HealthCheck{Test: []string{"NONE"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err = s.Inspect(t.Context(), "team/made:1")
	want := api.ImageConfig{
		Cmd: []string{"sh"}, Volumes: []string{"/data", "/more"}, Ports: []string{"53/udp", "80/tcp"}, StopSignal: "SIGQUIT",
		HealthCheck: &api.HealthCheck{Test: []string{"NONE"}},
	}
	if diff := cmp.Diff(want, got.Config); err != nil || diff != "" || got.Author != "me" {
		t.Errorf("committed: %v, author %q, configuration (-want +got):\n%s", err, got.Author, diff)
	}
}
