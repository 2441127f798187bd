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

from cats.paper import links, reading

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
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


# their code is measured in seconds and told in steps elsewhere
LONG = ("25_efficiency", "26_comparison")


def code_of(path):
    """The code cells of a notebook, the one with its parameters first."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    cells = sorted(cells, key=lambda cell: "parameters" not in cell["metadata"].get("tags", []))
    return ["".join(cell["source"]) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_short(path):
    lines = [line for source in code_of(path) for line in source.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 60 or path.stem in LONG


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_says_what_it_is(path):
    if path.stem in LONG:
        pytest.skip("its cells are worked on elsewhere")
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
    assert not whole or sorted(given) == [path.stem for path in NOTEBOOKS]
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
    """What the README says was found, said again from the figures' own numbers."""
    both = [
        [
            number("21_tasks_and_features_table_2", task=task, backbone=name)["F"]
            for name in ("mobilebert-uncased", "bge-small-en-v1.5")
        ]
        for task in TASKS
    ]
    (imdb, imdb_small), (claims, claims_small), (news, news_small), (stsb, stsb_small) = both
    yield (
        f"AG News {news:.1f} % (bge-small {news_small:.1f} %), STS-B {stsb / 100:.3f}"
        f" ({stsb_small / 100:.3f}), IMDB {imdb:.1f} % ({imdb_small:.1f} %), VitaminC {claims:.1f}"
        f" % ({claims_small:.1f} %)"
    )
    found = number("22_consistency", task="ag_news", method="shared", measure="meta", epsilon=0.05)
    yield (
        f"AG News at 0.95: `shared/meta` {100 * found.consistency_mean:.1f} % consistent with"
        f" {100 * found.layers_mean / 24:.0f} % of the layers"
    )
    for task, name in (("imdb", "IMDB"), ("vitaminc", "VitaminC")):
        found = number("22_consistency", task=task, method="shared", measure="meta", epsilon=0.05)
        yield (
            f"{name} {100 * found.consistency_mean:.1f} % with {100 * found.layers_mean / 24:.0f} %"
        )
    found = number(
        "22_consistency_regression", task="stsb", method="shared", measure="meta", epsilon=0.05
    )
    yield (
        f"STS-B at 0.95: {100 * found.consistency_mean:.1f} % with"
        f" {100 * found.layers_mean / 24:.0f} % of the layers"
    )
    ours, theirs = (
        number("23_tables_classification", task="ag_news", method=f"{method}/meta", target=0.95)
        for method in ("first_exit", "shared")
    )
    yield (
        f"AG News at 0.95: `shared/meta` {theirs.layers:.1f} layers, **`first_exit`"
        f" {ours.layers:.1f}** ({ours.consistency:.1f} % consistent)"
    )
    for task, name in (("imdb", "IMDB"), ("vitaminc", "VitaminC")):
        ours, theirs = (
            number("23_tables_classification", task=task, method=f"{method}/meta", target=0.95)
            for method in ("first_exit", "shared")
        )
        yield f"{name} {theirs.layers:.1f} and {ours.layers:.1f}"
    ours, theirs = (
        number("23_tables_regression", task="stsb", method=f"{method}/meta", target=0.95)
        for method in ("first_exit", "shared")
    )
    yield f"STS-B at 0.95: `shared/meta` {theirs.layers:.1f} layers, `first_exit` {ours.layers:.1f}"
    means = {
        (task, e): number("24_exit_layers_means", task=task, method="shared", epsilon=e).layers
        for task in TASKS
        for e in (0.05, 0.2)
    }
    yield "mean exit from ε = 0.05 to 0.2: " + ", ".join(
        f"{name} {means[task, 0.05]:.1f} → {means[task, 0.2]:.1f}" for task, name in TASKS.items()
    )
    ours, theirs = (
        number("25_efficiency_table_5", task="ag_news", method=f"{method}/meta")[
            "batch 32, MobileBERT"
        ]
        for method in ("first_exit", "shared")
    )
    yield (
        f"AG News at 0.90: `shared/meta` {theirs:.0f} % of the time at batch 32, `first_exit`"
        f" {ours:.0f} %"
    )
    frame = pd.read_csv(ROOT / "figures/25_efficiency.csv")
    over = frame["batch 32, MobileBERT"] / frame["share_32"]
    measured = json.loads((ROOT / "figures/25_efficiency.json").read_text())["measured"]
    yield f"measured on {measured['machine']}, {measured['date']}, {measured['repeats']} repeats"
    yield (
        f"T_G/T_F at batch 32 is {over.median():.2f} times layers_G/l (median of the rows of Tables"
        f" 5 and C.3; {over.min():.2f} to {over.max():.2f}"
    )
    naive, ltt = (
        number("30_naive", task="ag_news", method=method, target=0.95)
        for method in ("naive/meta", "ltt/meta")
    )
    yield (
        f"AG News at 0.95: `naive/meta` bound {naive.bound:.1f} %, {naive.layers:.1f} layers; `ltt`"
        f" promises 95 % with {ltt.layers:.1f}"
    )
    for task, unit in (("ag_news", " layers"), ("vitaminc", "")):
        meta, pmax = (
            number("31_measures", task=task, method=f"shared/{measure}", target=0.95)
            for measure in ("meta", "sm")
        )
        yield f"{TASKS[task]} at 0.95: meta {meta.layers:.1f}, p max {pmax.layers:.1f}{unit}"
    ours, waiting = (
        100
        * number("26_comparison-ag_news-bge-small-en-v1.5-0", what=what, setting=0.05).relative_time
        for what in ("CAT", "waiting for the slowest")
    )
    yield (
        f"the CAT takes {ours:.0f} % of the full model's time; the same exits, waiting for the"
        f" slowest of each batch, take {waiting:.0f} %"
    )
    found = number(
        "32_other_backbones",
        backbone="bge-small-en-v1.5",
        task="ag_news",
        method="shared",
        measure="meta",
        epsilon=0.05,
    )
    yield f"bge-small (12 layers): AG News {found.layers_mean:.1f} of 12 layers at 0.95"
    worth, hidden = [], []
    for run in ("sentiment-demo-0", "similarity-demo-0"):
        path = ROOT / f"figures/04_meta_classifiers_features-{run}.csv"
        layers = pd.read_csv(path).set_index("features")["layers"]
        without = layers.filter(like="without") - layers["all"]
        hidden.append(without.pop("without hidden"))
        worth.append(without.max())
    yield (
        f"no feature of Table 1 is worth more than {max(worth):.3f} layers; the early hidden state,"
        f" which M_k also reads, is worth {min(hidden):.1f} to {max(hidden):.1f}"
    )


