# dedupd's targets; plain `make` lists them.

GO      ?= go
BIN     := .bin
KAFKA   := .cache/kafka-4.1.0-libs
CONNECT := .cache/connect-4.1.0-libs
DEBEZIUM := .cache/debezium-jdbc-3.6.0
PROMETHEUS := .cache/prometheus
PROMTOOL := $(or $(shell command -v promtool),$(PROMETHEUS)/usr/bin/promtool)
MATPLOTLIB := .cache/matplotlib
PICTURE := "Duplicates,Outcomes and throughput,Lag and delay,Transactions"
HELM      ?= $(BIN)/helm
APISERVER ?= $(BIN)/kube-apiserver
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
RELEASE := -trimpath -ldflags "-s -w -X github.com/dedupd/dedupd/internal/app.release=$(VERSION)"


.PHONY: help
help: ## Lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Builds the binary, .bin/dedupd
	CGO_ENABLED=0 $(GO) build $(RELEASE) -o $(BIN)/dedupd ./cmd/dedupd

IMAGE     ?= dedupd
PLATFORMS ?= linux/$(shell $(GO) env GOARCH)
IMAGE_BINARIES = $(foreach p,$(PLATFORMS),$(BIN)/$(subst /,-,$(p))/dedupd)

.PHONY: image
image: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null)
image: ## Builds the container image, without a daemon, into .bin/image (IMAGE=registry/name, VERSION, PLATFORMS="linux/amd64 linux/arm64", PUSH=1)
	set -e; for p in $(PLATFORMS); do \
		CGO_ENABLED=0 GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) build $(RELEASE) -o $(BIN)/$${p%/*}-$${p#*/}/dedupd ./cmd/dedupd; done
	cd deploy/image && $(GO) run . -o ../../$(BIN)/image -name $(IMAGE) -version $(or $(VERSION),dev) -licence ../../LICENSE $(if $(PUSH),-push) $(addprefix ../../,$(IMAGE_BINARIES))

.PHONY: demo
demo: build ## Shows all of it on embedded servers: a noisy producer, crashes, the books (ARGS="-keep ...")
	$(GO) build -o $(BIN)/demo ./e2e/demo
	$(BIN)/demo -dedupd $(BIN)/dedupd $(ARGS)

.PHONY: test
test: $(if $(DEDUPD_TEST_KAFKA),,kafka) ## Runs all tests, with the race detector, against real servers that it sets up
	$(GO) test -race -timeout 20m $(TESTFLAGS) $$($(GO) list ./... | grep -v -e /e2e/chaos$$ -e /e2e/monitoring$$)
	$(GO) test -timeout 15m $(TESTFLAGS) ./e2e/chaos # needs the machine for itself

.PHONY: test-short
test-short: ## Runs the tests that need no servers (seconds)
	$(GO) test -short ./...

.PHONY: test-pgbouncer
test-pgbouncer: $(if $(DEDUPD_TEST_KAFKA),,kafka) ## Runs the end-to-end tests with every worker behind a PgBouncer (apt-get install pgbouncer)
	DEDUPD_TEST_PGBOUNCER=1 $(GO) test -timeout 20m -skip '/kafka$$' $(TESTFLAGS) ./e2e # shapes by NATS: `make test` has both brokers

.PHONY: chart-test
chart-test: kafka $(BIN)/kube-score ## Tests the image and the Helm chart, and runs both under runc (apt-get install runc umoci; UPDATE=1 writes what is generated)
	cd deploy/image && $(GO) test $(TESTFLAGS) .
	cd deploy/helm/test && $(GO) test -timeout 15m $(TESTFLAGS) . $(if $(UPDATE),-update)

.PHONY: chart-server-test
chart-server-test: kafka $(HELM) $(APISERVER) ## Installs, upgrades, runs and removes the chart in a real Kubernetes API server (apt-get install etcd-server runc umoci; builds it: ten minutes the first time)
	cd deploy/helm/test && DEDUPD_TEST_HELM=$(abspath $(HELM)) DEDUPD_TEST_APISERVER=$(abspath $(APISERVER)) $(GO) test -count=1 -timeout 15m $(TESTFLAGS) ./server

