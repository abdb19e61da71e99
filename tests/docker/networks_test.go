package docker

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// fetchIndex reads a page of the server on port 8080 of a container.
const fetchIndex = `sh -c 'printf "GET /index HTTP/1.0\r\n\r\n" | busybox nc %s 8080'`

// networkLines are lines about networks. Served is a container with a server on port 8080.
var networkLines = []line{
	{args: "network ls --format {{.Name}}:{{.Driver}}:{{.Scope}}", out: `^bridge:bridge:local\nnone:null:local\n$`},
	{args: "network create --label app=shop --driver bridge shop_default", out: `^[0-9a-f]{64}\n$`},
	{args: "network create shop_default", code: 1, err: `network with name shop_default already exists`},
	{args: "network create --internal Inside", out: `^[0-9a-f]{64}\n$`},
	{args: "network create net", out: `^[0-9a-f]{64}\n$`}, // a top-level domain
	{args: "network create bridge", code: 1, err: `operation is not permitted on predefined bridge network`},
	{args: "network create host", code: 1, err: `operation is not permitted on predefined host network`},
	{args: "network create -d overlay w", code: 1, err: `Driver "overlay": the daemon connects containers itself`},
	{args: "network create -d macvlan -o parent=eth0 w", code: 1, err: `Driver "macvlan"`},
	{args: "network create --subnet 10.9.0.0/16 w", code: 1, err: `IPAM: the daemon chooses addresses`},
	{args: "network create --ipv6 w", code: 1, err: `EnableIPv6: containers reach each other over IPv4`},
	{args: "network create -o com.docker.network.bridge.enable_icc=false w", code: 1, err: `Options "com.docker.network.bridge.enable_icc"`},
	{args: "network create --attachable -o com.docker.network.driver.mtu=1400 --label app=mtu mtu", out: `^[0-9a-f]{64}\n$`},
	{args: "network inspect --format '{{.Attachable}} {{.Options}} {{.Labels}}' mtu", out: `^true map\[com.docker.network.driver.mtu:1400\] map\[app:mtu\]\n$`},
	{args: "network create a/b", code: 1, err: `a network's name has up to 63 letters`},
	{args: "network create --label sandboxd.keep=true w", code: 1, err: `names that begin with "sandboxd." are the daemon's`},
	{args: "network ls -q --filter label=app=shop --no-trunc", out: `^[0-9a-f]{64}\n$`},
	{args: "network ls --filter label=app=other -q", out: `^$`},
	{args: "network ls --filter name=^shop --format {{.Name}}", out: `^shop_default\n$`},
	{args: "network ls --filter type=builtin --format {{.Name}}", out: `^bridge\nnone\n$`},
	{args: "network ls --filter type=custom --format {{.Name}}", out: `^Inside\nmtu\nnet\nshop_default\n$`},
	{args: "network ls --filter driver=null --format {{.Name}}", out: `^none\n$`},
	{args: "network ls --filter dangling=false --format {{.Name}}", out: `^bridge\nnone\n$`},
	{args: "network inspect --format '{{.Driver}} {{.Internal}} {{index .Labels \"app\"}} {{len .Containers}}' shop_default", out: `^bridge true shop 0\n$`},
	{args: "network inspect --format '{{.Internal}} {{.Attachable}} {{.Options}}' Inside", out: `^true false map\[\]\n$`},
	{args: "network inspect nosuch", code: 1, err: `not found|No such network`},
	{args: "run --rm --network nosuch tool:1 true", code: 125, err: `network nosuch not found`},
	{args: "run --rm --network shop_default --ip 10.9.0.2 tool:1 true", code: 125, err: `network shop_default: IPAMConfig: the daemon chooses addresses`},
	{args: "run --rm --network shop_default --network-alias a.b tool:1 true", code: 125, err: `an alias has up to 63 letters`},

	{args: "run -d --name web_1 --network shop_default --network-alias www -h page tool:1 sh -c 'echo served > /tmp/index; exec busybox httpd -f -p 8080 -h /tmp'", out: `^[0-9a-f]{64}\n$`},
	{args: "exec web_1 " + fmt.Sprintf(fetchIndex, "127.0.0.1"), out: `\n\r\nserved\n$`, late: true},
	{args: "run --rm --network shop_default tool:1 " + fmt.Sprintf(fetchIndex, "web_1"), out: `\n\r\nserved\n$`},
	{args: "run --rm --network shop_default tool:1 " + fmt.Sprintf(fetchIndex, "WWW"), out: `\n\r\nserved\n$`},
	{args: "run --rm --network shop_default tool:1 " + fmt.Sprintf(fetchIndex, "page"), out: `\n\r\nserved\n$`},
	{args: "run --rm --network shop_default tool:1 " + fmt.Sprintf(fetchIndex, "www.shop_default"), out: `\n\r\nserved\n$`},
	{args: "run --rm --network shop_default tool:1 " + fmt.Sprintf(fetchIndex, "nosuch"), code: 1},
	{args: "run --rm --network net tool:1 " + fmt.Sprintf(fetchIndex, "www"), code: 1},
	{args: "run --rm tool:1 " + fmt.Sprintf(fetchIndex, "www"), code: 1},
	{args: "inspect --format '{{range $n, $e := .NetworkSettings.Networks}}{{$n}} {{$e.Aliases}} {{$e.IPAddress}};{{end}} {{.HostConfig.NetworkMode}}' web_1", out: `^shop_default \[www\] 198\.1[89]\.\d+\.\d+; shop_default\n$`},
	{args: "network inspect --format '{{range .Containers}}{{.Name}} {{.IPv4Address}};{{end}}' shop_default", out: `^web_1 198\.1[89]\.\d+\.\d+/15;\n$`},
	{args: "ps --filter network=shop_default --format {{.Names}}", out: `^web_1\n$`},
	{args: "ps -q --filter network=net", out: `^$`},
	{args: "network ls --filter dangling=true --format {{.Name}}", out: `^Inside\nmtu\nnet\n$`},
	{args: "network rm shop_default", code: 1, err: `network shop_default has active endpoints \(name:"web_1" id:"[0-9a-f]{12}"\)`},
	{args: "network rm bridge", code: 1, err: `bridge is a pre-defined network and cannot be removed`},
	{args: "network rm nosuch", code: 1, err: `network nosuch not found|No such network: nosuch`},
	{args: "network prune -f --filter label=app=other"},
	{args: "network ls --filter type=custom --format {{.Name}}", out: `^Inside\nmtu\nnet\nshop_default\n$`},

	// A container that is created, not started, as Compose and testcontainers have it.
	{args: "create --name client --network net tool:1 " + fmt.Sprintf(fetchIndex, "www"), out: `^[0-9a-f]{64}\n$`},
	{args: "network connect nosuch client", code: 1, err: `network nosuch not found`},
	{args: "network connect shop_default nosuch", code: 1, err: `No such container: nosuch`},
	{args: "network connect --ip 10.9.0.2 shop_default client", code: 1, err: `IPAMConfig`},
	{args: "network connect --link web_1:w shop_default client", code: 1, err: `Links: containers in one network reach each other by name`},
	{args: "network connect --alias c1 shop_default client"},
	{args: "inspect --format '{{range $n, $e := .NetworkSettings.Networks}}{{$n}} {{$e.Aliases}};{{end}}' client", out: `^net \[\];shop_default \[c1\];\n$`},
	{args: "start -a client", out: `\n\r\nserved\n$`},
	{args: "network disconnect shop_default client"},
	{args: "network disconnect shop_default client", code: 1, err: `is not connected to the network shop_default`},
	{args: "network disconnect net client"},
	{args: "inspect --format '{{len .NetworkSettings.Networks}}' client", out: `^0\n$`},
	{args: "start -a client", code: 1},
	{args: "network connect --alias c2 shop_default client"},
	{args: "start -a client", out: `\n\r\nserved\n$`},
	{args: "rm client"},

	// A running one joins, leaves and joins again.
	{args: "run -d --name late --network net tool:1 sleep 1000"},
	{args: "network connect --alias later shop_default late"},
	{args: "exec late " + fmt.Sprintf(fetchIndex, "www.shop_default"), out: `\n\r\nserved\n$`},
	{args: "exec web_1 busybox nslookup later", out: `(?m)^Address: 198\.1[89]\.`},
	{args: "network connect shop_default late", code: 1, err: `endpoint with name late already exists in network shop_default`},
	{args: "network disconnect -f shop_default late"},
	{args: "network disconnect shop_default late", code: 1, err: `is not connected to the network shop_default`},
	{args: "exec late " + fmt.Sprintf(fetchIndex, "www"), code: 1},
	{args: "exec web_1 busybox nslookup later", code: 1},
	{args: "network disconnect net late"},
	{args: "inspect --format '{{len .NetworkSettings.Networks}} {{.State.Running}}' late", out: `^0 true\n$`},
	{args: "network connect shop_default late"},
	{args: "inspect --format '{{range $n, $e := .NetworkSettings.Networks}}{{$n}} {{$e.IPAddress}};{{end}}' late", out: `^shop_default 198\.1[89]\.\d+\.\d+;\n$`},
	{args: "exec late " + fmt.Sprintf(fetchIndex, "www"), out: `\n\r\nserved\n$`},
	{args: "network disconnect shop_default late"},
	{args: "stop late"},
	{args: "start late"},
	{args: "network connect net late", code: 1, err: `late runs without a network, which a running one cannot get`},
	{args: "rm -f late"},

	// None, and the network of another container.
	{args: "create --name alone --network none tool:1 true"},
	{args: "network connect net alone", code: 1, err: `private \(none\) mode`},
	{args: "create --name shares --network container:web_1 tool:1 " + fmt.Sprintf(fetchIndex, "127.0.0.1")},
	{args: "network connect net shares", code: 1, err: `sharing network namespace`},
	{args: "start -a shares", out: `\n\r\nserved\n$`},
	{args: "create --name bridged tool:1 true"},
	{args: "network disconnect bridge bridged", code: 1, err: `bridged cannot leave bridge: create it with --network none`},
	{args: "network connect net bridged"},
	{args: "inspect --format '{{range $n, $e := .NetworkSettings.Networks}}{{$n}};{{end}}' bridged", out: `^bridge;net;\n$`},
	{args: "rm alone shares bridged"},
	{args: "run -d --name 1.2 --network net tool:1 sleep 1000", err: `is no label of a host name`},
	{args: "rm -f web_1 1.2", out: `^web_1\n1\.2\n$`},
	{args: "network prune -f --filter label=app=shop", out: `^Deleted Networks:\nshop_default\n`},
	{args: "network rm Inside net", out: `^Inside\nnet\n$`},
	{args: "network prune -f", out: `^Deleted Networks:\nmtu\n`},
	{args: "network ls --format {{.Name}}", out: `^bridge\nnone\n$`},
}