def headlines_of_use():
    """The same for what is watched, and for models of any kind."""
    quiet = pd.read_csv(ROOT / "figures/45_monitor_quiet.csv")
    rate = 100 * quiet["alarms"] / quiet["streams"]
    n, naive = quiet["streams"][0], rate[quiet["way"] == "p-values"]
    kept = rate[(quiet["way"] == "monitor") & (quiet["threshold"] != "first_exit")]
    yield (
        f"a false alarm in {kept.min():.1f} to {kept.max():.1f} % of {n:,} streams"
        f" (δ = 1 %; p-values looked at again and again: {naive.min():.1f} to {naive.max():.1f} %)"
    )
    again = pd.read_csv(ROOT / "figures/45_monitor_again.csv")
    hard = again[again["part"] == "hardest quarter"]
    yield (
        f"a shift to the hardest quarter: {100 * hard['shifted'].min():.0f} to"
        f" {100 * hard['shifted'].max():.0f} % consistent, recalibrated"
        f" {100 * hard['recalibrated'].min():.0f} %"
    )
    found = number("51_cascade", method="first_exit", epsilon=0.1)
    yield (
        f"TF-IDF before the demo's encoder at 0.90: {100 * found.cost:.0f} % of its multiply-adds,"
        f" {100 * found.consistency:.1f} % consistent"
    )


def test_the_readme_says_what_the_figures_say():
    readme = (ROOT / "README.md").read_text()
    said = [*headlines(), *headlines_of_use()]
    assert [line for line in said if line not in readme] == []


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
