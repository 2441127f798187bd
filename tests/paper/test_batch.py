"""The batch, killed and started again: every file comes out as if nothing had happened, and what
failed does not stop the rest.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import batches
import psutil
import pytest
import yaml

from cats.paper.batch import differences, record

SMALL = {
    "task": "sentiment",
    "model": "demo",
    "limit": {"train": 160, "validation": 40, "test": 30},
    "training": {"batch_size": 8, "save_steps": 4, "epochs": 1},
    "head_options": {"epochs": 1},
    "meta_options": {"epochs": 1},
}
RUN = "build/small/runs/sentiment-demo-0"


def profile(folder, **changes):
    """One run that works and one that cannot: its model is nowhere."""
    content = {
        "profile": "small",
        "runs": [SMALL | changes, SMALL | {"model": "nowhere", "seed": 1}],
        "parameters": {},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(content))


def batch(folder, *options):
    return batches.start(
        folder,
        "small.yaml",
        "--cores",
        "1",
        *options,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process, there):
    """Wait until a file is there, and something in it."""
    deadline = time.monotonic() + 600
    while not there.exists() or not there.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline, (
            f"the batch ended without {there}"
        )
        time.sleep(0.02)


def kill_when(process, there):
    """Kill the batch and all it has started, at once, as soon as a file is there."""
    wait_for(process, there)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family)


def made(folder):
    """Every result by name; executed notebooks and logs hold times."""
    paths = [*(folder / "figures").rglob("*"), *(folder / RUN).rglob("*")]
    wanted = [
        path
        for path in paths
        if path.suffix in (".safetensors", ".csv", ".png", ".pdf", ".md", ".tex")
        or path.name.endswith("settings.json")
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in wanted}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One batch that ran through, and one that was killed in training, after its heads, and among
    its scores.
    """
    whole, broken = folders = [tmp_path_factory.mktemp(name) for name in ("whole", "broken")]
    for folder in folders:
        batches.copy(folder, "cats", "notebooks", "data/paper", "Snakefile")
        profile(folder)
    unbroken = batch(whole)
    wait_for(unbroken, whole / "build/batch.lock")
    second, _ = batch(whole).communicate(timeout=600)  # while the first one runs
    for there in (
        "model/checkpoints/checkpoint-8",
        "paper/heads.safetensors",
        "paper/validation.safetensors",
    ):
        kill_when(batch(broken), broken / RUN / there)
    words = [process.communicate(timeout=600)[0] for process in (batch(broken), unbroken)]
    (whole / "second.txt").write_text(second)
    (broken / "last.txt").write_text(words[0])
    return whole, broken


def test_a_killed_batch_ends_as_an_unbroken_one(both):
    expected, found = made(both[0]), made(both[1])
    assert {
        f"{RUN}/{name}.safetensors"
        for name in (
            *(f"paper/{what}" for what in ("heads", "meta", "validation", "test")),
            "model/model",
        )
    } <= set(expected)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


def test_a_second_batch_says_who_is_running_and_stops(both):
    said = (both[0] / "second.txt").read_text()
    assert re.search(
        r"Another batch is running in this folder: small.yaml, process \d+, since \d{4}-\d\d-\d\d",
        said,
    ), said
    assert "Building DAG" not in said and not (both[0] / "build/batch.lock").read_text()


def test_a_batch_that_failed_says_where_to_look(both):
    said = (both[1] / "last.txt").read_text()
    words = said[said.index("1 notebook failed") :].splitlines()
    assert re.match(r"  02_fine_tuning \(sentiment-nowhere-1\): \w+Error: .*nowhere", words[1]), (
        words
    )
    assert (
        words[2]
        == "    traceback: build/small/runs/sentiment-nowhere-1/02_fine_tuning.running.ipynb"
    )


