// Package image measures the time and cost until an image of a registry can be run, against
// Debian's tools for it: skopeo with umoci, and podman. `make bench-image` runs it and writes the
// page of its figures.
//
// The sides take turns, and the first one changes from round to round: a loaded machine slows all
// of them.
package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

var (
	rounds = flag.Int("rounds", 7, "rounds of pulls")
	runs   = flag.Int("runs", 100, "first runs of each image that count")
)

// Measurement is one line of the output: one side, once.
type Measurement struct {
	What  string  `json:"what"` // "big", "forty", "second", "run"
	Side  string  `json:"side"`
	Round int     `json:"round"`
	Wall  float64 `json:"wall_s"`
	CPU   float64 `json:"cpu_s,omitempty"`
	Peak  float64 `json:"peak_mb,omitempty"`
	Load  float64 `json:"load"` // of the machine, the minute before
}

// record writes a line of JSON, which the table is made of.
func record(b *testing.B, m Measurement) {
	b.Helper()
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := fmt.Sscan(string(load), &m.Load); err != nil {
		b.Fatal(err)
	}
	line, err := json.Marshal(m)
	if err != nil {
		b.Fatal(err)
	}
	fmt.Println(string(line))
}

// usage is the cost of a pull: the processor time and memory of all its processes.
type usage struct {
	cpu  time.Duration
	peak int64 // bytes
}

// side is one way to get an image ready to run.
type side struct {
	name string
	pull func(ref string) (usage, error)
	// remove takes an image away with all that no other one needs.
	remove func(ref string) error
	// once is for a peer that is not near the others: it takes part in the first round only.
	once bool
}

// served are the images in a registry.
func served(b *testing.B) map[string]string {
	b.Helper()
	dir := os.Getenv("SANDBOXD_BENCH_LAYOUT")
	if dir == "" {
		b.Skip("SANDBOXD_BENCH_LAYOUT names no images; `make bench-image` makes them and runs this")
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		b.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		b.Fatal(err)
	}
	registry := harness.DebianRegistry(b, false)
	refs := map[string]string{}
	for _, d := range manifest.Manifests {
		name := d.Annotations["org.opencontainers.image.ref.name"]
		img, err := index.Image(d.Digest)
		if err != nil {
			b.Fatal(err)
		}
		// One repository: the layers that two images share are there once, as they are after docker push.
		refs[name] = registry.Push(b, "bench:"+name, img)
	}
	busybox := harness.Image(b, v1.Config{}, harness.Layer(b, "gzip", harness.Tar(b, harness.Busybox(b)...)))
	refs["tiny"] = registry.Push(b, "bench:tiny", busybox)
	return refs
}

// sides are ours and the peers, each with a store of its own.
func sides(b *testing.B) []side {
	b.Helper()
	testenv.RequireUserNS(b)
	testenv.RequireOrdinaryUser(b) // as root podman and umoci do something else
	return []side{ours(b, harness.Start(b, harness.Options{})), umoci(b), podman(b)}
}

func ours(b *testing.B, d *harness.Daemon) side {
	b.Helper()
	program := harness.Program(b, "sandboxd")
	return side{
		name: "sandboxd",
		pull: func(ref string) (usage, error) {
			watch, err := watchDaemon(d.PID(), d.System(b).Launcher)
			if err != nil {
				return usage{}, err
			}
			cli, err := command(b.Context(), nil, program, "pull", "--socket", d.Socket, ref)
			all, werr := watch.end()
			if err := errors.Join(err, werr); err != nil {
				return usage{}, err
			}
			return usage{cpu: all.cpu + cli.cpu, peak: all.peak + cli.peak}, nil
		},
		remove: func(ref string) error {
			path := "/v1/images?" + url.Values{"reference": {ref}}.Encode()
			if err := d.Call(b.Context(), http.MethodDelete, path, nil, nil); err != nil {
				return err
			}
			var list api.ImageList
			if err := d.Call(b.Context(), http.MethodGet, "/v1/images", nil, &list); err != nil {
				return err
			}
			blobs, err := os.ReadDir(filepath.Join(d.DataDir, "blobs", "blobs", "sha256"))
			if err == nil && len(list.Images) == 0 && len(blobs) > 0 {
				err = fmt.Errorf("%d blobs are left", len(blobs))
			}
			return err
		},
	}
}

