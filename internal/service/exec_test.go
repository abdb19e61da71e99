package service

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

func TestValidation(t *testing.T) {
	long := strings.Repeat("x", 200)
	neg := int64(-1)
	bad := map[string]api.CreateSandbox{
		"name with a slash":     {Name: "a/b"},
		"name beginning with -": {Name: "-rf"},
		"long name":             {Name: long},
		"name with a newline":   {Name: "a\n"},
		"env without a name":    {Env: []string{"=1"}},
		"env with NUL":          {Env: []string{"A=\x00"}},
		"relative cwd":          {Cwd: "tmp"},
		"cwd with NUL":          {Cwd: "/a\x00b"},
		"cwd with ..":           {Cwd: "/a/../b"},
		"user":                  {User: "-1"},
		"label with =":          {Labels: map[string]string{"a=b": ""}},
		"empty label":           {Labels: map[string]string{"": "x"}},
		"long label":            {Labels: map[string]string{long: "x"}},
		"label with a control":  {Labels: map[string]string{"a": "\x1b[31m"}},
		"negative memory":       {Limits: api.Limits{Memory: -1}},
		"little memory":         {Limits: api.Limits{Memory: 4096}},
		"negative swap":         {Limits: api.Limits{Swap: &neg}},
		"negative cpus":         {Limits: api.Limits{CPUs: -0.5}},
		"few cpus":              {Limits: api.Limits{CPUs: 1e-9}},
		"negative pids":         {Limits: api.Limits{Pids: -1}},
		"many files":            {Limits: api.Limits{Nofile: 1 << 40}},
		"negative timeout":      {Timeout: -2},
		"endless timeout":       {Timeout: 1e300},
		"too short a timeout":   {Timeout: 1e-9},
		"negative idle timeout": {IdleTimeout: -1},
		"image with a control":  {Image: "a\nb"},
		"profile with a slash":  {Profile: "../x"},
	}
	many := make(map[string]string)
	for i := range maxLabels + 1 {
		many[strings.Repeat("k", i+1)] = ""
	}
	bad["many labels"] = api.CreateSandbox{Labels: many}
	for name, req := range bad {
		if err := validateCreate(&req); !errors.Is(err, class.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	swap := int64(0)
	good := api.CreateSandbox{
		Name: "a.b-c_d", Env: []string{"A=", "B=c=d"}, Cwd: "/a..b", User: "app:users", Labels: map[string]string{"a": "b c"},
		Limits: api.Limits{Memory: 1 << 30, Swap: &swap, CPUs: 0.5, Pids: 10, Nofile: 100}, Timeout: 1.5,
		Network: api.Network{Mode: api.NetworkNone},
	}
	if err := validateCreate(&good); err != nil {
		t.Error(err)
	}
	for name, req := range map[string]api.ExecRequest{
		"no argv":           {},
		"empty program":     {Argv: []string{""}},
		"NUL in argv":       {Argv: []string{"a", "b\x00"}},
		"one huge argument": {Argv: []string{"a", strings.Repeat("x", maxOneString+1)}},
		"huge argv":         {Argv: strings.Split(strings.Repeat(strings.Repeat("x", 1<<16)+" ", 17), " ")},
		"env":               {Argv: []string{"a"}, Env: []string{"=A"}},
		"annotations":       {Argv: []string{"a"}, Annotations: map[string]string{"k": strings.Repeat("x", maxExecAnnotations)}},
		"cwd":               {Argv: []string{"a"}, Cwd: "x"},
		"user":              {Argv: []string{"a"}, User: "a b"},
		"negative timeout":  {Argv: []string{"a"}, Timeout: -1},
		"negative limit":    {Argv: []string{"a"}, OutputLimit: -1},
		"huge limit":        {Argv: []string{"a"}, OutputLimit: 1 << 40},
	} {
		if err := validateExec(&req); !errors.Is(err, class.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A secret in the environment must not come back in an error, which ends in logs.
func TestErrorsDoNotRepeatEnvironmentValues(t *testing.T) {
	for _, env := range [][]string{{"K=hunter2\x00"}, {"=hunter2"}} {
		if err := validateEnv(env); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%v", err)
		}
	}
}

func FuzzRequests(f *testing.F) {
	f.Add([]byte(`{"argv":["a"],"env":["K=V"],"cwd":"/","user":"0:0","stdin":"AA==","timeout":1.5}`))
	f.Add([]byte(`{"name":"a","limits":{"memory":5,"swap":0},"labels":{"a":"b"}}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		var e api.ExecRequest
		if json.Unmarshal(data, &e) == nil {
			_ = validateExec(&e)
		}
		var c api.CreateSandbox
		if json.Unmarshal(data, &c) == nil {
			_ = validateCreate(&c)
		}
	})
}
