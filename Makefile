# make figures   every figure and table, from a fresh clone
# make test      the tests, from a fresh clone
# make figures CLUSTER=slurm   the same as jobs of a cluster, see notebooks/profiles/slurm/config.yaml
PYTHON  ?= python3
PROFILE ?= demo
CORES   ?= 2
BIN     := .venv/bin
STAMP   := .venv/.installed
SLURM   := .venv/.slurm

.PHONY: install figures test mutants slurm bench lab clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cats needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

# Snakemake loads every executor it finds, so this one is there only for those who ask for a cluster
$(SLURM): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[slurm]"
	touch $@

# --nolock and --rerun-incomplete: a killed run leaves no lock behind and half-made outputs are made again
figures: $(if $(CLUSTER),$(SLURM),$(STAMP))
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake $(if $(CLUSTER),--profile notebooks/profiles/$(CLUSTER),--cores $(CORES)) --nolock --rerun-incomplete --keep-going --quiet rules --configfile notebooks/profiles/$(PROFILE).yaml $(if $(LOCAL),--config local=$(LOCAL)) $(FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest

# bugs planted in the statistics, each of which a named test has to catch; a few are part of `make test`
mutants: $(STAMP)
	$(BIN)/python tests/mutations.py

# the batch as jobs of a Slurm that is started for it, as root on Debian: one is killed, the figures must be those of a local run
slurm: $(SLURM)
	$(BIN)/python tests/slurm.py $(PROFILE)

bench: $(STAMP)
	$(BIN)/python tests/bench.py

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

clean:
	rm -rf build .snakemake .pytest_cache .hypothesis cats.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
