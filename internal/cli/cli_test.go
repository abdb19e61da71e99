package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

// TestMain makes the test binary the command itself if [cmdtest.Command] runs it.
func TestMain(m *testing.M) {
	if os.Getenv(cmdtest.AsCommand) != "" {
		os.Exit(command(context.Background(), os.Stdin, os.Stdout, os.Stderr, os.Args[1:]...))
	}
	syscall.Umask(0o022) // the tests expect modes under this umask
	os.Exit(cmdtest.Main(m))
}

// command runs a command line.
func command(ctx context.Context, stdin, stdout, stderr *os.File, args ...string) int {
	return run(ctx, args, deps{
		Deps:  cmdline.Deps{Stdin: stdin, Stdout: stdout, Stderr: stderr, Program: os.Executable},
		serve: serveFake,
		checks: func(_ context.Context, dir string) []api.Check {
			return []api.Check{{Name: "data directory", Found: dir, Means: "nothing works", Fatal: true}}
		},
	})
}

// inline runs a command line in this process, against the daemon at the socket.
func inline(t *testing.T, socket, stdin string, args ...string) cmdtest.Outcome {
	t.Helper()
	return cmdtest.Inline(t, stdin, func(ctx context.Context, stdin, stdout, stderr *os.File) int {
		return command(ctx, stdin, stdout, stderr, append([]string{"--socket", socket}, args...)...)
	})
}

// serveFake is the daemon of the commands that start one.
func serveFake(ctx context.Context, opts boot.Options) error {
	if os.Getenv("FAKE_BROKEN") != "" {
		return errors.New("the data directory is no good")
	}
	return cmdtest.Serve(ctx, opts.Socket)
}

// sentVolume checks the one request that has changed a volume.
func sentVolume(want string) func(*cmdtest.Daemon) string {
	return func(f *cmdtest.Daemon) string { return cmp.Diff([]string{want}, f.Volumes) }
}

// sentNetwork checks the one request that has changed a named network.
func sentNetwork(want string) func(*cmdtest.Daemon) string {
	return func(f *cmdtest.Daemon) string { return cmp.Diff([]string{want}, f.Networks) }
}

