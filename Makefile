# Every target makes what it needs. `make demo` and `make test` are the two that a newcomer needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
EXTRAS := portable,spark,demo,dev,peers
COMMA  := ,
# What requirements.lock was tested with; elsewhere its versions may have no wheel.
LOCK_FITS := import platform, sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and sys.platform == "linux" \
  and platform.machine() in ("x86_64", "aarch64") and platform.python_implementation() == "CPython"))
RECORDS ?= all
BROKERS ?= 1
KILLS   ?= 100
# How many faults `make faults` plays, and how many times it kills the leader, stops it for longer than its lease, and kills all brokers.
ROUNDS  ?= 10
# The commit from which `make upgrade` begins.
FROM    ?= HEAD~100
# How long `make attack` repeats what draws random cases; it plays everything once before, however long that takes.
MINUTES ?= 20
# How many random sequences of operations `make ordinary` plays, and from which seed on.
SEQUENCES ?= 500
SEED      ?= 1
# How many seeds of one region, and of a cluster's cores, `make simulate` runs (of two regions a fiftieth, of a restored source a hundredth, of the QUIC engines alone a tenth, of a region over them a twentieth; or of WORLD alone), and from which on.
SEEDS     ?= 2000
FIRST     ?= 0
# Test processes side by side; a file's tests stay together, since they share brokers and Spark. Four more than the cores of a small
# machine: most tests of brokers and agents wait for disks, timers and other processes, over three quarters of their time in all.
WORKERS ?= 6
# Test files that do more of something in `make test-long`.
LONG = $(shell grep -rlE --include='test_*.py' '^(from|import) long_runs\b' tests)
# Test files with something that `make test-slow` runs and `make test` does not.
SLOW = $(shell grep -rlE --include='test_*.py' '^(from|import) slow_runs\b' tests)
# Tests start hundreds of processes: each would read the sources anew where the environment forbids compiled files.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo faults upgrade runbooks test test-slow test-long sync wheels attack ordinary lock soak check format bench clean help

help: ## show this list
	@grep -E '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml sdk/pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Felix needs Python 3.11 or newer; $(PYTHON) is older. Install one, or name it: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "This Python cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "installing Felix and what it needs into $(VENV) (a minute or two, once) ..."
	@if $(BIN)/python -c '$(LOCK_FITS)'; then \
	  $(PIP) --require-hashes --requirement requirements.lock && $(PIP) --no-deps --no-build-isolation --editable sdk --editable .; \
	else \
	  echo "requirements.lock is for CPython 3.11 to 3.13 on Linux (x86-64, arm64): here versions are resolved anew, without hashes"; \
	  $(PIP) --editable '.[$(EXTRAS)]' && $(PIP) --no-deps --editable sdk; \
	fi
	@$(BIN)/python -m compileall -q felix keys policy audit region bridge cli
	@touch $@

lock: $(STAMP) ## renew requirements.lock: newest versions within the bounds of pyproject.toml, with hashes (by uv)
	@$(PIP) 'uv>=0.8,<1'
	@$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' $(foreach extra,$(subst $(COMMA), ,$(EXTRAS)),--extra $(extra)) pyproject.toml --no-emit-package felix-sdk \
	  --output-file requirements.lock
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' --constraint requirements.lock pyproject.toml --no-emit-package felix-sdk \
	  --output-file deploy/container/requirements.lock

demo: $(STAMP) ## two regions, one bridge, one report, on real input (RECORDS=20000 for a quick one; BROKERS=3 to each region, with kills on the way)
	@$(BIN)/felix demo --records $(RECORDS) --brokers $(BROKERS)

demo-%: $(STAMP) ## a demo of its own, one of examples/demos: make demo-slow-consumer, demo-restart, ...
	@PYTHONPATH=. $(BIN)/python examples/demos/$(subst -,_,$*).py