$(BIN)/helm: deploy/helm/test/go.mod
	cd deploy/helm/test && GOBIN=$(CURDIR)/$(BIN) $(GO) install helm.sh/helm/v4/cmd/helm@$$($(GO) list -m -f '{{.Version}}' helm.sh/helm/v4)

$(BIN)/kube-apiserver: deploy/helm/test/apiserver/go.mod
	cd deploy/helm/test/apiserver && $(GO) build -ldflags "-X k8s.io/component-base/version.gitVersion=$$($(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)" -o ../../../../$@ .

.PHONY: chart-build
chart-build: $(BIN)/kube-score
	cd deploy/helm/test && $(GO) test -run '^$$' .
	cd deploy/image && $(GO) test -run '^$$' .

.PHONY: chart-schemas
chart-schemas: ## Writes the schemas that chart-test checks the chart's objects against (downloads Kubernetes' sources)
	cd deploy/helm/test && $(GO) run ./schemas testdata/schemas

.PHONY: alerts-test
alerts-test: $(PROMTOOL) ## Tests alerts, runbooks and dashboard with promtool, and what /metrics shows (fetches promtool: Debian, linux)
	DEDUPD_TEST_PROMTOOL=$(abspath $(PROMTOOL)) $(GO) test -count=1 -timeout 10m $(TESTFLAGS) ./e2e/monitoring

# Debian's package, unpacked: nothing is installed, and no service starts.
$(PROMETHEUS)/usr/bin/promtool:
	rm -rf $(PROMETHEUS) && mkdir -p $(PROMETHEUS)
	@apt-cache show prometheus >/dev/null 2>&1 || apt-get update -qq || { echo "there is no package prometheus to fetch promtool from: put promtool on the PATH" >&2; exit 1; }
	cd $(PROMETHEUS) && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

.PHONY: alerts-record
alerts-record: build ## Records real runs, with which the alerts are tested (ten minutes)
	$(GO) run ./e2e/monitoring/record -dedupd $(BIN)/dedupd $(ARGS)

.PHONY: dashboard-picture
dashboard-picture: build $(PROMETHEUS)/usr/bin/promtool $(MATPLOTLIB)/.complete ## Draws the dashboard of a noisy run, into docs/dashboard.png (6 minutes; needs Python 3)
	$(GO) run ./e2e/monitoring/record -dedupd $(BIN)/dedupd -prometheus $(PROMETHEUS)/usr/bin/prometheus -for 5m \
		$(MATPLOTLIB)/bin/python e2e/monitoring/picture/picture.py deploy/helm/dedupd/files/dashboard.json docs/dashboard.png 280 $(PICTURE)

$(MATPLOTLIB)/.complete: e2e/monitoring/picture/requirements.txt
	python3 -m venv $(MATPLOTLIB)
	$(MATPLOTLIB)/bin/pip install -q -r $<
	@touch $@

.PHONY: chaos
chaos: kafka ## Runs every fault against real processes and judges the outcome, into docs/benchmarks/reliability.md (hours; SEED, ARGS="-run ... -shape ...")
	$(GO) run ./e2e/chaos -out docs/benchmarks/reliability.md $(if $(SEED),-seed $(SEED)) $(ARGS)

.PHONY: soak
soak: kafka ## Does the same for FOR (default 8h), with faults drawn at random
	$(GO) run ./e2e/chaos -soak $(or $(FOR),8h) $(if $(SEED),-seed $(SEED)) $(ARGS)

.PHONY: mutants
mutants: kafka ## Builds one bug at a time into the product: the rig must notice each, into docs/benchmarks/mutants.md (half an hour)
	$(GO) run ./e2e/chaos -mutants -out docs/benchmarks/mutants.md $(if $(SEED),-seed $(SEED)) $(ARGS)

.PHONY: mutate
mutate: ## Lists small changes to packages that their tests don't notice (PKGS=./message, ARGS="-short -run REGEXP -only FILE")
	$(GO) run ./internal/mutate $(ARGS) $(or $(PKGS),./message)

.PHONY: kafka
kafka: $(KAFKA)/.complete ## Fetches the Kafka broker that tests start (needs Java 17 and Maven)

