"""The ScoreTables in data/tables: real runs, eight pairs of task and backbone, a validation and a test split each.

    shipped.pairs()                                        # what there is
    shipped.table("ag_news", "mobilebert-uncased", "test") # checked against the manifest's hash

`add` puts the tables, heads and meta classifiers of a finished run there. Scores stay in float32: in half precision the
confident ones tie (above 0.5 it has steps of 0.0005), and thresholds and exits would move.
"""

import json
import os
import shutil
from pathlib import Path

from cats.files import DATA, sha256, write_json, writing
from cats.tables import ScoreTable

FOLDER = Path(os.environ.get("CATS_TABLES", DATA / "tables"))  # the variable: figures of your own tables
SPLITS = ("validation", "test")
KEPT = (*SPLITS, "heads", "meta")  # files of a run's folder


def manifest(folder=FOLDER):
    """What is shipped, by file name: task, backbone, what it holds, and its hash."""
    path = Path(folder) / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def pairs(folder=FOLDER, layers=None):
    """(task, backbone) of the tables there are, in the paper's order of tasks; with `layers` only of backbones that deep."""
    order = ("imdb", "vitaminc", "ag_news", "stsb")
    found = {(entry["task"], entry["backbone"]) for entry in manifest(folder).values() if layers in (None, entry["layers"])}
    return sorted(found, key=lambda pair: (pair[1], order.index(pair[0]) if pair[0] in order else len(order)))


def path(task, backbone, what, folder=FOLDER):
    """A shipped file, after checking that it is the one the manifest names."""
    name, known = f"{task}-{backbone}-{what}.safetensors", manifest(folder)
    if name not in known:
        raise FileNotFoundError(f"no {what} of {task} with {backbone} is shipped; there are {', '.join(known) or 'none'}")
    file = Path(folder) / name
    if not file.exists() or sha256(file) != known[name]["sha256"]:
        raise ValueError(f"{file} is not the file its manifest names: check it out again, or make it anew (see data/README.md)")
    return file


def table(task, backbone, split="test", folder=FOLDER):
    """The ScoreTable of a split."""
    return ScoreTable.load(path(task, backbone, split, folder))


def add(run, folder=FOLDER):
    """Copy a finished run's tables, heads and meta classifiers, and enter them in the manifest."""
    folder, entries = Path(folder), manifest(folder)
    tables = {split: run.table(split) for split in SPLITS}  # made now if they are not there
    for what in KEPT:
        about = {"task": run.task.name, "backbone": run.backbone_name, "seed": run.seed, "what": what, "layers": run.backbone.n_layers}
        name = f"{about['task']}-{about['backbone']}-{what}.safetensors"
        with writing(folder / name) as aside:
            shutil.copyfile(run.folder / f"{what}.safetensors", aside)
        entries[name] = about | {"sha256": sha256(folder / name), "bytes": (folder / name).stat().st_size}
        if what in tables:
            entries[name] |= {"inputs": len(tables[what]), "data": tables[what].metadata["data"]}
    write_json(folder / "manifest.json", entries)
    return folder