// TestCommands drives the command line against the fake daemon. A nil check accepts anything.
func TestCommands(t *testing.T) {
	is := func(want string) func(string) bool { return func(s string) bool { return s == want } }
	has := func(parts ...string) func(string) bool {
		return func(s string) bool {
			for _, p := range parts {
				if !strings.Contains(s, p) {
					return false
				}
			}
			return true
		}
	}
	none := is("")
	tests := []struct {
		name   string
		args   string // split at spaces; "_" is an empty argument
		stdin  string
		setup  func(*cmdtest.Daemon)
		stdout func(string) bool
		stderr func(string) bool
		code   int
		check  func(*cmdtest.Daemon) string // returns a description of the defect
	}{
		{name: "run passes output on", args: "run -- echo hi there", stdout: is("hi there\n"), stderr: is("\xff\n"), check: func(f *cmdtest.Daemon) string {
			want := []string{"POST /v1/sandboxes", "POST /v1/sandboxes/sb1/exec", "DELETE /v1/sandboxes/sb1"}
			return cmp.Diff(want, f.Log)
		}},
		{name: "run passes the exit code on", args: "run -- exit3", stdout: none, stderr: none, code: 3, check: (*cmdtest.Daemon).Left},
		{name: "flags behind the image are the program's", args: "run host echo --json -t", stdout: is("--json -t\n")},
		{name: "the first -- behind the image is ours, the second is not", args: "run host -- echo -- x", stdout: is("-- x\n")},
		{name: "a signal is 128+n, and memory is mentioned", args: "run -- killed", stderr: has("ran out of memory"), code: 137},
		{
			name: "timeout is 124", args: "run --timeout 1.5 -- slow", stderr: is("sandboxd: the program was stopped: its timeout of 1.5s had ended\n"), code: 124,
			check: func(f *cmdtest.Daemon) string { return cmp.Diff(1.5, f.Execs[0].Timeout) },
		},
		{name: "no such program", args: "run -- missing", stderr: is("sandboxd: there is no program \"missing\" in the sandbox\nhint: name a program that is in the image\n"), code: 127, check: (*cmdtest.Daemon).Left},
		{name: "not executable", args: "run -- denied", stderr: has("denied", "hint: chmod"), code: 126, check: (*cmdtest.Daemon).Left},
		{name: "the sandbox dies", args: "run -- die", stderr: is("sandboxd: the sandbox ended\nhint: see its reason\n"), code: 125, check: (*cmdtest.Daemon).Left},
		{name: "an exit code that cannot be", args: "run -- wild", stderr: has("1048576"), code: 125},
		{name: "run without a program", args: "run debian", stdout: none, stderr: has("says no command", "sandboxd run debian -- PROGRAM"), code: 125, check: (*cmdtest.Daemon).Left},
		{name: "run without anything", args: "run", stderr: has("sandboxd run host -- PROGRAM"), code: 125},
		{name: "run with an unknown flag", args: "run --nope -- x", stderr: has("unknown flag: --nope", "hint:"), code: 125},
		{name: "run with an empty program", args: "run -- _", stderr: has("empty name"), code: 125},
		{name: "run pulls what is not here", args: "run debian:12 -- echo hi", stdout: is("hi\n"), stderr: is("\xff\n"), check: func(f *cmdtest.Daemon) string {
			want := []string{"POST /v1/sandboxes", "POST /v1/images/pull", "POST /v1/sandboxes", "POST /v1/sandboxes/sb1/exec", "DELETE /v1/sandboxes/sb1"}
			return cmp.Diff(want, f.Log)
		}},
		{
			name: "run of an image that cannot be had, said without its escape sequences", args: "run missing:1 -- echo", code: 125,
			stderr: is("sandboxd: pull missing:1: the registry says \\x1b[31mMANIFEST_UNKNOWN\nhint: check the name\n"),
		},
		{
			name: "everything that can be asked for", args: "run -e A=1 -e FROM_HERE -e NOT_HERE --cwd /w -u 7:8 --name n -l a=b -l c --memory 512m --swap 0 --cpus 0.5 --pids 9 --nofile 10 --profile p --network none --lifetime 2h --idle-timeout 30 -- echo",
			check: func(f *cmdtest.Daemon) string {
				want := api.CreateSandbox{
					Name: "n", Env: []string{"A=1", "FROM_HERE=here", "NOT_HERE"}, Cwd: "/w", User: "7:8", Labels: map[string]string{"a": "b", "c": ""}, Profile: "p",
					Limits:  api.Limits{Memory: 512 << 20, Swap: new(int64), CPUs: 0.5, Pids: 9, Nofile: 10},
					Network: api.Network{Mode: api.NetworkNone}, Timeout: 7200, IdleTimeout: 30,
				}
				return cmp.Diff(want, f.Creates[0])
			},
		},
		{name: "a long timeout lengthens the sandbox's life", args: "run --timeout 2h -- echo", check: func(f *cmdtest.Daemon) string { return cmp.Diff(7260.0, f.Creates[0].Timeout) }},
		{name: "memory of nothing", args: "run --memory 0 -- x", stderr: has("--memory"), code: 125, check: nothingAsked},
		{name: "memory of words", args: "run --memory lots -- x", stderr: has(`"lots" is no size such as 512m`), code: 125, check: nothingAsked},
		{name: "no cores", args: "run --cpus 0 -- x", stderr: has("--cpus 0"), code: 125, check: nothingAsked},
		{name: "cores that are not a number", args: "run --cpus NaN -- x", stderr: has("--cpus NaN"), code: 125, check: nothingAsked},
		{name: "no processes", args: "run --pids 0 -- x", stderr: has("--pids 0"), code: 125, check: nothingAsked},
		{name: "a negative timeout", args: "run --timeout -1s -- x", stderr: has("--timeout", "greater than zero"), code: 125, check: nothingAsked},
		{name: "a network we do not have", args: "run --network host -- x", stderr: has("want none, full, egress:POLICY, sandbox:SANDBOX or net:NAME"), code: 125, check: nothingAsked},
		{name: "a variable without a name", args: "run -e =x -- x", stderr: has("has no name"), code: 125, check: nothingAsked},
		{name: "a label without a key", args: "run -l =x -- x", stderr: has("has no key"), code: 125, check: nothingAsked},
		{name: "run --json", args: "run --json -- exit3", stdout: has(`"code": 3`, `"stdout": "out"`), stderr: none, code: 3},
		{name: "run --json -i", args: "run --json -i -- x", stderr: has("--json waits"), code: 125, check: nothingAsked},
		{name: "run --keep", args: "run --keep -- echo", stderr: has("the sandbox stays: sb1 (name1)"), check: func(f *cmdtest.Daemon) string { return cmp.Diff(1, len(f.Sandboxes)) }},
		{name: "run -d", args: "run -d", stdout: is("sb1\n"), stderr: none},
		{name: "run -d with a program", args: "run -dit host x -y", stdout: is("sb1\n"), stderr: none, check: mainProcess("host", true, "x", "-y")},
		{name: "run -d with the image's program", args: "run -d --image-command host", stdout: is("sb1\n"), check: mainProcess("host", false)},
		{name: "run -dt of nothing", args: "run -dt host", stderr: has("there is none"), code: 125, check: nothingAsked},
		{name: "run -d with a timeout", args: "run -d --timeout 3s host x", stderr: has("--lifetime"), code: 125, check: nothingAsked},
		{name: "run with the image's program", args: "run --image-command host -- x", stderr: has("--detach"), code: 125, check: nothingAsked},
		{
			name: "run, and the sandbox cannot be deleted", args: "run -- exit3", code: 3, stderr: has("sandbox sb1 was left behind: busy", "hint: wait"),
			setup: func(f *cmdtest.Daemon) {
				f.DeleteErr = &api.Problem{Code: api.CodeInternal, Detail: "busy", Hint: "wait"}
			},
		},
		{name: "run -i", args: "run -i -- cat", stdin: "some\nlines\n", stdout: is("some\nlines\n"), check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{`{"stdin_close":true}`}, f.Controls) + f.Left()
		}},
		{name: "run -i: the program ends first", args: "run -i -- cat", stdin: "q", stdout: is("q"), code: 7, check: (*cmdtest.Daemon).Left},
		{name: "run without -i does not pass stdin on", args: "run -- echo x", stdin: "secret", stdout: is("x\n"), check: func(f *cmdtest.Daemon) string { return cmp.Diff([]byte(nil), f.Execs[0].Stdin) }},

		{
			name: "run --learn", args: "run --learn -- exit3", code: 3, setup: someFlows, stdout: none, stderr: has("- allow: pypi.org", "ports: 443", "2 flows were not recorded"),
			check: func(f *cmdtest.Daemon) string {
				return cmp.Diff(api.Network{Mode: api.NetworkFull}, f.Creates[0].Network) + cmp.Diff([]string{`stop {"grace":0}`}, f.Updates) + f.Left()
			},
		},
		{name: "flows with their processes", args: "flows sb1", setup: flowing, stdout: has("443 (151.101.0.223) by pip", "[7] exec x1 sandbox guest\n"), stderr: has("2 flows before this")},
		{name: "flows of an exec", args: "flows --exec x1 --json sb1", setup: flowing, stdout: func(s string) bool {
			return strings.Count(s, "\n") == 1 && strings.Contains(s, `"exec":"x1"`)
		}},
		{name: "flows of no exec", args: "flows --exec x2 sb1", setup: flowing, stdout: none},
		{name: "run --learn of another network", args: "run --learn --network egress:npm -- echo", setup: someFlows, stderr: has("- allow: pypi.org"), check: func(f *cmdtest.Daemon) string {
			return cmp.Diff(api.NetworkEgress, f.Creates[0].Network.Mode)
		}},
		{name: "run --learn to a file that cannot be", args: "run --learn=/nowhere/policy.yaml -- echo", setup: someFlows, code: 125, stderr: has("- allow: pypi.org", "/nowhere/policy.yaml"), check: (*cmdtest.Daemon).Left},
		{name: "run --learn to no file", args: "run --learn= -- echo", stderr: has("names no file"), code: 125, check: nothingAsked},
		{name: "run --learn -d", args: "run --learn -d host x", stderr: has("policy learn"), code: 125, check: nothingAsked},
		{name: "run --learn without a network", args: "run --learn --network none -- x", stderr: has("needs no policy"), code: 125, check: nothingAsked},

		{
			name: "ports of every kind", args: "create --network full -p 80 -p 8080:80/tcp -p 127.0.0.2:5353:53/udp -p [::1]:8081:81 -p unix:web.sock:82 -p unix:/run/sandboxd/ports/a:83/tcp",
			check: func(f *cmdtest.Daemon) string {
				return cmp.Diff([]api.PortMapping{
					{Port: 80},
					{Port: 80, HostPort: 8080, Protocol: "tcp"},
					{Port: 53, HostPort: 5353, Address: "127.0.0.2", Protocol: "udp"},
					{Port: 81, HostPort: 8081, Address: "::1"},
					{Port: 82, Socket: "web.sock"},
					{Port: 83, Socket: "/run/sandboxd/ports/a", Protocol: "tcp"},
				}, f.Creates[0].Ports)
			},
		},
		{name: "a port of another protocol", args: "create --network full -p 80/sctp", stderr: has(`"sctp" is neither tcp nor udp`), code: 2, check: nothingAsked},
		{name: "a socket without a name", args: "create --network full -p unix::80", stderr: has("the socket has no name"), code: 2, check: nothingAsked},
		{name: "a socket without a port", args: "create --network full -p unix:web", stderr: has(`"web" is no port number`), code: 2, check: nothingAsked},
		{name: "port", args: "port sb1", setup: publishing, stdout: is("80/tcp -> 127.0.0.1:8080\n53/udp -> [::1]:5353\n82/tcp -> unix:/run/w\\x1b\n"), stderr: none},

		{
			name: "secret set", args: "secret set github --host api.github.com --method GET --path /repos/* --variable GITHUB_TOKEN", stdin: "ghp_value\n", stdout: is("github\n"), stderr: none,
			check: func(f *cmdtest.Daemon) string {
				want := api.SetSecret{Kind: api.SecretBearer, Value: "ghp_value", Host: "api.github.com", Methods: []string{"GET"}, Paths: []string{"/repos/*"}, Variable: "GITHUB_TOKEN"}
				return cmp.Diff([]api.SetSecret{want}, f.Secrets)
			},
		},
		{
			name: "secret set of another kind", args: "secret set s3 --host s3.example.com --port 9000 --aws AKIA --file -", stdin: "value\r\n",
			check: func(f *cmdtest.Daemon) string {
				return cmp.Diff([]api.SetSecret{{Kind: api.SecretAWS, Value: "value", AccessKeyID: "AKIA", Host: "s3.example.com", Port: 9000}}, f.Secrets)
			},
		},
		{
			name: "secret set of a password of any user", args: "secret set git --host git.example.com --basic= --always", stdin: "two\nlines",
			check: func(f *cmdtest.Daemon) string {
				return cmp.Diff([]api.SetSecret{{Kind: api.SecretBasic, Value: "two\nlines", Host: "git.example.com", Always: true}}, f.Secrets)
			},
		},
		{name: "secret set without a host", args: "secret set a", stdin: "value", stderr: has("--host is missing"), code: 2, check: nothingAsked},
		{name: "secret set of two kinds", args: "secret set a --host h --basic me --header x", stdin: "value", stderr: has("give one"), code: 2, check: nothingAsked},
		{name: "secret set with a token for nothing", args: "secret set a --host h --session-token-file x", stdin: "value", stderr: has("for --aws"), code: 2, check: nothingAsked},
		{name: "secret set from a missing file", args: "secret set a --host h --file /nowhere/value", stderr: has("read the secret: open /nowhere/value"), code: 1, check: nothingAsked},
		{name: "secret set of too much", args: "secret set a --host h", stdin: strings.Repeat("x", maxSecret+1), stderr: has("larger"), code: 1, check: nothingAsked},
		{name: "network ls", args: "network ls", stderr: none, stdout: is("NETWORK   SANDBOX   STATE     ADDRESS\nback      db        running   198.18.37.4\nback      app\\x1b   stopped   -\nempty     -         -         -\nfront     db        running   198.18.37.4\n")},
		{name: "network ls --json", args: "network ls --json", stdout: has(`"name": "back"`, `"address": "198.18.37.4"`)},
		{name: "network ls -q --filter", args: "network ls -q --filter label=app=shop --filter dangling=true --filter driver=bridge", stdout: is("empty\n")},
		{name: "network ls of a sandbox", args: "network ls --filter sandbox=db --filter name=ack --format {{.Name}}", stdout: is("back\n")},
		{name: "network ls of an unknown key", args: "network ls --filter scope=local", code: 2, stderr: has("dangling, driver, label, name, sandbox")},
		{name: "network create", args: "network create -l a=b --internal x", stdout: is("made\n"), check: sentNetwork(`POST /v1/networks {"name":"x","labels":{"a":"b"},"internal":true}`)},
		{name: "network inspect", args: "network inspect -f {{.Name}}:{{.Internal}} empty", stdout: is("empty:true\n")},
		{name: "network rm", args: "network rm nothing back gone", code: 1, stdout: is("gone\n"), stderr: has("no such network", "db (sb1) is in it")},
		{name: "network rm -f", args: "network rm -f nothing", stderr: none},
		{name: "network prune", args: "network prune --filter label=a=b", stdout: is("empty\n1 networks\n"), check: sentNetwork(`POST /v1/networks/prune {"labels":{"a":"b"}}`)},
		{name: "network prune of an unknown key", args: "network prune --filter until=1h", code: 2, stderr: has("label=KEY=VALUE")},
		{name: "network connect", args: "network connect --alias sql --alias data back db", stdout: none, check: sentNetwork(`POST /v1/networks/back/connect {"sandbox":"db","aliases":["sql","data"]}`)},
		{name: "network disconnect", args: "network disconnect back db", stdout: none, check: sentNetwork(`POST /v1/networks/back/disconnect {"sandbox":"db"}`)},
		{name: "aliases", args: "create --network net:back --network net:front --network-alias sql", check: func(f *cmdtest.Daemon) string {
			return cmp.Diff(map[string][]string{"back": {"sql"}, "front": {"sql"}}, f.Creates[0].Network.Aliases)
		}},
		{name: "aliases of no network", args: "create --network full --network-alias sql", stderr: has("--network net:NAME"), code: 2, check: nothingAsked},
		{name: "secret ls", args: "secret ls", stderr: none, stdout: func(s string) bool {
			rows := strings.Split(s, "\n")
			return len(rows) == 4 && strings.Join(strings.Fields(rows[1])[:6], " ") == "github bearer api.github.com:443 all /repos/* GITHUB_TOKEN" &&
				strings.Join(strings.Fields(rows[2]), " ") == `model header x-api-key h\x1b:8443 GET,POST all - (file)`
		}},
		{name: "secret ls --json", args: "secret ls --json", stdout: has(`"name": "github"`, `"file": true`)},
		{name: "secret rm", args: "secret rm a b", stdout: is("a\nb\n"), stderr: none},
		{name: "secret rm of nothing", args: "secret rm nothing a", stdout: is("a\n"), stderr: has("no such secret"), code: 1},

		{name: "create", args: "create --name work debian:12", stdout: is("sb1\n"), stderr: none, setup: func(f *cmdtest.Daemon) { f.Images = []string{"debian:12"} }},
		{name: "create --json", args: "create --json", stdout: has(`"id": "sb1"`, `"state": "running"`)},
		{name: "create, two images", args: "create a b", stderr: has("behind \"--\""), code: 2},
		{name: "create with a program", args: "create host -it -- x -y", stdout: is("sb1\n"), check: mainProcess("host", true, "x", "-y")},
		{name: "create of the host with a program", args: "create -- x", stdout: is("sb1\n"), check: mainProcess("", false, "x")},
		{name: "create with a terminal for nothing", args: "create -t", stderr: has("there is none"), code: 2, check: nothingAsked},

		{name: "exec", args: "exec -e K=v -w /d -u me sb1 -- echo a b", setup: oneSandbox, stdout: is("a b\n"), check: func(f *cmdtest.Daemon) string {
			want := api.ExecRequest{Argv: []string{"echo", "a", "b"}, Env: []string{"K=v"}, Cwd: "/d", User: "me"}
			return cmp.Diff(want, f.Execs[0]) + cmp.Diff(1, len(f.Sandboxes))
		}},
		{name: "exec by name, without --", args: "exec first echo -e", setup: oneSandbox, stdout: is("-e\n")},
		{name: "exec in nothing", args: "exec nope -- echo", stderr: is("sandboxd: there is no sandbox \"nope\"\nhint: sandboxd ps lists them\n"), code: 125},
		{name: "exec of nothing", args: "exec sb1", setup: oneSandbox, stderr: has("no program is named"), code: 125},
		{name: "exec without a sandbox", args: "exec", stderr: has("no sandbox is named"), code: 125},
		{name: "exec in a path trick", args: "exec .. -- echo", stderr: has(`".." is not the id`), code: 125, check: nothingAsked},

		{name: "ps", args: "ps", setup: oneSandbox, stdout: func(s string) bool {
			return strings.Join(strings.Fields(s), " ") == "ID NAME IMAGE STATE CREATED ENDS sb1 first host running - -"
		}},
		{name: "ps -q", args: "ps -q", setup: oneSandbox, stdout: is("sb1\n")},
		{
			name: "update", args: "update sb1 --memory 512m --cpus 0 --cpuset _ --oom-group=false --io-write-bps 1m --lifetime 2h --label a=b --label c-", setup: oneSandbox,
			stdout: is("sb1\n"), stderr: none, check: func(f *cmdtest.Daemon) string {
				return cmp.Diff([]string{`{"limits":{"memory":536870912,"oom_group":false,"cpus":0,"cpuset":"","io":{"write_bps":1048576}},` +
					`"labels":{"a":"b","c":null},"timeout":7200}`}, f.Updates)
			},
		},
		{name: "update of one of io", args: "update sb1 --io-read-iops 0 --io-weight 5", setup: oneSandbox, check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{`{"limits":{"io":{"weight":5,"read_iops":0}}}`}, f.Updates)
		}},
		{name: "update of nothing", args: "update sb1", setup: oneSandbox, stderr: has("nothing is to be changed"), code: 2},
		{name: "update with half a label", args: "update sb1 --label a", setup: oneSandbox, stderr: has("neither key=value nor key-"), code: 2},
		{name: "update of NaN cores", args: "update sb1 --cpus nan", setup: oneSandbox, stderr: has("--cpus"), code: 2},
		{name: "update of an unknown one", args: "update sb2 --pids 5", setup: oneSandbox, stderr: has("sb2"), code: 1},
		{name: "stats", args: "stats sb1", setup: oneSandbox, stderr: none, stdout: func(s string) bool {
			return has("running for", "1m1.5s", "64MiB", "1.5s", "disk 259:0 written", "1MiB in 16", "12.3 % of 10 s")(s) && !strings.Contains(s, "swap") && !strings.Contains(s, "killed")
		}},
		{name: "system df", args: "system df", stdout: is("TYPE          TOTAL   ACTIVE   SIZE    RECLAIMABLE\nImages        2       1        148MB   37MB (25%)\nSandboxes     2       0        5MB     0B (0%)\n" +
			"Snapshots     0       0        0B      0B\nVolumes       0       0        0B      0B\nLogs          0       0        0B      0B\nBuild cache   0       0        0B      0B\n")},
		{name: "system df -v", args: "system df -v", stdout: func(s string) bool {
			return strings.Contains(s, "sb1       one       running   31      5MB    0B\n") && strings.Contains(s, "sb2       t\\x1bwo   lost      --      --     0B\n")
		}},
		{name: "system df --format", args: "system df --format {{.Type}}:{{.Size}}", stdout: is("Images:148MB\nSandboxes:5MB\nSnapshots:0B\nVolumes:0B\nLogs:0B\nBuild cache:0B\n")},
		{name: "volume create", args: "volume create --size 1g --inodes 5k -l a=b -o inodes=6k x", stdout: is("made\n"), check: sentVolume(`POST /v1/volumes {"name":"x","labels":{"a":"b"},"size":1073741824,"inodes":6000}`)},
		{name: "volume ls", args: "volume ls", stdout: is("NAME       LIMIT   FILES    SANDBOXES   CREATED\ncache      1GiB    131072   one         About an hour ago\ndata\\x1b   -       -        -           About an hour ago\n")},
		{name: "volume ls -q --filter", args: "volume ls -q --filter label=app=shop --filter sandbox=one", stdout: is("cache\n")},
		{name: "volume ls --filter dangling", args: "volume ls -q --filter dangling=true", stdout: is("data\\x1b\n")},
		{name: "volume ls --format", args: "volume ls --filter name=ach --format {{.Name}}:{{.Size}}", stdout: is("cache:1073741824\n")},
		{name: "volume ls of an unknown key", args: "volume ls --filter size=1", code: 2, stderr: has("dangling, driver, label, name, sandbox")},
		{name: "volume inspect", args: "volume inspect -f {{.Name}}:{{.Usage.Bytes}} cache", stdout: is("cache:4096\n")},
		{name: "volume rm", args: "volume rm nothing cache gone", code: 1, stdout: is("gone\n"), stderr: has("no such volume", "one (sb1) has it")},
		{name: "volume rm -f", args: "volume rm -f nothing", stderr: none},
		{name: "volume prune", args: "volume prune -l a=b", stdout: is("data\\x1b\n1 volumes, 5MB\n"), check: sentVolume(`POST /v1/volumes/prune {"labels":{"a":"b"}}`)},
		{name: "volume prune --all", args: "volume prune --all", code: 2, stderr: has("--force")},
		{name: "volume prune --all --force", args: "volume prune -af", stdout: has("1 volumes"), check: sentVolume(`POST /v1/volumes/prune {"all":true}`)},
		{name: "volume export", args: "volume export cache", stdout: is("an archive")},
		{name: "volume import", args: "volume import --size 2k copy", stdin: "tar", stdout: is("copy\n"), stderr: has("left out: null: a device"), check: sentVolume("POST /v1/volumes/import?name=copy&size=2048 tar")},
		{name: "volume import of no file", args: "volume import copy /nonesuch", code: 1, stderr: has("/nonesuch")},
		{name: "system df --format -v", args: "system df -v --format x", code: 2, stderr: has("give one of them")},
		{name: "stats --json", args: "stats sb1 --json", setup: oneSandbox, stdout: func(s string) bool {
			return has(`"current": 67108864`)(s) && !strings.Contains(s, "swap")
		}},
		{name: "create with limits", args: "create --memory-high 1g --oom-group --cpu-weight 50 --cpuset 0-1 --io-read-iops 7", check: func(f *cmdtest.Daemon) string {
			return cmp.Diff(api.Limits{MemoryHigh: 1 << 30, OOMGroup: true, CPUWeight: 50, CPUSet: "0-1", IO: api.IOLimits{ReadIOPS: 7}}, f.Creates[0].Limits)
		}},
		{name: "create with a memory-high of nothing", args: "create --memory-high 0", stderr: has("--memory-high"), code: 2},
		{name: "create with no writes", args: "create --io-write-iops 0", stderr: has("--io-write-iops"), code: 2},
		{name: "create with a weight of nothing", args: "create --cpu-weight 0", stderr: has("--cpu-weight"), code: 2},
		{
			name: "events", args: "events --since 1795635487213904 --filter type=sandbox --filter type=secret", stderr: has("3 or more events before this"),
			stdout: is("2026-01-02T03:04:05.000 sandbox stopped sb1 name=\"name1\" image=\"host\" code=3 reason=\"\\x1b[2J\"\n2026-01-02T03:04:05.000 secret set github\n"),
			check: func(f *cmdtest.Daemon) string {
				return cmp.Diff([]string{"filter=type%3Dsandbox&filter=type%3Dsecret&follow=true&since=1795635487213904"}, f.Updates)
			},
		},
		{name: "events --json", args: "events --no-follow --json", stdout: has(`{"lost":3}`, `"id":9`), stderr: none, check: func(f *cmdtest.Daemon) string { return cmp.Diff([]string{""}, f.Updates) }},
		{name: "events --format", args: "events -n 2 --format {{.ID}}:{{.Type}}", stdout: is("7:sandbox\n9:secret\n"), check: func(f *cmdtest.Daemon) string { return cmp.Diff([]string{"follow=true&tail=2"}, f.Updates) }},
		{name: "events with Docker's keys", args: "events --no-follow --filter event=start --filter container=sb1", check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{"filter=action%3Dstart&filter=sandbox%3Dsb1"}, f.Updates)
		}},
		{name: "events with half a filter", args: "events --filter type", stderr: has("is not key=value"), code: 2, check: nothingAsked},
		{name: "events with an unknown filter", args: "events --filter color=red", stderr: has("must be one of type, action, object, name, sandbox, image, label"), code: 2, check: nothingAsked},
		{name: "rename", args: "rename sb1 other", setup: oneSandbox, stdout: is("other\n"), stderr: none},
		{name: "rename of none", args: "rename nope other", stderr: has("there is no sandbox"), code: 1},
		{name: "rename to nothing", args: "rename sb1", stderr: has("hint:"), code: 2, check: nothingAsked},
		{name: "ps -a --format", args: "ps -a --format {{.Names}}:{{.State}}", setup: oneSandbox, stdout: is("first:running\n")},
		{name: "ps --format json", args: "ps --format json", setup: oneSandbox, stdout: has(`{"id":"sb1"`)},
		{name: "ps -q --no-trunc", args: "ps -q --no-trunc", setup: oneSandbox, stdout: is("sb1\n")},
		{name: "ps of one that never ends", args: "ps --format {{.Ends}}", setup: neverEnding, stdout: is("never\n")},
		{name: "ps cuts a long reason", args: "ps", setup: neverEnding, stdout: func(s string) bool { return strings.Contains(s, "xxx...") && !strings.Contains(s, "xxx)") }},
		{name: "ps --no-trunc", args: "ps --no-trunc", setup: neverEnding, stdout: func(s string) bool { return strings.Contains(s, "xxx)") }},
		{name: "create --lifetime never", args: "create --lifetime never", check: created(func(r *api.CreateSandbox) bool { return r.Timeout == api.Never })},
		{name: "run -d --rm", args: "run -d --rm -- echo", check: created(func(r *api.CreateSandbox) bool { return r.AutoRemove })},
		{name: "run --rm", args: "run --rm -- echo", stdout: func(string) bool { return true }, check: created(func(r *api.CreateSandbox) bool { return !r.AutoRemove })},
		{name: "ps --filter", args: "ps -q --filter state=running --filter state=paused --filter name=f*t --filter network=none", setup: oneSandbox, stdout: is("sb1\n")},
		{name: "ps --filter of others", args: "ps --json --filter state=stopped", setup: oneSandbox, stdout: has(`"sandboxes": []`)},
		{name: "ps with an unknown filter", args: "ps --filter color=red", stderr: has("must be one of health, id, image, label, name, network, profile, state, status"), code: 2, check: nothingAsked},
		{name: "ps with a template of nonsense", args: "ps --format {{.Nope}}", setup: oneSandbox, stderr: has("--format", "Nope"), code: 2},
		{name: "images -q", args: "images -q", setup: someImages, stdout: is("sha256:0123456789abcdef\n")},
		{name: "images --filter", args: "images --filter reference=debian --format {{.Reference}}", setup: someImages, stdout: is("docker.io/library/debian:12\n")},
		{name: "images with half a filter", args: "images --filter debian", stderr: has("is not key=value"), code: 2, check: nothingAsked},
		{name: "inspect", args: "inspect first", setup: oneSandbox, stdout: has("[\n  {\n    \"id\": \"sb1\"")},
		{name: "inspect of an image with slashes", args: "inspect -f {{.Reference}} docker.io/library/debian:12", stdout: is("docker.io/library/debian:12\n")},
		{name: "inspect --format", args: "inspect -f {{.ID}}={{.State}} sb1", setup: oneSandbox, stdout: is("sb1=running\n")},
		{name: "inspect of a secret", args: "inspect --type secret -f {{.Name}}:{{.Host}} github", stdout: is("github:api.github.com\n")},
		{name: "inspect of an exec", args: "inspect --type exec -f {{.PID}} sb1/x1", setup: oneSandbox, stdout: is("7\n")},
		{name: "inspect of an exec by its id", args: "inspect --type exec -f {{.Sandbox}} x1", setup: oneSandbox, stdout: is("sb1\n")},
		{name: "inspect of some", args: "inspect --type sandbox sb1 nope", setup: oneSandbox, stdout: has(`"sb1"`), stderr: has("nope"), code: 1},
		{name: "inspect of another type", args: "inspect --type net x", stderr: has("none of sandbox, image"), code: 2, check: nothingAsked},
		{name: "ps of nothing", args: "ps -q", stdout: none, stderr: none},
		{name: "ps --label", args: "ps -q --label k=other", setup: oneSandbox, stdout: none},
		{name: "ps with half a label", args: "ps --label k", stderr: has("is not key=value"), code: 2},
		{name: "ps --json of nothing is a list", args: "ps --json", stdout: has(`"sandboxes": []`)},
		{name: "a state that would act on the terminal", args: "ps", stdout: has(`stopped (\x1b[2J)`), setup: func(f *cmdtest.Daemon) {
			f.Sandboxes = []api.Sandbox{{ID: "x", State: api.StateStopped, Reason: "\x1b[2J"}}
		}},

		{name: "stop", args: "stop -t 0.5 sb1", setup: oneSandbox, stdout: is("sb1\n"), check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{`stop {"grace":0.5}`}, f.Updates)
		}},
		{name: "stop at once", args: "stop -t 0 --json sb1", setup: oneSandbox, stdout: has(`"state": "stopped"`), check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{`stop {"grace":0}`}, f.Updates)
		}},
		{name: "stop with a negative grace", args: "stop -t -1 sb1", setup: oneSandbox, stderr: has("grace"), code: 2},
		{name: "stop of nothing", args: "stop", code: 2},
		{name: "start", args: "start --lifetime 2h nope sb1", setup: oneSandbox, stdout: is("sb1\n"), stderr: has("nope"), code: 1, check: func(f *cmdtest.Daemon) string {
			return cmp.Diff([]string{`start {"timeout":7200}`}, f.Updates)
		}},
		{name: "pause", args: "pause sb1", setup: oneSandbox, stdout: is("sb1\n")},
		{name: "resume", args: "resume sb1 --json", setup: oneSandbox, stdout: has(`"state": "running"`)},
		{name: "rm", args: "rm sb1", setup: oneSandbox, stdout: is("sb1\n"), check: (*cmdtest.Daemon).Left},
		{name: "rm --all", args: "rm --all", setup: oneSandbox, stdout: is("sb1\n"), check: (*cmdtest.Daemon).Left},
		{name: "rm of one that is gone", args: "rm nope", stderr: has(`no sandbox "nope"`), code: 1},
		{name: "rm goes on after an error", args: "rm nope sb1", setup: oneSandbox, stdout: is("sb1\n"), stderr: has("nope"), code: 1, check: (*cmdtest.Daemon).Left},
		{name: "rm --json", args: "rm --json sb1", setup: oneSandbox, stdout: has(`"deleted": [`, `"sb1"`)},
		{name: "rm of nothing", args: "rm", stderr: has("no sandbox is named"), code: 2},
		{name: "rm of all and some", args: "rm --all x", stderr: has("exclude"), code: 2},

		{name: "pull", args: "pull debian:12", stdout: is("debian:12 sha256:0123\n"), stderr: none},
		{name: "pull --json", args: "pull --json debian:12", stdout: has(`"reference": "debian:12"`)},
		{name: "pull of what is not there", args: "pull missing", stderr: has("MANIFEST_UNKNOWN", "hint: check the name"), code: 1},
		{name: "pull of nothing", args: "pull", stderr: has("no argument is given; as in: sandboxd pull [flags] REFERENCE"), code: 2},
		{name: "images", args: "images", setup: func(f *cmdtest.Daemon) { f.Images = []string{"debian:12"} }, stdout: has("REFERENCE", "debian:12", "0123456789ab", "1.5MB")},
		{name: "images --json of nothing is a list", args: "images --json", stdout: has(`"images": []`)},

		{name: "doctor asks the daemon", args: "doctor", stdout: has("ok    user namespaces: 3 of 3", "lack  cgroup: v1", "means: no memory limit", "remedy: boot with", "1 of 2 checks are ok")},
		{name: "doctor --json", args: "doctor --json", stdout: has(`"checks": [`)},
		{name: "version", args: "version", stdout: has("v9.9.9-fake")},
		{name: "version --json", args: "version --json", stdout: has(`"version": "v9.9.9-fake"`)},
		{name: "shutdown", args: "shutdown", stdout: none, stderr: none},

		{name: "cp between nothing", args: "cp a b", stderr: has("neither"), code: 2},
		{name: "cp between two sandboxes", args: "cp x:/a y:/b", stderr: has("both"), code: 2},
		{name: "cp to no path", args: "cp a x:", stderr: has("no path after the colon"), code: 2},
		{name: "cp of what is not there", args: "cp a sb1:/b", setup: oneSandbox, stderr: has("no such file"), code: 1},
		{name: "cp out of nothing", args: "cp nope:/a .", stderr: has(`no sandbox "nope"`), code: 1},
		{name: "cp of nothing out", args: "cp sb1:/a .", setup: oneSandbox, stderr: has(`there is no "/a"`), code: 1},

		{name: "an unknown command", args: "rum", stderr: has("sandboxd: unknown command \"rum\" for \"sandboxd\" Did you mean this?", "\nhint: sandboxd --help\n"), code: 2},
		{name: "an unknown flag", args: "ps --nope", stderr: has("unknown flag", "hint: sandboxd ps --help"), code: 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := cmdtest.New()
			if tt.setup != nil {
				tt.setup(f)
			}
			args := strings.Fields(tt.args)
			for i := range args {
				if args[i] == "_" {
					args[i] = ""
				}
			}
			got := inline(t, f.Start(t), tt.stdin, args...)
			if tt.stdout != nil && !tt.stdout(got.Stdout) || tt.stderr != nil && !tt.stderr(got.Stderr) || got.Code != tt.code {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.Code, tt.code, got.Stdout, got.Stderr)
			}
			if tt.check != nil {
				f.Mu.Lock()
				defer f.Mu.Unlock()
				if wrong := tt.check(f); wrong != "" {
					t.Error(wrong) // a diff is -want +got
				}
			}
		})
	}
}

