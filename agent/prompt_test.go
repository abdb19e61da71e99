package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPromptRendering(t *testing.T) {
	for _, tc := range []struct {
		name, config, system, user, fails string
	}{
		{"directories", "system_prompt: 'a {working_dir} {input_dir} {output_dir}'\ninstance_prompt: '{output_dir} {problem_statement}'\n", "a /testbed /testbed/input /testbed/output", "/testbed/output Q {x}", ""},
		{"own directories", "system_prompt: '{working_dir}'\nworking_dir: /w\n", "/w", "Q {x}", ""},
		{"doubled braces", "system_prompt: 'awk {{print}} \\boxed{{}}'\ninstance_prompt: '{{{problem_statement}}}'\n", "awk {print} \\boxed{}", "{Q {x}}", ""},
		{"docs and demo", "system_prompt: 'a{command_docs}{demo}b'\n", "ab", "Q {x}", ""},
		{"braces in a directory", "system_prompt: '{working_dir}'\nworking_dir: '/a{b}'\n", "/a{b}", "Q {x}", ""},
		{"unknown keys are passed over", "dataset: json\nsystem_prompt: s\n", "s", "Q {x}", ""},
		{"empty", "", "", "Q {x}", ""},
		{"unknown field", "system_prompt: |\n  a\n  b {task}\n", "", "", "unknown field {task} in line 2; write {{ and }}"},
		{"problem in the system prompt", "system_prompt: '{problem_statement}'\n", "", "", "unknown field"},
		{"single closing brace", "instance_prompt: 'a } b'\n", "", "", "instance_prompt: a single }"},
		{"single opening brace", "instance_prompt: 'a { b'\n", "", "", "instance_prompt: a single {"},
		{"relative directory", "working_dir: here\n", "", "", "absolute path"},
		{"not YAML", "\t:", "", "", "parse prompt config"},
		{"not a map", "- a\n", "", "", "parse prompt config"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := ParsePromptConfig([]byte(tc.config))
			var system, user string
			if err == nil {
				system, user, err = c.Render("Q {x}")
			}
			if tc.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tc.fails) {
					t.Errorf("error %v, want ...%s", err, tc.fails)
				}
				return
			}
			if err != nil || system != tc.system || user != tc.user {
				t.Errorf("%q, %q, %v; want %q, %q", system, user, err, tc.system, tc.user)
			}
		})
	}
}

func TestBuiltInPrompt(t *testing.T) {
	c, err := LoadPromptConfig("")
	if err != nil {
		t.Fatal(err)
	}
	system, user, err := c.Render("How many?")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"/testbed is your working directory", "/testbed/input", "/testbed/output", ToolBash, ToolEditor, ToolSubmit} {
		if !strings.Contains(system, want) {
			t.Errorf("the system prompt lacks %q", want)
		}
	}
	if !strings.Contains(user, "How many?") || !strings.Contains(user, "/testbed/output/answer.txt") || strings.ContainsAny(system+user, "{}") {
		t.Errorf("user message %q", user)
	}
	if _, err := LoadPromptConfig("/no/such/file"); err == nil || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("got %v", err)
	}
}

func TestSettingsSearchOrder(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	home := filepath.Join(dir, "home")
	env := map[string]string{"HOME": home}
	getenv := func(key string) string { return env[key] }
	write := func(name string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("llm_name: "+name+"\nother: x\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if s, name, err := LoadSettings("", getenv); err != nil || name != "" || s != (Settings{}) {
		t.Errorf("without any: %+v, %q, %v", s, name, err)
	}
	// From last to first: each file that is found hides the later ones.
	for _, name := range []string{filepath.Join(home, ".llm-in-sandbox.yaml"), filepath.Join(home, ".llm-in-sandbox", "config.yaml"), "llm_in_sandbox.yaml", "llm-in-sandbox.yaml", filepath.Join(dir, "env.yaml")} {
		write(name)
		if strings.HasSuffix(name, "env.yaml") {
			env["LLM_IN_SANDBOX_CONFIG"] = name
		}
		s, found, err := LoadSettings("", getenv)
		if diff := cmp.Diff(name, found); diff != "" || err != nil || s.LLMName != name {
			t.Errorf("found %q, %+v, %v, want %q", found, s, err, name)
		}
	}
	env["LLM_IN_SANDBOX_CONFIG"] = "/no/such"
	if _, found, err := LoadSettings("", getenv); err != nil || found != "llm-in-sandbox.yaml" {
		t.Errorf("%q, %v", found, err)
	}
	if _, _, err := LoadSettings("/no/such", getenv); err == nil {
		t.Error("a named file that does not exist was passed over")
	}
}

func FuzzPrompt(f *testing.F) {
	f.Add("a {problem_statement} {{x}} {working_dir}")
	f.Add("{{{problem_statement}}}")
	f.Add("{")
	f.Fuzz(func(t *testing.T, template string) {
		c := PromptConfig{InstancePrompt: template, WorkingDir: "/w", InputDir: "/i", OutputDir: "/o"}
		if _, _, err := c.Render("q"); err != nil && len(err.Error()) > 300 {
			t.Errorf("error of %d bytes", len(err.Error()))
		}
	})
}
