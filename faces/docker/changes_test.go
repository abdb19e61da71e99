package docker

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

func TestChanges(t *testing.T) {
	got, err := changesOf([]string{
		`CMD ["a", "b c"]`, "ENTRYPOINT x y", `ENV A="b c" D=$A`, "ENV E f", "EXPOSE 80 53/UDP", "HEALTHCHECK --interval=60s --retries=2 CMD true",
		`LABEL k="v w" l=m`, "STOPSIGNAL SIGINT", "USER me\nVOLUME /one /two", `VOLUME ["/three"]`, "WORKDIR /work",
	})
	want := api.ImageConfig{
		Cmd: []string{"a", "b c"}, Entrypoint: []string{"/bin/sh", "-c", "x y"}, Env: []string{"A=b c", "D=", "E=f"}, WorkingDir: "/work", User: "me",
		Labels: map[string]string{"k": "v w", "l": "m"}, Volumes: []string{"/one", "/two", "/three"}, Ports: []string{"53/udp", "80/tcp"}, StopSignal: "SIGINT",
		HealthCheck: &api.HealthCheck{Test: []string{"CMD-SHELL", "true"}, Interval: 60, Retries: 2},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	if got, err := changesOf([]string{"", " "}); err != nil || !reflect.DeepEqual(got, api.ImageConfig{}) {
		t.Errorf("no changes: %+v, %v", got, err)
	}
	for text, bad := range map[string]string{
		"run is not a valid change command": "RUN true", "from is not": "FROM x", "nosuch is not": "NOSUCH x", "Invalid signal": "STOPSIGNAL NOSUCH",
		"changes: ": "HEALTHCHECK --nosuch CMD true",
	} {
		if _, err := changesOf([]string{bad}); err == nil || statusOf(err) != http.StatusBadRequest || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q", bad, err, text)
		}
	}
}

// A container made of the request of another does not get the port that was chosen for that one.
func TestRequestOfPorts(t *testing.T) {
	req := requestOf(&api.Sandbox{Ports: []api.PortMapping{
		{Address: "127.0.0.1", HostPort: 8080, Port: 80, Protocol: "tcp"}, {Address: "127.0.0.1", HostPort: 40001, Port: 81, Protocol: "tcp", Chosen: true},
	}})
	got := fmt.Sprint(req.HostConfig.PortBindings)
	if want := "map[80/tcp:[{127.0.0.1 8080}] 81/tcp:[{127.0.0.1 }]]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// An image completes a container's configuration, and replaces nothing in it.
func TestAddImage(t *testing.T) {
	req := requestOf(&api.Sandbox{})
	req.Env, req.Labels, req.Cmd = []string{"A=mine", "B"}, map[string]string{"k": "mine"}, []string{"run"}
	addImage(req.Config, &api.ImageConfig{
		Env: []string{"A=image", "B=image", "C=image"}, Labels: map[string]string{"k": "image", "l": "image"}, User: "app", Cmd: []string{"image"},
		Entrypoint: []string{"entry"}, Volumes: []string{"/data"}, Ports: []string{"80/tcp", "nonsense"}, StopSignal: "SIGINT",
	})
	if got := strings.Join(req.Env, " "); got != "A=mine B C=image" {
		t.Errorf("environment: %q", got)
	}
	if !reflect.DeepEqual(req.Labels, map[string]string{"k": "mine", "l": "image"}) || req.User != "app" || req.StopSignal != "SIGINT" {
		t.Errorf("labels %v, user %q, signal %q", req.Labels, req.User, req.StopSignal)
	}
	if !reflect.DeepEqual([][]string{req.Cmd, req.Entrypoint}, [][]string{{"run"}, {"entry"}}) || len(req.Volumes) != 1 || len(req.ExposedPorts) != 1 {
		t.Errorf("command %q %q, volumes %v, ports %v", req.Entrypoint, req.Cmd, req.Volumes, req.ExposedPorts)
	}
	large := map[string]string{"large": strings.Repeat("x", maxImageLabels)}
	if addImage(req.Config, &api.ImageConfig{Labels: large}); len(req.Labels) != 2 {
		t.Errorf("%d labels: those of an image have a limit", len(req.Labels))
	}
}