func oneSandbox(f *cmdtest.Daemon) {
	f.Sandboxes = []api.Sandbox{{ID: "sb1", Name: "first", Image: "host", State: api.StateRunning, Labels: map[string]string{"k": "v"}}}
}

// created checks the first request for a sandbox.
func created(ok func(*api.CreateSandbox) bool) func(*cmdtest.Daemon) string {
	return func(f *cmdtest.Daemon) string {
		if len(f.Creates) == 0 || !ok(&f.Creates[0]) {
			return fmt.Sprintf("requests %+v", f.Creates)
		}
		return ""
	}
}

func neverEnding(f *cmdtest.Daemon) {
	oneSandbox(f)
	f.Sandboxes[0].Deadline, f.Sandboxes[0].Reason = time.Now().AddDate(199, 0, 0), strings.Repeat("x", 100)
}

func publishing(f *cmdtest.Daemon) {
	oneSandbox(f)
	f.Sandboxes[0].Ports = []api.PortMapping{
		{Port: 80, HostPort: 8080, Address: "127.0.0.1", Protocol: "tcp"}, {Port: 53, HostPort: 5353, Address: "::1", Protocol: "udp"}, {Port: 82, Socket: "/run/w\x1b", Protocol: "tcp"},
	}
}

func flowing(f *cmdtest.Daemon) {
	oneSandbox(f)
	someFlows(f)
}

