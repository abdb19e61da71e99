package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// attackedProfiles lists the profiles that `doctor --attack` attacks.
var attackedProfiles = []string{"default", "hardened"}

const (
	attackerPath   = "/tmp/sandboxd-attacker"
	attackTimeout  = 20 * time.Second // for one attack
	callsTimeout   = 4 * time.Minute  // for measuring the system calls: seconds, but minutes on an emulated machine
	attackLifetime = 30 * time.Minute // of the sandboxes, if this process cannot delete them
)

// attacked is the output of `doctor --attack --json`.
type attacked struct {
	Profiles []attackedProfile `json:"profiles"`
	Attacks  []attackedBy      `json:"attacks"`
	Held     bool              `json:"held"` // no attack worked in a sandbox, and each filter is as planned
	Seconds  float64           `json:"seconds"`
}

// attackedProfile describes one attacked sandbox, or the reason why there was none.
type attackedProfile struct {
	Name     string        `json:"name"`
	Enforced *api.Enforced `json:"enforced,omitempty"`
	Syscalls int           `json:"syscalls,omitempty"` // number that its filter allows
	Error    string        `json:"error,omitempty"`    // why there was no sandbox
	// Measured compares the answers of all system calls with the plan.
	Measured *attack.Judged `json:"measured,omitempty"`
	Docker   *dockerCompare `json:"docker,omitempty"`
	// Network is set with --network. Refused counts the entries in the record of its network that are
	// refusals; Passed lists those that allowed what the policy does not.
	Network *api.NetworkMode `json:"network,omitempty"`
	Refused int              `json:"refused,omitempty"`
	Passed  []string         `json:"passed,omitempty"`
}

// dockerCompare compares a sandbox with Docker's default filter for x86-64.
type dockerCompare struct {
	Source   string `json:"source"`
	Syscalls int    `json:"syscalls"` // number that Docker's filter allows
	// More lists the calls that only Docker's filter allows, Less the calls that only this one does.
	More []string `json:"more"`
	Less []string `json:"less"`
	// Features lists the attacks that Docker's filter allows and that failed here, Opened the reverse.
	Features []string `json:"features"`
	Opened   []string `json:"opened"`
}

// attackedBy describes one attack.
type attackedBy struct {
	Name  string `json:"name"`
	Layer string `json:"layer"` // layer of enforcement that should stop it
	// Control reports whether the attack works on this host in bare namespaces. If not, Reason is its
	// error, and its failure in a sandbox proves nothing.
	Control bool              `json:"control"`
	Reason  string            `json:"reason,omitempty"`
	Stopped map[string]string `json:"stopped"` // by profile: its error, "killed", or empty if it worked
}

// worked reports whether the attack worked in any sandbox.
func (a *attackedBy) worked() bool {
	for _, by := range a.Stopped {
		if by == "" {
			return true
		}
	}
	return false
}

