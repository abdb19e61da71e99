package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

const (
	// holdTimeout ends a program that holds a resource, if this process cannot.
	holdTimeout  = 2 * time.Minute
	probeTimeout = time.Minute
	// otherUser is the uid and gid of a user of the host without any right.
	otherUser = 65534
)

// neighboured is the output of `doctor --attack --neighbours --json`.
type neighboured struct {
	Profiles  []neighbouredProfile `json:"profiles"`
	Resources []takenFrom          `json:"resources"`
	// Held reports whether each resource is bounded where the product says that it is.
	Held    bool    `json:"held"`
	Seconds float64 `json:"seconds"`
}

// neighbouredProfile describes the sandbox that took the resources, or why there was none.
type neighbouredProfile struct {
	Name     string        `json:"name"`
	Enforced *api.Enforced `json:"enforced,omitempty"`
	// SharedIDs reports whether the sandbox and its neighbour have host ids in common.
	SharedIDs bool   `json:"shared_ids"`
	Error     string `json:"error,omitempty"` // why there was no sandbox
}

// takenFrom describes one resource.
type takenFrom struct {
	Name  string      `json:"name"`
	Pool  attack.Pool `json:"pool"`
	Bound int         `json:"bound"`
	Size  int64       `json:"size,omitempty"` // of the pool; zero if unknown, negative if it has none
	// Control is the outcome of an eighth of it where nothing holds the program.
	Control  attack.Taken           `json:"control"`
	Profiles map[string]*takenByOne `json:"profiles"`
}

// Verdicts of a resource in a sandbox.
const (
	verdictHeld    = "held"    // bounded, by the layer that should
	verdictOpen    = "open"    // bounded by nothing, as the product says
	verdictLost    = "LOST"    // bounded by nothing, though it should be
	verdictDiffers = "differs" // bounded by another layer than the product says
)

// takenByOne describes the outcome of one resource in a sandbox of one profile.
type takenByOne struct {
	attack.Taken

	Layer   string `json:"layer"` // layer that bounds it, as seen; empty if none does
	Want    string `json:"want"`  // layer that should, by `enforced`
	Verdict string `json:"verdict"`
	// Lost lists failures of operations by place, while the resource was held, Kept those after its
	// program had ended, After those after its sandbox had.
	Lost  map[string]map[string]string `json:"lost,omitempty"`
	Kept  map[string]map[string]string `json:"kept,omitempty"`
	After map[string]map[string]string `json:"after,omitempty"`
}

// runNeighbours has a sandbox take all that it gets of each resource, within a bound of harm, while
// a neighbour, programs on the host and the daemon go on.
func runNeighbours(ctx context.Context, opts doctorOptions, d deps) error {
	began := time.Now()
	rows, err := chosen(attack.Resources(), opts.attacks, "resource", func(r attack.Resource) string { return r.Name })
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	c, err := d.Daemon(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	report := neighboured{Held: true}
	for i := range rows {
		r := &rows[i]
		row := takenFrom{Name: r.Name, Pool: r.Pool, Bound: r.Bound, Profiles: make(map[string]*takenByOne)}
		if r.Size != nil {
			row.Size = r.Size()
		}
		if row.Control, err = attack.ControlResource(ctx, self, r.Name); err != nil {
			return fmt.Errorf("attack: %w", err)
		}
		report.Resources = append(report.Resources, row)
	}
	for _, profile := range attackedProfiles {
		w := street{client: c, self: self, profile: profile}
		p, err := w.run(ctx, rows, report.Resources)
		if err != nil {
			return fmt.Errorf("attack: profile %s: %w", profile, err)
		}
		report.Profiles = append(report.Profiles, p)
	}
	if report.Profiles[0].Error != "" {
		return fmt.Errorf("attack: profile %s: %s", report.Profiles[0].Name, report.Profiles[0].Error)
	}
	for _, row := range report.Resources {
		for _, by := range row.Profiles {
			report.Held = report.Held && by.Verdict != verdictLost
		}
	}
	report.Seconds = time.Since(began).Seconds()
	return conclude(d.Stdout, opts, &report, report.Held)
}

// street is a sandbox that takes, with its neighbours.
type street struct {
	client        *client.Client
	self, profile string
	taker         *api.Sandbox
	neighbour     *api.Sandbox
	claimed, real attack.Setting
	before        map[string]attack.Probed // by place
}

// run tries all resources in sandboxes of one profile.
func (w *street) run(ctx context.Context, rows []attack.Resource, out []takenFrom) (p neighbouredProfile, err error) {
	p.Name = w.profile
	if w.taker, err = w.create(ctx, w.profile); err != nil {
		p.Error = err.Error() // for example without subordinate ids
		return p, nil
	}
	defer func() { err = errors.Join(err, w.client.DeleteSandbox(context.WithoutCancel(ctx), w.taker.ID)) }()
	if w.neighbour, err = w.create(ctx, w.profile); err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, w.client.DeleteSandbox(context.WithoutCancel(ctx), w.neighbour.ID)) }()
	p.Enforced = &w.taker.Enforced
	if p.SharedIDs, err = w.shareIDs(ctx); err != nil {
		return p, err
	}
	w.claimed = settingOf(w.taker)
	w.real = w.claimed
	w.real.OwnIDs = !p.SharedIDs
	w.before = make(map[string]attack.Probed)
	if lost := w.probe(ctx); len(lost["neighbour"])+len(lost["daemon"]) > 0 {
		return p, fmt.Errorf("before anything is taken: %v", lost)
	}
	for i := range rows {
		got, err := w.try(ctx, &rows[i], out[i].Size)
		if err != nil {
			return p, fmt.Errorf("%s: %w", rows[i].Name, err)
		}
		out[i].Profiles[w.profile] = got
	}
	return p, nil
}

