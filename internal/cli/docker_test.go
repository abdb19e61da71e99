package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

// habitLines are command lines that users of Docker type, with "docker" left out. Empty: it works.
// Else: the text of its refusal.
var habitLines = []struct{ args, refusal string }{
	// Programs.
	{"run debian", ""},
	{"run debian echo hi", ""},
	{"run --rm debian echo hi", ""},
	{"run --rm -i debian cat", ""},
	{"run -d debian", ""},
	{"run -d --rm debian sleep 60", ""},
	{"run -d --name web debian", ""},
	{"run -d --restart always debian", ""},
	{"run -d --restart=unless-stopped debian", ""},
	{"run -d --restart on-failure:3 debian", ""},
	{"run -d --restart no debian", ""},
	{"run --restart always debian", "give --detach"},
	{"run --restart always --rm -d debian", "give one of them"},
	{"run --entrypoint /bin/sh debian -c true", ""},
	{"run --entrypoint= debian echo", ""},
	{"run --init debian echo", ""},
	{"run --workdir /src debian echo", ""},
	{"run -w /src debian echo", ""},
	{"run -u 1000:1000 debian echo", ""},
	{"run --user www-data:www-data debian echo", ""},
	{"run --group-add video debian", "/etc/group"},
	{"run -e A=1 -e HOME debian echo", ""},
	{"run --env A=1 debian echo", ""},
	{"run --env-file ENVFILE debian echo", ""},
	{"run --env-file /nowhere debian echo", "read variables"},
	{"run -l a=b --label c debian echo", ""},
	{"run --label-file f debian", "--label"},
	{"run --annotation a=b debian", "--label"},
	{"run --stop-signal SIGQUIT debian echo", ""},
	{"run --stop-timeout 5 debian", "stop --grace"},
	{"run --detach-keys ctrl-x,q debian echo", ""},
	{"run --detach-keys ctrl-pq debian", "neither a character nor ctrl-"},
	{"run -a stdout debian echo", ""},
	{"run -a stdin debian", "-i passes stdin on"},
	{"run --sig-proxy debian echo", ""},
	{"run --sig-proxy=false debian echo", ""},
	{"run --cidfile f debian", "the id is printed"},
	{"run -q debian echo", ""},
	{"run --pull missing debian echo", ""},
	{"run --pull always debian", "sandboxd pull"},
	{"run --platform linux/arm64 debian", "the image for this host"},
	{"run --disable-content-trust debian echo", ""},
	{"create --name c debian", ""},
	{"create debian -- sleep 1", ""},
	{"create debian sleep 1", "stands behind \"--\""},
	// Limits.
	{"run -m 512m debian echo", ""},
	{"run --memory=1g debian echo", ""},
	{"run --memory-swap 1g debian", "--swap"},
	{"run --memory-swappiness 0 debian", "--swap"},
	{"run --memory-reservation 1g debian", "--memory-high"},
	{"run --kernel-memory 1g debian", "--memory"},
	{"run --oom-kill-disable debian", "--oom-group"},
	{"run --oom-score-adj 5 debian", "--oom-group"},
	{"run --cpus 1.5 debian echo", ""},
	{"run -c 512 debian", "--cpu-weight"},
	{"run --cpu-shares 512 debian", "--cpu-weight"},
	{"run --cpu-period 100000 --cpu-quota 50000 debian", "--cpus"},
	{"run --cpu-quota 50000 debian", "--cpus"},
	{"run --cpu-rt-runtime 5 debian", "real-time"},
	{"run --cpuset-cpus 0-1 debian echo", ""},
	{"run --cpuset-mems 0 debian", "--cpuset"},
	{"run --pids-limit 100 debian echo", ""},
	{"run --pids-limit -1 debian", "less than 1"},
	{"run --ulimit nofile=65536:65536 debian echo", ""},
	{"run --ulimit core=0 --ulimit nproc=64 debian echo", ""},
	{"run --ulimit nofile debian", "NAME=SOFT"},
	{"run --shm-size 256m debian echo", ""},
	{"run --tmpfs /tmp debian echo", ""},
	{"run --tmpfs /run:rw,noexec,nosuid,size=65536k debian echo", ""},
	{"run --tmpfs /tmp:size=50% debian", "size=50%"},
	{"run --blkio-weight 300 debian", "--io-weight"},
	{"run --device-read-bps /dev/sda:1mb debian", "--io-read-bps"},
	{"run --device-write-iops /dev/sda:10 debian", "--io-write-iops"},
	{"run --storage-opt size=10G debian", "--disk 10g sets the quota"},
	// Networks.
	{"run --network none debian echo", ""},
	{"run --net none debian echo", ""},
	{"run --network host debian", "never has the host's"},
	{"run --network=bridge debian", "full"},
	{"run --net container:web debian", "sandbox:SANDBOX"},
	{"run -p 8080:80 --network full debian echo", ""},
	{"run -p 8080:80 debian echo", "--network full"},
	{"run -p 127.0.0.1:8080:80/tcp --network full debian echo", ""},
	{"run --publish 53:53/udp --network full debian echo", ""},
	{"run -P debian", "name the ports"},
	{"run --publish-all debian", "name the ports"},
	{"run --expose 80 debian", "nothing needs to be exposed"},
	{"run --link db:db debian", "net:NAME"},
	{"run --dns 1.1.1.1 debian", "gateway"},
	{"run --dns-search example.com debian", "gateway"},
	{"run --dns-option ndots:1 debian", "gateway"},
	{"run --add-host db:10.0.0.2 debian echo", ""},
	{"run --add-host host.docker.internal:host-gateway debian", "does not reach the host's own"},
	{"run --hostname web debian echo", ""},
	{"run -h debian", ""}, // help, as of every command here
	{"run --domainname example.com debian", "--hostname"},
	{"run --ip 172.17.0.5 debian", "by name"},
	{"run --mac-address 02:42:ac:11:00:02 debian", "by name"},
	{"run --network-alias db debian", "net:NAME"},
	{"run --network net:back --network-alias db debian echo", ""},
	{"run --network net:back --net-alias db debian echo", ""},
	{"network create --driver bridge back", ""},
	{"network create -d overlay back", "there are no drivers"},
	{"network create --subnet 10.0.0.0/8 back", "chosen by the daemon"},
	{"network prune -f", ""},
	{"network connect --ip 10.0.0.2 back db", "by name"},
	{"network disconnect -f back sb1", ""},
	// Security.
	{"run --privileged debian", "no sandbox has power over the host"},
	{"run --privileged=false debian echo", ""},
	{"run --cap-drop ALL debian echo", ""},
	{"run --cap-drop=NET_RAW --cap-add=CHOWN debian echo", ""},
	{"run --read-only debian echo", ""},
	{"run --read-only --tmpfs /tmp debian echo", ""},
	{"run --security-opt no-new-privileges debian echo", ""},
	{"run --security-opt no-new-privileges:true debian echo", ""},
	{"run --security-opt seccomp=unconfined debian", "--profile"},
	{"run --security-opt apparmor=unconfined debian", "--profile"},
	{"run --security-opt label=disable debian", "--profile"},
	{"run --userns host debian", "never shares a namespace"},
	{"run --pid host debian", "never shares a namespace"},
	{"run --pid=container:web debian", "never shares a namespace"},
	{"run --ipc host debian", "never shares a namespace"},
	{"run --ipc private debian echo", ""},
	{"run --uts host debian", "never shares a namespace"},
	{"run --cgroupns host debian", "never shares a namespace"},
	{"run --cgroup-parent /x debian", "--memory"},
	{"run --gpus all debian", "GPU"},
	{"run --device /dev/fuse debian", "/dev has null"},
	{"run --device-cgroup-rule 'c debian", "there is none to allow"},
	{"run --sysctl net.core.somaxconn=1024 debian", "cannot be changed"},
	{"run --runtime runsc debian", "there is no other"},
	{"run --isolation hyperv debian", "Windows"},
	{"run --use-api-socket debian", "daemon's power"},
	// Files.
	{"run -v /src:/src debian", ""},
	{"run -v .:/src debian", ""},
	{"run -v /src debian", ""},
	{"run -v data:/data debian", ""},
	{"run -v data:/data:ro,nocopy debian", ""},
	{"run -v /src:/src:nocopy debian", "nothing is copied"},
	{"run -v data debian", "as in data:/data"},
	{"run -v /src:/src:shared debian", "never appear"},
	{"run -v /src:/src:rw,Z debian", ""},
	{"run --volume /src:/src:ro debian", ""},
	{"run --mount type=bind,source=/a,target=/b debian", ""},
	{"run --mount type=bind,src=/a,dst=/b,readonly debian", ""},
	{"run --mount type=bind,source=/a debian", "target is missing"},
	{"run --mount type=tmpfs,target=/b,tmpfs-size=1m debian", ""},
	{"run --mount type=tmpfs,target=/b,ro debian", "empty for ever"},
	{"run --mount source=data,target=/b debian", ""},
	{"run --mount type=volume,src=data,dst=/b,ro,volume-nocopy debian", ""},
	{"run --mount type=volume,src=/data,dst=/b debian", "type=bind"},
	{"run --mount type=volume,src=data,dst=/b,volume-opt=o=x debian", "sandboxd volume create"},
	{"run --mount type=bind,source=/a,target=/b,bind-propagation=shared debian", "never appear"},
	{"run --volumes-from web debian", "-v NAME:TARGET"},
	{"run --volume-driver local debian", ""},
	{"run --volume-driver nfs debian", "no drivers"},
	// Health and logs.
	{"run -d --health-cmd true --health-interval 5s --health-timeout=2s --health-retries 3 debian", ""},
	{"run -d --health-cmd true --health-start-period 1m --health-start-interval 2s debian", ""},
	{"run --health-cmd true --health-interval fast debian", "no time span"},
	{"run --health-cmd true --no-healthcheck debian", "give one of them"},
	{"run --no-healthcheck debian echo", ""},
	{"run --log-driver json-file debian echo", ""},
	{"run --log-driver syslog debian", "sandboxd logs"},
	{"run --log-opt max-size=10m debian", "--log-size"},
	{"run --nope debian", "unknown flag: --nope; "},
	{"run -z debian", "sandboxd docs docker"},
	// Other commands.
	{"exec --detach-keys ctrl-x,q sb1 echo", ""},
	{"exec sb1 echo", ""},
	{"exec -e A=1 -w / -u root sb1 echo", ""},
	{"exec --workdir / sb1 echo", ""},
	{"exec --env-file ENVFILE sb1 echo", ""},
	{"exec --privileged sb1 echo", "--user 0"},
	{"ps", ""},
	{"ps -q", ""},
	{"ps --filter status=exited", ""},
	{"ps --filter status=restarting", "must be one of"},
	{"ps -n 3", "tail -n"},
	{"ps --latest", "tail -n"},
	{"ps -s", "system df"},
	{"stop sb1", ""},
	{"stop -t 1 sb1", ""},
	{"start sb1", ""},
	{"start -a sb1", "sandboxd attach -i"},
	{"start -ai sb1", "sandboxd attach -i"},
	{"pause sb1", ""},
	{"unpause sb1", ""},
	{"kill sb1", ""},
	{"kill -s HUP sb1", ""},
	{"rm sb1", ""},
	{"rm -f sb1", ""},
	{"rm -v sb1", ""},
	{"stats sb1", ""},
	{"stats --no-stream", ""},
	{"stats -a --no-stream --no-trunc", ""},
	{"top sb1", ""},
	{"system df", ""},
	{"system df -v", ""},
	{"system prune", "sandboxd prune"},
	{"system info", "sandboxd doctor"},
	{"system nonsense", "system df"},
	{"images", ""},
	{"pull debian", ""},
	{"version", ""},
	{"build --push .", "sandboxd push"},
	{"build --secret id=x,src=ENVFILE CONTEXT", ""},
	{"build --secret src=x .", "the id is missing"},
	{"build --ssh default .", "--secret"},
	{"build --cache-from x .", "cached here"},
	{"volume ls", ""},
	{"volume ls -q -f dangling=true", ""},
	{"volume create data", ""},
	{"volume create -d local -o size=1g --label a=b sized", ""},
	{"volume create -d nfs data", "no drivers"},
	{"volume create -o type=tmpfs data", "--tmpfs"},
	{"volume inspect cache", ""},
	{"volume rm -f nothing", ""},
	{"volume rm cache", "has it"},
	{"volume prune -f", ""},
	{"volume prune -a", "--force"},
	{"container ls", "no group"},
	{"restart web", "sandboxd stop"},
	{"history debian", "sandboxd image"},
	{"save debian", "sandboxd export"},
	{"load", "sandboxd import"},
	{"login", "config.json"},
	{"logout", "config.json"},
	{"search nginx", "not searched"},
	{"info", "sandboxd doctor"},
	{"compose up", "not read"},
	{"buildx build .", "sandboxd build"},
	{"context ls", "--socket"},
	{"swarm init", "no clusters"},
	{"service ls", "no clusters"},
	{"plugin ls", "no plugins"},
	{"--socket /x.sock swarm init", "no clusters"},
	{"--socket=/x.sock restart web", "sandboxd stop"},
}