func someFlows(f *cmdtest.Daemon) {
	f.Flows = []api.Flow{
		{Kind: api.FlowQuery, Protocol: "dns", Name: "pypi.org", Port: 53, Method: "A", Allow: true},
		{Kind: api.FlowConnection, Protocol: "tls", Name: "pypi.org", Address: "151.101.0.223", Port: 443, Allow: true, Lost: 2, Process: &api.FlowProcess{PID: 7, Name: "pip\x1b", Exec: "x1", Sandbox: "guest"}},
		{Kind: api.FlowConnection, Protocol: "tls", Name: "other.example.com", Address: "151.101.0.224", Port: 443},
	}
}

// mainProcess checks that one sandbox was created with this main process; no argv means the
// image's.
func mainProcess(image string, terminal bool, argv ...string) func(*cmdtest.Daemon) string {
	return func(f *cmdtest.Daemon) string {
		if len(f.Creates) != 1 {
			return fmt.Sprintf("asked for %+v", f.Creates)
		}
		c := f.Creates[0]
		if c.Image != image || c.TTY != terminal || c.StdinOpen != terminal || c.ImageCommand != (argv == nil) || !slices.Equal(c.Command, argv) || len(f.Execs) > 0 {
			return fmt.Sprintf("asked for %+v and %+v", c, f.Execs)
		}
		return ""
	}
}

