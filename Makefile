# Everything that a newcomer types. Each target makes .venv first, when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RIVALS := .venv-rivals

# So that isolated builds (pip makes its own environment for them) obey the pins as well: up to pip 25.2
# by the first, from then on by the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Containers set it: hundreds of processes of the tests would each compile all of Atoll anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test check soak scripts scripts-rivals bench lint clean

train: $(READY)
	$(BIN)/atoll run --workers 4 --strategy ps-hra --set groups.count=2 --set sync.consistency=asp \
		examples/gpt.py --windows 16000

# Four at a time on two cores: much of a test is waiting for others. Who is done first takes half of what the other has left.
test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not (check or soak)"

# What needs processes, sockets, kills or seconds. A test that fails runs once more alone, and is named at the end.
check: $(READY)
	$(BIN)/python tests/check.py -n 3 --dist worksteal

# What must be survived is survived over both transports.
soak: $(READY)
	$(BIN)/python -m pytest -m soak
	ATOLL_TEST_TRANSPORT=ltp $(BIN)/python -m pytest -m "soak or not soak" \
		$(wildcard tests/processes/test_survival_*.py)

# Scripts as users write them, at every strategy and store: docs/reference/any-script.md. It can be stopped, and
# goes on where it was with `python tests/scripts_table.py --missing`.
scripts: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/scripts_table.py

# The same under DDP, FSDP2, Accelerate and DeepSpeed, in an environment of their own: with tests/rivals.txt's packages.
scripts-rivals: $(RIVALS)/.ready
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(RIVALS)/extensions \
		$(RIVALS)/bin/python tests/scripts_table.py --columns DDP FSDP2 Accelerate "DeepSpeed ZeRO-3"
	TORCH_EXTENSIONS_DIR=$(CURDIR)/$(RIVALS)/extensions $(RIVALS)/bin/python -m pytest tests/processes/test_coming_from.py

$(RIVALS)/.ready: tests/rivals.txt constraints.txt $(READY)
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(RIVALS)/bin/python -m pip install --quiet --no-build-isolation \
		--constraint constraints.txt --requirement tests/rivals.txt --editable '.[test]'
	rm -rf $(RIVALS)/extensions  # a build that was stopped leaves a lock, for which the next one would wait without end
	PATH=$(CURDIR)/$(RIVALS)/bin:$$PATH DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(RIVALS)/extensions \
		$(RIVALS)/bin/python tests/support/deepspeed_ops.py
	@touch $(RIVALS)/.ready

bench: $(READY)
	@for script in benchmarks/overhead.py benchmarks/step.py benchmarks/ring.py benchmarks/muon.py benchmarks/ring_order.py benchmarks/footprint.py \
			benchmarks/server.py benchmarks/hub_scale.py benchmarks/many.py benchmarks/strangers.py \
			benchmarks/consistency.py benchmarks/lab.py benchmarks/survival.py benchmarks/shares.py benchmarks/uneven.py \
			benchmarks/losstime.py \
			benchmarks/readiness.py benchmarks/journal.py benchmarks/staleness.py benchmarks/stragglers.py \
			benchmarks/links.py benchmarks/udp.py benchmarks/fec.py benchmarks/transport.py benchmarks/tunnel.py \
			benchmarks/wan.py benchmarks/wantrain.py benchmarks/incast.py benchmarks/fairness.py \
			benchmarks/peers.py benchmarks/peers_rivals.py benchmarks/moves.py benchmarks/memory.py \
			benchmarks/memory_rivals.py; do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done
	@for strategy in ps-hra peers; do \
		echo "== benchmarks/staleness.py --strategy $$strategy"; \
		$(BIN)/python benchmarks/staleness.py --strategy $$strategy || exit 1; \
	done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/atoll/*/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report,examples,test,lint]'
	@touch $(READY)

clean:
	rm -rf $(VENV) $(RIVALS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
