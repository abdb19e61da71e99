package build

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

var here = Platform{OS: "linux", Architecture: "amd64"}

// base is the configuration below stages that are FROM an image.
func base() *Image {
	img := &Image{}
	img.Config.Env = []string{"PATH=/usr/bin:/bin", "FROM_BASE=yes"}
	img.Config.Cmd = []string{"from-base"}
	img.Config.Labels = map[string]string{"base": "b"}
	img.Config.User = "nobody"
	return img
}

// evaluate treats a Dockerfile as the daemon does, without executing its steps.
func evaluate(t testing.TB, data []byte, opts Options) (*Plan, map[*Stage][]Step, map[*Stage]*Image, error) {
	t.Helper()
	f, err := Parse("Dockerfile", data)
	if err != nil {
		return nil, nil, nil, err
	}
	p, err := f.Plan(t.Context(), opts)
	if err != nil {
		return nil, nil, nil, err
	}
	steps, images := make(map[*Stage][]Step), make(map[*Stage]*Image)
	for _, s := range p.Stages {
		var from *Image
		switch {
		case s.Base != nil:
			from = images[s.Base]
		case s.Image != "":
			from = base()
		}
		if steps[s], images[s], err = s.Evaluate(t.Context(), from); err != nil {
			return nil, nil, nil, err
		}
	}
	return p, steps, images, nil
}

// TestDockerfilesMeanWhatTheyMeanToBuildKit compares with golden files, which were compared by hand
// with BuildKit's documentation.
func TestDockerfilesMeanWhatTheyMeanToBuildKit(t *testing.T) {
	files, err := filepath.Glob("testdata/dockerfiles/*")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			opts := Options{
				Platform: here, Epoch: "1700000000",
				Args: map[string]string{"GIVEN": "given", "UNDECLARED": "x", "HTTP_PROXY": "http://proxy", "SOURCE_DATE_EPOCH": "1700000000"},
			}
			p, steps, images, err := evaluate(t, data, opts)
			if err != nil {
				t.Fatal(err)
			}
			var b strings.Builder
			for _, s := range p.Stages {
				fmt.Fprintf(&b, "stage %d %q from %q", s.Index, s.Name, s.From)
				if s.Base != nil {
					fmt.Fprintf(&b, " (stage %d)", s.Base.Index)
				}
				b.WriteString("\n")
				for _, step := range steps[s] {
					fmt.Fprintf(&b, "%d: %s\n", step.Line, step.Text)
					what, err := json.Marshal(struct {
						Run  *Run       `json:"run,omitempty"`
						Copy *shownCopy `json:"copy,omitempty"`
						Dir  *Dir       `json:"dir,omitempty"`
					}{step.Run, shown(step.Copy), step.Dir})
					if err != nil {
						t.Fatal(err)
					}
					if string(what) != "{}" {
						fmt.Fprintf(&b, "    %s\n", what)
					}
					if step.History.CreatedBy != step.Text {
						fmt.Fprintf(&b, "    history %s\n", step.History.CreatedBy)
					}
				}
				config, err := json.MarshalIndent(images[s], "", "  ")
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&b, "%s\n\n", config)
			}
			golden := filepath.Join("testdata", "plans", filepath.Base(file)+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), b.String()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

type shownCopy struct {
	Add, Unpack                bool     `json:",omitempty"`
	From                       string   `json:",omitempty"`
	Stage                      string   `json:",omitempty"`
	Image                      string   `json:",omitempty"`
	Sources                    []string `json:",omitempty"`
	Inline                     []Inline `json:",omitempty"`
	Dest, Chown, Chmod, Unused string   `json:",omitempty"`
}

func shown(c *Copy) *shownCopy {
	if c == nil {
		return nil
	}
	s := &shownCopy{
		Add: c.Add, Unpack: c.Unpack, From: c.From, Image: c.Image, Sources: c.Sources, Inline: c.Inline,
		Dest: c.Dest, Chown: c.Chown, Chmod: c.Chmod,
	}
	if c.Stage != nil {
		s.Stage = fmt.Sprint(c.Stage.Index)
	}
	return s
}