def test_a_failed_notebook_keeps_its_traceback_and_stops_nothing_else(both):
    folder = both[1] / "build/small/runs/sentiment-nowhere-1"
    notebook = json.loads((folder / "02_fine_tuning.running.ipynb").read_text())
    errors = [
        output["evalue"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
    ]
    assert "nowhere" in errors[0]
    assert not (folder / "02_fine_tuning.ipynb").exists()


def test_only_what_depends_on_a_parameter_runs_again(both):
    folder = both[1]
    profile(folder, meta_options={"epochs": 2})
    said, _ = batch(folder, "--dry-run").communicate(timeout=600)
    again = [
        stage
        for stage in ("02_fine_tuning", "03_early_heads", "04_meta_classifiers", "05_scores")
        if f"output: {RUN}/{stage}.ipynb" in said
    ]
    assert again == ["04_meta_classifiers", "05_scores"], said


def test_what_a_profile_says_reaches_notebooks_and_what_is_launched_before_them(tmp_path):
    """The rates of the paper profile are numbers: JSON would write 1e-05, which YAML takes for a
    word. And profiles of the first version named the options of heads and meta classifiers `early`
    and `meta`.
    """
    batches.copy(tmp_path, "cats", "notebooks", "Snakefile")
    profile(tmp_path, training={"learning_rate": 0.00001}, head_options={"epochs": 3})
    said = (tmp_path / "small.yaml").read_text().replace("head_options", "early")
    (tmp_path / "small.yaml").write_text(said.replace("meta_options", "meta"))
    options = ("--dry-run", "--printshellcmds", "--config", "launch=accelerate launch")
    told, _ = batch(tmp_path, *options).communicate(timeout=600)
    lines = [line for line in told.splitlines() if "papermill" in line and "demo-0" in line]
    given = [yaml.safe_load(shlex.split(line.partition(" -y ")[2])[0]) for line in lines]
    assert len(given) == 4 and all(one["training"] == {"learning_rate": 1e-5} for one in given)
    found = [[one.get(name) for name in ("head_options", "meta_options")] for one in given]
    heads, both = [{"epochs": 3}, None], [{"epochs": 3}, {"epochs": 1}]
    assert sorted(found, key=str) == sorted([[None, None], heads, both, both], key=str)
    for line, notebook in zip(lines, given):
        launched = json.loads(shlex.split(line.partition(" cats.train.run ")[2])[0])
        assert launched == notebook | {"folder": f"../{notebook['folder']}"}


def test_a_page_as_old_as_its_tables_is_made_anew(tmp_path):
    """A clone writes all files in one moment: what is stale is not older, and is seen all the
    same.
    """
    batches.copy(tmp_path, "cats", "notebooks", "Snakefile")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"profile": "small", "parameters": {}}))
    page, tables = tmp_path / "figures/explorer.html", tmp_path / "data/tables/manifest.json"
    for path in (page, tables):
        path.parent.mkdir(parents=True)
        path.write_text("{}")

    def told(*options):
        for path in tmp_path.rglob("*"):
            os.utime(path, (1.6e9, 1.6e9))
        return batch(tmp_path, "build/small/explorer.made", *options).communicate(timeout=600)[0]

    said = told()
    assert page.read_text().startswith("<!doctype html>"), said
    assert "Nothing to be done" in told("--dry-run")
    tables.write_text(json.dumps({"a": {"what": "heads"}}))
    assert "rule explorer" in told("--dry-run")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with figures of two notebooks, one of which measures time, or so its profile says."""
    folder = tmp_path_factory.mktemp("clone")
    figures = [
        f"figures/{path.name}"
        for name in ("60_scale", "10_calibration")
        for path in (batches.ROOT / "figures").glob(f"{name}*")
    ]
    (folder / "figures").mkdir()
    batches.copy(folder, "cats", "notebooks", "data/paper", "Snakefile", ".gitignore", *figures)
    content = {
        "profile": "two",
        "alone": ["60_scale"],
        "parameters": {"60_scale": {"gpu": 80}, "10_calibration": {"trials": 1}},
    }
    (folder / "two.yaml").write_text(yaml.safe_dump(content))
    for command in (
        "init --quiet",
        "add --all",
        "-c user.name=a -c user.email=a commit --quiet --message all",
    ):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    return folder


def two(folder, *options):
    """The batch as make gives it its options."""
    process = batches.start(
        folder,
        "two.yaml",
        "--quiet",
        "rules",
        "--cores",
        "1",
        *options,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process.communicate(timeout=600)[0]


def test_a_target_is_made_and_seconds_leave_the_record_alone(clone):
    """What a notebook measured goes beside the record, which stays as it was committed."""
    said = two(clone, "60_scale")
    assert (clone / "build/two/60_scale.ipynb").exists() and not (
        clone / "build/two/10_calibration.ipynb"
    ).exists(), said
    assert json.loads((clone / "figures/here/60_scale.json").read_text())["parameters"]["gpu"] == 80
    assert "All 14 files in figures/ are as committed." in said


def test_the_batch_ends_by_saying_what_differs(clone):
    said = two(clone)
    ends = (".csv", ".json", ".pdf", ".png", "_reading.md")
    names = ", ".join(f"figures/10_calibration{end}" for end in ends)
    assert (
        f"5 of 14 files differ from the committed ones: {names}\n" in said
        and "1 new: figures/index.html\n" in said
    ), said
    assert "What this machine measured in seconds is in figures/here/" in said
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True
    ).stdout.split("\n")
    assert sorted(line[3:] for line in changed if line) == sorted(
        [*names.split(", "), "figures/index.html"]
    )


def test_a_readme_that_follows_the_figures_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").mkdir()
    files = [tmp_path / "figures/a.csv", tmp_path / "README.md"]
    for file in files:
        file.write_text("1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", *command], check=True)
    assert [*differences(Path("figures"))] == ["All 1 files in figures/ are as committed."]
    files[0].write_text("2\n")
    assert not any("README" in line for line in differences(Path("figures")))
    files[1].write_text("2\n")
    assert any("README.md, which quotes" in line for line in differences(Path("figures")))


def test_papermill_by_hand_runs_from_any_folder_and_leaves_the_figures_alone(clone, tmp_path):
    """No folder of ours is needed: notebooks find their data through the package; and other
    parameters replace no committed figure.
    """
    before = {path: path.read_bytes() for path in (clone / "figures").glob("*.*")}
    environment = {name: value for name, value in os.environ.items() if name != "CATS_FIGURES"} | {
        "PYTHONPATH": str(clone)
    }
    command = [
        Path(sys.executable).parent / "papermill",
        clone / "notebooks/10_calibration.ipynb",
        "out.ipynb",
        *"-p epsilon 0.2 -p trials 2 --kernel python3".split(),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert not done.returncode, done.stderr[-3000:]
    assert (
        json.loads((clone / "build/figures/10_calibration.json").read_text())["parameters"][
            "trials"
        ]
        == 2
    )
    assert (tmp_path / "out.ipynb").read_text().count("Results go to build/figures/.") == 1
    assert {path: path.read_bytes() for path in (clone / "figures").glob("*.*")} == before


def test_the_record_is_renewed_only_when_asked_and_only_by_measurements(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures/here").mkdir(parents=True)
    (tmp_path / "one.yaml").write_text(
        yaml.safe_dump({"profile": "one", "alone": ["25_efficiency"], "parameters": {}})
    )
    (tmp_path / "figures/here/25_efficiency.json").write_text("{}")
    with pytest.raises(
        SystemExit,
        match="Nothing has been measured in figures/here/: run make figures PROFILE=one first",
    ):
        record("one.yaml")
    measured = json.dumps(
        {"measured": {"machine": "2 threads", "date": "2026-11-17", "repeats": 2}}
    )
    (tmp_path / "figures/here/25_efficiency.json").write_text(measured)
    (tmp_path / "figures/here/30_naive.csv").write_text("not a measurement")
    record("one.yaml")
    assert (tmp_path / "figures/25_efficiency.json").read_text() == measured and not (
        tmp_path / "figures/30_naive.csv"
    ).exists()
