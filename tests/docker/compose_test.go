package docker

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// A web server that has asked its database, and serves the answer.
const (
	databaseCommand = "exec busybox nc -ll -p 5432 -e echo rows"
	webCommand      = "until busybox nc sql 5432 </dev/null > /tmp/index; do :; done; exec busybox httpd -f -p 8080 -h /tmp"
)

// served waits until a published port serves the answer of the database.
func (f *face) served(t *testing.T, address string) {
	t.Helper()
	harness.Eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/index", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "rows\n" {
			return fmt.Errorf("%q, %w", body, err)
		}
		return nil
	})
}

// Debian's docker-compose starts a web server and its database, in networks and with a volume. It
// finds them as they are when it is run again, and leaves nothing.
func TestComposeUpAndDown(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	python := testenv.RequirePeer(t, "python3")
	if _, err := os.Stat("/usr/bin/python3"); err == nil {
		python = "/usr/bin/python3" // has Debian's packages
	}
	lib := harness.Unpacked(t)
	file := filepath.Join(f.home, "shop", "docker-compose.yml")
	if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	doc := `
services:
  web:
    image: tool:1
    command: ["sh", "-c", "` + webCommand + `"]
    ports: ["127.0.0.1::8080"]
    depends_on: [db]
    networks: [front, back]
  db:
    image: tool:1
    command: ["sh", "-c", "` + databaseCommand + `"]
    volumes: ["data:/var"]
    networks:
      back: {aliases: [sql]}
networks:
  front: {}
  back: {internal: true}
volumes:
  data: {}
`
	if err := os.WriteFile(file, []byte(doc), 0o644); err != nil {
		t.Fatal(err)
	}
	docker := filepath.Join(f.bin, "docker")
	compose := func(args ...string) string {
		t.Helper()
		argv := append([]string{"env", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + filepath.Join(lib, "usr/lib/python3/dist-packages"), python, filepath.Join(lib, "usr/bin/docker-compose"), "-f", file}, args...)
		code, stdout, stderr := f.run(t, "", argv...)
		if code != 0 {
			t.Fatalf("docker-compose %s: %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
		}
		return stdout + stderr
	}
	compose("up", "-d")
	address := strings.TrimSpace(f.must(t, docker, "port", "shop_web_1", "8080"))
	f.served(t, address)
	if out := compose("up", "-d"); strings.Count(out, "is up-to-date") != 2 {
		t.Errorf("again: %s", out)
	}
	f.served(t, address)
	if out := compose("ps"); strings.Count(out, " Up ") != 2 {
		t.Errorf("ps: %s", out)
	}
	const networks = "{{range $n, $e := .NetworkSettings.Networks}}{{$n}} {{$e.Aliases}};{{end}}"
	if got := f.must(t, docker, "inspect", "--format", networks, "shop_db_1"); got != "shop_back [db sql];\n" && got != "shop_back [sql db];\n" {
		t.Errorf("the database is in %s", got)
	}
	compose("stop")
	compose("start")
	compose("down", "-v")
	for _, args := range [][]string{{"ps", "-aq"}, {"network", "ls", "-q", "--filter", "type=custom"}, {"volume", "ls", "-q"}} {
		if got := f.must(t, docker, args...); got != "" {
			t.Errorf("left by docker %v: %s", args, got)
		}
	}
}

// document is JSON of any shape.
type document = map[string]any

// The requests that Compose of version 2 sends for a web server and its database: networks that are
// looked for by name and label, and all endpoints with their aliases when a container is created.
func TestComposeConversation(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	get := func(path string, status int, out any) {
		t.Helper()
		got, answer := f.do(t, "GET", path, "", nil)
		if got != status {
			t.Fatalf("GET %s: %d %s", path, got, answer)
		}
		if out != nil {
			if err := json.Unmarshal([]byte(answer), out); err != nil {
				t.Fatalf("GET %s: %v: %s", path, err, answer)
			}
		}
	}
	filters := func(path string, doc any) string {
		t.Helper()
		text, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		return path + "filters=" + url.QueryEscape(string(text))
	}
	labels := func(more ...string) map[string]bool {
		all := map[string]bool{"com.docker.compose.project=shop": true}
		for _, l := range more {
			all[l] = true
		}
		return all
	}
	type networkDoc struct {
		ID         string `json:"Id"`
		Name       string
		Labels     map[string]string
		Internal   bool
		Containers map[string]struct{ Name string }
	}
	type containerDoc struct {
		ID    string `json:"Id"`
		State struct {
			Running bool
			Health  *struct{ Status string }
		}
		NetworkSettings struct {
			Ports    map[string][]struct{ HostIP, HostPort string }
			Networks map[string]struct{ NetworkID string }
		}
	}

	// up: networks
	ids := map[string]string{}
	for _, key := range []string{"front", "back"} {
		name := "shop_" + key
		get("/v1.51/networks/"+name, http.StatusNotFound, nil)
		var none []networkDoc
		if get(filters("/v1.51/networks?", document{"name": document{name: true}}), http.StatusOK, &none); len(none) != 0 {
			t.Fatalf("%+v", none)
		}
		status, answer := f.post(t, "/v1.51/networks/create", document{
			"Name": name, "Driver": "", "Scope": "", "Internal": key == "back", "Attachable": false, "Ingress": false, "ConfigOnly": false, "ConfigFrom": nil, "Options": nil,
			"IPAM": nil, "Labels": map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.network": key, "com.docker.compose.config-hash": "1f0", "com.docker.compose.version": "2.40.3"},
		})
		var made struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &made); err != nil || status != http.StatusCreated || made.ID == "" {
			t.Fatalf("create %s: %d %s", name, status, answer)
		}
		ids[name] = made.ID
	}

	// up: containers, in the order of depends_on with a condition
	var none []document
	if get(filters("/v1.51/containers/json?all=1&", document{"label": labels("com.docker.compose.oneoff=False")}), http.StatusOK, &none); len(none) != 0 {
		t.Fatalf("%v", none)
	}
	create := func(service string, config document, endpoints map[string][]string, mode string) string {
		t.Helper()
		ends := document{}
		for name, aliases := range endpoints {
			ends[name] = document{
				"IPAMConfig": document{}, "Links": nil, "Aliases": aliases, "MacAddress": "", "DriverOpts": nil, "GwPriority": 0, "NetworkID": "", "EndpointID": "", "Gateway": "",
				"IPAddress": "", "IPPrefixLen": 0, "IPv6Gateway": "", "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "DNSNames": nil,
			}
		}
		host := document{"NetworkMode": mode, "RestartPolicy": document{"Name": "", "MaximumRetryCount": 0}, "Binds": nil}
		if service == "web" {
			host["PortBindings"] = document{"8080/tcp": []document{{"HostIp": "127.0.0.1", "HostPort": ""}}}
		}
		body := document{
			"Image": "tool:1", "AttachStdout": true, "AttachStderr": true, "HostConfig": host, "NetworkingConfig": document{"EndpointsConfig": ends},
			"Labels": map[string]string{"com.docker.compose.project": "shop", "com.docker.compose.service": service, "com.docker.compose.oneoff": "False", "com.docker.compose.container-number": "1"},
		}
		maps.Copy(body, config)
		status, answer := f.post(t, "/v1.51/containers/create?name=shop-"+service+"-1", body)
		var made struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &made); err != nil || status != http.StatusCreated {
			t.Fatalf("create %s: %d %s", service, status, answer)
		}
		var doc containerDoc
		get("/v1.51/containers/"+made.ID+"/json", http.StatusOK, &doc)
		for name := range endpoints {
			if doc.NetworkSettings.Networks[name].NetworkID != ids[name] || len(doc.NetworkSettings.Networks) != len(endpoints) {
				t.Errorf("%s is in %+v, want those of %v", service, doc.NetworkSettings.Networks, endpoints)
			}
		}
		if status, answer := f.do(t, "POST", "/v1.51/containers/"+made.ID+"/start", "", nil); status != http.StatusNoContent {
			t.Fatalf("start %s: %d %s", service, status, answer)
		}
		return made.ID
	}
	db := create("db", document{
		"Cmd": []string{"sh", "-c", databaseCommand}, "Healthcheck": document{"Test": []string{"CMD-SHELL", "busybox nc 127.0.0.1 5432 </dev/null"}, "Interval": int64(1e9)},
	}, map[string][]string{"shop_back": {"shop-db-1", "db", "sql"}}, "shop_back")
	harness.Eventually(t, func() error { // condition: service_healthy
		var doc containerDoc
		if get("/v1.51/containers/"+db+"/json", http.StatusOK, &doc); doc.State.Health == nil || doc.State.Health.Status != "healthy" {
			return fmt.Errorf("%+v", doc.State)
		}
		return nil
	})
	web := create("web", document{"Cmd": []string{"sh", "-c", webCommand}, "ExposedPorts": document{"8080/tcp": document{}}},
		map[string][]string{"shop_front": {"shop-web-1", "web"}, "shop_back": {"shop-web-1", "web"}}, "shop_front")
	var doc containerDoc
	get("/v1.51/containers/"+web+"/json", http.StatusOK, &doc)
	f.served(t, "127.0.0.1:"+doc.NetworkSettings.Ports["8080/tcp"][0].HostPort)

	// up again: the networks are those of the project
	for _, key := range []string{"front", "back"} {
		var n networkDoc
		get("/v1.51/networks/shop_"+key, http.StatusOK, &n)
		members := map[string]int{"front": 1, "back": 2}[key]
		if n.ID != ids[n.Name] || n.Labels["com.docker.compose.network"] != key || n.Labels["com.docker.compose.config-hash"] != "1f0" || len(n.Containers) != members {
			t.Errorf("%+v", n)
		}
	}

	// down
	var running []struct {
		ID string `json:"Id"`
	}
	if get(filters("/v1.51/containers/json?all=1&", document{"label": labels()}), http.StatusOK, &running); len(running) != 2 {
		t.Fatalf("%v", running)
	}
	for _, id := range []string{web, db} {
		for _, step := range []struct{ method, path string }{{"POST", "/stop"}, {"DELETE", "?force=1"}} {
			if status, answer := f.do(t, step.method, "/v1.51/containers/"+id+step.path, "", nil); status != http.StatusNoContent {
				t.Fatalf("%s %s: %d %s", step.method, step.path, status, answer)
			}
		}
	}
	for _, key := range []string{"front", "back"} {
		var all []networkDoc
		if get(filters("/v1.51/networks?", document{"label": labels("com.docker.compose.network=" + key)}), http.StatusOK, &all); len(all) != 1 || all[0].ID != ids["shop_"+key] {
			t.Fatalf("%s: %+v", key, all)
		}
		var n networkDoc
		if get("/v1.51/networks/"+all[0].ID, http.StatusOK, &n); len(n.Containers) != 0 {
			t.Errorf("%+v", n)
		}
		if status, answer := f.do(t, "DELETE", "/v1.51/networks/"+n.ID, "", nil); status != http.StatusNoContent {
			t.Errorf("remove %s: %d %s", key, status, answer)
		}
		get("/v1.51/networks/"+n.ID, http.StatusNotFound, nil)
	}
}
