"""The batch, killed and started again: every file comes out as if nothing had happened, and what
failed does not stop the rest.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import batches
import psutil
import pytest
import yaml

SMALL = {
    "task": "sentiment",
    "model": "demo",
    "limit": {"train": 160, "validation": 40, "test": 30},
    "training": {"batch_size": 8, "save_steps": 4, "epochs": 1},
    "early": {"epochs": 1},
    "meta": {"epochs": 1},
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


def kill_when(process, there):
    """Kill the batch and all it has started, at once, as soon as a file is there."""
    deadline = time.monotonic() + 600
    while not there.exists():
        assert process.poll() is None and time.monotonic() < deadline, (
            f"the batch ended without {there}"
        )
        time.sleep(0.02)
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
    for there in (
        "model/checkpoints/checkpoint-8",
        "heads.safetensors",
        "scored/validation/plan.json",
    ):
        kill_when(batch(broken), broken / RUN / there)
    for process in (batch(broken), unbroken):
        process.communicate(timeout=600)
    return whole, broken


def test_a_killed_batch_ends_as_an_unbroken_one(both):
    expected, found = made(both[0]), made(both[1])
    assert {
        f"{RUN}/{name}.safetensors"
        for name in ("heads", "meta", "validation", "test", "model/model")
    } <= set(expected)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


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
    profile(folder, meta={"epochs": 2})
    said, _ = batch(folder, "--dry-run").communicate(timeout=600)
    again = [
        stage
        for stage in ("02_fine_tuning", "03_early_heads", "04_meta_classifiers", "05_scores")
        if f"output: {RUN}/{stage}.ipynb" in said
    ]
    assert again == ["04_meta_classifiers", "05_scores"], said


def test_papermill_runs_a_notebook_from_any_folder(tmp_path):
    """No folder of ours is needed: notebooks find data and figures through the package."""
    environment = os.environ | {"CATS_FIGURES": str(tmp_path / "figures")}
    command = [
        Path(sys.executable).parent / "papermill",
        batches.ROOT / "notebooks/60_scale.ipynb",
        "out.ipynb",
        "-p",
        "gpu",
        "80",
        "--kernel",
        "python3",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert not done.returncode, done.stderr[-3000:]
    assert json.loads((tmp_path / "figures/60_scale.json").read_text())["parameters"]["gpu"] == 80
