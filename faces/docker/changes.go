package docker

import (
	"cmp"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/sandboxd/sandboxd/api"
)

// changesOf reads instructions of a Dockerfile that change how an image is run. Variables have the
// values of ENV instructions before.
func changesOf(texts []string) (cfg api.ImageConfig, err error) {
	text := strings.Join(texts, "\n")
	if strings.TrimSpace(text) == "" {
		return cfg, nil
	}
	file, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return cfg, badf("changes: %v", err)
	}
	lex := shell.NewLex('\\')
	for _, node := range file.AST.Children {
		if !slices.Contains(changeable, strings.ToLower(node.Value)) {
			return cfg, badf("%s is not a valid change command", clip(strings.ToLower(node.Value)))
		}
		c, err := instructions.ParseCommand(node)
		if err != nil {
			return cfg, badf("changes: %v", err)
		}
		if e, ok := c.(instructions.SupportsSingleWordExpansion); ok {
			err = e.Expand(func(word string) (string, error) {
				out, _, err := lex.ProcessWord(word, shell.EnvsFromSlice(cfg.Env))
				return out, err
			})
			if err != nil {
				return cfg, badf("changes: %v", err)
			}
		}
		if err := change(&cfg, c); err != nil {
			return cfg, err
		}
	}
	return cfg, nil
}

// changeable are the instructions that commit and import take. Docker has ONBUILD, too.
var changeable = []string{"cmd", "entrypoint", "env", "expose", "healthcheck", "label", "stopsignal", "user", "volume", "workdir"}

func change(cfg *api.ImageConfig, c instructions.Command) error {
	argv := func(line instructions.ShellDependantCmdLine) []string {
		if line.PrependShell {
			return []string{"/bin/sh", "-c", strings.Join(line.CmdLine, " ")}
		}
		return line.CmdLine
	}
	switch c := c.(type) {
	case *instructions.CmdCommand:
		cfg.Cmd = argv(c.ShellDependantCmdLine)
	case *instructions.EntrypointCommand:
		cfg.Entrypoint = argv(c.ShellDependantCmdLine)
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			cfg.Env = append(cfg.Env, kv.Key+"="+kv.Value)
		}
	case *instructions.ExposeCommand:
		for _, port := range c.Ports {
			number, proto, _ := strings.Cut(port, "/")
			cfg.Ports = append(cfg.Ports, number+"/"+strings.ToLower(cmp.Or(proto, "tcp")))
		}
	case *instructions.HealthCheckCommand:
		cfg.HealthCheck = healthOf(c.Health)
	case *instructions.LabelCommand:
		if cfg.Labels == nil {
			cfg.Labels = map[string]string{}
		}
		for _, kv := range c.Labels {
			cfg.Labels[kv.Key] = kv.Value
		}
	case *instructions.StopSignalCommand:
		if _, ok := signalName(c.Signal); !ok {
			return badf("Invalid signal: %s", clip(c.Signal))
		}
		cfg.StopSignal = c.Signal
	case *instructions.UserCommand:
		cfg.User = c.User
	case *instructions.VolumeCommand:
		cfg.Volumes = append(cfg.Volumes, c.Volumes...)
	case *instructions.WorkdirCommand:
		cfg.WorkingDir = c.Path
	}
	return nil
}
