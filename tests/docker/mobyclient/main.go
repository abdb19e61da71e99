// Command mobyclient calls Docker's own client for Go, as programs do. Package docker runs it and
// judges the line of JSON that each step prints. It is a module of its own, so that the product's
// does not have that client.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
)

const image = "tool:1"

var out = json.NewEncoder(os.Stdout)

func tell(step string, value any) {
	if err := out.Encode(map[string]any{"step": step, "value": value}); err != nil {
		panic(err)
	}
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// program is a client, and the first error of its calls, after which the others do nothing.
type program struct {
	*client.Client

	err error
}

func run(ctx context.Context) error {
	c, err := client.New(client.FromEnv)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // the program ends
	p := &program{Client: c}
	for _, part := range []func(context.Context){p.system, p.streams, p.files, p.images, p.networks} {
		if part(ctx); p.err != nil {
			return p.err
		}
	}
	return nil
}

func (p *program) fail(doing string, err error) bool {
	if err != nil && p.err == nil {
		p.err = fmt.Errorf("%s: %w", doing, err)
	}
	return p.err != nil
}

func (p *program) system(ctx context.Context) {
	ping, err := p.Ping(ctx, client.PingOptions{NegotiateAPIVersion: true})
	if p.fail("ping", err) {
		return
	}
	tell("negotiated", []string{p.ClientVersion(), ping.APIVersion, ping.OSType})
	info, err := p.Info(ctx, client.InfoOptions{})
	if p.fail("info", err) {
		return
	}
	tell("info", info.Info.OSType)
	version, err := p.ServerVersion(ctx, client.ServerVersionOptions{})
	if p.fail("version", err) {
		return
	}
	tell("version", version.APIVersion)
	pull, err := p.ImagePull(ctx, os.Getenv("REGISTRY")+"/tool:1", client.ImagePullOptions{})
	if p.fail("pull", err) || p.fail("pull", pull.Wait(ctx)) {
		return
	}
	tell("pull", true)
	_, err = p.ContainerCreate(ctx, client.ContainerCreateOptions{Image: "nosuch:1"})
	tell("missing image", fmt.Sprint(err))
	_, err = p.ContainerCreate(ctx, client.ContainerCreateOptions{Image: image, HostConfig: &container.HostConfig{Privileged: true}})
	tell("refused", fmt.Sprint(err))
}

// create makes a container that runs a script.
func (p *program) create(ctx context.Context, name, script string, change func(*client.ContainerCreateOptions)) string {
	o := client.ContainerCreateOptions{
		Name: name, Config: &container.Config{Image: image, Cmd: []string{"sh", "-c", script}, AttachStdout: true, AttachStderr: true}, HostConfig: &container.HostConfig{},
	}
	if change != nil {
		change(&o)
	}
	made, err := p.ContainerCreate(ctx, o)
	p.fail("create", err)
	return made.ID
}

// attached starts a container with its streams attached, and returns what it writes and its exit
// code.
func (p *program) attached(ctx context.Context, id, input string) []any {
	a, err := p.ContainerAttach(ctx, id, client.ContainerAttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
	if p.fail("attach", err) {
		return nil
	}
	defer a.Close()
	wait := p.ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: container.WaitConditionNextExit})
	_, err = p.ContainerStart(ctx, id, client.ContainerStartOptions{})
	if p.fail("start", err) {
		return nil
	}
	return append(p.converse(&a.HijackedResponse, input), p.exit(wait))
}

// converse writes the input, half-closes, and reads both outputs.
func (p *program) converse(a *client.HijackedResponse, input string) []any {
	written := make(chan error, 1)
	go func() {
		if input == "" { // the program may have ended
			_ = a.CloseWrite()
			written <- nil
			return
		}
		_, err := io.WriteString(a.Conn, input)
		written <- errors.Join(err, a.CloseWrite())
	}()
	var stdout, stderr strings.Builder
	_, err := stdcopy.StdCopy(&stdout, &stderr, a.Reader)
	p.fail("read the streams", err)
	p.fail("write the input", <-written)
	return []any{stdout.String(), stderr.String()}
}

func (p *program) exit(wait client.ContainerWaitResult) int64 {
	select {
	case r := <-wait.Result:
		return r.StatusCode
	case err := <-wait.Error:
		p.fail("wait", err)
		return -1
	}
}

