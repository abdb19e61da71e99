package docker

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// Prune removes volumes whose name was made up, and named ones if the filter all or a client before
// version 1.42 asks for it. One that is in use, or that is to be kept, stays.
func TestVolumesPrune(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	docker := filepath.Join(f.bin, "docker")
	// Two alone has files.
	prune := func(path string) []string {
		t.Helper()
		status, answer := f.do(t, "POST", path, "", nil)
		var out struct {
			VolumesDeleted []string
			SpaceReclaimed int64
		}
		if err := json.Unmarshal([]byte(answer), &out); err != nil || status != http.StatusOK || slices.Contains(out.VolumesDeleted, "two") != (out.SpaceReclaimed > 0) {
			t.Fatalf("%s: %d %s, %v", path, status, answer, err)
		}
		slices.Sort(out.VolumesDeleted)
		return out.VolumesDeleted
	}
	f.must(t, docker, "run", "-d", "--name", "holder", "-v", "held:/data", "-v", "/anon", image, "sleep", "1000")
	for _, args := range [][]string{{"one"}, {"--label", "app=shop", "two"}, {"three"}} {
		f.must(t, docker, append([]string{"volume", "create"}, args...)...)
	}
	f.must(t, docker, "run", "--rm", "-v", "two:/bin", image, "true") // gets the image's files
	if _, err := f.Client(t).CreateVolume(t.Context(), api.CreateVolume{Name: "kept", Labels: map[string]string{api.LabelKeep: "true"}}); err != nil {
		t.Fatal(err)
	}
	status, answer := f.do(t, "POST", "/volumes/create", "application/json", []byte("{}"))
	var made struct{ Name string }
	if err := json.Unmarshal([]byte(answer), &made); err != nil || status != http.StatusCreated {
		t.Fatal(status, answer, err)
	}
	for _, step := range []struct {
		path string
		want []string
	}{
		{`/v1.51/volumes/prune?filters={"label":["nosuch"]}`, []string{}},
		{"/v1.51/volumes/prune", []string{made.Name}},
		{`/v1.51/volumes/prune?filters={"all":{"false":true}}`, []string{}},
		{`/v1.51/volumes/prune?filters={"all":["true"],"label":["app=shop"]}`, []string{"two"}},
		{`/v1.41/volumes/prune?filters={"label!":["app"]}`, []string{"one", "three"}},
		{`/v1.51/volumes/prune?filters={"all":["1"]}`, []string{}},
	} {
		if got := prune(step.path); !slices.Equal(got, step.want) {
			t.Errorf("%s removed %v, want %v", step.path, got, step.want)
		}
	}
	all, err := f.Client(t).Volumes(t.Context(), nil)
	if err != nil || len(all) != 3 {
		t.Errorf("%d volumes are left: %v, %v", len(all), all, err)
	}
}

// A volume that exists is the answer to its creation, whatever labels are asked for.
func TestVolumeExists(t *testing.T) {
	f := start(t)
	for _, body := range []string{`{"Name":"twice","Labels":{"a":"1"}}`, `{"Name":"twice","Labels":{"a":"2"}}`, `{"Name":"twice"}`} {
		status, answer := f.do(t, "POST", "/volumes/create", "application/json", []byte(body))
		var doc struct {
			Name, Driver, Mountpoint string
			Labels                   map[string]string
		}
		if err := json.Unmarshal([]byte(answer), &doc); err != nil || status != http.StatusCreated || doc.Name != "twice" || doc.Labels["a"] != "1" || doc.Driver != "local" {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
}

// A VOLUME of an image is a volume without a name that begins with the image's files. The next
// container has one of its own, and each goes with its container.
func TestVolumeOfAnImage(t *testing.T) {
	f := start(t)
	f.images(t)
	context := filepath.Join(f.home, "context")
	if err := os.Mkdir(context, 0o755); err != nil {
		t.Fatal(err)
	}
	dockerfile := "FROM tool:1\nRUN mkdir /vol && echo first > /vol/f\nVOLUME /vol\nCMD [\"sleep\", \"1000\"]\n"
	if err := os.WriteFile(filepath.Join(context, "Dockerfile"), []byte(dockerfile), 0o644); err != nil {
		t.Fatal(err)
	}
	for which, docker := range f.clients(t) {
		f.must(t, docker, "build", "-t", "vol:1", context)
		f.runLines(t, which, docker, []line{
			{args: "run -d --name a vol:1"},
			{args: "exec a sh -c 'cat /vol/f; echo second > /vol/f'", out: `^first\n$`},
			{args: "run -d --name b vol:1"},
			{args: "exec b cat /vol/f", out: `^first\n$`},
			{args: "run -d --name c -v named:/vol vol:1"},
			{args: "exec c cat /vol/f", out: `^first\n$`},
			{args: "inspect --format '{{range .Mounts}}{{.Type}} {{.Destination}} {{len .Name}};{{end}}' a", out: `^volume /vol 64;\n$`},
			{args: "inspect --format '{{range .Mounts}}{{.Type}} {{.Destination}} {{.Name}};{{end}}' c", out: `^volume /vol named;\n$`},
			{args: "volume ls -q", out: `^[0-9a-f]{64}\n[0-9a-f]{64}\nnamed\n$`},
			{args: "rm -f a"},
			{args: "volume ls -q", out: `^[0-9a-f]{64}\nnamed\n$`},
			{args: "rm -f -v b c"},
			{args: "volume ls -q", out: `^named\n$`},
			{args: "volume rm named"},
		}, os.Getenv)
	}
}
