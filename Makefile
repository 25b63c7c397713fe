# Spire. `make serve` and `make test` are all that a fresh machine needs; `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# More for pip, e.g. PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU build of torch.
PIP_FLAGS ?=
ONCE ?=
MINUTES ?= 30
# How many processes test at a time.
WORKERS ?= 2
MODEL ?=
DRAFT ?=
ARGS ?=
# With byte code written even where the environment says not to: rewriting all assertions takes half a minute.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
OUT ?= build/gpu
PARTS ?=
DRY_RUN ?=
GPU_PYTHON ?= 3.12
# From that directory, where compose reads .env and a docker-compose.override.yml by itself.
COMPOSE := cd deploy && docker compose

# pip's progress on one line; what it complains about is kept in a file and printed when it fails.
ONE_LINE := awk -v shown="$$(test -t 2 && echo yes)" \
	'shown && /^(Collecting|Installing)/ { printf "\r\033[K  %s", substr($$0, 1, 70); fflush() } END { if (shown) printf "\r\033[K" }'

.DEFAULT_GOAL := help
.PHONY: help serve compose-up compose-down images-test check test test-all faults faults-seen fuzz soak neighbours pictures gpu gpu-wheels lint format protos clean

help:  ## List what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.serve  ## Install, start the services, answer one prompt, serve until Ctrl-C (ONCE=1: stop after the answer; MODEL=tiny: the bundled toy).
	@$(VENV)/bin/spire up $(if $(MODEL),--model $(MODEL)) $(if $(DRAFT),--draft $(DRAFT)) $(if $(filter-out 0,$(ONCE)),--once) $(ARGS)

compose-up: deploy/.env  ## The system in containers, by docker compose: keys and certificates, images, services (options: deploy/.env).
	@mkdir -p deploy/secrets
	$(COMPOSE) build $(ARGS)
	$(COMPOSE) run --rm --user "$$(id -u):$$(id -g)" secrets
	$(COMPOSE) up --detach --wait
	@$(COMPOSE) ps --format 'table {{.Service}}\t{{.Status}}\t{{.Ports}}'
	@echo "Your API key is in deploy/secrets/you/api_key, Grafana's password (admin) in deploy/secrets/grafana/admin_password."

compose-down:  ## Stop it; what runs may end, volumes and secrets stay.
	$(COMPOSE) down

deploy/.env:
	cp deploy/.env.example $@

check: lint  ## ruff, mypy, and the quick tests that start no processes (a minute).
	$(PYTEST) -q -m "not slow and not thorough and not processes and not seconds" $(ARGS)

test: lint  ## Everything CI runs: ruff, mypy, pytest.
	$(PYTEST) $(ARGS)

test-all: lint  ## All tests, then the `slow` ones one by one, and MINUTES of mixed load with kills (hours).
	@mkdir -p build
	$(PYTEST) -m "not slow" $(ARGS)
	SPIRE_FAULTS_REPORT=build/faults.json $(VENV)/bin/python -m pytest -m slow $(ARGS)
	$(VENV)/bin/python -m tests.faults.soak --minutes $(MINUTES)

faults: $(VENV)/.dev  ## All faults of docs/faults.md, slow ones too (SPIRE_FAULTS_MINUTES of kills, 10 if not said); figures in build/faults.json.
	@mkdir -p build
	SPIRE_FAULTS_REPORT=build/faults.json $(VENV)/bin/python -m pytest -m fault $(ARGS)

faults-seen: $(VENV)/.dev  ## Faults and the panel that each colours within 30 s, in a real Prometheus (ten minutes; needs prometheus).
	$(VENV)/bin/python -m pytest -m slow tests/deploy/test_faults_seen.py $(ARGS)

fuzz: $(VENV)/.dev  ## 100,000 wrong messages to the verifier while clients stream; ARGS="--messages N --seed S"; figures in build/fuzz.json.
	$(VENV)/bin/python -m tests.faults.fuzz $(ARGS)

soak: $(VENV)/.dev  ## Mixed load with kills for MINUTES (30), on MODEL=DIR (DRAFT=DIR) instead of the bundled pair; ARGS="--trace FILE"; figures in build/soak.json.
	$(VENV)/bin/python -m tests.faults.soak --minutes $(MINUTES) $(if $(MODEL),--model $(MODEL)) $(if $(DRAFT),--draft $(DRAFT)) $(ARGS)

neighbours: $(VENV)/.dev  ## What one user's requests do to another's stream, attack by attack, on `spire up` (half an hour; ARGS="--only NAME", "--json"); figures in build/neighbours.json.
	$(VENV)/bin/python -m tests.faults.neighbours $(ARGS)

images-test: $(VENV)/.dev  ## Build the images by buildah, run the system from them (as root, without an engine; minutes, 4 GB while it runs).
	SPIRE_TEST_IMAGES=1 $(VENV)/bin/python -m pytest tests/deploy/test_images.py $(ARGS)

# With the machine's own Python and torch: nothing is installed that it has.
gpu:  ## Measure by parts on a GPU machine, bare and without a network: OUT=DIR, PARTS=0,3 (all), RESUME=FILE, DRY_RUN=1 on a CPU; docs/gpu.md.
	@$(PYTHON) -m experiments.gpu --out "$(OUT)" --parts "$(PARTS)" $(if $(RESUME),--resume "$(RESUME)") $(if $(filter-out 0,$(DRY_RUN)),--dry-run)

gpu-wheels:  ## What such a machine's Python (GPU_PYTHON=3.12) lacks, into build/gpu-wheels, to be carried there.
	@rm -rf build/gpu-wheels
	@$(PYTHON) -m pip --disable-pip-version-check download --quiet --only-binary=:all: \
		--python-version $(GPU_PYTHON) --implementation cp $(patsubst %,--platform manylinux_2_%_x86_64,31 28 27 24 17) \
		--platform manylinux2014_x86_64 --dest build/gpu-wheels -c constraints.txt -r experiments/gpu/wheels.txt
	@du -sh build/gpu-wheels

pictures: $(VENV)/.dev  ## Take docs/page.png and docs/page-dark.png anew (needs chromium and chromedriver).
	$(VENV)/bin/python -m tests.page.pictures

lint: $(VENV)/.dev  ## ruff check, ruff format --check, mypy.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.dev  ## Rewrite the code in the project's format.
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

protos: $(VENV)/.dev  ## Regenerate spire/v1 from protos/.
	$(VENV)/bin/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. protos/spire/v1/*.proto

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Spire needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages, older than what names them: then pip is asked again, else it is not.
$(VENV)/.serve: EXTRAS := gateway,model,certs,gguf
$(VENV)/.dev: EXTRAS := gateway,model,dev
$(VENV)/.serve $(VENV)/.dev: pyproject.toml constraints.txt $(wildcard spire/kernels/*.[ch]) | $(VENV)/bin/python
	@echo "installing spire-serve[$(EXTRAS)] (a few minutes the first time)"
	@$(PIP) install --progress-bar off $(PIP_FLAGS) -c constraints.txt -e '.[$(EXTRAS)]' 2>$(VENV)/pip.log | $(ONE_LINE) \
		|| { cat $(VENV)/pip.log; exit 1; }
	@touch $@
