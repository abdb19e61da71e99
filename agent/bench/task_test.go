package bench

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// write makes a task from files by name.
func write(t testing.TB, dir string, files map[string]string) string {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const (
	plainConfig = "system_prompt: s\ninstance_prompt: '{problem_statement}'\nscoring: exact\n"
	plainData   = `[{"id":"a","problem_statement":"q","ground_truth":"x"}]`
)

// Tasks with LLM-in-Sandbox's keys and shapes are read with its meaning.
func TestTasksOfTheOriginalsShape(t *testing.T) {
	const reward = "def compute_score(agent_answer, ground_truth, **kwargs):\n    return 1.0\n"
	for name, tc := range map[string]struct {
		files         map[string]string
		problems      int
		input, output string
		method        Method
	}{
		"demo": {map[string]string{
			"config.yaml": "dataset: \"json\"\ndata_files: \"demo/data.json\"\nsplit: \"train\"\nsystem_prompt: |-\n  In {working_dir}. A literal {{brace}}.\ninstance_prompt: |-\n  {problem_statement} in {output_dir}\nworking_dir: \"/testbed\"\ninput_dir: \"/testbed/documents\"\noutput_dir: \"/testbed\"\n",
			"data.json":   plainData, "reward.py": reward,
		}, 1, "/testbed/documents", "/testbed", MethodReward},
		"no directories": {map[string]string{
			"config.yaml": "dataset: json\ndata_files: data.json\nsystem_prompt: s\ninstance_prompt: i\n", "data.json": plainData, "reward.py": reward,
		}, 1, "/testbed/documents", "/testbed", MethodReward},
		"directories of its own": {map[string]string{
			"config.yaml": "dataset: json\ndata_files: data.json\nsystem_prompt: s\nworking_dir: /w\ninput_dir: /w/i\noutput_dir: /w/o\n", "data.json": plainData, "reward.py": reward,
		}, 1, "/w/i", "/w/o", MethodReward},
		"prompts apart": {map[string]string{
			"config.yaml": "dataset: json\ndata_files: data.json\nprompt_config: prompts.yaml\n", "prompts.yaml": "system_prompt: s\noutput_dir: /o\n", "data.json": plainData, "reward.py": reward,
		}, 1, "/testbed/documents", "/o", MethodReward},
		"json lines": {map[string]string{
			"config.yaml": plainConfig, "data.jsonl": "\ufeff{\"problem_statement\":\"a\"}\n\n{\"problem_statement\":\"b\",\"id\":7}\n",
		}, 2, "/testbed/documents", "/testbed", MethodExact},
		"for training": {map[string]string{
			"config.yaml": plainConfig, "data.json": `[{"prompt":[],"extra_info":{"id":"x","domain":"d","problem_statement":"p","ground_truth":"C"}}]`,
		}, 1, "/testbed/documents", "/testbed", MethodExact},
	} {
		t.Run(name, func(t *testing.T) {
			dir := write(t, filepath.Join(t.TempDir(), strings.ReplaceAll(name, " ", "-")), tc.files)
			task, err := LoadTask(dir, "")
			if err != nil {
				t.Fatal(err)
			}
			if len(task.Problems) != tc.problems || task.Prompt.InputDir != tc.input || task.Prompt.OutputDir != tc.output || task.Scoring.Method != tc.method {
				t.Errorf("%+v", task)
			}
		})
	}
}

func TestProblems(t *testing.T) {
	dir := write(t, t.TempDir(), map[string]string{"config.yaml": plainConfig, "data.json": `[
		{"id":"a","problem_statement":"q","ground_truth":12,"domain":"d","input_files":{"x.txt":"1","sub/y.txt":"2","none":null}},
		{"id":"a","problem_statement":"q","ground_truth":{"k":[1]},"input_files":"{\"x.txt\": \"1\"}"},
		{"id":"a","problem_statement":"q","ground_truth":null,"input_files":""},
		{"id":"a#2","problem_statement":"q","input_files":null}]`})
	task, err := LoadTask(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, p := range task.Problems {
		ids = append(ids, p.ID)
	}
	if got := strings.Join(ids, " "); got != "a a#2 a#3 a#2#2" {
		t.Errorf("ids are %s", got)
	}
	p := task.Problems
	if p[0].Truth != "12" || p[1].Truth != `{"k":[1]}` || p[2].Truth != "" || len(p[0].Files) != 2 || p[0].Files["sub/y.txt"] != "2" || len(p[1].Files) != 1 || len(p[3].Files) != 0 {
		t.Errorf("%+v", p)
	}
	if p[0].Domain != "d" || p[1].Domain != task.Name {
		t.Errorf("domains are %q, %q", p[0].Domain, p[1].Domain)
	}
	other, err := LoadTask(dir, filepath.Join(dir, "data.json"))
	if err != nil || other.Digest != task.Digest {
		t.Errorf("the same data by name: %v", err)
	}
	write(t, dir, map[string]string{"data.json": plainData})
	if other, err = LoadTask(dir, ""); err != nil || other.Digest == task.Digest {
		t.Errorf("other data has the same digest, %v", err)
	}
}

// A task that reads outside its directory, or that is contradictory, is refused.
func TestHostileTasks(t *testing.T) {
	outside := write(t, t.TempDir(), map[string]string{"secret.json": plainData, "secret.yaml": plainConfig})
	for name, tc := range map[string]struct {
		files map[string]string
		says  string
		more  func(dir string) error
	}{
		"no configuration":     {map[string]string{"data.json": plainData}, "config.yaml", nil},
		"data above":           {map[string]string{"config.yaml": plainConfig + "data_files: ../secret.json\n"}, "does not lie in the task's directory", nil},
		"data of the host":     {map[string]string{"config.yaml": plainConfig + "data_files: /etc/passwd\n"}, "does not lie in the task's directory", nil},
		"data by its own name": {map[string]string{"config.yaml": plainConfig + "data_files: task/../../secret.json\n"}, "does not lie", nil},
		"data through a link": {map[string]string{"config.yaml": plainConfig}, "escapes", func(dir string) error {
			return os.Symlink(filepath.Join(outside, "secret.json"), filepath.Join(dir, "data.json"))
		}},
		"config through a link": {map[string]string{"data.json": plainData}, "escapes", func(dir string) error {
			return os.Symlink(filepath.Join(outside, "secret.yaml"), filepath.Join(dir, "config.yaml"))
		}},
		"prompts elsewhere":      {map[string]string{"config.yaml": "scoring: exact\nprompt_config: ../secret.yaml\n", "data.json": plainData}, "does not lie", nil},
		"scoring files above":    {map[string]string{"config.yaml": "system_prompt: s\nscoring: {method: command, command: [x], files: [../x]}\n", "data.json": plainData}, "does not lie", nil},
		"scoring files reserved": {map[string]string{"config.yaml": "system_prompt: s\nscoring: {method: command, command: [x], files: [answer.txt]}\n", "data.json": plainData, "answer.txt": "x"}, "answer.txt", nil},
		"inputs above":           {map[string]string{"config.yaml": plainConfig + "inputs: ..\n", "data.json": plainData}, "inputs", nil},
		"inputs through a link":  {map[string]string{"config.yaml": plainConfig + "inputs: in\n", "data.json": plainData}, "inputs", func(dir string) error { return os.Symlink(outside, filepath.Join(dir, "in")) }},
		"a pipe as data":         {map[string]string{"config.yaml": plainConfig}, "not a regular file", func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "data.json"), 0o600) }},
		"a directory as data":    {map[string]string{"config.yaml": plainConfig, "data.json/x": ""}, "not a regular file", nil},
		"a huge configuration":   {map[string]string{"config.yaml": plainConfig + "#" + strings.Repeat("x", maxConfig), "data.json": plainData}, "more than", nil},
		"huge data": {map[string]string{"config.yaml": plainConfig, "data.json": ""}, "more than", func(dir string) error {
			return os.Truncate(filepath.Join(dir, "data.json"), maxData+1)
		}},
		"bad YAML":          {map[string]string{"config.yaml": "system_prompt: [", "data.json": plainData}, "config.yaml", nil},
		"a YAML bomb":       {map[string]string{"config.yaml": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\nscoring: *g\nsystem_prompt: s\n", "data.json": plainData}, "config.yaml", nil},
		"bad JSON":          {map[string]string{"config.yaml": plainConfig, "data.json": `[{"problem_statement":`}, "problem 1", nil},
		"more than a list":  {map[string]string{"config.yaml": plainConfig, "data.json": plainData + plainData}, "text after the list", nil},
		"a list of texts":   {map[string]string{"config.yaml": plainConfig, "data.json": `["x"]`}, "want an object", nil},
		"no problem":        {map[string]string{"config.yaml": plainConfig, "data.json": `[]`}, "no problem", nil},
		"no statement":      {map[string]string{"config.yaml": plainConfig, "data.json": `[{"id":"a"}]`}, "problem_statement", nil},
		"input above":       {map[string]string{"config.yaml": plainConfig, "data.json": `[{"problem_statement":"q","input_files":{"../x":"1"}}]`}, "not a name below", nil},
		"input of the host": {map[string]string{"config.yaml": plainConfig, "data.json": `[{"problem_statement":"q","input_files":{"/etc/cron.d/x":"1"}}]`}, "not a name below", nil},
		"input twice":       {map[string]string{"config.yaml": plainConfig, "data.json": `[{"problem_statement":"q","input_files":{"a":"1","a/b":"2"}}]`}, "a file and a directory", nil},
		"input in pieces":   {map[string]string{"config.yaml": plainConfig, "data.json": `[{"problem_statement":"q","input_files":[1]}]`}, "input_files", nil},
		"no scoring":        {map[string]string{"config.yaml": "system_prompt: s\n", "data.json": plainData}, "reward.py", nil},
		"unknown scoring":   {map[string]string{"config.yaml": "system_prompt: s\nscoring: guess\n", "data.json": plainData}, `unknown method "guess"`, nil},
		"scoring misspelt":  {map[string]string{"config.yaml": "system_prompt: s\nscoring: {method: numeric, tolerant: 1}\n", "data.json": plainData}, "tolerant", nil},
		"no command":        {map[string]string{"config.yaml": "system_prompt: s\nscoring: command\n", "data.json": plainData}, "wants a command", nil},
		"bad pattern":       {map[string]string{"config.yaml": "system_prompt: s\nscoring: {method: regex, pattern: (}\n", "data.json": plainData}, "pattern", nil},
		"bad template":      {map[string]string{"config.yaml": "system_prompt: 's {nobody}'\nscoring: exact\n", "data.json": plainData}, "nobody", nil},
		"relative workdir":  {map[string]string{"config.yaml": plainConfig + "output_dir: out\n", "data.json": plainData}, "output_dir", nil},
		"data on a hub":     {map[string]string{"config.yaml": plainConfig + "dataset: someone/something\n"}, "--data", nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := write(t, filepath.Join(t.TempDir(), "task"), tc.files)
			if tc.more != nil {
				if err := tc.more(dir); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := LoadTask(dir, ""); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want something with %q", err, tc.says)
			}
		})
	}
}