// umoci is skopeo into an OCI layout and umoci out of it: a root file system that runc could start.
func umoci(b *testing.B) side {
	b.Helper()
	skopeo, umoci := testenv.RequirePeer(b, "skopeo"), testenv.RequirePeer(b, "umoci")
	dir := filepath.Join(b.TempDir(), "oci")
	return side{
		name: "skopeo+umoci",
		once: true,
		pull: func(ref string) (usage, error) {
			tag := ref[strings.LastIndexByte(ref, ':')+1:]
			a, err := command(b.Context(), nil, skopeo, "copy", "--quiet", "--insecure-policy", "--src-tls-verify=false", "docker://"+ref, "oci:"+dir+":"+tag)
			if err != nil {
				return usage{}, err
			}
			c, err := command(b.Context(), nil, umoci, "unpack", "--rootless", "--image", dir+":"+tag, dir+"-"+tag)
			return usage{cpu: a.cpu + c.cpu, peak: max(a.peak, c.peak)}, err
		},
		remove: func(ref string) error {
			tag := ref[strings.LastIndexByte(ref, ':')+1:]
			_, err := command(b.Context(), nil, umoci, "remove", "--image", dir+":"+tag)
			if err == nil {
				_, err = command(b.Context(), nil, umoci, "gc", "--layout", dir)
			}
			return errors.Join(err, harness.RemoveAll(dir+"-"+tag))
		},
	}
}

func podman(b *testing.B) side {
	b.Helper()
	program := testenv.RequirePeer(b, "podman")
	env, base, run := harness.Podman(b)
	root := filepath.Join(base, "storage")
	// Overlay as the kernel has it, which is podman's own choice from Linux 5.13 on, and its fastest.
	args := []string{"--root", root, "--runroot", filepath.Join(run, "storage"), "--storage-driver", "overlay"}
	return side{
		name: "podman",
		pull: func(ref string) (usage, error) {
			return command(b.Context(), env, program, append(args, "pull", "--quiet", "--tls-verify=false", ref)...)
		},
		remove: func(ref string) error {
			_, err := command(b.Context(), env, program, append(args, "rmi", ref)...)
			return err
		},
	}
}

// command runs a program and returns the usage of it and its children.
func command(ctx context.Context, env []string, program string, args ...string) (usage, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = env
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return usage{}, fmt.Errorf("%s %s: %w: %s", filepath.Base(program), args[0], err, &said)
	}
	ru, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		return usage{}, errors.New("no resource usage")
	}
	return usage{cpu: cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), peak: ru.Maxrss << 10}, nil
}

// watch follows a daemon, its launcher and the launcher's children, from outside.
type watch struct {
	daemon, launcher int
	began            time.Duration // processor time before
	stop             chan struct{}
	peak             chan int64
}

func watchDaemon(daemon, launcher int) (*watch, error) {
	w := &watch{daemon: daemon, launcher: launcher, stop: make(chan struct{}), peak: make(chan int64)}
	for _, pid := range []int{daemon, launcher} {
		// 5 resets the peak to the resident size. The launcher belongs to its own user namespace, and its
		// past usage stays counted.
		err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
		if err != nil && pid == daemon {
			return nil, err
		}
	}
	var err error
	if w.began, err = w.cpu(); err != nil {
		return nil, err
	}
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		var peak int64
		for {
			peak = max(peak, w.resident())
			select {
			case <-tick.C:
			case <-w.stop:
				w.peak <- max(peak, w.resident())
				return
			}
		}
	}()
	return w, nil
}

// resident is the sum of the peaks of all processes that live now, which is never less than the
// peak of their sum.
func (w *watch) resident() (sum int64) {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", w.launcher, w.launcher))
	pids := []string{strconv.Itoa(w.daemon), strconv.Itoa(w.launcher)}
	if err == nil {
		pids = append(pids, strings.Fields(string(children))...)
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", w.launcher))
	if err == nil {
		for _, task := range tasks { // a child belongs to the thread that started it
			if task.Name() == strconv.Itoa(w.launcher) {
				continue
			}
			if children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", w.launcher, task.Name())); err == nil {
				pids = append(pids, strings.Fields(string(children))...)
			}
		}
	}
	for _, pid := range pids {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(status), "VmHWM:")
		if fields := strings.Fields(rest); len(fields) > 0 {
			kib, _ := strconv.ParseInt(fields[0], 10, 64)
			sum += kib << 10
		}
	}
	return sum
}