// runAttack attacks sandboxes of its own with a copy of this program, and reports the results.
func runAttack(ctx context.Context, opts doctorOptions, d deps) (err error) {
	began := time.Now()
	corpus := attack.Corpus()
	if opts.network {
		corpus = append(corpus, attack.Egress()...)
	}
	corpus, err = chosen(corpus, opts.attacks, "attack", func(a attack.Attack) string { return a.Name })
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

	var servers *attackedServers
	if opts.network {
		if servers, err = openAttackedServers(ctx); err != nil {
			return err
		}
		defer servers.Close()
	}
	report := attacked{Held: true}
	report.Attacks = make([]attackedBy, len(corpus))
	for i, a := range corpus {
		report.Attacks[i] = attackedBy{Name: a.Name, Layer: a.Layer, Stopped: make(map[string]string)}
	}
	// Run the sandboxes in parallel, and the attacks in each one by one.
	var mu sync.Mutex // guards report.Attacks
	var wg sync.WaitGroup
	errs := make([]error, 1+len(attackedProfiles))
	wg.Go(func() { errs[0] = controls(ctx, self, report.Attacks, &mu) })
	report.Profiles = make([]attackedProfile, len(attackedProfiles))
	for i, profile := range attackedProfiles {
		wg.Go(func() {
			report.Profiles[i], errs[i+1] = attackProfile(ctx, c, self, profile, servers, report.Attacks, &mu)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("attack: %w", err)
	}
	if report.Profiles[0].Error != "" {
		return fmt.Errorf("attack: profile %s: %s", report.Profiles[0].Name, report.Profiles[0].Error)
	}
	for i := range report.Attacks {
		report.Held = report.Held && !report.Attacks[i].worked()
	}
	for _, p := range report.Profiles {
		report.Held = report.Held && (p.Measured == nil || len(p.Measured.Wrong) == 0) && len(p.Passed) == 0
	}
	report.features()
	report.Seconds = time.Since(began).Seconds()
	return conclude(d.Stdout, opts, &report, report.Held)
}

// conclude prints a report and returns the exit code of one that does not hold as an error.
func conclude(w io.Writer, opts doctorOptions, report interface{ print(w io.Writer) error }, held bool) error {
	show := report.print
	if opts.json {
		show = func(w io.Writer) error { return cmdline.PrintJSON(w, report) }
	}
	if err := show(w); err != nil || held {
		return err
	}
	return &cmdline.ExitError{Code: cmdline.CodeError}
}

// chosen returns the rows of a table with these names, or all.
func chosen[T any](all []T, names []string, what string, nameOf func(T) string) ([]T, error) {
	if len(names) == 0 {
		return all, nil
	}
	var some []T
	for _, name := range names {
		i := slices.IndexFunc(all, func(row T) bool { return nameOf(row) == name })
		if i < 0 {
			return nil, cmdline.Usagef("there is no %s %q; the table of all has their names", what, name)
		}
		some = append(some, all[i])
	}
	return some, nil
}

// bringAttacker writes a copy of this program into a sandbox.
func bringAttacker(ctx context.Context, c *client.Client, self, id string) error {
	f, err := os.Open(self)
	if err != nil {
		return fmt.Errorf("open own executable: %w", err)
	}
	defer f.Close() // opened for reading
	return c.WriteFile(ctx, id, attackerPath, f, 0o755, "")
}

func controls(ctx context.Context, self string, attacks []attackedBy, mu *sync.Mutex) error {
	all, err := attack.Controls(ctx, self, attackNames(attacks)...)
	if err != nil {
		return err
	}
	mu.Lock()
	defer mu.Unlock()
	for i := range attacks {
		a := &attacks[i]
		a.Control, a.Reason = all[a.Name].Worked, all[a.Name].Found
	}
	return nil
}

func attackNames(attacks []attackedBy) []string {
	names := make([]string, len(attacks))
	for i := range attacks {
		names[i] = attacks[i].Name
	}
	return names
}

// attackProfile tries the attacks in a sandbox of one profile. With servers the sandbox has a
// network whose policy allows nothing.
func attackProfile(ctx context.Context, c *client.Client, self, profile string, servers *attackedServers, attacks []attackedBy, mu *sync.Mutex) (p attackedProfile, err error) {
	p.Name = profile
	create := api.CreateSandbox{Profile: profile, Timeout: attackLifetime.Seconds()}
	if servers != nil {
		create.Network = api.Network{Mode: api.NetworkEgress, Policy: nothingAllowed}
	}
	s, err := c.CreateSandbox(ctx, create)
	if err != nil {
		p.Error = err.Error() // for example without subordinate ids
		return p, nil
	}
	defer func() {
		err = errors.Join(err, c.DeleteSandbox(context.WithoutCancel(ctx), s.ID))
	}()
	p.Enforced = &s.Enforced
	shown, err := c.Profile(ctx, profile)
	if err != nil {
		return p, err
	}
	p.Syscalls = shown.Syscalls
	if err := bringAttacker(ctx, c, self, s.ID); err != nil {
		return p, err
	}
	var env []string
	if servers != nil {
		env = servers.env
		watch, failed := watchNetwork(ctx, c, s.ID, env)
		if failed != nil {
			return p, fmt.Errorf("profile %s: %w", profile, failed)
		}
		defer func() { err = errors.Join(err, watch.judge(ctx, c, s.ID, &p)) }()
	}
	stopped, err := tryAttacks(attackNames(attacks), func(group []string) (*api.ExecResult, error) {
		return c.Exec(ctx, s.ID, attempt(env, group...))
	})
	if err != nil {
		return p, fmt.Errorf("profile %s: %w", profile, err)
	}
	mu.Lock()
	for i := range attacks {
		attacks[i].Stopped[profile] = stopped[attacks[i].Name]
	}
	mu.Unlock()
	if len(attacks) < len(attack.Corpus()) {
		return p, nil // only the named attacks were asked for
	}
	return p, p.measure(ctx, c, s.ID, shown.Seccomp)
}

// attempt is the exec that tries attacks.
func attempt(env []string, attacks ...string) api.ExecRequest {
	limit := time.Duration(len(attacks)) * attackTimeout
	return api.ExecRequest{Argv: append([]string{attackerPath}, attack.Try(attacks...)...), Env: env, Timeout: limit.Seconds()}
}

// measure makes every system call but sync in the sandbox, and compares the answers with the plan
// and with Docker's filter.
func (p *attackedProfile) measure(ctx context.Context, c *client.Client, id string, filter json.RawMessage) error {
	plan := new(specs.LinuxSeccomp)
	if err := json.Unmarshal(filter, plan); err != nil {
		return fmt.Errorf("read the filter of profile %s: %w", p.Name, err)
	}
	result, err := c.Exec(ctx, id, api.ExecRequest{Argv: append([]string{attackerPath}, attack.Calls()...), Timeout: callsTimeout.Seconds()})
	if err != nil {
		return fmt.Errorf("measure system calls: %w", err)
	}
	var measured attack.Measured
	if err := json.Unmarshal([]byte(result.Stdout), &measured); err != nil {
		return fmt.Errorf("measure system calls in profile %s: %w; it ended with %+v %s", p.Name, err, result.Exit, result.Stderr)
	}
	judged := measured.Judge(plan)
	p.Measured = &judged
	if docker := attack.DockerCalls(measured.Arch); docker != nil {
		open := judged.Open()
		p.Docker = &dockerCompare{
			Source: attack.DockerSource, Syscalls: len(docker),
			More: attack.Beyond(docker, open), Less: attack.Beyond(open, docker),
		}
	}
	return nil
}

// features fills in the comparison of attacks, after the last one.
func (r *attacked) features() {
	docker := attack.DockerFeatures()
	for i := range r.Profiles {
		p := &r.Profiles[i]
		if p.Docker == nil {
			continue
		}
		p.Docker.Features, p.Docker.Opened = []string{}, []string{}
		for _, a := range r.Attacks {
			stopped, tried := a.Stopped[p.Name]
			switch {
			case !tried:
			case stopped != "" && slices.Contains(docker, a.Name):
				p.Docker.Features = append(p.Docker.Features, a.Name)
			case stopped == "" && !slices.Contains(docker, a.Name):
				p.Docker.Opened = append(p.Docker.Opened, a.Name)
			}
		}
	}
}

// tryAttacks returns the error that stopped each attack; empty if it worked.
func tryAttacks(names []string, try func(group []string) (*api.ExecResult, error)) (map[string]string, error) {
	stopped := make(map[string]string)
	var last api.ExecResult
	err := attack.TryAll(names, func(group []string) (said string, killed bool, err error) {
		result, err := try(group)
		if err != nil {
			return "", false, err
		}
		last = *result
		return result.Stdout, result.Exit.Signal == "SIGSYS", nil
	}, func(name string, r attack.Result) error {
		stopped[name] = ""
		if !r.Worked {
			stopped[name] = cmp.Or(r.Errno, r.Detail, "stopped")
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%w; the last program ended with %+v %s", err, last.Exit, last.Stderr)
	}
	return stopped, nil
}

func (r *attacked) print(w io.Writer) error {
	proven, worked, differ, passed := 0, 0, 0, 0
	for i := range r.Attacks {
		a := &r.Attacks[i]
		if a.worked() {
			worked++
		} else if a.Control {
			proven++
		}
	}
	if err := r.printAttacks(w); err != nil {
		return err
	}
	for _, p := range r.Profiles {
		line := fmt.Sprintf("no sandbox of it here: %s", cmdline.Printable(p.Error))
		if e := p.Enforced; e != nil {
			line = fmt.Sprintf("%d system calls, %d capabilities, ids %s, Landlock %d", p.Syscalls, e.Caps, e.IDs, e.Landlock)
		}
		if _, err := fmt.Fprintf(w, "profile %s: %s\n", p.Name, line); err != nil {
			return err
		}
		wrong, err := p.printMeasured(w)
		if err != nil {
			return err
		}
		differ += wrong
		if err := p.printNetwork(w); err != nil {
			return err
		}
		passed += len(p.Passed)
	}
	verdict := "everything held"
	switch {
	case worked > 0:
		verdict = fmt.Sprintf("%d WORKED", worked)
	case passed > 0:
		verdict = fmt.Sprintf("%d CONNECTIONS OR QUESTIONS PASSED THE POLICY", passed)
	case differ > 0:
		verdict = fmt.Sprintf("%d SYSTEM CALLS ARE NOT FILTERED AS PLANNED", differ)
	}
	_, err := fmt.Fprintf(w, "\n%d attacks, %d of them work on this host without a sandbox and were stopped in it: %s (%.0f s)\n",
		len(r.Attacks), proven, verdict, r.Seconds)
	return err
}

// printAttacks prints one table for each layer, in the order of the corpus. All tables have the
// same columns.
func (r *attacked) printAttacks(w io.Writer) error {
	var layers []string
	rows := make(map[string][][]string)
	proven := make(map[string]int)
	width := 0
	for i := range r.Attacks {
		a := &r.Attacks[i]
		width = max(width, len(a.Name))
		if !slices.Contains(layers, a.Layer) {
			layers = append(layers, a.Layer)
		}
		if a.Control {
			proven[a.Layer]++
		}
		rows[a.Layer] = append(rows[a.Layer], r.row(a))
	}
	head := []string{"ATTACK", controlHead}
	for _, p := range r.Profiles {
		head = append(head, strings.ToUpper(p.Name))
	}
	for _, layer := range layers {
		table := append([][]string{slices.Clone(head)}, rows[layer]...)
		for _, row := range table {
			row[0] = fmt.Sprintf("%-*s", width, row[0])
			for i := 2; i < len(row)-1; i++ {
				row[i] = fmt.Sprintf("%-*s", len("held: EPROTONOSUPPORT"), row[i])
			}
		}
		if _, err := fmt.Fprintf(w, "%s: %d attacks, %d of them work here without it\n", layer, len(rows[layer]), proven[layer]); err != nil {
			return err
		}
		if err := cmdline.Table(w, table); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
	}
	return nil
}

// controlHead has the width of the longest entry below it.
const controlHead = "CONTROL           "

// row describes one attack: its name, its control, and its result in each profile.
func (r *attacked) row(a *attackedBy) []string {
	control := "works"
	if !a.Control {
		control = "does not work here"
	}
	row := []string{a.Name, control}
	for _, p := range r.Profiles {
		by, tried := a.Stopped[p.Name]
		switch {
		case !tried:
			by = "not tried"
		case by == "":
			by = "WORKED"
		default:
			by = "held: " + by
		}
		row = append(row, by)
	}
	return row
}

// printMeasured prints the comparison of system calls, and returns the number of answers that
// differ from the plan.
func (p *attackedProfile) printMeasured(w io.Writer) (wrong int, err error) {
	if p.Measured == nil {
		return 0, nil
	}
	var lines []string
	line := fmt.Sprintf("%d system calls reach the kernel, measured from inside", len(p.Measured.Reached))
	if n := len(p.Measured.Unclear); n > 0 {
		line += fmt.Sprintf(", and %d may: %s", n, strings.Join(p.Measured.Unclear, " "))
	}
	lines = append(lines, line)
	for _, differs := range p.Measured.Wrong {
		lines = append(lines, "NOT AS PLANNED: "+differs)
	}
	if d := p.Docker; d != nil {
		lines = append(lines, fmt.Sprintf("Docker's default filter (%s) lets %d through.", d.Source, d.Syscalls),
			fmt.Sprintf("Of these %d are closed here: %s", len(d.More), orNone(d.More)),
			"Open here and closed there: "+orNone(d.Less),
			fmt.Sprintf("Of the attacks above it lets %d more reach the kernel: %s", len(d.Features), orNone(d.Features)))
		if len(d.Opened) > 0 {
			lines = append(lines, "Worked here, and it stops them: "+orNone(d.Opened))
		}
	}
	for _, line := range lines {
		if _, err := fmt.Fprintf(w, "  %s\n", cmdline.Printable(line)); err != nil {
			return 0, err
		}
	}
	return len(p.Measured.Wrong), nil
}

func orNone(words []string) string { return cmp.Or(strings.Join(words, " "), "none") }