test: $(STAMP) ## all tests but those of `make test-slow` (SLOW_DISK=60: each sync takes up to 60 ms longer; SLOW_NEWS=300: brokers hear of changes in etcd up to 300 ms later)
	@TESTS_SLOW_DISK_MS=$(SLOW_DISK) TESTS_SLOW_NEWS_MS=$(SLOW_NEWS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: $(STAMP) ## the tests that `make test` leaves out: they take long, and a shorter one of the same stands there; run it before a release
	@TESTS_SLOW_DISK_MS=$(SLOW_DISK) TESTS_SLOW_NEWS_MS=$(SLOW_NEWS) FELIX_SLOW=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(SLOW)

test-long: $(STAMP) ## the tests that have larger counts than in `make test`, with those (minutes)
	@FELIX_LONG=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --timeout 1800 $(LONG)

sync: $(STAMP) ## write felix/sync.py anew from the asynchronous client
	@$(BIN)/python sdk/sync_face.py

wheels: $(STAMP) ## the packages felix-sdk and felix-mesh of this version, into dist/
	@cd sdk && ../$(BIN)/hatchling build --target wheel --directory ../dist
	@FELIX_RELEASE=1 $(BIN)/hatchling build --target wheel --directory dist

attack: $(STAMP) ## every attack on the evidence that is known, then for the rest of MINUTES those that draw random cases, with new seeds (from FELIX_ATTACK_SEED on, if set); and the table of docs/claims.md
	@PYTHONPATH=.:tests $(BIN)/python -m attacks.run --minutes $(MINUTES) --workers $(WORKERS)

ordinary: $(STAMP) ## SEQUENCES random sequences of what operators do, from SEED on: every log verifies, every report reconciles (an hour)
	@FELIX_ORDINARY_SEQUENCES=$(SEQUENCES) FELIX_ORDINARY_SEED=$(SEED) $(BIN)/python -m pytest -s --timeout 86400 tests/ordinary

.PHONY: simulate
simulate: $(STAMP) ## SEEDS runs of a region and of the cores of a cluster, and some of two regions with their bridge and of the real QUIC engines, on simulated time, disks and network, from FIRST on, on all processors; WORLD=cluster, region, mesh, restored, doubt, transfers, transport or wire: of one world; TWINS=1: without the rules (minutes; 50000 take an hour)
	@PYTHONPATH=.:tests PYTHONHASHSEED=0 $(BIN)/python -m simulation.run --seeds $(SEEDS) --first $(FIRST) $(if $(WORLD),--world $(WORLD)) $(if $(TWINS),--twins)

soak: $(STAMP) ## broker and workers killed KILLS times under load, and hostile peers by the thousand (minutes)
	@FELIX_SOAK_KILLS=$(KILLS) FELIX_HOSTILE_CASES=5000 $(BIN)/python -m pytest -s --timeout 3600 tests/soak tests/region/test_kill.py \
	  tests/region/test_hostile.py

faults: $(STAMP) ## ROUNDS faults of 47 kinds (kills, stops, partitions, power cuts, restarts in turn, etcd away or put back, disks that are full, hang or fail a sync, wrong clocks, certificates that end, with operators' commands beside them) over brokers on machines of their own, for each ten rounds a region that becomes several brokers' and one that is put back from a backup, and kills of views' leaders, of the audit log's home, of bridges and of transactions' coordinator, under load (root, minutes)
	@FELIX_FAULT_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -s --timeout 86400 tests/cluster/test_faults.py tests/cluster/test_replicated_processes.py \
	  tests/cluster/test_copied_views_processes.py tests/cluster/test_audit_failover.py tests/cluster/test_kill_bridges.py tests/cluster/test_transactions_processes.py

upgrade: $(STAMP) ## a rolling upgrade from the commit FROM on: two regions of three brokers and their bridge, under load, with kills beside each step (minutes)
	@FELIX_UPGRADE_FROM=$(FROM) $(BIN)/python -m pytest -s --timeout 3600 tests/cluster/test_upgrade.py

runbooks: $(STAMP) ## the commands of docs/runbooks, each page against a mesh that was broken so (minutes)
	@FELIX_RUNBOOKS=1 $(BIN)/python -m pytest --timeout 1800 tests/docs/test_runbooks.py

check: $(STAMP) ## format, lint, types, imports
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## format, and fix what the linter can fix
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(STAMP) ## throughput and latency on this machine, beside a raw QUIC relay; across a border, audited; beside Redis and NATS
	@$(BIN)/felix bench publish && $(BIN)/felix bench deliver && $(BIN)/felix bench bridge \
	  && $(BIN)/felix bench report && for each in fanout queue cache fairness slow-consumer shards sessions cluster failover; do $(BIN)/python -m benchmarks $$each || exit; done

clean: ## remove what make made
	rm -rf $(VENV) demo-state bench-results .mypy_cache .ruff_cache .pytest_cache