// What users of Docker type works, or is refused by a sentence that says what to do.
func TestHabitsOfDocker(t *testing.T) {
	if len(habitLines) < 120 {
		t.Errorf("%d command lines", len(habitLines))
	}
	file, empty := filepath.Join(t.TempDir(), "env"), t.TempDir()
	if err := os.WriteFile(file, []byte("# comment\nA=1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range habitLines {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			f := cmdtest.New()
			oneSandbox(f)
			f.Images, f.Cmd = []string{"debian"}, []string{"echo", "by default"}
			got := inline(t, f.Start(t), "", strings.Fields(strings.NewReplacer("ENVFILE", file, "CONTEXT", empty).Replace(tt.args))...)
			switch {
			case tt.refusal == "":
				if got.Code != 0 {
					t.Errorf("exit %d: %s", got.Code, got.Stderr)
				}
			case got.Code == 0 || got.Code > 125 || !strings.Contains(got.Stderr, tt.refusal):
				t.Errorf("exit %d: %s", got.Code, got.Stderr)
			case strings.Contains(got.Stderr, "unknown") && !strings.Contains(got.Stderr, "sandboxd docs docker"):
				t.Errorf("a bare refusal: %s", got.Stderr)
			}
			f.Mu.Lock()
			defer f.Mu.Unlock()
			if tt.refusal != "" && len(f.Creates) > 0 {
				t.Errorf("it was refused after a sandbox was made: %+v", f.Creates)
			}
		})
	}
}

// A hidden flag must not hide one of ours, and each has its reason.
func TestHabitsHaveReasons(t *testing.T) {
	for _, h := range habits {
		if h.why == "" && len(h.accepts) == 0 || strings.HasSuffix(h.why, ".") {
			t.Errorf("--%s: %q", h.name, h.why)
		}
	}
	for _, table := range []map[string]string{foreignFlags, foreignCommands} {
		for name, why := range table {
			if why == "" || strings.HasSuffix(why, ".") {
				t.Errorf("%s: %q", name, why)
			}
		}
	}
	root := newRoot(testDeps)
	for name := range foreignCommands {
		if cmd, _, err := root.Find([]string{name}); err == nil && cmd != root {
			t.Errorf("%s: the command is there", name)
		}
	}
	for name := range foreignFlags {
		command, flag, _ := strings.Cut(name, " ")
		cmd, _, err := root.Find([]string{command})
		if command != root.Name() && (err != nil || cmd == root) {
			t.Errorf("%s: there is no such command", name)
		} else if cmd.Flags().Lookup(flag) != nil {
			t.Errorf("%s: the flag is there", name)
		}
	}
}
