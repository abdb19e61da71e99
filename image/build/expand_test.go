package build

import (
	"context"
	"errors"
	"fmt"
	"maps"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// last returns the environment and working directory of the last RUN, and the image.
func last(t testing.TB, dockerfile string, opts Options) (map[string]string, *Run, *Image) {
	t.Helper()
	opts.Platform = here
	p, steps, images, err := evaluate(t, []byte(dockerfile), opts)
	if err != nil {
		t.Fatalf("%q: %v", dockerfile, err)
	}
	env := make(map[string]string)
	list := steps[p.Target()]
	run := list[len(list)-1].Run
	if run == nil {
		return nil, nil, images[p.Target()]
	}
	for _, kv := range run.Env {
		k, v, _ := strings.Cut(kv, "=")
		if _, twice := env[k]; twice {
			t.Errorf("%q: %s is there twice", dockerfile, k)
		}
		env[k] = v
	}
	return env, run, images[p.Target()]
}

// TestVariablesAreWhatTheyAreToBuildKit has the results of dispatchArg, dispatchEnv and defaultArgs
// of BuildKit v0.34.
func TestVariablesAreWhatTheyAreToBuildKit(t *testing.T) {
	for _, c := range []struct {
		name, dockerfile, want string
		opts                   Options
	}{
		{"a later ARG wins over an ENV", "FROM a\nENV A=env\nARG A=arg\nRUN x\n", "A=arg", Options{}},
		{"a later ENV wins over an ARG", "FROM a\nARG A=arg\nENV A=env\nRUN x\n", "A=env", Options{}},
		{"an ARG without a value leaves an ENV", "FROM a\nENV A=env\nARG A\nRUN x\n", "A=env", Options{}},
		{"an ARG of a stage is there in those after it", "FROM a AS p\nARG A=arg\nFROM p\nRUN x\n", "A=arg", Options{}},
		{"and what wins there, wins here", "FROM a AS p\nENV A=env\nARG A=arg\nFROM p\nRUN x\n", "A=arg", Options{}},
		{"a given argument of a stage, too", "FROM a AS p\nARG A\nFROM p AS q\nFROM q\nRUN x\n", "A=given", Options{Args: map[string]string{"A": "given"}}},
		{"not one of a stage that is copied from", "FROM a AS p\nARG A=arg\nFROM b\nCOPY --from=p /x /x\nRUN x\n", "", Options{}},
		{"the target by default", "ARG A=$TARGETSTAGE\nFROM a\nARG A\nRUN x\n", "A=default", Options{}},
		{"the target by name", "FROM a\nARG TARGETSTAGE\nRUN x\nFROM b\nRUN y\n", "TARGETSTAGE=0", Options{Target: "0"}},
		{"the last is the target", "ARG A=$TARGETSTAGE\nFROM a AS end\nARG A\nRUN x\n", "A=end", Options{}},
		{"what is built in can be given", "ARG A=$TARGETARCH\nFROM a\nARG A\nRUN x\n", "A=mine", Options{Args: map[string]string{"TARGETARCH": "mine"}}},
		{"versions are empty", "FROM a\nARG TARGETOSVERSION\nRUN x\n", "TARGETOSVERSION=", Options{}},
		{"a pattern", "FROM a\nARG A=1.2.3\nARG B=${A%.*}-${A##*.}-${A//./_}\nRUN x\n", "A=1.2.3 B=1.2-3-1_2_3", Options{}},
	} {
		env, _, _ := last(t, c.dockerfile, c.opts)
		delete(env, "PATH")
		delete(env, "FROM_BASE")
		var got []string
		for _, k := range slices.Sorted(maps.Keys(env)) {
			got = append(got, k+"="+env[k])
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: %q, want %q", c.name, s, c.want)
		}
	}
	if _, run, _ := last(t, "FROM a\nWORKDIR /w\nWORKDIR $UNSET\nRUN x\n", Options{}); run.Cwd != "/w" {
		t.Errorf("WORKDIR of nothing leads to %q", run.Cwd)
	}
	_, steps, _, err := evaluate(t, []byte("FROM a\nWORKDIR /w\nCOPY a $UNSET\n"), Options{Platform: here})
	for _, list := range steps {
		if c := list[1].Copy; c.Dest != "/w/" {
			t.Errorf("COPY to nothing leads to %q", c.Dest)
		}
	}
	if err != nil {
		t.Error(err)
	}
	_, _, img := last(t, "FROM a\nEXPOSE 8080:80 127.0.0.1:81:82/udp [::1]:1:83 8000-8001:84 85/ ::86\nSTOPSIGNAL RTMIN+3\n", Options{})
	if got := strings.Join(slices.Sorted(maps.Keys(img.Config.ExposedPorts)), " "); got != "80/tcp 82/udp 83/tcp 84/tcp 85/tcp 86/tcp" {
		t.Errorf("ports %s", got)
	}
	for _, bad := range []string{"EXPOSE x:80", "EXPOSE host:80:80", "EXPOSE 1-2:80-90", "EXPOSE 80:", "STOPSIGNAL RTMINfoo", "STOPSIGNAL RTMIN+99"} {
		if _, _, _, err := evaluate(t, []byte("FROM a\n"+bad+"\n"), Options{Platform: here}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestSmallFilesStaySmall has Dockerfiles of a few kilobytes that would be gigabytes of memory, or
// hours.
func TestSmallFilesStaySmall(t *testing.T) {
	long := strings.Repeat("x", 30_000)
	words := func(instruction, word string, n int) string {
		var b strings.Builder
		b.WriteString(instruction)
		for i := range n {
			fmt.Fprintf(&b, " "+word, i)
		}
		return b.String() + "\n"
	}
	for name, c := range map[string]struct{ dockerfile, want string }{
		"arguments before FROM": {"ARG A=" + long + "\n" + words("ARG", "a%d=$A", 900) + "FROM a\n", "arguments with"},
		"arguments":             {"FROM a\nARG A=" + long + "\n" + words("ARG", "a%d=$A", 900) + "RUN x\n", "arguments with"},
		"labels":                {"FROM a\nARG A=" + long + "\n" + words("LABEL", "l%d=$A$A$A", 900), "an instruction has at most"},
		"variables":             {"FROM a\nARG A=" + long + "\n" + words("ENV", "l%d=$A", 900), "an instruction has at most"},
		"volumes":               {"FROM a\nARG A=" + long + "\n" + words("VOLUME", "/l%d$A$A$A", 900), "an instruction has at most"},
		"ports":                 {"FROM a\nARG A=" + long + "\n" + words("EXPOSE", "%d${A:+$A$A$A$A$A$A$A}", 900), "EXPOSE"},
		"here-documents": {
			"FROM a\nARG A=" + long + "\n" + strings.TrimSuffix(words("COPY", "<<E%d", 200), "\n") + " /d/\n" +
				strings.ReplaceAll(words("", "$A$A$A\nE%d\n", 200), " ", ""), "an instruction has at most",
		},
		"many instructions": {"FROM a\nARG A=" + long + "\n" + strings.Repeat("USER "+strings.Repeat("$A", 10)+"\nUSER x\n", 400), "an instruction has at most"},
		"runs":              {"FROM a\nARG A=" + long + "\n" + words("ARG", "a%d=$A", 15) + strings.Repeat("RUN x\n", 950), ""},
		"a long pattern":    {"FROM a\nARG A=" + long + "\nARG P=" + strings.Repeat("*y", 2000) + "\nARG B=${A#$P}\n", "a pattern has at most"},
		"long literally":    {"FROM a\nARG A=" + long + "\nARG B=${A/" + strings.Repeat("?", 2000) + "/}\n", "a pattern has at most"},
		"many patterns": {
			"FROM a\nARG A=" + long + "\n" + strings.Repeat("ARG B=${A%%"+strings.Repeat("*y", 400)+"}\n", 100), "compared with too much",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			_, steps, _, err := evaluate(t, []byte(c.dockerfile), Options{Platform: here})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			goruntime.GC()
			goruntime.ReadMemStats(&after)
			if held := int64(after.HeapAlloc) - int64(before.HeapAlloc); held > 64<<20 {
				t.Errorf("%d bytes are held", held)
			}
			goruntime.KeepAlive(steps)
		})
	}
}

func TestEvaluationEndsWithItsContext(t *testing.T) {
	f, err := Parse("Dockerfile", []byte("ARG A\nFROM a\nENV B=$A\n"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := f.Plan(t.Context(), Options{Platform: here})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
	defer cancel()
	if _, err := f.Plan(ctx, Options{Platform: here}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("plan: %v", err)
	}
	if _, _, err := p.Target().Evaluate(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("evaluate: %v", err)
	}
}

func TestTextIsCutBetweenCharacters(t *testing.T) {
	if got := clip(strings.Repeat("ä", 150)); got != strings.Repeat("ä", 100)+"..." {
		t.Errorf("%q", got)
	}
	if got := clip("a" + strings.Repeat("ä", 150)); got != "a"+strings.Repeat("ä", 99)+"..." {
		t.Errorf("%q", got)
	}
}
