"""The repository keeps its own promises: pins in step, notebooks clean, every notebook in the
batch.
"""

import json
import re
import tomllib
from inspect import signature
from itertools import chain
from pathlib import Path

import pytest
import yaml

from cats.paper import links, reading

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PINS = {
    re.sub("_", "-", name).lower(): version
    for name, version in (
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split()
    )
}


def test_environment_and_constraints_are_in_step():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *chain(*project["optional-dependencies"].values())}
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    pinned = dict(entry.split("==") for entry in pip if "==" in entry)
    assert pinned == {name: PINS[name.replace("_", "-")] for name in wanted}


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


def code_of(path):
    """The code cells of a notebook, the one with its parameters first."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    cells = sorted(cells, key=lambda cell: "parameters" not in cell["metadata"].get("tags", []))
    return ["".join(cell["source"]) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_short(path):
    lines = [line for source in code_of(path) for line in source.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 60


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_says_what_it_is(path):
    lines = [line for line in code_of(path)[0].splitlines() if re.match(r"\w+ =", line)]
    assert lines and [line for line in lines if not re.search(r"  # \w", line)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_opens_with_links_and_closes_with_its_reading(path):
    first = "".join(json.loads(path.read_text())["cells"][0]["source"])
    wanted = links.line(path.stem, links.every())
    assert first.splitlines()[2] == wanted, "run: python -m cats.paper.links"
    if reading.path(path.stem).exists():
        last = code_of(path)[-1].splitlines()[-1]
        assert last.startswith(f'reading.show("{path.stem}"')


def parameter_names(path):
    cells = json.loads(path.read_text())["cells"]
    source = next(
        "".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])
    )
    return set(re.findall(r"^(\w+) =", source, flags=re.M))


@pytest.mark.parametrize(
    "profile", sorted(path.stem for path in (ROOT / "notebooks/profiles").glob("*.yaml"))
)
def test_every_notebook_is_in_the_batch(profile):
    content = yaml.safe_load((ROOT / f"notebooks/profiles/{profile}.yaml").read_text())
    stages = re.search(r"^STAGES = (\[.*\])", (ROOT / "Snakefile").read_text(), flags=re.M)[1]
    given = dict(content["parameters"])
    for run in content["runs"]:
        given |= dict.fromkeys(json.loads(stages), None)
        assert set(run) <= parameter_names(ROOT / "notebooks/05_scores.ipynb")
    assert content["profile"] == profile
    whole = profile in ("demo", "short")  # the others are for training runs
    assert not whole or set(given) == {path.stem for path in NOTEBOOKS}
    for name, values in given.items():  # a misspelt parameter would be ignored in silence
        assert set(values or {}) <= parameter_names(ROOT / f"notebooks/{name}.ipynb")


@pytest.mark.parametrize(
    "profile", sorted(path.stem for path in (ROOT / "notebooks/profiles").glob("*.yaml"))
)
def test_what_a_profile_names_is_there(profile):
    """Options of a run are known to what they are given to, and whatever is named is there: not
    after a day on a GPU it should turn out that it is not.
    """
    from transformers import TrainingArguments  # it needs torch

    from cats.train import finetune, fit, tasks

    content = yaml.safe_load((ROOT / f"notebooks/profiles/{profile}.yaml").read_text())
    known = {
        "training": {
            *signature(finetune.fine_tune).parameters,
            *signature(TrainingArguments).parameters,
        },
        "head_options": signature(fit.train_heads).parameters,
        "meta_options": signature(fit.fit_meta).parameters,
        "limit": tasks.SPLITS,
    }
    for run in content["runs"]:
        assert run["task"] in tasks.TASKS
        for name, options in known.items():
            assert set(run.get(name, {})) <= set(options)
    runs = {f"{r['task']}-{Path(r['model']).name}-{r.get('seed', 0)}" for r in content["runs"]}
    named = [values["run"] for values in content["parameters"].values() if "run" in (values or {})]
    assert set(named) <= runs
    later = {*content.get("after_runs", []), *content.get("alone", [])}
    assert later <= set(content["parameters"])
    notebooks = {path.stem for path in NOTEBOOKS}
    assert set(content.get("resources", {})) <= notebooks
    read = set(re.findall(r'config(?:\.get\(|\[)["\'](\w+)', (ROOT / "Snakefile").read_text()))
    assert set(content) <= read  # by the Snakefile


def test_the_readme_is_short_and_its_links_lead_somewhere():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and [line for line in lines if len(line) > 100] == []
    for name in ("README.md", "figures/README.md", "notebooks/README.md"):
        text = (ROOT / name).read_text()
        found = re.findall(
            r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", text, flags=re.S)
        )
        gone = {path for path in found if "://" not in path}
        assert [path for path in gone if not (ROOT / name).parent.joinpath(path).exists()] == []


def test_seconds_are_a_record_of_named_runs():
    """Every committed file of a notebook that measures time says where, when and how often; what a
    reader measures is not committed.
    """
    timed = yaml.safe_load((ROOT / "notebooks/profiles/demo.yaml").read_text())["alone"]
    records = [path for name in timed for path in (ROOT / "figures").glob(f"{name}*.json")]
    measured = {path.stem: json.loads(path.read_text()).get("measured", {}) for path in records}
    assert len(records) >= 2 * len(timed)
    assert [
        name for name, said in measured.items() if not {"machine", "date", "repeats"} <= set(said)
    ] == []
    assert "figures/here/" in (ROOT / ".gitignore").read_text().split()


def test_style_and_short_figures_come_before_the_tests_in_one_clone():
    commands = [
        line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make")
    ]
    assert commands == ["make check", "make figures PROFILE=short", "make test"]


def test_the_readme_offers_the_cpu_build_beside_the_two_commands():
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert all(words in first for words in ("make figures", "make test", "CPU build", "CUDA"))