func (p *program) remove(ctx context.Context, id string) {
	_, err := p.ContainerRemove(ctx, id, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	p.fail("remove", err)
}

func (p *program) exec(ctx context.Context, id, input string, o client.ExecCreateOptions) []any {
	o.AttachStdin, o.AttachStdout, o.AttachStderr = true, true, true
	made, err := p.ExecCreate(ctx, id, o)
	if p.fail("create exec", err) {
		return nil
	}
	a, err := p.ExecAttach(ctx, made.ID, client.ExecAttachOptions{})
	if p.fail("attach to exec", err) {
		return nil
	}
	defer a.Close()
	said := p.converse(&a.HijackedResponse, input)
	x, err := p.ExecInspect(ctx, made.ID, client.ExecInspectOptions{})
	p.fail("inspect exec", err)
	return append(said, x.ExitCode, x.Running)
}

func (p *program) streams(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events := p.Events(ctx, client.EventsListOptions{Filters: make(client.Filters).Add("container", "box").Add("type", "container").Add("event", "create", "start", "die", "destroy")})
	withInput := func(o *client.ContainerCreateOptions) {
		o.Config.OpenStdin, o.Config.StdinOnce, o.Config.AttachStdin = true, true, true
	}
	id := p.create(ctx, "box", "cat; echo end >&2; exit 7", withInput)
	tell("attach", p.attached(ctx, id, "over\nand out\n"))
	logs, err := p.ContainerLogs(ctx, id, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true, Follow: true})
	if p.fail("logs", err) {
		return
	}
	var stdout, stderr strings.Builder
	_, err = stdcopy.StdCopy(&stdout, &stderr, logs)
	p.fail("logs", errors.Join(err, logs.Close()))
	tell("logs", []string{stdout.String(), stderr.String()})
	p.remove(ctx, id)
	var actions []string
	for !slices.Contains(actions, "destroy") {
		select {
		case e := <-events.Messages:
			actions = append(actions, string(e.Action))
		case err := <-events.Err:
			p.fail("events", err)
			return
		}
	}
	tell("events", actions)
	id = p.create(ctx, "", "wc -c", withInput)
	tell("attach with much input", p.attached(ctx, id, strings.Repeat("0123456789abcdef", 1<<18)))
	p.remove(ctx, id)

	// a terminal, and execs
	id = p.create(ctx, "term", "read x; stty size; read y; exit 3", func(o *client.ContainerCreateOptions) {
		withInput(o)
		o.Config.Tty = true
	})
	a, err := p.ContainerAttach(ctx, id, client.ContainerAttachOptions{Stream: true, Stdin: true, Stdout: true})
	if p.fail("attach", err) {
		return
	}
	wait := p.ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: container.WaitConditionNextExit})
	_, err = p.ContainerStart(ctx, id, client.ContainerStartOptions{})
	p.fail("start", err)
	_, err = p.ContainerResize(ctx, id, client.ContainerResizeOptions{Height: 33, Width: 77})
	p.fail("resize", err)
	size := p.line(&a.HijackedResponse, "33 77")
	tell("terminal", size)
	tell("exec", p.exec(ctx, id, "", client.ExecCreateOptions{Cmd: []string{"sh", "-c", "echo $X $PWD; id -u >&2; exit 9"}, Env: []string{"X=y"}, WorkingDir: "/tmp", User: "1000"}))
	tell("exec with input", p.exec(ctx, id, strings.Repeat("x", 1<<20), client.ExecCreateOptions{Cmd: []string{"wc", "-c"}}))
	made, err := p.ExecCreate(ctx, id, client.ExecCreateOptions{Cmd: []string{"sh", "-c", "stty size; read x; stty size"}, TTY: true, AttachStdin: true, AttachStdout: true, ConsoleSize: client.ConsoleSize{Height: 11, Width: 22}})
	if p.fail("create exec", err) {
		return
	}
	x, err := p.ExecAttach(ctx, made.ID, client.ExecAttachOptions{TTY: true, ConsoleSize: client.ConsoleSize{Height: 11, Width: 22}})
	if p.fail("attach to exec", err) {
		return
	}
	_, err = p.ExecResize(ctx, made.ID, client.ExecResizeOptions{Height: 12, Width: 34})
	p.fail("resize exec", err)
	tell("exec with a terminal", p.line(&x.HijackedResponse, "12 34"))
	x.Close()
	_, err = io.WriteString(a.Conn, "\n")
	p.fail("write", err)
	tell("exit of a terminal", p.exit(wait))
	a.Close()
	p.remove(ctx, id)
}

// line presses Enter and reads lines until one comes.
func (p *program) line(a *client.HijackedResponse, want string) string {
	if _, err := io.WriteString(a.Conn, "\n"); p.fail("write", err) {
		return ""
	}
	for {
		got, err := a.Reader.ReadString('\n')
		if p.fail("read the terminal", err) {
			return ""
		}
		if got = strings.TrimSpace(got); got == want {
			return got
		}
	}
}

