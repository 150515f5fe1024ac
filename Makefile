# Start with `make demo` or `make test`; both build .venv if it is missing.

PYTHON ?= python3
SECONDS ?= 60
VENV := .venv
BIN := $(VENV)/bin
# pytest writes bytecode of its rewritten tests, for all workers and for the next run. Workers outnumber the cores of a
# small machine, since many tests wait for processes that they start.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
CONTRIB := $(dir $(wildcard contrib/*/pyproject.toml))
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt

.PHONY: help demo gallery notebooks test slow contrib versions gpu fuzz systemd portable check format proto baseline bench tables docs release-notes dist arm64 clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(VENV)/demo  ## print and draw the positions of a text with two photographs
	@mkdir -p out
	$(BIN)/mmpos demo -o out/demo.png

gallery: $(VENV)/demo  ## draw the pictures of docs/gallery.md with the commands on it
	@mkdir -p docs/gallery
	sed -n 's|^mmpos plot|$(abspath $(BIN))/mmpos plot|p' docs/gallery.md | (cd docs/gallery && sh -e)

notebooks: $(VENV)/dev  ## run the notebooks of docs/ again
	$(BIN)/python tests/helpers/notebooks.py

test: $(VENV)/dev  ## run the tests
	$(PYTEST) -n 3 --dist worksteal

slow: $(VENV)/dev  ## run the tests that take longer
	$(PYTEST) -n 4 --dist loadgroup -m slow $(FLAGS)

contrib: $(VENV)/contrib  ## install the distributions of contrib/ and run all their tests
	for folder in $(CONTRIB); do $(PYTEST) -n 3 --dist worksteal -m "" $$folder || exit 1; done

versions: $(VENV)/dev  ## run the tests with the oldest and the newest versions, extras alone, and other Pythons: hours
	$(BIN)/python tests/helpers/versions.py $(VERSIONS)

gpu:  ## test the kernels on a GPU, with PYTHON and without network: docs/gpu.md
	PYTHONPATH=$(CURDIR):$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m mmpos_bench.gpu $(if $(PART),--part $(PART)) \
	    $(if $(OUT),--out '$(OUT)') $(if $(PEERS),--peers '$(PEERS)') $(if $(COMMIT),--commit '$(COMMIT)') $(if $(DRY),--dry)

fuzz: $(VENV)/dev  ## attack a server for SECONDS with a SEED; fail on INTERNAL errors, late answers or leaks
	$(BIN)/pytest -n 0 -s -m slow -k withstands tests/server/test_attacks.py --attack-seconds $(SECONDS) \
		$(if $(SEED),--attack-seed $(SEED)) $(FUZZ)

systemd: $(VENV)/dev  ## test the unit of deploy/ with systemd in namespaces; as root, on a quiet machine
	$(BIN)/pytest -q -m systemd tests/server/test_deploy.py

portable: $(VENV)/dev  ## run test and slow as on other processors and on a busy machine: hours
	$(BIN)/python tests/helpers/portable.py $(PORTABLE)

check: $(VENV)/contrib  ## check format, lint, words, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.[ch]
	$(BIN)/ruff check .
	$(PYTEST) tests/support/test_house.py
	$(BIN)/mypy
	for room in tests/*/conftest.py $(wildcard contrib/*/tests/conftest.py); do MYPYPATH=server:tests/helpers:tests/oracles $(BIN)/mypy $$room || exit 1; done
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/baseline.binpb

format: $(VENV)/dev  ## rewrite the files in the house format
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.[ch]
	$(BIN)/ruff check --fix .

PROTOC := PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto

proto: $(VENV)/dev  ## generate mmpos/rpc from proto/
	$(PROTOC) --python_out=. --mypy_out=. proto/mmpos/rpc/v1/*.proto

baseline: $(VENV)/dev  ## record the protocol of a release, which later versions must not break
	$(BIN)/buf build --exclude-source-info -o proto/baseline.binpb

# The server runs with the malloc settings of deploy/.
RESULTS := benchmarks/results
bench: $(VENV)/dev  ## record the figures of every benchmark suite, and write them into the pages; QUICK=1 only runs all
	mkdir -p $(if $(QUICK),out/bench,$(RESULTS))
	for suite in positions images rotary data service; do \
	    $(BIN)/mmpos bench $$suite --peers $(if $(QUICK),--quick) --malloc $$([ $$suite = service ] && echo tuned || echo default) \
	        --json $(if $(QUICK),out/bench,$(RESULTS))/$$suite.json || exit; \
	done
	$(if $(QUICK),,$(MAKE) tables)

tables: $(VENV)/dev  ## rewrite the tables of figures, models and properties in the pages
	$(BIN)/python benchmarks/fill_tables.py
	$(BIN)/python tests/helpers/scheme_properties.py

docs: $(VENV)/docs  ## build the site in build/site; SERVE=1 serves it on this machine
	PYTHONPATH=docs/extension $(BIN)/zensical $(if $(SERVE),serve,build --strict --clean)

release-notes:  ## print the first section of CHANGELOG.md
	@awk '/^## / { if (section++) exit } section' CHANGELOG.md

dist: $(VENV)/dist  ## build the files of a release, check them, and run them in empty environments
	rm -rf build dist
	$(BUILD) .
	@lacks=$$(for tool in aarch64-linux-gnu-gcc qemu-aarch64; do command -v $$tool > /dev/null || echo $$tool; done; \
	    apt-cache show python3:arm64 > /dev/null 2>&1 || echo python3:arm64); \
	if [ "$$lacks" ]; then echo "make dist: no wheel for ARM64, which requires" $$lacks; else $(MAKE) arm64; fi
	PATH=$(abspath $(BIN)):$$PATH auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest -q -n 2 -m slow --release dist tests/support/test_dist.py

BUILD := $(BIN)/uv build --python $(BIN)/python --build-constraint constraints.txt --out-dir build/dist

# Debian's gcc-aarch64-linux-gnu and libc6-dev-arm64-cross build the wheel for ARM64. It runs under qemu-user, with Debian's
# Python for ARM64, which is unpacked here: apt-get finds it after dpkg --add-architecture arm64 and apt-get update.
ARM64 := .venv-arm64

arm64: $(ARM64)/python
	CC=aarch64-linux-gnu-gcc $(BUILD) --wheel --config-setting=--build-option=--plat-name=linux_aarch64 build/dist/*.tar.gz

$(ARM64)/python:
	rm -rf $(ARM64) && mkdir $(ARM64)
	cd $(ARM64) && apt-get -qq download $$(apt-cache depends --recurse --important libstdc++6:arm64 python3:arm64 | grep '^[a-z].*:arm64$$')
	cd $(ARM64) && for package in *.deb; do dpkg-deb --extract $$package . || exit; done
	cd $(ARM64) && rm *.deb && ln -s usr/bin/python3 python

clean:  ## remove everything that was built
	rm -rf $(VENV) $(ARM64) .cache build out dist *.egg-info mmpos/_native*.so

# Remove an installation under the former distribution name mmpos.
$(VENV)/uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("PYTHON: got %d.%d, want >= 3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip uninstall -qq --yes mmpos
	rm -rf mmpos.egg-info
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

$(VENV)/demo: $(VENV)/uv pyproject.toml $(wildcard csrc/*)
	$(UV) --editable '.[cli]'
	@touch $@

# Bytecode is compiled here, since tests start many processes, also where Python must not write bytecode.
$(VENV)/dev: $(VENV)/uv pyproject.toml $(wildcard csrc/*)
	$(UV) --compile-bytecode --editable . --group dev
	@touch $@ $(VENV)/demo $(VENV)/docs

$(VENV)/contrib: $(VENV)/dev $(CONTRIB:=pyproject.toml)
	$(UV) --compile-bytecode --editable . $(addprefix --editable ./,$(CONTRIB))
	@touch $@

$(VENV)/docs: $(VENV)/uv pyproject.toml
	$(UV) --group docs
	@touch $@

$(VENV)/dist: $(VENV)/dev
	$(UV) --group dist
	@touch $@
