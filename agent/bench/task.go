package bench

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"go.yaml.in/yaml/v3"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
)

// Bounds on a task.
const (
	maxConfig   = 1 << 20
	maxScript   = 16 << 20 // of one scoring file
	maxData     = 1 << 30
	maxProblems = 100_000
	maxID       = 200
	maxInputs   = 10_000 // files of one problem
	maxReplay   = 256 << 20
)

// Files of a task.
const (
	configName = "config.yaml"
	rewardName = "reward.py"
	promptName = "vanilla_llm_prompt.py"
)

// Task is a set of problems with their prompts and scoring.
type Task struct {
	Name     string // name of the directory
	Dir      string // absolute path
	Prompt   agent.PromptConfig
	Scoring  Scoring
	Problems []Problem
	// LLMPrompt is the prompt template of [ModeLLM]. If empty, the prompt is the problem statement,
	// or the result of vanilla_llm_prompt.py.
	LLMPrompt string
	// Inputs is the absolute path of a directory whose files every problem gets; "" for none.
	Inputs string
	// Digest identifies the task's configuration, data, input and scoring files: a benchmark is not
	// resumed with others.
	Digest string

	scripts map[string][]byte // scoring files, reward.py and vanilla_llm_prompt.py, by name
}

// Problem is one record of a task's data.
type Problem struct {
	Index     int    // position in the data, from 0
	ID        string // unique
	Domain    string
	Statement string
	Truth     string            // expected answer as text
	Files     map[string]string // input: texts by local names
	Record    json.RawMessage   // whole record
}

// config is the part of config.yaml other than the prompts.
type config struct {
	Dataset      string    `yaml:"dataset"`
	DataFiles    yaml.Node `yaml:"data_files"`
	PromptConfig string    `yaml:"prompt_config"` // older form: the file with the prompts
	SystemPrompt *string   `yaml:"system_prompt"`

	// Keys that LLM-in-Sandbox does not have.
	Scoring   *Scoring `yaml:"scoring"`
	LLMPrompt string   `yaml:"llm_prompt"`
	Inputs    string   `yaml:"inputs"`
}

// LoadTask reads the task in a directory. If data is not empty, it names the file of problems and
// overrides the configuration. Links that lead out of the directory are not followed.
func LoadTask(dir, data string) (*Task, error) {
	t, err := loadTask(dir, data)
	if err != nil {
		return nil, fmt.Errorf("task %s: %w", dir, err)
	}
	return t, nil
}

func loadTask(dir, data string) (t *Task, err error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	t = &Task{Name: filepath.Base(abs), Dir: abs, scripts: map[string][]byte{}}
	text, err := readFile(root, configName, maxConfig)
	if err != nil {
		return nil, err
	}
	var c config
	if err := yaml.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	sum := sha256.New()
	sum.Write(text)
	prompts := text
	if c.SystemPrompt == nil {
		if c.PromptConfig == "" {
			return nil, fmt.Errorf("%s: neither system_prompt nor prompt_config is set", configName)
		}
		if prompts, err = readFile(root, c.PromptConfig, maxConfig); err != nil {
			return nil, fmt.Errorf("prompt_config: %w", err)
		}
		sum.Write(prompts)
	}
	if t.Prompt, err = parsePrompts(prompts); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	t.LLMPrompt = c.LLMPrompt
	if c.Inputs != "" {
		fi, err := root.Stat(c.Inputs)
		if err != nil {
			return nil, fmt.Errorf("inputs: %w", err)
		}
		if !fi.IsDir() {
			return nil, fmt.Errorf("inputs %q: not a directory", c.Inputs)
		}
		t.Inputs = filepath.Join(abs, c.Inputs)
		if err := addTree(sum, root, c.Inputs); err != nil {
			return nil, fmt.Errorf("inputs: %w", err)
		}
	}
	if err := t.loadScripts(root, &c, sum); err != nil {
		return nil, err
	}
	problems, err := t.loadData(root, &c, data)
	if err != nil {
		return nil, err
	}
	for _, file := range problems {
		sum.Write(file)
		if err := t.addProblems(file); err != nil {
			return nil, err
		}
	}
	if len(t.Problems) == 0 {
		return nil, errors.New("no problem in the data")
	}
	// A broken template is found before any model is called.
	if _, _, err := t.Prompt.Render("x"); err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	t.Digest = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return t, nil
}

// addTree adds the names and contents below a directory to a digest.
func addTree(sum io.Writer, root *os.Root, dir string) (err error) {
	below, err := root.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, below.Close()) }()
	return fs.WalkDir(below.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var target string
		if d.Type() == fs.ModeSymlink { // copied as a link, not followed
			if target, err = below.Readlink(name); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintf(sum, "%q %v %q ", name, d.Type(), target); err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := openFile(below.OpenFile, name, os.O_RDONLY)
		if err != nil {
			return err
		}
		n, err := io.Copy(sum, f)
		if err == nil {
			_, err = fmt.Fprintf(sum, " %d", n)
		}
		return errors.Join(err, f.Close())
	})
}

