# make figures   set up, then run every notebook: pictures and tables go to figures/
# make test      set up, then run the tests
# make check     set up, then look at format, style, types and notebooks: a minute
# make format    set up, then mend what a program can mend of that
# make browser   the explorer and the site in a real browser (Debian's chromium and chromium-driver)
# make site      notebooks as they ran, the package, the explorer: pages with search, in build/site/
# make lab       the notebooks in JupyterLab
# make bench     speed, as ratios in one run
# make record    make the seconds this machine measured (figures/here/) the record in figures/
# make mutants   bugs planted in the statistics, each of which a named test must catch
# make soak      damage, kills, threads and long use, for an hour
# make rehearsal the paper profile from start to end with tiny stand-ins for its models and data
# make slurm     the batch on a Slurm of one node, started for it (Debian, as root)
# make clean     throw away build/ and other leftovers; figures/ and .venv stay
#
# make figures PROFILE=cpu              another profile of notebooks/profiles/
# make figures FLAGS=10_calibration     one notebook and what it needs; or options of Snakemake, as --dry-run
# make figures CORES=8
# make figures CLUSTER=slurm            as jobs of a cluster, see notebooks/profiles/slurm/config.yaml
# make lab FLAGS="--port 9999"          options of JupyterLab
PYTHON  ?= python3
PROFILE ?= demo
CORES   ?= 2
BIN     := .venv/bin
STAMP   := .venv/.installed
SLURM   := .venv/.slurm
BROWSER := .venv/.browser
SITE    := .venv/.site
HALF    := .venv/.installing
PIP      = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: help install figures record test browser site check format mutants soak rehearsal slurm bench lab clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# An environment that came along with a copied or moved clone would run the other clone's code: its commands and its package are elsewhere.
HERE := import importlib.util as u, pathlib as p, sys; here = p.Path.cwd(); found = u.find_spec("cats"); \
	sys.exit(not found or p.Path(found.origin or "") != here / "cats/__init__.py" or f"{here}/.venv/bin/python" not in (here / ".venv/bin/pip").read_text())
ifneq ($(shell $(BIN)/python -I -c '$(HERE)' >/dev/null 2>&1 && echo yes),yes)
.PHONY: $(STAMP)
endif

install: $(STAMP)

# A set-up that was killed is begun again: bin/activate is the last thing venv writes, and $(HALF) goes when pip is done.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cats needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Setting up .venv: this takes some minutes the first time"
	test ! -e $(HALF) -a -e $(BIN)/activate && grep -qsF '$(CURDIR)/$(BIN)/python' $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	touch $(HALF)
	$(PIP) ".[paper,onnx,test,dev]"
	mv $(HALF) $@

# Snakemake loads every executor it finds, so this one is there only for those who ask for a cluster
$(SLURM): $(STAMP)
	$(PIP) ".[slurm]"
	touch $@

$(BROWSER): $(STAMP)
	$(PIP) ".[browser]"
	touch $@

$(SITE): $(STAMP)
	$(PIP) ".[site]"
	touch $@

# FLAGS come last, after an option that takes one value: they may be options or targets
figures: $(if $(CLUSTER),$(SLURM),$(STAMP))
	@$(BIN)/python -m cats.paper.batch notebooks/profiles/$(PROFILE).yaml --quiet rules $(if $(LOCAL),--config local=$(LOCAL)) $(if $(CLUSTER),--profile notebooks/profiles/$(CLUSTER),--cores $(CORES)) $(FLAGS)

record: $(STAMP)
	@$(BIN)/python -m cats.paper.batch notebooks/profiles/$(PROFILE).yaml --record

# a file is one process's, so its fixtures are made once; long files come early
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(CORES) --dist loadfile --no-loadscope-reorder $(FLAGS)

# pages and pictures of them go to build/browser/
browser: $(BROWSER)
	$(BIN)/python -m pytest tests/paper/test_browser.py -rs $(FLAGS)

# from the notebooks of the last make figures, without a network
site: $(SITE)
	@$(BIN)/python -m cats.paper.pages build/$(PROFILE)
	$(BIN)/python -m mkdocs build --strict --config-file build/mkdocs.yml
	@echo "The site: build/site/index.html"

# bugs planted in the statistics, each of which a named test has to catch; a few are part of `make test`
mutants: $(STAMP)
	$(BIN)/python tests/mutations.py

# files damaged, processes killed, threads and long use: the long form of tests that are quick elsewhere
soak: $(STAMP)
	$(BIN)/python tests/soak.py

# all runs, stages, figures and tables of the paper profile, by tiny random models on generated text; everything is in build/rehearsal/
rehearsal: $(STAMP)
	$(BIN)/python tests/rehearsal.py $(CORES)

# a notebook is kept without what it printed; its cells' names and tags stay
NOTEBOOKS := --keep-id notebooks/*.ipynb
check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile
	$(BIN)/nbstripout --verify $(NOTEBOOKS)

format: $(STAMP)
	$(BIN)/python -m cats.paper.links
	$(BIN)/nbstripout $(NOTEBOOKS)
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(BIN)/snakefmt Snakefile

# the batch as jobs of a Slurm that is started for it, as root on Debian: one is killed, the figures must be those of a local run
slurm: $(SLURM)
	$(BIN)/python tests/slurm.py $(PROFILE)

bench: $(STAMP)
	$(BIN)/python tests/bench.py

lab: $(STAMP)
	@if test "$$(id -u)" = 0 && ! echo ' $(FLAGS) ' | grep -q -- ' --allow-root '; then echo "JupyterLab does not start as root unless told to: make lab FLAGS=\"--allow-root $(FLAGS)\"" >&2; exit 1; fi
	$(BIN)/jupyter lab notebooks $(FLAGS)

clean:
	rm -rf build .snakemake .pytest_cache .ruff_cache .mypy_cache .hypothesis cats.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