func nothingAsked(f *cmdtest.Daemon) string {
	if len(f.Log) > 0 {
		return fmt.Sprintf("a wrong command line led to requests: %v", f.Log)
	}
	return ""
}

// A signal goes to the program, whose exit code is ours; the sandbox is deleted.
func TestRunInterrupted(t *testing.T) {
	for _, tt := range []struct {
		sig  syscall.Signal
		args []string
		code int
	}{
		{syscall.SIGINT, []string{"run", "--", "wait"}, 130},
		{syscall.SIGTERM, []string{"run", "--", "wait"}, 143},
		{syscall.SIGHUP, []string{"run", "--", "wait"}, 129},
		{syscall.SIGQUIT, []string{"run", "--", "wait"}, 131},
		{syscall.SIGQUIT, []string{"run", "-i", "--", "cat"}, 131},
		{syscall.SIGINT, []string{"run", "-i", "--", "cat"}, 130},
	} {
		t.Run(fmt.Sprint(tt.sig, tt.args), func(t *testing.T) {
			t.Parallel()
			testenv.Heed(tt.sig)
			f := cmdtest.New()
			cmd := cmdtest.Command(t, f.Start(t), tt.args...)
			in, err := cmd.StdinPipe() // open, and without input
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			var errs bytes.Buffer
			cmd.Stderr = &errs
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			<-f.Started
			if err := cmd.Process.Signal(tt.sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != tt.code || errs.Len() > 0 {
				t.Errorf("exit %d, want %d; stderr %q", got, tt.code, errs.String())
			}
			f.Mu.Lock()
			defer f.Mu.Unlock()
			if left := f.Left(); left != "" {
				t.Error(left)
			}
		})
	}
}

// `sandboxd run … | head -1` kills the program and deletes the sandbox after its reader is gone.
func TestRunIntoClosedPipe(t *testing.T) {
	f := cmdtest.New()
	cmd := cmdtest.Command(t, f.Start(t), "run", "--", "flood")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	cmd.Stdout = w
	got := cmdtest.Finish(t, cmd)
	_ = w.Close()
	if got.Code != 128+int(syscall.SIGPIPE) || got.Stderr != "" {
		t.Errorf("exit %d, stderr %q", got.Code, got.Stderr)
	}
	<-f.Killed
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if left := f.Left(); left != "" {
		t.Error(left)
	}
}

// Without a daemon, commands that need one fail clearly, doctor examines the host itself, and
// shutdown has nothing to do.
func TestNoDaemon(t *testing.T) {
	socket := filepath.Join(cmdtest.ShortDir(t), "none", "s")
	tests := []struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{[]string{"ps"}, 1, "", "no daemon is running at " + socket},
		{[]string{"exec", "x", "--", "y"}, 125, "", "sandboxd serve"},
		{[]string{"rm", "--all"}, 1, "", "no daemon is running"},
		{[]string{"images"}, 1, "", "no daemon is running"},
		{[]string{"cp", "x:/y", "."}, 1, "", "no daemon is running"},
		{[]string{"shutdown"}, 0, "", "no daemon is running"},
		{[]string{"doctor"}, 1, "FAIL  data directory:", ""},
		{[]string{"doctor", "--data-dir", "/d"}, 1, "FAIL  data directory: /d", ""},
		{[]string{"version"}, 0, "not running", ""},
	}
	for _, tt := range tests {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			t.Parallel()
			got := inline(t, socket, "", tt.args...)
			if got.Code != tt.code || !strings.Contains(got.Stdout, tt.stdout) || !strings.Contains(got.Stderr, tt.stderr) {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.Code, tt.code, got.Stdout, got.Stderr)
			}
		})
	}
}