// parsePrompts parses prompts and directories. The defaults of the directories are those of
// LLM-in-Sandbox's benchmarks, which differ from those of its runs: prompts may name them.
func parsePrompts(text []byte) (agent.PromptConfig, error) {
	var dirs struct {
		WorkingDir string `yaml:"working_dir"`
		InputDir   string `yaml:"input_dir"`
		OutputDir  string `yaml:"output_dir"`
	}
	if err := yaml.Unmarshal(text, &dirs); err != nil {
		return agent.PromptConfig{}, err
	}
	p, err := agent.ParsePromptConfig(text)
	if err != nil {
		return p, err
	}
	if dirs.InputDir == "" {
		p.InputDir = "/testbed/documents"
	}
	if dirs.OutputDir == "" {
		p.OutputDir = "/testbed"
	}
	return p, nil
}

// loadScripts reads the scoring files, so that later changes do not affect the benchmark.
func (t *Task) loadScripts(root *os.Root, c *config, sum io.Writer) error {
	for _, name := range []string{rewardName, promptName} {
		text, err := readFile(root, name, maxScript)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		t.scripts[name] = text
	}
	switch {
	case c.Scoring != nil:
		t.Scoring = *c.Scoring
	case t.scripts[rewardName] != nil:
		t.Scoring = Scoring{Method: MethodReward}
	default:
		return fmt.Errorf("%s has no scoring, and %s does not exist", configName, rewardName)
	}
	for _, name := range t.Scoring.Files {
		text, err := readFile(root, name, maxScript)
		if err != nil {
			return fmt.Errorf("scoring: %w", err)
		}
		t.scripts[name] = text
	}
	for _, name := range append([]string{rewardName, promptName}, t.Scoring.Files...) {
		if _, err := fmt.Fprintf(sum, "%d %s", len(t.scripts[name]), t.scripts[name]); err != nil {
			return err
		}
	}
	return t.Scoring.check(t)
}

// loadData reads the files of problems.
func (t *Task) loadData(root *os.Root, c *config, named string) (files [][]byte, err error) {
	if named != "" {
		text, err := readNamed(named, maxData)
		return [][]byte{text}, err
	}
	if c.Dataset != "" && c.Dataset != "json" {
		return nil, fmt.Errorf("its dataset %q is on a hub, from which nothing is fetched here: save the split as JSON lines and name the file with --data", c.Dataset)
	}
	var names []string
	switch c.DataFiles.Kind { //nolint:exhaustive // Kind is one of two, or none
	case 0:
		for _, name := range []string{"data.json", "data.jsonl"} {
			if _, err := root.Lstat(name); err == nil {
				names = append(names, name)
				break
			}
		}
		if names == nil {
			return nil, errors.New("it names no data_files, and has neither data.json nor data.jsonl")
		}
	case yaml.ScalarNode:
		names = []string{c.DataFiles.Value}
	case yaml.SequenceNode:
		if err := c.DataFiles.Decode(&names); err != nil {
			return nil, fmt.Errorf("data_files: %w", err)
		}
	default:
		return nil, errors.New("data_files: want a name or a list of names")
	}
	for _, name := range names {
		// LLM-in-Sandbox resolves the name from the parent of the task's directory.
		if inside, ok := strings.CutPrefix(path.Clean(name), t.Name+"/"); ok {
			if _, err := root.Lstat(name); errors.Is(err, fs.ErrNotExist) {
				name = inside
			}
		}
		text, err := readFile(root, name, maxData)
		if err != nil {
			return nil, fmt.Errorf("data_files: %w", err)
		}
		files = append(files, text)
	}
	return files, nil
}

