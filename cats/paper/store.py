"""The ScoreTables in data/tables: real runs, eight pairs of task and backbone, a validation and a
test split each.

    shipped.pairs()                                        # what there is
    shipped.table("ag_news", "mobilebert-uncased", "test") # checked against the manifest's hash

`add` puts the tables, heads and meta classifiers of a finished run there. Scores stay in float32:
in half precision the confident ones tie (above 0.5 it has steps of 0.0005), and thresholds and
exits would move.
"""

import json
import os
import shutil
from pathlib import Path

from filelock import FileLock

from cats._io import DATA, sha256, write_json, writing
from cats.stats.table import ScoreTable

FOLDER = Path(
    os.environ.get("CATS_TABLES", DATA / "tables")
)  # the variable: figures of your own tables
SPLITS = ("validation", "test")
MAIN = ("mobilebert-uncased", "albert-xlarge-v2")  # stands for the paper's main model, and is it
KEPT = (*SPLITS, "heads", "meta")  # files of a run's folder


def manifest(folder=FOLDER):
    """What is shipped, by file name: task, backbone, what it holds, and its hash."""
    path = Path(folder) / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def pairs(folder=FOLDER):
    """(task, backbone) of the tables there are, backbone by backbone, in the paper's order of
    tasks.
    """
    order = ("imdb", "vitaminc", "ag_news", "stsb")
    found = {(entry["task"], entry["backbone"]) for entry in manifest(folder).values()}
    return sorted(
        found, key=lambda pair: (pair[1], order.index(pair[0]) if pair[0] in order else len(order))
    )


def main(wanted=MAIN[0], folder=FOLDER):
    """The backbone to draw the paper's main figures from: the one wanted, if it is there, else one
    of MAIN, else the first with most layers.
    """
    layers = {entry["backbone"]: entry["layers"] for _, entry in sorted(manifest(folder).items())}
    if not layers:
        raise FileNotFoundError(f"no ScoreTables in {folder}: make them first (see data/README.md)")
    return next((name for name in (wanted, *MAIN) if name in layers), max(layers, key=layers.get))


def tables(split, backbone=MAIN[0], folder=FOLDER):
    """{task: ScoreTable} of one backbone in the paper's order of tasks; of another where there is
    none of this (see `main`).
    """
    used = main(backbone, folder)
    return {task: table(task, name, split, folder) for task, name in pairs(folder) if name == used}


def path(task, backbone, what, folder=FOLDER):
    """A shipped file, after checking that it is the one the manifest names."""
    name, known = f"{task}-{backbone}-{what}.safetensors", manifest(folder)
    if name not in known:
        raise FileNotFoundError(
            f"no {what} of {task} with {backbone} is shipped; there are"
            f" {', '.join(known) or 'none'}"
        )
    file = Path(folder) / name
    if not file.exists() or sha256(file) != known[name]["sha256"]:
        raise ValueError(
            f"{file} is not the file its manifest names: check it out again, or make it anew (see"
            " data/README.md)"
        )
    return file


def table(task, backbone, split="test", folder=FOLDER):
    """The ScoreTable of a split."""
    return ScoreTable.load(path(task, backbone, split, folder))


def add(run, folder=FOLDER):
    """Copy a finished run's tables, heads and meta classifiers, and enter them in the manifest."""
    folder, entries = Path(folder), {}
    tables = {split: run.table(split) for split in SPLITS}  # made now if they are not there
    for what in KEPT:
        about = {
            "task": run.task.name,
            "backbone": run.backbone_name,
            "seed": run.seed,
            "what": what,
            "layers": run.backbone.n_layers,
        }
        name = f"{about['task']}-{about['backbone']}-{what}.safetensors"
        with writing(folder / name) as aside:
            shutil.copyfile(run.folder / f"{what}.safetensors", aside)
        entries[name] = about | {
            "sha256": sha256(folder / name),
            "bytes": (folder / name).stat().st_size,
        }
        if what in tables:
            entries[name] |= {"inputs": len(tables[what]), "data": tables[what].metadata["data"]}
    with FileLock(
        folder / ".manifest.lock"
    ):  # runs that end together must not lose each other's entries
        write_json(folder / "manifest.json", manifest(folder) | entries)
    return folder
