package network

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// fetching are steps that use a network. Their shell fails at the first wrong answer.
const fetching = `FROM localhost/tools
COPY ca.pem ` + op.CA + `
%ENV%
RUN test "$(curl -sS https://site.test/echo/x)" = "GET /echo/x"
RUN test "$(curl -sS https://evil.test/ 2>&1 | grep -c 'resolve host')" = 1
RUN git clone -q https://site.test/git/demo.git /srv/demo && rm -rf /srv/demo/.git
RUN python3 -m pip install -q --no-cache-dir --disable-pip-version-check --no-input --break-system-packages --root-user-action=ignore \
	--index-url https://site.test/simple/ demo
RUN --network=none test "$(curl -sS https://site.test/echo/x 2>&1 | grep -c 'resolve host')" = 1
`

// The programs of a build use the network that it is given, whether or not the gateway reads their
// requests. The image knows nothing of the authority that they trusted.
func TestBuildsFetch(t *testing.T) {
	files := packages(t)
	tools := harness.DebianArchive(t, "curl", "git", "python3-pip", "coreutils", "grep", "dash")
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, files)
		d.ImportArchive(t, "localhost/tools", tools)
		for mode, policy := range modes(t, d) {
			t.Run(mode, func(t *testing.T) {
				env := ""
				if mode == "relayed" {
					env = "ENV"
					for _, name := range trustingVariables {
						env += " " + name + "=" + op.CA
					}
				}
				context := harness.Tar(t,
					harness.File{Name: "Dockerfile", Body: strings.Replace(fetching, "%ENV%", env, 1)}, harness.File{Name: "ca.pem", Body: string(ca)})
				d.MustBuild(t, context, api.Build{Tags: []string{"localhost/fetched"}, Network: api.Network{Mode: api.NetworkEgress, Policy: policy}})
				s := d.Create(t, api.CreateSandbox{Image: "localhost/fetched"})
				want := "1.0 first 0\n"
				got := s.Sh(t, `echo $(python3 -c 'import demo; print(demo.version)') $(head -n 1 /srv/demo/file) $(cat `+bundleOfTheHost+` 2>/dev/null | wc -c)`)
				if got != want {
					t.Errorf("the image has %q, want %q", got, want)
				}
				if env := s.Sh(t, "env"); mode == "inspected" && strings.Contains(env, bundleOfTheHost) {
					t.Errorf("the image's environment names the bundle of the build: %s", env)
				}
			})
		}
		if _, _, err := d.Build(t.Context(), harness.Tar(t, harness.File{Name: "Dockerfile", Body: "FROM localhost/tools\nRUN curl -sS http://10.1.0.7/echo/x\n"}),
			api.Build{}, nil); err == nil || !strings.Contains(err.Error(), "exit code") {
			t.Errorf("without a network: %v", err)
		}
	})
}