// addProblems adds the records of a JSON list or of JSON lines.
func (t *Task) addProblems(data []byte) error {
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	dec := json.NewDecoder(bytes.NewReader(data))
	list := bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte("["))
	if list {
		if _, err := dec.Token(); err != nil {
			return fmt.Errorf("problems: %w", err)
		}
	}
	seen := map[string]int{}
	for _, p := range t.Problems {
		seen[p.ID] = 1
	}
	for !list || dec.More() {
		var record json.RawMessage
		err := dec.Decode(&record)
		if errors.Is(err, io.EOF) && !list {
			return nil
		}
		if err != nil {
			return fmt.Errorf("problem %d: %w", len(t.Problems)+1, err)
		}
		p, err := parseProblem(record)
		if err != nil {
			return fmt.Errorf("problem %d: %w", len(t.Problems)+1, err)
		}
		p.Index = len(t.Problems)
		if p.ID == "" {
			p.ID = strconv.Itoa(p.Index)
		}
		if p.Domain == "" {
			p.Domain = t.Name
		}
		// Data that repeats each problem for a mean repeats its ID too.
		for id := p.ID; seen[p.ID] > 0; {
			seen[id]++
			p.ID = id + "#" + strconv.Itoa(seen[id])
		}
		seen[p.ID]++
		if t.Problems = append(t.Problems, p); len(t.Problems) > maxProblems {
			return fmt.Errorf("more than %d problems", maxProblems)
		}
	}
	_, err := dec.Token()
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = errors.New("text after the list")
		}
	}
	return fmt.Errorf("problems: %w", err)
}

func parseProblem(record json.RawMessage) (Problem, error) {
	p := Problem{Record: record}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(record, &fields); err != nil {
		return p, fmt.Errorf("want an object: %w", err)
	}
	if _, ok := fields["problem_statement"]; !ok && fields["extra_info"] != nil {
		// The form of training data.
		p.Record = fields["extra_info"]
		fields = nil
		if err := json.Unmarshal(p.Record, &fields); err != nil {
			return p, fmt.Errorf("extra_info: %w", err)
		}
	}
	for name, to := range map[string]*string{"id": &p.ID, "domain": &p.Domain, "problem_statement": &p.Statement, "ground_truth": &p.Truth} {
		*to = text(fields[name])
	}
	switch {
	case p.Statement == "":
		return p, errors.New("it has no problem_statement")
	case len(p.ID) > maxID:
		return p, fmt.Errorf("its id has more than %d bytes", maxID)
	}
	var err error
	p.Files, err = inputFiles(fields["input_files"])
	return p, err
}

// text returns a JSON string's value, or the JSON form of another value; null and nothing give "".
func text(raw json.RawMessage) string {
	var s string
	if len(raw) == 0 || json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

// inputFiles decodes a record's input: an object of texts by name, or a string that holds one. A
// null is no file: loaders that give all records the same keys insert nulls.
func inputFiles(raw json.RawMessage) (map[string]string, error) {
	if inner := text(raw); len(raw) > 0 && raw[0] == '"' {
		raw = json.RawMessage(inner)
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	var files map[string]*string
	if err := json.Unmarshal(raw, &files); err != nil {
		return nil, fmt.Errorf("input_files: want texts by name: %w", err)
	}
	if len(files) > maxInputs {
		return nil, fmt.Errorf("input_files: more than %d", maxInputs)
	}
	var out map[string]string
	for name, content := range files {
		if content == nil {
			continue
		}
		if !filepath.IsLocal(name) || filepath.Clean(name) != name || strings.ContainsRune(name, 0) || name == "." {
			return nil, fmt.Errorf("input_files: %q is not a name below the input directory", name)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = *content
	}
	for name := range out {
		for above := filepath.Dir(name); above != "."; above = filepath.Dir(above) {
			if _, ok := out[above]; ok {
				return nil, fmt.Errorf("input_files: %q is a file and a directory", above)
			}
		}
	}
	return out, nil
}

// readFile reads a regular file below a task's directory. A link that leads out of it is an error.
func readFile(root *os.Root, name string, most int64) ([]byte, error) {
	if !filepath.IsLocal(name) {
		return nil, fmt.Errorf("%q does not lie in the task's directory", name)
	}
	f, err := openFile(root.OpenFile, name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	return readOpen(f, name, most)
}

// OpenReplay opens the recorded trajectory dir/ID.json for the problem with that ID. As for other
// files of a task, a link that leads out of dir is an error.
func OpenReplay(dir, id string) (*llm.Replay, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open recordings: %w", err)
	}
	defer root.Close()
	text, err := readFile(root, id+".json", maxReplay)
	if err != nil {
		return nil, fmt.Errorf("open the recording of problem %q: %w", id, err)
	}
	return llm.NewReplay(filepath.Join(dir, id+".json"), bytes.NewReader(text))
}

// readNamed reads a file that the user named.
func readNamed(name string, most int64) ([]byte, error) {
	f, err := openFile(os.OpenFile, name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	return readOpen(f, name, most)
}

// openFile opens a regular file. A pipe without a writer does not block it.
func openFile(open func(string, int, fs.FileMode) (*os.File, error), name string, flags int) (*os.File, error) {
	f, err := open(name, flags|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func readOpen(f *os.File, name string, most int64) ([]byte, error) {
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case fi.Size() > most:
		return nil, fmt.Errorf("%s has %d bytes, more than %d", name, fi.Size(), most)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%s has more than %d bytes", name, most)
	}
	return data, err
}