// create makes a sandbox with a copy of this program.
func (w *street) create(ctx context.Context, profile string) (*api.Sandbox, error) {
	s, err := w.client.CreateSandbox(ctx, api.CreateSandbox{Profile: profile, Timeout: attackLifetime.Seconds()})
	if err != nil {
		return nil, err
	}
	if err := bringAttacker(ctx, w.client, w.self, s.ID); err != nil {
		return nil, errors.Join(err, w.client.DeleteSandbox(context.WithoutCancel(ctx), s.ID))
	}
	return s, nil
}

// renew replaces the sandbox that takes.
func (w *street) renew(ctx context.Context) error {
	next, err := w.create(ctx, w.profile)
	if err != nil {
		return err
	}
	last := w.taker
	w.taker = next
	return w.client.DeleteSandbox(context.WithoutCancel(ctx), last.ID)
}

// settingOf returns the setting that the product reports of a sandbox.
func settingOf(s *api.Sandbox) attack.Setting {
	e := &s.Enforced
	of := attack.Setting{Profile: e.Profile, OwnIDs: e.IDs == "own", CPU: e.Pids == "cgroup"}
	if e.Memory == "cgroup" {
		of.Memory = s.Limits.Memory
	}
	return of
}

func (w *street) shareIDs(ctx context.Context) (bool, error) {
	var maps [2][]attack.IDRange
	for i, s := range []*api.Sandbox{w.taker, w.neighbour} {
		if err := w.inside(ctx, s, attack.ShowIDs(), &maps[i]); err != nil {
			return false, fmt.Errorf("ids: %w", err)
		}
	}
	return attack.Overlap(maps[0], maps[1]), nil
}

// inside executes this program in a sandbox and decodes the line that it prints.
func (w *street) inside(ctx context.Context, s *api.Sandbox, args []string, into any) error {
	result, err := w.client.Exec(ctx, s.ID, api.ExecRequest{Argv: append([]string{attackerPath}, args...), Timeout: probeTimeout.Seconds()})
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(result.Stdout), into); err != nil {
		return fmt.Errorf("%w; it ended with %+v %s", err, result.Exit, result.Stderr)
	}
	return nil
}

// try has the sandbox take one resource, and looks at its neighbours meanwhile and afterwards.
func (w *street) try(ctx context.Context, r *attack.Resource, size int64) (*takenByOne, error) {
	got := &takenByOne{Want: r.Wanted(w.claimed)}
	taken, release, err := w.take(ctx, r)
	if err != nil {
		return nil, err
	}
	got.Taken = taken
	got.Size = size
	switch {
	case taken.Taken == 0:
	case r.Shared():
		got.Lost = w.probe(ctx)
	default:
		got.Lost = w.look(ctx)
	}
	release()
	if taken.Taken > 0 && r.Shared() {
		if got.Kept = w.look(ctx); len(got.Kept) > 0 || r.Lingers {
			if err := w.renew(ctx); err != nil {
				return nil, err
			}
			got.After = w.look(ctx)
		}
	}
	got.Layer = r.Judge(got.Taken, len(got.Lost)+len(got.Kept)+len(got.After) > 0, w.real)
	switch {
	case got.Layer != got.Want && got.Layer == attack.Nothing, len(got.After) > 0:
		got.Verdict = verdictLost
	case got.Layer != got.Want:
		got.Verdict = verdictDiffers
	case got.Layer == attack.Nothing:
		got.Verdict = verdictOpen
	default:
		got.Verdict = verdictHeld
	}
	return got, nil
}

