package agent

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed prompts/general.yaml
var generalPrompt []byte

// PromptConfig is a prompt config file: the prompts, and the directories in the sandbox.
//
// In both prompts {working_dir}, {input_dir} and {output_dir} are replaced first. The result is a
// template in the manner of Python's str.format: the instance prompt may use {problem_statement},
// and the system prompt {command_docs} and {demo}, which are empty. A literal brace is doubled.
type PromptConfig struct {
	SystemPrompt   string `yaml:"system_prompt"`
	InstancePrompt string `yaml:"instance_prompt"` // if empty, the user message is the problem alone
	WorkingDir     string `yaml:"working_dir"`
	InputDir       string `yaml:"input_dir"`
	OutputDir      string `yaml:"output_dir"`
}

// LoadPromptConfig reads the file at name, or the built-in config if name is empty.
func LoadPromptConfig(name string) (PromptConfig, error) {
	data := generalPrompt
	if name != "" {
		var err error
		if data, err = os.ReadFile(name); err != nil {
			return PromptConfig{}, fmt.Errorf("read the prompt config: %w", err)
		}
	} else {
		name = "built-in prompt config"
	}
	c, err := ParsePromptConfig(data)
	if err != nil {
		return PromptConfig{}, fmt.Errorf("%s: %w", name, err)
	}
	return c, nil
}

// ParsePromptConfig parses a prompt config. It ignores unknown keys: benchmark tasks have further
// ones.
func ParsePromptConfig(data []byte) (PromptConfig, error) {
	var c PromptConfig
	if err := yaml.Unmarshal(data, &c); err != nil {
		return PromptConfig{}, fmt.Errorf("parse prompt config: %w", err)
	}
	if c.WorkingDir == "" {
		c.WorkingDir = "/testbed"
	}
	if c.InputDir == "" {
		c.InputDir = "/testbed/input"
	}
	if c.OutputDir == "" {
		c.OutputDir = "/testbed/output"
	}
	for key, dir := range map[string]string{"working_dir": c.WorkingDir, "input_dir": c.InputDir, "output_dir": c.OutputDir} {
		if !path.IsAbs(dir) || strings.ContainsRune(dir, 0) {
			return PromptConfig{}, fmt.Errorf("%s %q: want an absolute path in the sandbox", key, dir)
		}
	}
	return c, nil
}

// Render returns the system prompt and the first user message for a problem.
func (c PromptConfig) Render(problem string) (system, user string, err error) {
	system, err = formatBraces(c.directories(c.SystemPrompt), map[string]string{"command_docs": "", "demo": ""})
	if err != nil {
		return "", "", fmt.Errorf("system_prompt: %w", err)
	}
	if c.InstancePrompt == "" {
		return system, problem, nil
	}
	user, err = formatBraces(c.directories(c.InstancePrompt), map[string]string{"problem_statement": problem})
	if err != nil {
		return "", "", fmt.Errorf("instance_prompt: %w", err)
	}
	return system, user, nil
}

func (c PromptConfig) directories(text string) string {
	double := strings.NewReplacer("{", "{{", "}", "}}") // the inserted text passes through the template too
	return strings.NewReplacer(
		"{working_dir}", double.Replace(c.WorkingDir),
		"{input_dir}", double.Replace(c.InputDir),
		"{output_dir}", double.Replace(c.OutputDir),
	).Replace(text)
}

// formatBraces implements the part of Python's str.format that prompts use: {name}, {{ and }}.
func formatBraces(template string, values map[string]string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(template); i++ {
		ch := template[i]
		doubled := i+1 < len(template) && template[i+1] == ch
		switch {
		case ch != '{' && ch != '}':
			b.WriteByte(ch)
		case doubled:
			b.WriteByte(ch)
			i++
		case ch == '}':
			return "", fmt.Errorf("a single } %s; write }} for a literal brace", whereIs(template, i))
		default:
			name, _, closed := strings.Cut(template[i+1:], "}")
			if !closed {
				return "", fmt.Errorf("a single { %s; write {{ for a literal brace", whereIs(template, i))
			}
			value, known := values[name]
			if !known {
				return "", fmt.Errorf("unknown field {%s} %s; write {{ and }} for literal braces", clipMiddle(name, 60), whereIs(template, i))
			}
			b.WriteString(value)
			i += len(name) + 1
		}
	}
	return b.String(), nil
}

func whereIs(text string, offset int) string {
	return fmt.Sprintf("in line %d", 1+strings.Count(text[:offset], "\n"))
}

// Settings is a user's file with defaults for all runs.
type Settings struct {
	LLMName      string `yaml:"llm_name"`
	LLMBaseURL   string `yaml:"llm_base_url"`
	APIKey       string `yaml:"api_key"`
	PromptConfig string `yaml:"prompt_config"`
}

// LoadSettings reads the named settings file, or else the first that exists of
// $LLM_IN_SANDBOX_CONFIG, ./llm-in-sandbox.yaml, ./llm_in_sandbox.yaml,
// ~/.llm-in-sandbox/config.yaml and ~/.llm-in-sandbox.yaml. A missing file is an error only if it
// was named. The name of the file is returned with an error too.
func LoadSettings(named string, getenv func(string) string) (Settings, string, error) {
	candidates := []string{named}
	if named == "" {
		candidates = candidates[:0]
		if env := getenv("LLM_IN_SANDBOX_CONFIG"); env != "" {
			candidates = append(candidates, env)
		}
		candidates = append(candidates, "llm-in-sandbox.yaml", "llm_in_sandbox.yaml")
		if home := getenv("HOME"); home != "" {
			candidates = append(candidates, filepath.Join(home, ".llm-in-sandbox", "config.yaml"), filepath.Join(home, ".llm-in-sandbox.yaml"))
		}
	}
	for _, name := range candidates {
		data, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) && name != named {
			continue
		}
		if err != nil {
			return Settings{}, name, fmt.Errorf("read the settings: %w", err)
		}
		var s Settings
		if err := yaml.Unmarshal(data, &s); err != nil {
			return Settings{}, name, fmt.Errorf("settings %s: %w", name, err)
		}
		return s, name, nil
	}
	return Settings{}, "", nil
}
