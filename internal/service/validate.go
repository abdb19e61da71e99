package service

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Bounds of requests.
const (
	maxName       = 63
	maxLabels     = 64
	maxLabelKey   = 128
	maxLabelValue = 1024
	maxEnv        = 4096
	maxEnvBytes   = 1 << 20
	maxArgs       = 65536
	maxArgBytes   = 1 << 20
	maxCommand    = 128 << 10
	maxOneString  = 128<<10 - 1 // the kernel's MAX_ARG_STRLEN with its NUL
	maxPath       = 4095        // the kernel's PATH_MAX with its NUL
	maxTimeout    = 30 * 24 * time.Hour

	maxOutputLimit = 16 << 20
)

func validateCreate(req *api.CreateSandbox) error {
	if err := validateName(req.Name); err != nil {
		return err
	}
	if len(req.Image) > 1024 || hasControl(req.Image) {
		return class.Invalidf("image %q: not a reference", class.Clip(req.Image))
	}
	if req.Snapshot != "" {
		if req.Image != "" {
			return class.Invalidf("image and snapshot: a snapshot has its image; name one of them")
		}
		if err := validateName(req.Snapshot); err != nil {
			return class.Invalidf("snapshot %q: not an id or name", class.Clip(req.Snapshot))
		}
	}
	switch {
	case req.ImageCommand && req.Snapshot != "" && len(req.Entrypoint) == 0:
		return class.Invalidf("image_command: a snapshot does not say what its image runs; give the command or an entrypoint")
	case req.ImageCommand:
		if err := validateArgs("command", req.Command); err != nil {
			return err
		}
	case len(req.Command) > 0:
		if err := validateCommand(req.Command); err != nil {
			return err
		}
	case req.Restart != "" && req.Restart != restartNo:
		return class.Invalidf("restart: the policy is about a main process, and there is no command")
	case req.TTY || req.StdinOpen:
		return class.Invalidf("tty and stdin_open are of the main process, and there is no command")
	}
	if len(req.Entrypoint) > 0 && req.Entrypoint[0] == "" && len(req.Entrypoint) > 1 {
		return class.Invalidf("entrypoint[0] is empty: name a program, or nothing else")
	}
	if len(req.Entrypoint) > 0 && req.Entrypoint[0] != "" {
		if err := validateCommand(req.Entrypoint); err != nil {
			return fmt.Errorf("entrypoint: %w", err)
		}
	}
	if err := validateSettings(&req.Settings); err != nil {
		return err
	}
	if err := validateEnv(req.Env); err != nil {
		return err
	}
	if req.Cwd != "" {
		if err := validatePath("cwd", req.Cwd); err != nil {
			return err
		}
	}
	if err := validateUser(req.User); err != nil {
		return err
	}
	if err := validateLabels(req.Labels); err != nil {
		return err
	}
	if req.Profile != "" && validateName(req.Profile) != nil {
		return class.Invalidf("profile %q: not a name", class.Clip(req.Profile))
	}
	if err := validateLimits(&req.Limits); err != nil {
		return err
	}
	if err := validateLifetime(req.Timeout); err != nil {
		return err
	}
	_, err := seconds("idle_timeout", req.IdleTimeout)
	return err
}

func validateExec(req *api.ExecRequest) error {
	if len(req.Argv) == 0 {
		return class.Invalidf("argv is empty: name a program")
	}
	if req.Argv[0] == "" {
		return class.Invalidf("argv[0] is empty: name a program")
	}
	if err := validateArgs("argv", req.Argv); err != nil {
		return err
	}
	if err := errors.Join(validateEnv(req.Env), validateAnnotations(req.Annotations, maxExecAnnotations)); err != nil {
		return err
	}
	if req.Cwd != "" {
		if err := validatePath("cwd", req.Cwd); err != nil {
			return err
		}
	}
	if err := validateUser(req.User); err != nil {
		return err
	}
	if _, err := seconds("timeout", req.Timeout); err != nil {
		return err
	}
	for name := range req.Rlimits {
		if _, ok := rlimits[name]; !ok {
			return class.Invalidf("rlimits %q: must be one of %s", class.Clip(name), strings.Join(slices.Sorted(maps.Keys(rlimits)), ", "))
		}
	}
	if req.StdinOpen && !req.Detach {
		return class.Invalidf("stdin_open: only a detached exec's stdin can be left open")
	}
	if req.OutputLimit < 0 || req.OutputLimit > maxOutputLimit {
		return class.Invalidf("output_limit %d: must be between 0 and %d", req.OutputLimit, maxOutputLimit)
	}
	return nil
}

// validateCommand is for the main process, whose arguments are kept, and shown in lists.
func validateCommand(argv []string) error {
	if argv[0] == "" {
		return class.Invalidf("command[0] is empty: name a program")
	}
	total := 0
	for i, a := range argv {
		if total += len(a) + 1; !utf8.ValidString(a) {
			return class.Invalidf("command[%d] is not UTF-8", i)
		}
	}
	if total > maxCommand {
		return class.Invalidf("command has %d bytes, at most %d are possible", total, maxCommand)
	}
	return validateArgs("command", argv)
}