// take starts the program that takes a resource, and returns when it holds it. Release ends it.
func (w *street) take(ctx context.Context, r *attack.Resource) (got attack.Taken, release func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	lines, ended, done := make(chan string, 1), make(chan error, 1), make(chan struct{})
	var exit api.Exit
	go func() {
		var said bytes.Buffer
		end, err := w.client.ExecStream(ctx, w.taker.ID, api.ExecRequest{
			Argv: append([]string{attackerPath}, attack.TakeResource(r.Name, r.Bound)...), Timeout: holdTimeout.Seconds(),
		}, func(e api.ExecEvent) error {
			said.WriteString(e.Text)
			if e.Stream == "stdout" && strings.HasSuffix(e.Text, "\n") {
				select {
				case lines <- e.Text:
				default:
				}
			}
			return nil
		})
		if end != nil {
			exit = end.Exit
			err = fmt.Errorf("the program ended with %+v: %s", end.Exit, &said)
		}
		ended <- err
		close(done)
	}()
	select {
	case line := <-lines:
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			cancel()
			<-done
			return got, nil, fmt.Errorf("the program printed %q: %w", line, err)
		}
		return got, func() { cancel(); <-done }, nil
	case err := <-ended:
		cancel()
		if exit.OOM {
			return attack.Taken{Resource: r.Name, Killed: true, Taken: 1}, func() {}, nil
		}
		return got, nil, err
	}
}

// probe has every neighbour work, and returns the failures by place. The first call says what works
// at all.
func (w *street) probe(ctx context.Context) map[string]map[string]string {
	failed := w.look(ctx)
	terminal, err := w.client.Exec(ctx, w.neighbour.ID, api.ExecRequest{
		Argv: append([]string{attackerPath}, attack.ShowIDs()...), TTY: true, Timeout: probeTimeout.Seconds(),
	})
	if err == nil && terminal.Exit.Code != 0 {
		err = fmt.Errorf("it ended with %+v", terminal.Exit)
	}
	if err != nil {
		put(failed, "neighbour", "exec with a terminal", err)
	}
	for name, do := range map[string]func() error{
		"create a sandbox": func() error {
			s, err := w.client.CreateSandbox(ctx, api.CreateSandbox{Timeout: attackLifetime.Seconds()})
			if err != nil {
				return err
			}
			result, err := w.client.Exec(ctx, s.ID, api.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo fine"}, Timeout: probeTimeout.Seconds()})
			if err == nil && result.Stdout != "fine\n" {
				err = fmt.Errorf("its program ended with %+v: %s", result.Exit, result.Stderr)
			}
			return errors.Join(err, w.client.DeleteSandbox(ctx, s.ID))
		},
		"write and read a file": func() error {
			const path, text = "/tmp/probe", "fine"
			if err := w.client.WriteFile(ctx, w.neighbour.ID, path, strings.NewReader(text), 0o600, ""); err != nil {
				return err
			}
			f, err := w.client.ReadFile(ctx, w.neighbour.ID, path)
			if err != nil {
				return err
			}
			got, err := io.ReadAll(f)
			if err == nil && string(got) != text {
				err = fmt.Errorf("it reads %q", got)
			}
			return errors.Join(err, f.Close())
		},
		"list sandboxes": func() error {
			_, err := w.client.ListSandboxes(ctx, client.ListOptions{})
			return err
		},
	} {
		if err := do(); err != nil {
			put(failed, "daemon", name, err)
		}
	}
	return failed
}

// look tries the operations of programs: in the neighbour, and on the host as this user and, as
// root, as a user without any right.
func (w *street) look(ctx context.Context) map[string]map[string]string {
	failed := make(map[string]map[string]string)
	judge := func(place string, now attack.Probed, err error) {
		before, known := w.before[place]
		switch {
		case err != nil:
			put(failed, place, "start a program", err)
		case !known:
			w.before[place] = now
		default:
			for name, by := range now.Lost(before) {
				put(failed, place, name, errors.New(by))
			}
		}
	}
	var in attack.Probed
	err := w.inside(ctx, w.neighbour, attack.ProbeResources(), &in)
	judge("neighbour", in, err)
	own := os.Geteuid()
	uids := []int{own}
	if own == 0 {
		uids = append(uids, otherUser)
	}
	for _, uid := range uids {
		var on attack.Probed
		err := w.onHost(ctx, uid, &on)
		judge("host, uid "+strconv.Itoa(uid), on, err)
	}
	return failed
}

// onHost executes this program on the host and decodes the line that it prints.
func (w *street) onHost(ctx context.Context, uid int, into any) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	// The other user need not reach the directory of the program.
	cmd := exec.CommandContext(ctx, "/proc/self/exe", attack.ProbeResources()...) //nolint:gosec // G204: constants
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if uid != os.Geteuid() {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)} //nolint:gosec // a constant
	}
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	return json.Unmarshal(out, into)
}

