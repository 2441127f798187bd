"""The repository keeps its own promises: pins in step, notebooks clean, every notebook in the
batch.
"""

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import pandas as pd
import pytest
import yaml

from cats.paper import links, reading, summary

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
READMES = {"README": "README.md", "figures": "figures/README.md"}
TASKS = {"imdb": "IMDB", "vitaminc": "VitaminC", "ag_news": "AG News", "stsb": "STS-B"}
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


def number(name, **where):
    """The one row of figures/NAME.csv where these columns have these values."""
    frame = pd.read_csv(ROOT / f"figures/{name}.csv")
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1, (name, where)
    return frame.iloc[0]


def headlines():
    """What both READMEs say was found, said again from the figures' own numbers."""
    found = number("22_consistency", task="ag_news", method="shared", measure="meta", epsilon=0.05)
    share = f"{100 * found.layers_mean / 24:.0f} % of the layers"
    yield "README", f"agrees on {100 * found.consistency_mean:.1f} % with {share}"
    yield "figures", f"{100 * found.consistency_mean:.1f} % consistent with {share}"
    ours, theirs = (
        number("23_tables_classification", task="ag_news", method=f"{method}/meta", target=0.95)
        for method in ("first_exit", "shared")
    )
    yield "README", f"`first_exit` needs {ours.layers:.1f} layers instead of {theirs.layers:.1f}"
    yield "figures", f"AG News {theirs.layers:.1f}, **{ours.layers:.1f}** ({ours.consistency:.1f} %"
    for task in ("imdb", "vitaminc"):
        ours, theirs = (
            number("23_tables_classification", task=task, method=f"{method}/meta", target=0.95)
            for method in ("first_exit", "shared")
        )
        yield "figures", f"{TASKS[task]} {theirs.layers:.1f}, {ours.layers:.1f}"
    means = {
        (task, e): number("24_exit_layers_means", task=task, method="shared", epsilon=e).layers
        for task in TASKS
        for e in (0.05, 0.2)
    }
    for task, name in TASKS.items():
        yield "figures", f"{name} {means[task, 0.05]:.1f} → {means[task, 0.2]:.1f}"
    ours, waiting = (
        100
        * number("26_comparison-ag_news-bge-small-en-v1.5-0", what=what, setting=0.05).relative_time
        for what in ("CAT", "waiting for the slowest")
    )
    yield "README", f"the CAT takes {ours:.0f} % of the full model's time"
    yield "README", f"waiting for the slowest of each batch, take {waiting:.0f} %"
    naive, ltt = (
        number("30_naive", task="ag_news", method=method, target=0.95)
        for method in ("naive/meta", "ltt/meta")
    )
    yield "figures", f"`naive/meta` bound {naive.bound:.1f} %, {naive.layers:.1f} layers"
    yield "figures", f"`ltt` promises 95 % with {ltt.layers:.1f}"
    worth, hidden = [], []
    for run in ("sentiment-demo-0", "similarity-demo-0"):
        path = ROOT / f"figures/04_meta_classifiers_features-{run}.csv"
        layers = pd.read_csv(path).set_index("features")["layers"]
        without = layers.filter(like="without") - layers["all"]
        hidden.append(without.pop("without hidden"))
        worth.append(without.max())
    yield "README", f"no feature of Table 1 is worth more than {max(worth):.3f} layers"
    yield "figures", f"M_k also reads, is worth {min(hidden):.1f} to {max(hidden):.1f}"
    measured = json.loads((ROOT / "figures/25_efficiency.json").read_text())["measured"]
    yield "figures", f"measured on {measured['machine']}, {measured['date']}"


def headlines_of_use():
    """The same for what is watched, and for models of any kind."""
    quiet = pd.read_csv(ROOT / "figures/45_monitor_quiet.csv")
    rate = 100 * quiet["alarms"] / quiet["streams"]
    n, naive = quiet["streams"][0], rate[quiet["way"] == "p-values"]
    kept = rate[(quiet["way"] == "monitor") & (quiet["threshold"] != "first_exit")]
    yield (
        "figures",
        f"a false alarm in {kept.min():.1f} to {kept.max():.1f} % of {n:,} streams"
        f" (δ = 1 %; p-values looked at again and again: {naive.min():.1f} to {naive.max():.1f} %)",
    )
    again = pd.read_csv(ROOT / "figures/45_monitor_again.csv")
    hard = again[again["part"] == "hardest quarter"]
    yield (
        "figures",
        f"a shift to the hardest quarter: {100 * hard['shifted'].min():.0f} to"
        f" {100 * hard['shifted'].max():.0f} % consistent, recalibrated"
        f" {100 * hard['recalibrated'].min():.0f} %",
    )
    found = number("51_cascade", method="first_exit", epsilon=0.1)
    yield (
        "figures",
        f"TF-IDF before the demo's encoder at 0.90: {found.cost:.0%} of its multiply-adds,"
        f" {found.consistency:.1%} consistent",
    )


def test_the_readmes_say_what_the_figures_say():
    said = {name: " ".join((ROOT / path).read_text().split()) for name, path in READMES.items()}
    every = [*headlines(), *headlines_of_use()]
    assert [(name, line) for name, line in every if line not in said[name]] == []


def test_the_readmes_are_in_step_with_the_figures():
    """Written by python -m cats.paper.summary, as the batch does at its end."""
    readme = (ROOT / "README.md").read_text()
    assert summary.readme(readme) == readme
    assert summary.page() == (ROOT / "figures/README.md").read_text()


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