func validateArgs(what string, args []string) error {
	if len(args) > maxArgs {
		return class.Invalidf("%s has %d elements, at most %d are possible", what, len(args), maxArgs)
	}
	total := 0
	for i, a := range args {
		if strings.IndexByte(a, 0) >= 0 {
			return class.Invalidf("%s[%d] has a NUL byte", what, i)
		}
		if len(a) > maxOneString {
			return class.Invalidf("%s[%d] has %d bytes, at most %d are possible", what, i, len(a), maxOneString)
		}
		total += len(a) + 1
	}
	if total > maxArgBytes {
		return class.Invalidf("%s has %d bytes, at most %d are possible", what, total, maxArgBytes)
	}
	return nil
}

// validateName accepts the empty name, which means "make one up".
func validateName(name string) error {
	if name == "" {
		return nil
	}
	if len(name) > maxName {
		return class.Invalidf("name %q: longer than %d characters", class.Clip(name), maxName)
	}
	for i, r := range name {
		alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("_.-", r)) {
			return class.Invalidf("name %q: letters, digits and \"_.-\" only, a letter or digit first", name)
		}
	}
	return nil
}

func validateEnv(env []string) error {
	if len(env) > maxEnv {
		return class.Invalidf("env has %d entries, at most %d are possible", len(env), maxEnv)
	}
	total := 0
	for i, kv := range env {
		k, _, _ := strings.Cut(kv, "=")
		// The value is not shown: it may be a secret.
		switch {
		case k == "":
			return class.Invalidf("env[%d]: must be KEY=value, or KEY to take a variable away", i)
		case strings.IndexByte(kv, 0) >= 0:
			return class.Invalidf("env[%d]: has a NUL byte", i)
		case len(kv) > maxOneString:
			return class.Invalidf("env[%d]: %d bytes, at most %d are possible", i, len(kv), maxOneString)
		}
		total += len(kv) + 1
	}
	if total > maxEnvBytes {
		return class.Invalidf("env has %d bytes, at most %d are possible", total, maxEnvBytes)
	}
	return nil
}

// validateVariables is validateEnv for the environment of an image or a snapshot, below which there
// is none to take a variable from.
func validateVariables(env []string) error {
	if err := validateEnv(env); err != nil {
		return err
	}
	if i := slices.IndexFunc(env, func(kv string) bool { return !strings.Contains(kv, "=") }); i >= 0 {
		return class.Invalidf("env[%d]: must be KEY=value", i)
	}
	return nil
}

// validatePath checks a path that the sandbox resolves. A path with ".." is refused: it has a
// plainer name, and its sender has computed something wrong.
func validatePath(what, p string) error {
	switch {
	case p == "":
		return class.Invalidf("%s is missing", what)
	case strings.IndexByte(p, 0) >= 0:
		return class.Invalidf("%s %q: has a NUL byte", what, class.Clip(p))
	case !path.IsAbs(p):
		return class.Invalidf("%s %q: must be absolute", what, class.Clip(p))
	case len(p) > maxPath:
		return class.Invalidf("%s %q: longer than %d bytes", what, class.Clip(p), maxPath)
	case slices.Contains(strings.Split(p, "/"), ".."):
		return class.Invalidf("%s %q: \"..\" is not allowed", what, class.Clip(p))
	}
	return nil
}

func validateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return class.Invalidf("labels: %d keys, at most %d are possible", len(labels), maxLabels)
	}
	for k, v := range labels {
		switch {
		case k == "" || len(k) > maxLabelKey || strings.Contains(k, "=") || hasControl(k):
			return class.Invalidf("label %q: a key has 1 to %d characters, none of them \"=\" or a control character", class.Clip(k), maxLabelKey)
		case len(v) > maxLabelValue || hasControl(v):
			return class.Invalidf("label %q: a value has at most %d bytes and no control character", k, maxLabelValue)
		}
	}
	return nil
}

func validateLimits(l *api.Limits) error {
	if err := l.Check(); err != nil {
		return class.Invalidf("%w", err)
	}
	if _, err := cgroup.ParseCPUs(l.CPUSet); err != nil {
		return class.Invalidf("limits.cpuset: must be like \"0-1,3\": %w", err)
	}
	return nil
}

func validateUpdate(req *api.UpdateSandbox) error {
	if req.Limits.Nofile != nil {
		return class.Invalidf("limits.nofile: each process has its own since its start, so it cannot be changed; create another sandbox")
	}
	_, asked := req.Limits.Apply(api.Limits{}, api.Limits{})
	if err := validateLimits(&asked); err != nil {
		return err
	}
	labels := make(map[string]string, len(req.Labels))
	for k, v := range req.Labels {
		if labels[k] = ""; v != nil {
			labels[k] = *v
		}
	}
	if err := validateLabels(labels); err != nil {
		return err
	}
	if req.Restart != nil {
		if _, err := parseRestart(*req.Restart); err != nil {
			return err
		}
	}
	_, err := seconds("idle_timeout", req.IdleTimeout)
	return err
}

// seconds turns a number of a request into a duration.
func seconds(what string, s float64) (time.Duration, error) {
	if math.IsNaN(s) || s < 0 || s > maxTimeout.Seconds() {
		return 0, class.Invalidf("%s %s: must be between 0 (the default) and %s seconds", what, decimal(s), decimal(maxTimeout.Seconds()))
	}
	if s > 0 && s < 0.001 {
		return 0, class.Invalidf("%s %s: shorter than a millisecond", what, decimal(s))
	}
	return time.Duration(s * float64(time.Second)), nil
}

// decimal writes a number without an exponent.
func decimal(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

func hasControl(s string) bool {
	return !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}