func put(in map[string]map[string]string, place, name string, err error) {
	if in[place] == nil {
		in[place] = make(map[string]string)
	}
	in[place][name] = err.Error()
}

func (r *neighboured) print(w io.Writer) error {
	counts := make(map[string]int)
	for _, p := range r.Profiles {
		if p.Error != "" {
			if _, err := fmt.Fprintf(w, "profile %s: no sandbox of it here: %s\n\n", p.Name, cmdline.Printable(p.Error)); err != nil {
				return err
			}
			continue
		}
		shared := "own ids"
		if p.SharedIDs {
			shared = "ids shared with its neighbours"
		}
		if _, err := fmt.Fprintf(w, "profile %s: %s, memory %s, processes %s\n", p.Name, shared, p.Enforced.Memory, p.Enforced.Pids); err != nil {
			return err
		}
		rows := [][]string{{"RESOURCE", "COUNTED FOR", "TAKEN", "STOPPED BY", "NEIGHBOUR", "HOST", "DAEMON", "VERDICT"}}
		for _, row := range r.Resources {
			by := row.Profiles[p.Name]
			if by == nil {
				continue
			}
			counts[by.Verdict]++
			taken := strconv.Itoa(by.Taken.Taken)
			if by.Taken.Taken >= row.Bound {
				taken += " (all it tried)"
			}
			stopped := cmp.Or(by.Layer, "nothing")
			if by.Stopped != "" {
				stopped += ": " + by.Stopped
			}
			host := ""
			for _, place := range slices.Sorted(maps.Keys(by.Lost)) {
				if strings.HasPrefix(place, "host") {
					host = strings.TrimPrefix(host+", "+orFine(by.Lost[place]), ", ")
				}
			}
			rows = append(rows, []string{
				row.Name, string(row.Pool), taken, stopped, orFine(by.Lost["neighbour"]), cmp.Or(host, "fine"), orFine(by.Lost["daemon"]), by.said(),
			})
		}
		if err := cmdline.Table(w, rows); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	verdict := "each is bounded where `enforced` and SECURITY.md say so"
	if n := counts[verdictLost]; n > 0 {
		verdict = fmt.Sprintf("%d LOST", n)
	}
	_, err := fmt.Fprintf(w, "%d resources: %d held, %d bounded by nothing on this host, as is said: %s (%.0f s)\n",
		len(r.Resources), counts[verdictHeld]+counts[verdictDiffers], counts[verdictOpen], verdict, r.Seconds)
	return err
}

// said returns the verdict with the reason for one that is not as expected.
func (t *takenByOne) said() string {
	switch {
	case len(t.After) > 0:
		return t.Verdict + ": not given back"
	case len(t.Kept) > 0:
		return t.Verdict + ": given back when its sandbox ended"
	case t.Verdict == verdictLost, t.Verdict == verdictDiffers:
		return t.Verdict + ": it should be " + cmp.Or(t.Want, "nothing")
	}
	return t.Verdict
}

func orFine(lost map[string]string) string {
	if len(lost) == 0 {
		return "fine"
	}
	return "lost: " + cmdline.Printable(strings.Join(slices.Sorted(maps.Keys(lost)), ", "))
}