// cpu is the time of the daemon and the launcher, with all children that were waited for.
func (w *watch) cpu() (time.Duration, error) {
	var ticks int64
	for _, pid := range []int{w.daemon, w.launcher} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, err
		}
		fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
		for _, i := range []int{11, 12, 13, 14} { // utime, stime, cutime, cstime
			n, err := strconv.ParseInt(fields[i], 10, 64)
			if err != nil {
				return 0, err
			}
			ticks += n
		}
	}
	return time.Duration(ticks) * time.Second / 100, nil // USER_HZ
}

func (w *watch) end() (usage, error) {
	close(w.stop)
	peak := <-w.peak
	now, err := w.cpu()
	return usage{cpu: now - w.began, peak: peak}, err
}

// measure pulls ref with every side, round after round.
func measure(b *testing.B, what string, all []side, ref string) {
	b.Helper()
	for round := range *rounds {
		for i := range all {
			s := &all[(round+i)%len(all)]
			if s.once && round > 0 {
				continue
			}
			// Data that other programs have left to be written is not this one's to wait for.
			unix.Sync()
			began := time.Now()
			used, err := s.pull(ref)
			wall := time.Since(began)
			if err != nil {
				b.Fatalf("%s: %v", s.name, err)
			}
			record(b, Measurement{
				What: what, Side: s.name, Round: round + 1, Wall: wall.Seconds(), CPU: used.cpu.Seconds(), Peak: float64(used.peak) / (1 << 20),
			})
			if err := s.remove(ref); err != nil {
				b.Fatalf("%s: clean up: %v", s.name, err)
			}
		}
	}
}

// BenchmarkPull pulls an image into an empty store until it can be run, and then one that shares
// nine tenths of its layers.
func BenchmarkPull(b *testing.B) {
	refs := served(b)
	all := sides(b)
	// The first of all makes databases and starts helpers.
	for _, s := range all {
		if _, err := s.pull(refs["tiny"]); err != nil {
			b.Fatalf("%s: %v", s.name, err)
		}
		if err := s.remove(refs["tiny"]); err != nil {
			b.Fatalf("%s: %v", s.name, err)
		}
	}
	for _, what := range []string{"big", "forty"} {
		b.Run(what, func(b *testing.B) { measure(b, what, all, refs[what]) })
	}
	b.Run("second", func(b *testing.B) {
		// umoci shares blobs, but no trees: it unpacks everything again.
		all := slices.DeleteFunc(slices.Clone(all), func(s side) bool { return s.once })
		for _, s := range all {
			if _, err := s.pull(refs["forty"]); err != nil {
				b.Fatalf("%s: %v", s.name, err)
			}
		}
		measure(b, "second", all, refs["forty-next"])
	})
}

// BenchmarkRun is the first program in a sandbox of an image that is there, of a large one and of a
// tiny one: nothing of it may grow with the image. A sandbox is new in every round, so each of them
// is a first one.
func BenchmarkRun(b *testing.B) {
	refs := served(b)
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	images := []struct{ name, program string }{{"tiny", "/bin/true"}, {"big", "/bin/true"}, {"forty", "/bin/true"}}
	for _, image := range images {
		d.MustPull(b, refs[image.name])
	}
	for round := range *runs + 5 {
		for i := range images {
			image := images[(round+i)%len(images)]
			began := time.Now()
			s, err := d.TryCreate(b.Context(), api.CreateSandbox{Image: refs[image.name]})
			if err != nil {
				b.Fatalf("%s: %v", image.name, err)
			}
			result, err := s.TryExec(b.Context(), api.ExecRequest{Argv: []string{image.program}})
			wall := time.Since(began)
			if err != nil || result.Exit.Code != 0 {
				b.Fatalf("%s: %v, %+v", image.name, err, result)
			}
			if err := s.TryDelete(b.Context()); err != nil {
				b.Fatal(err)
			}
			if round >= 5 {
				record(b, Measurement{What: "run", Side: image.name, Round: round - 4, Wall: wall.Seconds()})
			}
		}
	}
}
