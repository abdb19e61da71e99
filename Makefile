# Everything that is done with this tree, on a Debian 12 machine with Go: `make help`.
#
# cgo and the seccomp build tag are set here and nowhere else: sandboxd-launcher is the only cgo binary, and built
# without the tag it refuses to run rather than run unprotected.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

GO      ?= go
# How many packages are compiled at once. Two fit a machine of two cores and 4 GiB; the linter's own build is the largest.
P       ?= 2
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
BIN     := bin
TAGS    := seccomp osusergo netgo
# -buildvcs=false: a clone that belongs to another uid makes git, and so `go build`, fail; the version is given by hand.
GOBUILD := $(GO) build -p $(P) -trimpath -buildvcs=false
# -s -w: without symbols and debug data, which panics and the Go tools do not need. The size of sandboxd-init is paid at every start.
LDFLAGS := -s -w -X main.version=$(VERSION)
SUDO    := $(if $(filter 0,$(shell id -u)),,sudo)

# What building needs, what the quickstart runs in its sandbox, and what the tests need besides: a registry, a runtime
# and image tools as peers, a static program for images, a browser that looks at reports, and real programs that must run in sandboxes.
BUILD_DEPS := gcc libc6-dev libseccomp-dev pkg-config uidmap
DEMO_DEPS  := python3 procps
TEST_DEPS  := docker-registry runc busybox-static git sudo skopeo umoci podman python3-pip strace chromium-headless-shell xfsprogs \
	ruby perl nodejs $(if $(shell command -v npm),,npm) python3-numpy default-jdk-headless gdb make curl wget openssl \
	r-base-core esbuild python3-requests python3-httpx python3-h2 python3-aiohttp python3-grpcio
# What only the benchmark of sandboxes needs: more peers.
SANDBOX_BENCH_DEPS := bubblewrap crun
# What only the benchmark of images needs: a maker of root file systems.
IMAGE_BENCH_DEPS := mmdebstrap e2fsprogs
# What only the benchmark of networks needs: peers, and ip(8).
NET_BENCH_DEPS := slirp4netns passt iproute2

GOLANGCI = $(GO) tool -modfile=tools/go.mod golangci-lint

##@ Start here

.PHONY: help
help: ## Show what can be made
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-zA-Z_-]*:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nVariables: GO=%s P=%s (packages compiled at once) RUN=regexp and PKG=./path (narrow the tests) BED=no (test without the bed)\n' \
		'$(GO)' '$(P)'

.PHONY: quickstart
quickstart: demo-deps build ## See it work: a sandboxed program and a whole agent run, then everything stopped again
	@hack/quickstart.sh

.PHONY: deps
deps: ## Install the Debian packages that building and testing need, if any is missing
	@hack/deps.sh $(BUILD_DEPS) $(DEMO_DEPS) $(TEST_DEPS)

.PHONY: demo-deps
demo-deps:
	@hack/deps.sh $(BUILD_DEPS) $(DEMO_DEPS)

##@ Build

.PHONY: build
build: $(BIN)/sandboxd $(BIN)/sandboxd-agent $(BIN)/sandboxd-launcher $(BIN)/sandboxd-init ## Build the four binaries into bin/

# The go tool knows better than make what is out of date, so each binary is always asked for.
.PHONY: $(BIN)/sandboxd $(BIN)/sandboxd-agent $(BIN)/sandboxd-launcher $(BIN)/sandboxd-init
$(BIN)/sandboxd $(BIN)/sandboxd-agent $(BIN)/sandboxd-init:
	CGO_ENABLED=0 $(GOBUILD) -ldflags '$(LDFLAGS)' -o $@ ./cmd/$(@F)

# Static, because it runs as the root of a namespace whose root file system is not the host's.
$(BIN)/sandboxd-launcher:
	CGO_ENABLED=1 $(GOBUILD) -tags '$(TAGS)' -ldflags '$(LDFLAGS) -linkmode external -extldflags "-static"' -o $@ ./cmd/sandboxd-launcher

.PHONY: clients
clients: client-python client-typescript ## Build the packages of the clients into build/clients

.PHONY: client-python
client-python: # the wheel and the sdist, without a network
	@python3 hack/pyclient.py build