// archive makes a tar of files, as name and content.
func archive(files ...string) *bytes.Buffer {
	b := new(bytes.Buffer)
	w := tar.NewWriter(b)
	for i := 0; i < len(files); i += 2 {
		if err := w.WriteHeader(&tar.Header{Name: files[i], Size: int64(len(files[i+1])), Mode: 0o640, Uid: 1000, Gid: 1000}); err != nil {
			panic(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b
}

func (p *program) files(ctx context.Context) {
	id := p.create(ctx, "files", "trap exit TERM; while :; do sleep 1; done", nil)
	put := func(name, content string) {
		_, err := p.CopyToContainer(ctx, id, client.CopyToContainerOptions{DestinationPath: "/root", Content: archive(name, content), CopyUIDGID: true})
		p.fail("copy in", err)
	}
	put("before", "early")
	_, err := p.ContainerStart(ctx, id, client.ContainerStartOptions{})
	p.fail("start", err)
	put("after", "later")
	tell("copied in", p.exec(ctx, id, "", client.ExecCreateOptions{Cmd: []string{"sh", "-c", "cat /root/before /root/after; stat -c '%u %g %a' /root/after"}}))
	got, err := p.CopyFromContainer(ctx, id, client.CopyFromContainerOptions{SourcePath: "/root/after"})
	if p.fail("copy out", err) {
		return
	}
	r := tar.NewReader(got.Content)
	h, err := r.Next()
	if p.fail("read the archive", err) {
		return
	}
	content, err := io.ReadAll(r)
	p.fail("read the archive", errors.Join(err, got.Content.Close()))
	tell("copied out", []any{h.Name, string(content), got.Stat.Size, got.Stat.Mode.String()})
	st, err := p.ContainerStatPath(ctx, id, client.ContainerStatPathOptions{Path: "/root"})
	p.fail("stat", err)
	tell("stat", st.Stat.Mode.IsDir())
	_, err = p.ContainerStatPath(ctx, id, client.ContainerStatPathOptions{Path: "/nosuch"})
	tell("stat of nothing", err != nil)
	diff, err := p.ContainerDiff(ctx, id, client.ContainerDiffOptions{})
	p.fail("diff", err)
	tell("diff", slices.ContainsFunc(diff.Changes, func(c container.FilesystemChange) bool {
		return c.Path == "/root/after" && c.Kind == container.ChangeAdd
	}))
	top, err := p.ContainerTop(ctx, id, client.ContainerTopOptions{})
	p.fail("top", err)
	tell("top", slices.Contains(top.Titles, "PID"))
	stats, err := p.ContainerStats(ctx, id, client.ContainerStatsOptions{})
	if p.fail("stats", err) {
		return
	}
	var s container.StatsResponse
	p.fail("stats", errors.Join(json.NewDecoder(stats.Body).Decode(&s), stats.Body.Close()))
	tell("stats", s.Name)
	kept, err := p.ContainerCommit(ctx, id, client.ContainerCommitOptions{Reference: "kept:1", Changes: []string{`CMD ["cat", "/root/after"]`}})
	p.fail("commit", err)
	tell("commit", strings.HasPrefix(kept.ID, "sha256:"))
	list, err := p.ContainerList(ctx, client.ContainerListOptions{Filters: make(client.Filters).Add("name", "^/files$")})
	p.fail("list", err)
	for i := range list.Items {
		tell("list", []any{list.Items[i].Names, list.Items[i].State, list.Items[i].ID == id})
	}
	_, err = p.ContainerStop(ctx, id, client.ContainerStopOptions{})
	p.fail("stop", err)
	state, err := p.ContainerInspect(ctx, id, client.ContainerInspectOptions{})
	if p.fail("inspect", err) {
		return
	}
	tell("inspect", []any{state.Container.State.Status, state.Container.Name, state.Container.Config.Image})
	p.remove(ctx, id)
	id = p.create(ctx, "", "", func(o *client.ContainerCreateOptions) { o.Config.Image, o.Config.Cmd = "kept:1", nil })
	tell("run of what was committed", p.attached(ctx, id, ""))
	p.remove(ctx, id)
}

func (p *program) images(ctx context.Context) {
	built, err := p.ImageBuild(ctx, archive("Dockerfile", "FROM tool:1\nARG word\nCOPY file /file\nRUN echo $word >>/file\nCMD [\"cat\", \"/file\"]\n", "file", "copied\n"),
		client.ImageBuildOptions{Tags: []string{"built:1"}, Remove: true, BuildArgs: map[string]*string{"word": new(string)}})
	if p.fail("build", err) {
		return
	}
	log, err := io.ReadAll(built.Body)
	p.fail("build", errors.Join(err, built.Body.Close()))
	tell("build", strings.Contains(string(log), "Successfully tagged built:1"))
	id := p.create(ctx, "", "", func(o *client.ContainerCreateOptions) {
		o.Config.Image, o.Config.Cmd, o.Config.User = "built:1", nil, "0"
	})
	tell("run of what was built", p.attached(ctx, id, ""))
	p.remove(ctx, id)
	_, err = p.ImageTag(ctx, client.ImageTagOptions{Source: "built:1", Target: os.Getenv("REGISTRY") + "/built:2"})
	p.fail("tag", err)
	push, err := p.ImagePush(ctx, os.Getenv("REGISTRY")+"/built:2", client.ImagePushOptions{RegistryAuth: "e30="})
	if p.fail("push", err) || p.fail("push", push.Wait(ctx)) {
		return
	}
	tell("push", true)
	saved, err := p.ImageSave(ctx, []string{"built:1"})
	if p.fail("save", err) {
		return
	}
	loaded, err := p.ImageLoad(ctx, saved)
	if p.fail("load", err) {
		return
	}
	log, err = io.ReadAll(loaded)
	p.fail("load", errors.Join(err, loaded.Close(), saved.Close()))
	tell("load", strings.Contains(string(log), "Loaded image: built:1"))
	inspected, err := p.ImageInspect(ctx, "built:1")
	p.fail("inspect an image", err)
	tell("inspect of an image", []any{slices.Contains(inspected.RepoTags, "built:1"), inspected.Os})
	for _, name := range []string{"built:1", "kept:1"} {
		_, err = p.ImageRemove(ctx, name, client.ImageRemoveOptions{})
		p.fail("remove image", err)
	}
	all, err := p.ImageList(ctx, client.ImageListOptions{Filters: make(client.Filters).Add("reference", "tool:1")})
	p.fail("list images", err)
	tell("images", len(all.Items))
	usage, err := p.DiskUsage(ctx, client.DiskUsageOptions{Images: true, Volumes: true, Containers: true})
	p.fail("disk usage", err)
	tell("disk usage", usage.Images.TotalCount > 0)
}

func (p *program) networks(ctx context.Context) {
	made, err := p.NetworkCreate(ctx, "front", client.NetworkCreateOptions{Labels: map[string]string{"app": "shop"}})
	if p.fail("create network", err) {
		return
	}
	_, err = p.VolumeCreate(ctx, client.VolumeCreateOptions{Name: "data", Labels: map[string]string{"app": "shop"}})
	p.fail("create volume", err)
	mounted := func(o *client.ContainerCreateOptions) {
		o.HostConfig.Mounts = []mount.Mount{{Type: mount.TypeVolume, Source: "data", Target: "/data"}}
		o.HostConfig.NetworkMode = "front"
	}
	server := p.create(ctx, "server", "echo rows >/data/index; exec busybox httpd -f -p 8080 -h /data", func(o *client.ContainerCreateOptions) {
		mounted(o)
		port := network.MustParsePort("8080/tcp")
		o.Config.ExposedPorts = network.PortSet{port: {}}
		o.HostConfig.PortBindings = network.PortMap{port: {{}}}
		o.NetworkingConfig = &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{"front": {Aliases: []string{"web"}}}}
	})
	_, err = p.ContainerStart(ctx, server, client.ContainerStartOptions{})
	p.fail("start", err)
	id := p.create(ctx, "", "until busybox wget -qO- http://web:8080/index; do :; done 2>/dev/null; cat /data/index", mounted)
	tell("network and volume", p.attached(ctx, id, ""))
	p.remove(ctx, id)
	state, err := p.ContainerInspect(ctx, server, client.ContainerInspectOptions{})
	if p.fail("inspect", err) {
		return
	}
	ports := state.Container.NetworkSettings.Ports[network.MustParsePort("8080/tcp")]
	tell("ports", []any{len(ports), ports[0].HostIP.String(), ports[0].HostPort != ""})
	in, err := p.NetworkInspect(ctx, made.ID, client.NetworkInspectOptions{})
	p.fail("inspect network", err)
	tell("members", len(in.Network.Containers))
	_, err = p.NetworkRemove(ctx, made.ID, client.NetworkRemoveOptions{})
	tell("network in use", err != nil)
	_, err = p.VolumeRemove(ctx, "data", client.VolumeRemoveOptions{})
	tell("volume in use", err != nil)
	p.remove(ctx, server)
	_, err = p.NetworkRemove(ctx, made.ID, client.NetworkRemoveOptions{})
	p.fail("remove network", err)
	_, err = p.VolumeRemove(ctx, "data", client.VolumeRemoveOptions{})
	p.fail("remove volume", err)
	volumes, err := p.VolumeList(ctx, client.VolumeListOptions{})
	p.fail("list volumes", err)
	tell("volumes", len(volumes.Items))
	left, err := p.ContainerList(ctx, client.ContainerListOptions{All: true})
	p.fail("list", err)
	tell("left", len(left.Items))
}