func TestNetworkLines(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	for which, docker := range f.clients(t) {
		before := len(f.events(t, `{"network":["shop_default"]}`))
		f.runLines(t, which, docker, networkLines, os.Getenv)
		id := networkID(t, f, docker, "shop_default")
		times := map[string]int{}
		got := f.events(t, `{"network":["shop_default"]}`)[before:]
		for _, e := range got {
			times[strings.TrimSuffix(strings.TrimPrefix(e, "network "), " "+id)]++
		}
		// Containers join when they start, and leave when they end.
		joins := times["connect"]
		if want := map[string]int{"create": 2, "connect": joins, "disconnect": joins, "destroy": 2}; joins < 8 || !maps.Equal(times, want) {
			t.Errorf("%s: events: %q, %v", which, got, times)
		}
	}
	if bridge := f.events(t, `{"network":["bridge"]}`); len(bridge) < 1 {
		t.Errorf("a container that joins another network stays in bridge: events %q", bridge)
	}
	if got := f.events(t, `{"network":["net"],"type":["container"]}`); len(got) != 0 {
		t.Errorf("events of containers are about a network: %q", got)
	}
}

// networkID returns the ID that a network of a name has.
func networkID(t *testing.T, f *face, docker, name string) string {
	t.Helper()
	id := strings.TrimSpace(f.must(t, docker, "network", "create", name))
	if got := strings.TrimSpace(f.must(t, docker, "network", "inspect", "--format", "{{.Name}}", id[:12])); got != name {
		t.Errorf("network %s is %q", id[:12], got)
	}
	f.must(t, docker, "network", "rm", id)
	return id
}
