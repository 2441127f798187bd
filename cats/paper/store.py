"""The ScoreTables in data/tables: real runs, a validation and a test split each; and the runs of
this checkout.

    store.pairs()                                         # what there is
    store.table("ag_news", "mobilebert-uncased", "test")  # checked against the manifest's hash
    store.table("ag_news", "mobilebert-uncased", "test", recipe="distilled")

`add` puts the tables, heads and meta classifiers of a finished run there. Scores stay in float32:
in half precision the confident ones tie (above 0.5 it has steps of 0.0005), and thresholds and
exits would move.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from cats._io import read_json, sha256, write_json, writing
from cats.paper.places import BUILD, DATA, ROOT, TABLES
from cats.stats.table import ScoreTable

if TYPE_CHECKING:
    from cats.train.run import Run

FOLDER = TABLES
SPLITS = ("validation", "test")
# the paper's encoders, and before each the one that stands for it in the shipped tables
MAIN = ("mobilebert-uncased", "albert-xlarge-v2")
SHALLOW = ("bge-small-en-v1.5", "albert-base-v2")  # Figure C.2
OTHER = ("all-mpnet-base-v2", "roberta-large")  # Figure C.3
KEPT = (*SPLITS, "heads", "meta")  # files of a run's folder; see `kept`
LARGEST = 2_500_000  # bytes of heads that are kept
PAPER = "paper"  # the recipe that the paper's figures are drawn from
Tables = dict[tuple[str, str], ScoreTable]  # by task and backbone


def open_run(**settings: Any) -> "Run":
    """A run of this checkout: its folder counts from the root, and has a default place."""
    from cats.train.run import Run  # it needs torch

    folder = settings.pop("folder", "") or None
    run = Run(**settings, folder=BUILD)
    run.folder = ROOT / folder if folder else BUILD / "demo" / "runs" / run.name
    return run


def manifest(folder: str | Path = FOLDER) -> dict:
    """What is shipped, by file name: task, backbone, recipe, what it holds, and its hash."""
    return read_json(Path(folder) / "manifest.json") or {}


def shipped() -> bool:
    """Whether the tables are those that come with the repository, not somebody's own."""
    return FOLDER.resolve() == (DATA / "tables").resolve()


def _first(entry: dict) -> bool:
    """Whether an entry is of the paper's recipe and the first seed."""
    return entry.get("recipe", PAPER) == PAPER and entry.get("seed", 0) == 0


def pairs(folder: str | Path = FOLDER, recipe: str = PAPER) -> list[tuple[str, str]]:
    """(task, backbone) of the tables there are, backbone by backbone, those of Figure C.3 last, in
    the paper's order of tasks.
    """
    order = ("imdb", "vitaminc", "ag_news", "stsb")
    found = {
        (entry["task"], entry["backbone"])
        for entry in manifest(folder).values()
        if entry.get("recipe", PAPER) == recipe and entry.get("seed", 0) == 0
    }
    place = lambda task: order.index(task) if task in order else len(order)
    return sorted(found, key=lambda pair: (pair[1] in OTHER, pair[1], place(pair[0])))


def seeds(task: str, backbone: str, recipe: str = PAPER, folder: str | Path = FOLDER) -> list[int]:
    """The seeds of which there is a test table."""
    wanted = (task, backbone, recipe, "test")
    keys = ("task", "backbone", "recipe", "what")
    entries = ({"recipe": PAPER, "seed": 0} | entry for entry in manifest(folder).values())
    return sorted(e["seed"] for e in entries if tuple(e[key] for key in keys) == wanted)


def one_of(wanted: str, known: Iterable[str], folder: str | Path = FOLDER) -> str | None:
    """The backbone that is wanted, if it has tables, else the first of those known that has."""
    there = {backbone for _, backbone in pairs(folder)}
    return next((name for name in (wanted, *known) if name in there), None)


def main(wanted: str = MAIN[0], folder: str | Path = FOLDER) -> str:
    """The backbone to draw the paper's main figures from: the one wanted, if it is there, else one
    of MAIN, else the first with most layers.
    """
    entries = sorted(manifest(folder).items())
    layers = {entry["backbone"]: entry["layers"] for _, entry in entries if _first(entry)}
    if not layers:
        raise FileNotFoundError(f"no ScoreTables in {folder}: make them first (see data/README.md)")
    return one_of(wanted, MAIN, folder) or max(layers, key=lambda name: layers[name])