// withHome gives a command a home of its own. Root's data directory does not depend on it, so tests
// run commands that start a daemon as an ordinary user.
func withHome(t *testing.T, cmd *exec.Cmd, home string) *exec.Cmd {
	t.Helper()
	cmd.Env = append(cmd.Env, "HOME="+home)
	return cmd
}

// Without a daemon, run starts one and says so, and the next run uses it.
func TestRunStartsDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := cmdtest.ShortDir(t)
	chown(t, cred, home)
	socket := filepath.Join(home, "s")
	spawn := func(args ...string) cmdtest.Outcome {
		cmd := withHome(t, cmdtest.Command(t, socket, args...), home)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		return cmdtest.Finish(t, cmd)
	}
	defer spawn("shutdown")

	got := spawn("run", "--", "echo", "hi")
	if got.Code != 0 || got.Stdout != "hi\n" {
		t.Fatalf("exit %d\nstdout: %q\nstderr: %q", got.Code, got.Stdout, got.Stderr)
	}
	log := filepath.Join(home, ".local", "share", "sandboxd", "daemon.log")
	first, _, _ := strings.Cut(got.Stderr, "\n")
	var pid int
	if _, err := fmt.Sscanf(first, "sandboxd: no daemon was running; started one (pid %d, log "+log+"); stop it with: sandboxd shutdown (sandboxes keep their files)", &pid); err != nil {
		t.Fatalf("stderr %q: %v", first, err)
	}
	// The daemon leads a session of its own, so that the terminal's signals do not reach it.
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	if f := strings.Fields(rest); f[3] != strconv.Itoa(pid) {
		t.Errorf("session %s, want %d", f[3], pid)
	}
	if got := spawn("run", "--", "exit3"); got.Code != 3 || got.Stderr != "" {
		t.Errorf("second run: exit %d, stderr %q", got.Code, got.Stderr)
	}
	if got := spawn("shutdown"); got.Code != 0 || got.Stderr != "" {
		t.Errorf("shutdown: exit %d, stderr %q", got.Code, got.Stderr)
	}
	if got := spawn("ps"); got.Code != 1 {
		t.Errorf("ps after shutdown: exit %d", got.Code)
	}
}

