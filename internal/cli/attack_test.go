package cli

import (
	"io"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
)

func TestAttackReport(t *testing.T) {
	r := attacked{
		Profiles: []attackedProfile{{Name: "default", Syscalls: 287, Enforced: &api.Enforced{IDs: "single"}}, {Name: "hardened", Error: "no ids"}},
		Attacks: []attackedBy{
			{Name: "a", Layer: "filter", Control: true, Stopped: map[string]string{"default": "EPERM"}},
			{Name: "another", Layer: "masked", Stopped: map[string]string{"default": "EACCES"}},
			{Name: "b", Layer: "filter", Stopped: map[string]string{"default": "killed"}},
		},
		Held: true,
	}
	text := func() string {
		t.Helper()
		var b strings.Builder
		if err := r.print(&b); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	if got := text(); !strings.Contains(got, "3 attacks, 1 of them work on this host without a sandbox and were stopped in it: everything held") ||
		!strings.Contains(got, "held: EPERM             not tried") || !strings.Contains(got, "does not work here") || !strings.Contains(got, "no ids") {
		t.Error(got)
	}
	// Attacks stand with their layer, once.
	if got := text(); !regexp.MustCompile(`(?s)^filter: 2 attacks, 1 of them work.*\na .*\nb .*\nmasked: 1 attacks, 0 of them.*\nanother .*\nprofile`).MatchString(got) || strings.Count(got, "filter:") != 1 {
		t.Error(got)
	}
	// An attack that worked is reported whether or not its control did.
	for i := range r.Attacks {
		was := r.Attacks[i].Stopped["default"]
		if r.Attacks[i].Stopped["default"] = ""; !r.Attacks[i].worked() {
			t.Errorf("attack %d: it did not work", i)
		}
		r.Held = false
		if got := text(); !strings.Contains(got, "WORKED") || !strings.Contains(got, "1 WORKED") {
			t.Error(got)
		}
		r.Attacks[i].Stopped["default"] = was
	}
}

// Measured calls are reported beside Docker's. A filter that differs from its plan is a failure.
func TestAttackReportCompares(t *testing.T) {
	r := attacked{
		Profiles: []attackedProfile{{
			Name: "default", Enforced: &api.Enforced{},
			Measured: &attack.Judged{Reached: []string{"read", "write"}, Unclear: []string{"mseal"}},
			Docker:   &dockerCompare{Source: "somewhere v1", Syscalls: 4, More: []string{"chroot", "modify_ldt"}},
		}},
		Attacks: []attackedBy{
			{Name: "tiocsti", Control: true, Stopped: map[string]string{"default": "EPERM"}},
			{Name: "keyctl", Control: true, Stopped: map[string]string{"default": ""}},
		},
		Held: true,
	}
	r.features()
	if d := r.Profiles[0].Docker; !slices.Equal(d.Features, []string{"tiocsti"}) || !slices.Equal(d.Opened, []string{"keyctl"}) {
		t.Errorf("%+v", d)
	}
	r.Attacks[1].Stopped["default"] = "EPERM"
	r.features()
	for _, wrong := range []string{"", "bpf answers EBADF, planned was ENOSYS"} {
		want := []string{
			"2 system calls reach the kernel, measured from inside, and 1 may: mseal", "Docker's default filter (somewhere v1) lets 4 through.",
			"Of these 2 are closed here: chroot modify_ldt", "Open here and closed there: none", "lets 1 more reach the kernel: tiocsti", "everything held",
		}
		if wrong != "" {
			r.Profiles[0].Measured.Wrong = []string{wrong}
			want = append(want[:5], "NOT AS PLANNED: "+wrong, "1 SYSTEM CALLS ARE NOT FILTERED AS PLANNED")
		}
		var b strings.Builder
		if err := r.print(&b); err != nil {
			t.Fatal(err)
		}
		for _, line := range want {
			if !strings.Contains(b.String(), line) {
				t.Errorf("not told: %q\n%s", line, &b)
			}
		}
	}
}

func TestWhatStoppedAnAttack(t *testing.T) {
	for name, tc := range map[string]struct {
		result api.ExecResult
		want   string
		bad    bool
	}{
		"it worked":     {api.ExecResult{Stdout: `{"attack":"a","worked":true}`}, "", false},
		"an error":      {api.ExecResult{Stdout: `{"attack":"a","worked":false,"errno":"EPERM","detail":"not permitted"}`}, "EPERM", false},
		"another":       {api.ExecResult{Stdout: `{"attack":"a","worked":false,"detail":"empty"}`}, "empty", false},
		"nothing said":  {api.ExecResult{Stdout: `{"attack":"a","worked":false}`}, "stopped", false},
		"the filter":    {api.ExecResult{Exit: api.Exit{Signal: "SIGSYS"}}, "killed", false},
		"it said none":  {api.ExecResult{}, "", true},
		"it did not go": {api.ExecResult{Exit: api.Exit{Timeout: true}}, "", true},
	} {
		got, err := tryAttacks([]string{"a"}, func([]string) (*api.ExecResult, error) { return &tc.result, nil })
		if by, tried := got["a"]; by != tc.want || tried == tc.bad || (err != nil) != tc.bad {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// An entry of the record that allowed anything is reported, and so is a record with gaps. The
// gateway answers DNS over TCP itself.
func TestRecordOfAnAttackedNetworkIsJudged(t *testing.T) {
	for name, tc := range map[string]struct {
		flow    api.Flow
		refused int
		passed  string
	}{
		"a refusal":         {api.Flow{Kind: api.FlowConnection, Address: "10.0.0.1", Port: 80}, 1, ""},
		"a refused request": {api.Flow{Kind: api.FlowRequest, Protocol: "http"}, 1, ""},
		"a connection":      {api.Flow{Kind: api.FlowConnection, Protocol: "tcp", Address: "10.0.0.1", Port: 80, Allow: true}, 0, "connection  10.0.0.1:80"},
		"a question":        {api.Flow{Kind: api.FlowQuery, Protocol: "dns", Name: "x.example", Port: 53, Allow: true}, 0, "query x.example :53"},
		"a stream of DNS":   {api.Flow{Kind: api.FlowConnection, Protocol: "dns", Address: "1.1.1.1", Port: 53, Allow: true}, 0, ""},
		"lost entries":      {api.Flow{Kind: api.FlowConnection, Lost: 2}, 0, "2 entries of the record were lost"},
		"a restart":         {api.Flow{Kind: api.FlowRestart, Allow: true}, 0, "the gateway was started again"},
	} {
		var w networkWatch
		w.add(&tc.flow)
		if got := strings.Join(w.passed, ", "); got != tc.passed || w.refused != tc.refused {
			t.Errorf("%s: %d refused, passed %q", name, w.refused, got)
		}
	}
	mode := api.NetworkEgress
	r := attacked{Profiles: []attackedProfile{{Name: "default", Enforced: &api.Enforced{}, Network: &mode, Refused: 3, Passed: []string{"query x.example :53"}}}}
	var b strings.Builder
	if err := r.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"PASSED THE POLICY: query x.example :53", "network egress: 3 refusals", "1 CONNECTIONS OR QUESTIONS PASSED"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("not told: %q\n%s", want, &b)
		}
	}
}

// The servers that attacks look for answer, and attacks are told where they are. Servers of
// concurrent attacks have other addresses.
func TestAttackedServersAnswer(t *testing.T) {
	s, err := openAttackedServers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := openAttackedServers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	for i, l := range s.servers {
		c, err := new(net.Dialer).DialContext(t.Context(), l.Addr().Network(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("x"))
		if answer, err := io.ReadAll(c); len(answer) == 0 || err != nil {
			t.Errorf("%s: %q, %v", l.Addr(), answer, err)
		}
		_ = c.Close()
		if _, at, _ := strings.Cut(s.env[i], "="); !strings.HasSuffix(l.Addr().String(), at) || at == "" {
			t.Errorf("%s is told as %q", l.Addr(), s.env[i])
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