# The compiler comes from npm, as npm is configured here.
.PHONY: client-typescript
client-typescript:
	cd clients/typescript && npm ci --ignore-scripts --no-audit --no-fund && npm run build && \
		mkdir -p ../../build/clients && npm pack --ignore-scripts --pack-destination ../../build/clients

.PHONY: clean
clean: ## Remove what was built
	rm -rf $(BIN) build clients/typescript/dist clients/typescript/node_modules

##@ Check

# The lanes mostly wait, so lint runs beside them. Its output is kept, and shown where it fails.
.PHONY: test
test: deps build ## What a change must pass: format, lint with vet, every deterministic test in every lane; what CI runs
	@mkdir -p build; \
	$(MAKE) --no-print-directory check-tree >build/check-tree.log 2>&1 & lint=$$!; \
	status=0; \
	$(GO) run -buildvcs=false ./tests/lanes -p $(P) -lane all -run '$(RUN)' -pkg '$(PKG)' $(if $(BED),-bed '$(BED)') || status=1; \
	if wait $$lint; then echo 'format and lint: ok'; else cat build/check-tree.log; echo 'format or lint: FAILED'; status=1; fi; \
	exit $$status

# What a contributor's edit is answered by, in some minutes: no race detector, one user, one pass.
SMOKE := TestRunFromARegistryPrintsAndPassesTheExitCodeThrough|TestRunStartsADaemonWhereNoneRuns|TestBadRequestsAreAnsweredClearly|TestCommandLineExitCodes|TestBuildStepsAreKeptByContent|TestCommit|TestDetachedStdinEnds|TestFilesGoInAndOutUnchanged|TestTerminal|TestStdinReachesTheProgram|TestMainProcessCommands|TestSandboxRunsUnderSeccompAndNoNewPrivs|TestRollback|TestStopAndStartCommands|TestKilledDaemonAdoptsItsSandboxes|TestQuickstartReplay
.PHONY: quick
quick: build vet ## In three minutes: build, vet, unit tests without the race detector, some functional tests, as you are
	CGO_ENABLED=1 $(GO) test -p $(P) -buildvcs=false -vet=off -tags '$(TAGS)' $(UNITS)
	CGO_ENABLED=0 $(GO) test -buildvcs=false -vet=off -count=1 -run '^($(SMOKE))$$' ./tests/functional

.PHONY: check
check: check-tree unit ## Before a commit: format, lint with vet, voice, unit tests with the race detector, as you are

# Rates and delays by the clock, hundreds of kills, every machine of the bed, long fuzzing.
.PHONY: soak
soak: deps build ## Before a release, on a quiet machine: all of test and what only a clock or chance can judge; hours. RUN= PKG= narrow
	$(GO) run -buildvcs=false ./tests/lanes -soak -p $(P) -lane all -run '$(RUN)' -pkg '$(PKG)' $(if $(BED),-bed '$(BED)')
	$(if $(RUN)$(PKG),,@hack/fuzz.sh 5m '$(TAGS)')

.PHONY: test-root
test-root: deps build ## Every test as root (through sudo, if you are not)
	$(GO) run -buildvcs=false ./tests/lanes -p $(P) -lane root -run '$(RUN)' -pkg '$(PKG)'

.PHONY: test-rootless
test-rootless: deps build ## Every test as an ordinary user (one made for it, if you are root)
	$(GO) run -buildvcs=false ./tests/lanes -p $(P) -lane rootless -run '$(RUN)' -pkg '$(PKG)'

.PHONY: check-tree
check-tree: fmt-check voice lint # whose govet is vet's

.PHONY: voice
voice: ## How comments are written, measured (CONTRIBUTING.md)
	@hack/voice.sh

# The packages whose tests are beside the code.
UNITS = $(or $(PKG),$$($(GO) list -tags '$(TAGS)' ./... | grep -v /tests/))

.PHONY: unit
unit: ## The tests beside the code, with the race detector, as you are
	CGO_ENABLED=1 $(GO) test -p $(P) -buildvcs=false -race -tags '$(TAGS)' $(if $(RUN),-run '$(RUN)') $(UNITS)