def tables(
    split: str, backbone: str = MAIN[0], folder: str | Path = FOLDER
) -> dict[str, ScoreTable]:
    """{task: ScoreTable} of one backbone in the paper's order of tasks; of another where there is
    none of this (see `main`).
    """
    used = main(backbone, folder)
    return {task: table(task, name, split, folder) for task, name in pairs(folder) if name == used}


def file_name(task: str, backbone: str, what: str, recipe: str = PAPER, seed: int = 0) -> str:
    """TASK-BACKBONE-WHAT.safetensors, with recipe and seed in between where they are not the first.

    >>> file_name("stsb", "bge", "test"), file_name("stsb", "bge", "test", "distilled", 1)
    ('stsb-bge-test.safetensors', 'stsb-bge-distilled-seed1-test.safetensors')
    """
    parts = [task, backbone, recipe if recipe != PAPER else "", f"seed{seed}" if seed else "", what]
    return "-".join(part for part in parts if part) + ".safetensors"


def path(
    task: str,
    backbone: str,
    what: str,
    folder: str | Path = FOLDER,
    recipe: str = PAPER,
    seed: int = 0,
) -> Path:
    """A shipped file, after checking that it is the one the manifest names."""
    name, known = file_name(task, backbone, what, recipe, seed), manifest(folder)
    if name not in known:
        raise FileNotFoundError(
            f"no {what} of {task} with {backbone} is shipped for the recipe {recipe} and seed"
            f" {seed}; there are {', '.join(known) or 'none'}"
        )
    file = Path(folder) / name
    if not file.exists() or sha256(file) != known[name]["sha256"]:
        raise ValueError(
            f"{file} is not the file its manifest names: check it out again, or make it anew (see"
            " data/README.md)"
        )
    return file


def table(
    task: str,
    backbone: str,
    split: str = "test",
    folder: str | Path = FOLDER,
    recipe: str = PAPER,
    seed: int = 0,
) -> ScoreTable:
    """The ScoreTable of a split."""
    return ScoreTable.load(path(task, backbone, split, folder, recipe, seed))


def kept(run: "Run") -> tuple[str, ...]:
    """What is kept of a finished run. Heads read states of an F that is not kept, and say nothing
    without it: so of other seeds than 0, and where heads are large, the tables alone.
    """
    small = (run.home / "heads.safetensors").stat().st_size <= LARGEST
    return KEPT if run.seed == 0 and small else SPLITS


def add(runs: "Run | Iterable[Run]", folder: str | Path = FOLDER) -> Path:
    """Copy finished runs' tables, heads and meta classifiers, and enter them in the manifest: see
    `kept`. What is not kept goes, if another run of the same name left it there.
    """
    from cats.train.run import Run  # it needs torch

    folder, entries, gone = Path(folder), {}, []
    for run in [runs] if isinstance(runs, Run) else runs:
        tables = {split: run.table(split) for split in SPLITS}  # made now if they are not there
        name_of = lambda what, run=run: file_name(
            run.task.name, run.backbone_name, what, run.recipe.name, run.seed
        )
        gone += [name_of(what) for what in KEPT if what not in kept(run)]
        for what in kept(run):
            about = {
                "task": run.task.name,
                "backbone": run.backbone_name,
                "seed": run.seed,
                "recipe": run.recipe.name,
                "what": what,
                "layers": run.backbone.n_layers,
            }
            name = name_of(what)
            with writing(folder / name) as aside:
                shutil.copyfile(run.home / f"{what}.safetensors", aside)
            size = (folder / name).stat().st_size
            entries[name] = about | {"sha256": sha256(folder / name), "bytes": size}
            if what in tables:
                entries[name]["inputs"] = len(tables[what])
                entries[name]["data"] = tables[what].metadata["data"]
    with FileLock(folder / ".manifest.lock"):  # runs that end together must not lose entries
        known = manifest(folder) | entries
        write_json(
            folder / "manifest.json",
            {name: entry for name, entry in known.items() if name not in gone},
        )
        for name in gone:
            (folder / name).unlink(missing_ok=True)
    return folder