// Of several commands at once, one starts the daemon and says so.
func TestRunStartsOneDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := cmdtest.ShortDir(t)
	chown(t, cred, home)
	socket := filepath.Join(home, "s")
	spawn := func(args ...string) cmdtest.Outcome {
		cmd := withHome(t, cmdtest.Command(t, socket, args...), home)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		return cmdtest.Finish(t, cmd)
	}
	defer spawn("shutdown")
	const n = 4
	results := make(chan cmdtest.Outcome, n)
	for range n {
		go func() { results <- spawn("run", "--", "exit3") }()
	}
	started := 0
	for range n {
		got := <-results
		if got.Code != 3 {
			t.Errorf("exit %d, stderr %q", got.Code, got.Stderr)
		}
		started += strings.Count(got.Stderr, "started one")
	}
	if started != 1 {
		t.Errorf("%d said that they started a daemon", started)
	}
}

// The error about a daemon that cannot start has its log.
func TestRunCannotStartDaemon(t *testing.T) {
	cred := ordinaryUser(t)
	home := cmdtest.ShortDir(t)
	chown(t, cred, home)
	cmd := withHome(t, cmdtest.Command(t, filepath.Join(home, "s"), "run", "--", "echo"), home)
	cmd.Dir = "/"
	cmd.Env = append(cmd.Env, "FAKE_BROKEN=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	got := cmdtest.Finish(t, cmd)
	if got.Code != 125 || !strings.Contains(got.Stderr, "it ended at once (exit status 1)") || !strings.Contains(got.Stderr, "the data directory is no good") {
		t.Errorf("exit %d, stderr %q", got.Code, got.Stderr)
	}
}

// ordinaryUser returns the credential to run a command with that must not be root; nil if the test
// is not root.
func ordinaryUser(t *testing.T) *syscall.Credential {
	t.Helper()
	if os.Getuid() != 0 {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	// go test builds into a directory that other users cannot enter.
	for dir := filepath.Dir(exe); ; dir = filepath.Dir(dir) {
		fi, err := os.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm()&0o001 == 0 {
			if err := os.Chmod(dir, fi.Mode().Perm()|0o011); err != nil {
				t.Fatal(err)
			}
		}
		if dir == "/" || dir == os.TempDir() {
			break
		}
	}
	return &syscall.Credential{Uid: nobody, Gid: nobody}
}

func chown(t *testing.T, cred *syscall.Credential, path string) {
	t.Helper()
	if cred == nil {
		return
	}
	if err := os.Chown(path, int(cred.Uid), int(cred.Gid)); err != nil {
		t.Fatal(err)
	}
}

// The help texts are part of the interface: a change shows in review.
func TestHelpGolden(t *testing.T) {
	cmdtest.HelpGolden(t, func() *cobra.Command {
		return newRoot(testDeps)
	}, agentName) // of sandboxd-agent
}

// Output that is JSON is exactly one document.
func TestJSONIsOneDocument(t *testing.T) {
	for _, args := range []string{"ps --json", "stats --json sb1", "stats --json", "system df --json", "update --json --pids 5 sb1", "images --json", "doctor --json", "version --json", "run --json -- echo", "run -d --json", "create --json", "rm --all --json", "pull --json x"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			f := cmdtest.New()
			oneSandbox(f)
			got := inline(t, f.Start(t), "", strings.Fields(args)...)
			var v any
			if err := json.Unmarshal([]byte(got.Stdout), &v); err != nil || got.Code != 0 {
				t.Errorf("exit %d, %v in %q; stderr %q", got.Code, err, got.Stdout, got.Stderr)
			}
		})
	}
}

func dirEntry(name string) cmdtest.Entry {
	return cmdtest.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}}
}

func fileEntry(name, body string) cmdtest.Entry {
	return cmdtest.Entry{Header: tar.Header{Name: name}, Body: body}
}