# Its exit status: 0, the tests' own, or 125 where a machine died and nothing is known.
TESTBED := build/testbed-cmd
.PHONY: testbed
testbed: build-deps build $(TESTBED) ## The limits on a real cgroup v2 host, in a machine of its own: KERNEL=6.1|6.12|newest|all FLAVOUR=tiny|systemd|all WHO=dev|root|all SOAK=yes
	$(TESTBED) -kernel $(or $(KERNEL),6.12) -flavour $(or $(FLAVOUR),tiny) -as $(or $(WHO),all) $(if $(TIMEOUT),-timeout $(TIMEOUT)) $(if $(SOAK),-soak) $(if $(RUN),-run '$(RUN)') $(if $(PKG),-pkg '$(PKG)')

.PHONY: testbed-shell
testbed-shell: build-deps build $(TESTBED) ## A root shell in that machine, with our binaries in /payload/bin; testbed-as dev bash makes you a user
	$(TESTBED) -kernel $(or $(KERNEL),6.12) -flavour $(or $(FLAVOUR),tiny) -shell

.PHONY: $(TESTBED)
$(TESTBED):
	@CGO_ENABLED=0 $(GOBUILD) -o $@ ./tests/testbed

.PHONY: build-deps
build-deps:
	@hack/deps.sh $(BUILD_DEPS)

.PHONY: vet
vet: ## go vet, with the tags of the launcher
	$(GO) vet -p $(P) -buildvcs=false -tags '$(TAGS)' ./...

# Parallel runners: the lock against them is one file in /tmp, and where root has made it nobody else can ever lint.
.PHONY: lint
lint: ## golangci-lint, built from the version that tools/go.mod pins (the first time takes minutes)
	GOFLAGS='-buildvcs=false -p=$(P)' $(GOLANGCI) run --allow-parallel-runners --concurrency $(P) --timeout 20m ./...

.PHONY: fmt
fmt: ## Format the tree as the linter wants it
	GOFLAGS='-buildvcs=false -p=$(P)' $(GOLANGCI) fmt ./...

.PHONY: fmt-check
fmt-check:
	@bad=$$(git ls-files -co --exclude-standard '*.go' | xargs -r gofmt -l); \
		if [ -n "$$bad" ]; then printf 'not formatted, run make fmt:\n%s\n' "$$bad" >&2; exit 1; fi

FUZZTIME ?= 60s
.PHONY: fuzz
fuzz: ## Every fuzz target of the tree, one after the other, for FUZZTIME (60s) each
	@hack/fuzz.sh '$(FUZZTIME)' '$(TAGS)'

.PHONY: fuzz-short
fuzz-short: ## The same for 20 seconds each
	@hack/fuzz.sh 20s '$(TAGS)'

.PHONY: bench
bench: bench-sandbox bench-image ## All figures of docs/performance.md but those of networks, on this machine, as you are

.PHONY: bench-sandbox
bench-sandbox: deps build ## The figures of sandboxes there, against runc, crun, bubblewrap and podman: ITERATIONS=300 COUNT=3 RUN=regexp
	@hack/deps.sh $(SANDBOX_BENCH_DEPS)
	@hack/bench.sh

.PHONY: bench-image
bench-image: deps build ## The figures of pulls there, against skopeo with umoci, and podman: ROUNDS=7 RUNS=100 RUN=regexp
	@hack/deps.sh $(IMAGE_BENCH_DEPS)
	@hack/bench-image.sh

.PHONY: bench-net
bench-net: deps build ## The figures of networks there, against slirp4netns, pasta and a veth; root only: ROUNDS=5 REQUESTS=200 RUN=regexp
	@hack/deps.sh $(NET_BENCH_DEPS) || echo 'without the peers that are missing'
	@hack/bench-net.sh

.PHONY: bench-code
bench-code: deps build ## Code runs, in turns with the host's python3 -c, and contexts: ITERATIONS=100
	$(GO) test -buildvcs=false -tags '$(TAGS)' -run '^$$' -bench 'Python|BenchmarkContexts' -benchtime $(or $(ITERATIONS),100)x ./tests/code
	$(GO) test -buildvcs=false -tags '$(TAGS)' -run '^$$' -bench Busy -benchtime 1x ./tests/code

.PHONY: bench-docker
bench-docker: deps build ## The figures of Docker's clients there, against dockerd; root only: ROUNDS=40
	@hack/bench-docker.sh