// TestWhatIsNotSupportedIsRefusedByNameAndLine has an error for each thing that another builder
// does and this one does not.
func TestWhatIsNotSupportedIsRefusedByNameAndLine(t *testing.T) {
	double := "FROM base\nENV A=0123456789abcdef\n" + strings.Repeat("ENV A=$A$A$A$A$A$A$A$A\n", 8)
	for _, c := range []struct{ dockerfile, want string }{
		{"", "Dockerfile: file with no instructions"},
		{"# only a comment\n", "file with no instructions"},
		{"ARG X=1\n", "Dockerfile: it has no FROM"},
		{"RUN x\n", "Dockerfile:1: no build stage in current context"},
		{"FROM a\nFORM b\n", "Dockerfile:2: unknown instruction: FORM"},
		{"# syntax=docker/dockerfile:1-labs\nFROM a\n", "Dockerfile:1: syntax=docker/dockerfile:1-labs: other frontends"},
		{"# syntax=evil.example/front:1\nFROM a\n", "Dockerfile:1: syntax=evil.example/front:1"},
		{"FROM a\nONBUILD RUN x\n", "Dockerfile:2: ONBUILD is not supported"},
		{"FROM a\nRUN --mount=type=bind,target=/x --mount=type=ssh x\n", "Dockerfile:2: RUN --mount=type=ssh is not supported"},
		{"FROM a\nRUN --mount=type=bind,from=b$X,target=/x x\n", "variable expansion"},
		{"FROM a\nRUN --network=host x\n", "Dockerfile:2: RUN --network=host is not supported"},
		{"FROM a\nRUN --security=insecure x\n", "Dockerfile:2: RUN --security=insecure is not supported"},
		{"FROM a\nRUN --device=vendor/x x\n", "Dockerfile:2: RUN --device is not supported"},
		{"FROM a\nCOPY --link a /\n", "Dockerfile:2: COPY --link is not supported"},
		{"FROM a\nCOPY --parents a /\n", "Dockerfile:2: COPY --parents is not supported"},
		{"FROM a\nCOPY --exclude=*.o a /\n", "Dockerfile:2: COPY --exclude is not supported"},
		{"FROM a\nADD --link a /\n", "Dockerfile:2: ADD --link is not supported"},
		{"FROM a\nADD --checksum=sha256:0 a /\n", "Dockerfile:2: ADD --checksum is not supported"},
		{"FROM a\nADD --keep-git-dir a /\n", "Dockerfile:2: ADD --keep-git-dir is not supported"},
		{"FROM a\nADD --exclude=x a /\n", "Dockerfile:2: ADD --exclude is not supported"},
		{"FROM a\nADD https://example.org/x /\n", "Dockerfile:2: ADD https://example.org/x: nothing is fetched"},
		{"FROM a\nARG U=http://x\nADD $U /\n", "Dockerfile:3: ADD http://x: nothing is fetched"},
		{"FROM a\nADD git@github.com:a/b.git /\n", "Dockerfile:2: ADD git@github.com:a/b.git: nothing is fetched"},
		{"FROM --platform=linux/s390x a\n", "Dockerfile:1: FROM --platform=linux/s390x: programs of this build run on linux/amd64"},
		{"FROM $NOPE\n", "Dockerfile:1: FROM $NOPE: the name of the image is empty"},
		{"FROM a AS x\nFROM b AS X\n", "Dockerfile:2: FROM … AS x: a stage before has that name"},
		{"FROM a AS x\nCOPY --from=x y /\n", "Dockerfile:2: COPY --from=x: no stage before this one"},
		{"FROM a\nCOPY --from=3 y /\n", "Dockerfile:2: COPY --from=3: no stage before this one"},
		{"FROM a\nCOPY --from=$X y /\n", "Dockerfile:2: COPY --from=$X: variables are not filled in here"},
		{"FROM a\nCOPY --from=scratch y /\n", "Dockerfile:2: COPY --from=scratch: there is nothing in it"},
		{"FROM a\nCOPY a b /c\n", `Dockerfile:2: COPY of 2 sources: the destination "/c" must be a directory`},
		{"FROM a\nCOPY --chmod=u+x a /\n", "Dockerfile:2: --chmod=u+x: only octal numbers"},
		{"FROM a\nCOPY --chmod=77777 a /\n", "Dockerfile:2: --chmod=77777: only octal numbers"},
		{"FROM a\nCOPY --nope a /\n", "Dockerfile:2: unknown flag: --nope"},
		{"FROM a\nEXPOSE 99999\n", "Dockerfile:2: EXPOSE 99999: want a port"},
		{"FROM a\nEXPOSE 80/quic\n", "Dockerfile:2: EXPOSE 80/quic: want a port"},
		{"FROM a\nEXPOSE 1-65535 1-65535/udp\n", "Dockerfile:2: EXPOSE 1-65535"},
		{"FROM a\nSTOPSIGNAL SIGNONE\n", "Dockerfile:2: STOPSIGNAL SIGNONE: no such signal"},
		{"FROM a\nENV A=${B:?needed}\n", "Dockerfile:2: failed to process \"${B:?needed}\": B: needed"},
		{"FROM a\nENV A=${B\n", "Dockerfile:2: failed to process \"${B\""},
		{"FROM a\nENV =x\n", "Dockerfile:2: ENV names can not be blank"},
		{"FROM a\nSHELL bash -c\n", "Dockerfile:2: SHELL requires the arguments to be in JSON form"},
		{"FROM a\nRUN []\n", "Dockerfile:2: RUN: no program is named"},
		{"FROM a\nRUN <<EOF\nnever ends\n", "Dockerfile:2: unterminated heredoc"},
		{"FROM a\nCOPY [\"a\\u0000\", \"/b\"]\n", "Dockerfile:2: COPY: \"a\\x00\" is not the name of a file"},
		{"FROM a\nWORKDIR /" + strings.Repeat("w", 5000) + "\n", "is not a path"},
		{"FROM a\nRUN [\"x\"]\x00\n", "Dockerfile:2: a NUL byte"},
		{double, "are allowed"},
		{"FROM a\nENV A=" + strings.Repeat("x", 40000) + "\n", "Dockerfile:2: the value of A has 40000 bytes"},
		{"FROM a\nENV A=" + strings.Repeat("x", 30000) + "\nENV B=${A//x/${A//x/${A//x/$A}}}\n", "Dockerfile:3: \"${A//x/${A//x/${A//x/$A}}}\" could grow without measure"},
		{"FROM a\n" + strings.Repeat("ENV A=1\n", 1001), "Dockerfile:1002: more than 1000 instructions"},
		{"FROM a\nLABEL" + strings.Repeat(" a=$A", 1001) + "\n", "Dockerfile:2: LABEL of 1001 words, 1000 are allowed"},
		{"FROM a\nCOPY" + strings.Repeat(" a", 1001) + " /b/\n", "Dockerfile:2: COPY of 1001 words"},
		{strings.Repeat("ARG A\n", 1001) + "FROM a\n", "Dockerfile:1001: more than 1000 arguments before the first FROM"},
		{strings.Repeat("FROM a\n", 101), "Dockerfile:101: more than 100 stages"},
		{strings.Repeat("#", maxDockerfile+1), "Dockerfile: it has 1048577 bytes"},
	} {
		want := c.want
		_, _, _, err := evaluate(t, []byte(c.dockerfile), Options{Platform: here})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.100q: %v, want %q", c.dockerfile, err, want)
		} else if !errors.Is(err, ErrInvalid) {
			t.Errorf("%.100q: %v is not of the class ErrInvalid", c.dockerfile, err)
		}
	}
}

