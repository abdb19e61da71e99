package httpapi

import (
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// allCodes is the closed list, as api declares it.
var allCodes = []api.Code{
	api.CodeInvalid, api.CodeTooLarge, api.CodeForbidden, api.CodeNotFound, api.CodeExists, api.CodeConflict, api.CodeGone,
	api.CodeProgramMissing, api.CodeProgramDenied, api.CodeUnenforceable, api.CodeRegistry, api.CodeImage,
	api.CodeBuild, api.CodeNoLanguage, api.CodeLibraries, api.CodeRefused, api.CodeUnavailable, api.CodeInternal,
}

func TestEveryClassHasACodeAndEveryCodeAClass(t *testing.T) {
	seen := make(map[api.Code]bool)
	for _, c := range mappings {
		seen[c.code] = true
		// However deep it is wrapped, and beside whatever else it is joined.
		p := ProblemOf(errors.Join(errors.New("beside"), fmt.Errorf("doing: %w", class.Mark(c.err, errors.New("what went wrong")))))
		if p.Code != c.code || p.Hint != c.hint || p.Title == "" {
			t.Errorf("%v: %+v", c.err, p)
		}
		if c.status == 0 && p.Status != c.code.Status() || c.status != 0 && p.Status != c.status {
			t.Errorf("%v: status %d", c.err, p.Status)
		}
		if strings.Contains(p.Detail, c.err.Error()) {
			t.Errorf("%v: the class's words are in the detail %q", c.err, p.Detail)
		}
		if !errors.Is(p, &api.Problem{Code: c.code}) {
			t.Errorf("%v: the problem is not found by its code", c.err)
		}
	}
	for _, code := range allCodes {
		if titles[code] == "" {
			t.Errorf("%s has no title", code)
		}
		if !seen[code] {
			t.Errorf("no error leads to %s", code)
		}
	}
	if len(titles) != len(allCodes) {
		t.Errorf("%d titles for %d codes", len(titles), len(allCodes))
	}
}

func TestUnknownErrorIsInternal(t *testing.T) {
	p := ProblemOf(errors.New("boom"))
	if p.Code != api.CodeInternal || p.Status != http.StatusInternalServerError || p.Detail != "boom" {
		t.Errorf("%+v", p)
	}
}

func TestDetailIsBoundedAndText(t *testing.T) {
	p := ProblemOf(errors.New("\xff" + strings.Repeat("ä", maxDetail)))
	if len(p.Detail) > maxDetail+8 || !strings.HasPrefix(p.Detail, "\uFFFDä") {
		t.Errorf("%d bytes: %.20q", len(p.Detail), p.Detail)
	}
}

// A problem reported by a process of an agent run cannot break the answer.
func TestRelayedProblems(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	p := ProblemOf(fmt.Errorf("remove: %w", &api.Problem{Code: "mine", Status: 1, Title: "\xff", Detail: long, Hint: long}))
	if p.Code != api.CodeInternal || p.Status != http.StatusInternalServerError || p.Title != "\uFFFD" {
		t.Errorf("%s, %d, %q", p.Code, p.Status, p.Title)
	}
	if len(p.Detail) > maxDetail+8 || len(p.Hint) > maxDetail+8 {
		t.Errorf("%d and %d bytes", len(p.Detail), len(p.Hint))
	}
	given := api.Problem{Code: api.CodeConflict, Title: "t", Detail: "d", Hint: "h", Findings: []api.CodeFinding{{}}}
	want := given
	want.Findings = nil // of a process that may lie
	want.Status = http.StatusConflict
	if p := ProblemOf(&given); !reflect.DeepEqual(*p, want) {
		t.Errorf("%+v", p)
	}
}