// A benchmark does not continue with another input or other scoring files.
func TestDigestIsOfAllThatCounts(t *testing.T) {
	dir := write(t, filepath.Join(t.TempDir(), "task"), map[string]string{"config.yaml": plainConfig + "inputs: in\n", "data.json": plainData, "in/a": "1", "in/sub/b": "2"})
	if err := os.Symlink("a", filepath.Join(dir, "in/link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "in/pipe"), 0o600); err != nil { // neither read nor sent
		t.Fatal(err)
	}
	seen := map[string]string{}
	look := func(what string) {
		t.Helper()
		task, err := LoadTask(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		if was, ok := seen[task.Digest]; ok {
			t.Errorf("%s has the digest of %s", what, was)
		}
		seen[task.Digest] = what
	}
	look("the task")
	write(t, dir, map[string]string{"in/sub/b": "3"})
	look("other content")
	if err := os.Rename(filepath.Join(dir, "in/sub"), filepath.Join(dir, "in/other")); err != nil {
		t.Fatal(err)
	}
	look("another name")
	if err := errors.Join(os.Remove(filepath.Join(dir, "in/link")), os.Symlink("other", filepath.Join(dir, "in/link"))); err != nil {
		t.Fatal(err)
	}
	look("another link")
}

// A recording is a file of the directory, whatever the problem's ID, and a pipe does not block.
func TestRecordingsOfATask(t *testing.T) {
	const recording = `{"steps":[{"action":{"function":"submit","parameters":{}}}]}`
	outside := write(t, t.TempDir(), map[string]string{"secret.json": recording})
	dir := write(t, t.TempDir(), map[string]string{"q.json": recording, "sub/q.json": recording})
	if err := errors.Join(os.Symlink(filepath.Join(outside, "secret.json"), filepath.Join(dir, "link.json")), syscall.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for id, says := range map[string]string{
		"q": "", "sub/q": "", "link": "escapes", "pipe": "not a regular file", "../" + filepath.Base(outside) + "/secret": "does not lie", "nobody": "no such file",
	} {
		_, err := OpenReplay(dir, id)
		if (says == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", id, err, says)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, LedgerName), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadConfig(dir); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a pipe as a record: %v", err)
	}
}

// For any content of the two files, a task is read or refused. Names in a task are safe below a
// directory.
func FuzzTask(f *testing.F) {
	f.Add([]byte(plainConfig), []byte(plainData))
	f.Add([]byte("prompt_config: p\nscoring: {method: judge, repeats: 3}\ndata_files: [data.json]\n"), []byte("{\"problem_statement\":\"a\",\"input_files\":\"{\\\"x\\\":null}\"}\n{}"))
	f.Add([]byte("system_prompt: '{{x}}'\nscoring:\n  method: regex\n  pattern: (a)\ninputs: .\n"), []byte(`[{"extra_info":{"problem_statement":1,"id":[2]}}]`))
	f.Fuzz(func(t *testing.T, config, data []byte) {
		dir := write(t, t.TempDir(), map[string]string{"config.yaml": string(config), "data.json": string(data)})
		task, err := LoadTask(dir, "")
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, p := range task.Problems {
			if seen[p.ID] || p.Statement == "" || !json.Valid(p.Record) {
				t.Errorf("problem %+v", p)
			}
			seen[p.ID] = true
			for name := range p.Files {
				if !filepath.IsLocal(name) {
					t.Errorf("a file %q", name)
				}
			}
			if name := fileName(p.ID); strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, ".") {
				t.Errorf("%q becomes %q", p.ID, name)
			}
		}
	})
}

// No answer yields an invalid score.
func FuzzScores(f *testing.F) {
	f.Add(`\boxed{\frac{1}{2}}`, "0.5")
	f.Add("Answer: B", "B")
	f.Add("1e-400%", "1/3")
	f.Add("police killed the gunman", "police kill the gunman")
	f.Fuzz(func(t *testing.T, answer, truth string) {
		for _, m := range []Method{MethodExact, MethodNumeric, MethodLetter, MethodChoices, MethodRegex, MethodF1, MethodRougeL} {
			s := Scoring{Method: m}
			got, err := s.scoreText(answer, truth)
			if err == nil {
				err = valid(got)
			} else if m == MethodRegex {
				err = nil
			}
			if err != nil {
				t.Errorf("%s of %q against %q: %v", m, answer, truth, err)
			}
		}
	})
}