func TestTargetAndStages(t *testing.T) {
	data := []byte("FROM a AS one\nRUN x\nFROM b AS two\nRUN y\nFROM one AS three\nCOPY --from=two /a /b\nFROM c AS four\n")
	for target, want := range map[string]string{"": "four", "one": "one", "TWO": "two", "three": "one two three", "0": "one", "2": "one two three"} {
		p, _, _, err := evaluate(t, data, Options{Platform: here, Target: target})
		if err != nil {
			t.Errorf("%q: %v", target, err)
			continue
		}
		var names []string
		for _, s := range p.Stages {
			names = append(names, s.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("target %q needs %q, want %q", target, got, want)
		}
	}
	for _, target := range []string{"five", "4", "-1"} {
		if _, _, _, err := evaluate(t, data, Options{Platform: here, Target: target}); !errors.Is(err, ErrInvalid) {
			t.Errorf("target %q: %v", target, err)
		}
	}
}

// TestBaseThatWantsToRunThingsIsRefused is about instructions in an image for builds based on it.
func TestBaseThatWantsToRunThingsIsRefused(t *testing.T) {
	f, err := Parse("Dockerfile", []byte("\nFROM a\nRUN x\n"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := f.Plan(t.Context(), Options{Platform: here})
	if err != nil {
		t.Fatal(err)
	}
	img := base()
	img.Config.OnBuild = []string{"RUN rm -rf /"}
	if _, _, err := p.Target().Evaluate(t.Context(), img); err == nil || !strings.HasPrefix(err.Error(), "Dockerfile:2: FROM a: the image has ONBUILD") {
		t.Errorf("%v", err)
	}
}

func TestKeyFollowsFromWhatAStepIsMadeOf(t *testing.T) {
	run := Run{Argv: []string{"a"}, Env: []string{"X=1"}, Cwd: "/", User: "u", Network: "none"}
	same := run
	same.Proxy = []string{"HTTP_PROXY=x"}
	if run.Key("p", "", nil) != same.Key("p", "", nil) {
		t.Error("a proxy makes another key")
	}
	keys := map[string]string{run.Key("p", "", nil): "itself"}
	for name, change := range map[string]func(*Run) string{
		"argv":    func(r *Run) string { r.Argv = []string{"b"}; return r.Key("p", "", nil) },
		"words":   func(r *Run) string { r.Argv = []string{"\xff"}; return r.Key("p", "", nil) },
		"words2":  func(r *Run) string { r.Argv = []string{"\xfe"}; return r.Key("p", "", nil) },
		"env":     func(r *Run) string { r.Env = []string{"X=2"}; return r.Key("p", "", nil) },
		"cwd":     func(r *Run) string { r.Cwd = "/x"; return r.Key("p", "", nil) },
		"user":    func(r *Run) string { r.User = "v"; return r.Key("p", "", nil) },
		"network": func(r *Run) string { r.Network = ""; return r.Key("p", "", nil) },
		"script":  func(r *Run) string { r.Script = "#!"; return r.Key("p", "", nil) },
		"parent":  func(r *Run) string { return r.Key("q", "", nil) },
		"epoch":   func(r *Run) string { return r.Key("p", "1", nil) },
	} {
		r := run
		k := change(&r)
		if other, ok := keys[k]; ok {
			t.Errorf("%s has the key of %s", name, other)
		}
		keys[k] = name
	}
}

func FuzzDockerfile(f *testing.F) {
	files, err := filepath.Glob("testdata/dockerfiles/*")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, s := range []string{
		"FROM a\nENV A=${A//x/y} B=${A#*x} C=${A%%x*}\nRUN <<A <<B\nA\nB\n", "FROM a\nHEALTHCHECK NONE\nCMD [\"a\", 1]\n", "# escape=`\nFROM a\nRUN a `\n b\n",
		"FROM a\nRUN --mount=type=bind,from=x,source=/,target=/y z\n", "ARG A\nARG A=$A$A\nFROM $A\n", "FROM a\nCOPY [\"a b\", \"c\"]\nCOPY <<\"\" /x\n\n",
		"\xef\xbb\xbfFROM a\nLABEL \"a\"=b c='d e' f\\ g=h\n", "FROM a\nEXPOSE 1-2/tcp ${X:-3}\nVOLUME [\"/a\"]\nSTOPSIGNAL 9\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_, steps, images, err := evaluate(t, data, Options{Platform: here, Args: map[string]string{"A": "1"}})
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%v is of no class", err)
			}
			return
		}
		for s, list := range steps {
			if len(list) != s.Steps() {
				t.Errorf("%d steps, %d were promised", len(list), s.Steps())
			}
			for _, step := range list {
				if step.Line < 1 {
					t.Errorf("step %q has no line", step.Text)
				}
				if c := step.Copy; c != nil && !strings.HasPrefix(c.Dest, "/") {
					t.Errorf("destination %q", c.Dest)
				}
				if r := step.Run; r != nil && (len(r.Argv) == 0 || !strings.HasPrefix(r.Cwd, "/")) {
					t.Errorf("run %+v", r)
				}
			}
			if data, err := json.Marshal(images[s]); err != nil || len(data) > maxConfig+maxDockerfile {
				t.Errorf("configuration of %d bytes: %v", len(data), err)
			}
		}
	})
}