$(KAFKA)/.complete: internal/kafkatest/pom.xml
	@internal/kafkatest/need-java
	mvn -q -B -f internal/kafkatest/pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/$(KAFKA)
	@touch $@

# All modules with code of ours. The others pin tools, which are built where they are needed.
MODULES = $(filter-out ./internal/tools% %/apiserver,$(patsubst %/go.mod,%,$(shell find . -path './.*' -prune -o -name go.mod -print)))

.PHONY: lint
lint: $(BIN)/golangci-lint ## Checks style, and that all modules are tidy
	$(BIN)/golangci-lint run
	set -e; for module in $(MODULES); do (cd $$module && $(GO) mod tidy -diff && $(GO) vet ./...); done

# The tools' versions are pinned in internal/tools.
$(BIN)/golangci-lint: internal/tools/go.mod
	cd internal/tools && $(GO) build -o ../../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(BIN)/kube-score: internal/tools/go.mod
	cd internal/tools && $(GO) build -o ../../$@ github.com/zegl/kube-score/cmd/kube-score

# govulncheck's exit code is 3 for findings. If it fails otherwise although all builds,
# its database is out of reach.
.PHONY: vuln
vuln: $(BIN)/govulncheck ## Looks for known vulnerabilities in what the product calls; "unchecked" where their database is out of reach (VULNDB=file:///folder for a copy)
	$(GO) build ./...
	@$(BIN)/govulncheck $(if $(VULNDB),-db $(VULNDB)) ./...; code=$$?; \
		if [ $$code -eq 3 ]; then exit 3; \
		elif [ $$code -ne 0 ]; then echo "unchecked: the database of vulnerabilities is out of reach"; fi

$(BIN)/govulncheck: internal/tools/vuln/go.mod
	cd internal/tools/vuln && $(GO) build -o ../../../$@ golang.org/x/vuln/cmd/govulncheck

.PHONY: fmt
fmt: $(BIN)/golangci-lint ## Formats the code
	$(BIN)/golangci-lint fmt

.PHONY: fuzz
fuzz: ## Fuzzes each target for FUZZTIME (default 10s)
	@for package in $$($(GO) list ./...); do \
		for target in $$($(GO) test -short -list '^Fuzz' $$package | grep '^Fuzz'); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $${FUZZTIME:-10s} $$package || exit 1; \
		done; \
	done

.PHONY: bench
bench: build kafka $(CONNECT)/.complete ## Measures dedupd beside its peers on one topic, into docs/benchmarks/throughput.md (half an hour; needs Java 17 and Maven)
	cd e2e/bench/peers && $(GO) build -o ../../../$(BIN)/peers .
	$(GO) run ./e2e/bench/throughput -out docs/benchmarks/throughput.md $(ARGS)

$(CONNECT)/.complete: e2e/bench/connect/pom.xml
	@internal/kafkatest/need-java
	mvn -q -B -f e2e/bench/connect/pom.xml process-sources -Dlibs=$(CURDIR)/$(CONNECT) -Dplugin=$(CURDIR)/$(DEBEZIUM)
	@touch $@

.PHONY: bench-faults
bench-faults: ## Compares dedupd and its peers under the same faults, into docs/benchmarks/faults.md (15 minutes)
	$(MAKE) bench ARGS="-faults -out docs/benchmarks/faults.md $(ARGS)"

.PHONY: bench-strategies
bench-strategies: ## Measures the strategies and the table sink's modes, into docs/benchmarks/strategies.md (10 minutes)
	$(MAKE) bench ARGS="-strategies -out docs/benchmarks/strategies.md $(ARGS)"

.PHONY: bench-growth
bench-growth: ## Measures dedupd's cost as work grows, into docs/benchmarks/growth.md (15 minutes; 20 GB of disk)
	$(MAKE) bench ARGS="-growth -out docs/benchmarks/growth.md $(ARGS)"

.PHONY: bench-retention
bench-retention: ## Measures what remembering ids costs, into docs/benchmarks/retention.md (half an hour; 40 GB of disk)
	@mkdir -p docs/benchmarks
	$(GO) run ./e2e/bench/retention -out docs/benchmarks/retention.md $(ARGS)

.PHONY: clean
clean: ## Removes what was built; downloads stay
	rm -rf $(BIN) dist
