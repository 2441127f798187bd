"""The repository keeps its own promises: pins in step, notebooks clean, every notebook in the batch."""

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())


def test_environment_and_constraints_are_in_step():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    pinned = dict(entry.split("==") for entry in pip if "==" in entry)
    assert pinned == {name: PINS[name] for name in wanted}


def test_every_pin_is_exact():
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


def parameter_names(path):
    cells = json.loads(path.read_text())["cells"]
    source = next("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))
    return set(re.findall(r"^(\w+) =", source, flags=re.M))


@pytest.mark.parametrize("profile", sorted(path.stem for path in (ROOT / "notebooks/profiles").glob("*.yaml")))
def test_every_notebook_is_in_the_batch(profile):
    content = yaml.safe_load((ROOT / f"notebooks/profiles/{profile}.yaml").read_text())
    stages = re.search(r"^STAGES = (\[.*\])", (ROOT / "Snakefile").read_text(), flags=re.M)[1]
    given = dict(content["parameters"])
    for run in content["runs"]:
        given |= dict.fromkeys(json.loads(stages), None)
        assert set(run) <= parameter_names(ROOT / "notebooks/05_scores.ipynb")
    assert content["profile"] == profile
    whole = profile in ("demo", "short")  # the others are for training runs
    assert not whole or sorted(given) == [path.stem for path in NOTEBOOKS]
    for name, values in given.items():  # a misspelt parameter would be ignored in silence
        assert set(values or {}) <= parameter_names(ROOT / f"notebooks/{name}.ipynb")
