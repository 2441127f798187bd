"""Tasks: which columns hold the text, which labels there are, and how the data is cut (Section 5.1,
Table 2, Appendix B).

Data is named by a Hub id, by a folder with train, validation and test files (parquet, CSV or JSON
lines), or is generated (the demo tasks). A task of your own is one entry:

    add(Task("spam", ("subject", "body"), labels=("ham", "spam")))
    load("spam", "path/to/folder")
"""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset

from cats._io import digest
from cats.train import demo

SPLITS = ("train", "validation", "test")
CUTS = {"tune": 0.7, "scale": 0.1, "meta": 0.2}  # of the training data (Appendix B)
READERS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}


@dataclass(frozen=True)
class Task:
    """One text classification or regression task.

    name        letters, digits and underscores: it begins the name of a run
    columns     the text columns, one or two
    labels      names of the classes; empty for regression
    hub         where the data is on the Hugging Face Hub, if no other place is given; "demo" means
                generated here
    validation  how many training rows to hold out where the data has no validation split, or to
                keep where it has one
    rename      columns that are called differently on the Hub
    """

    name: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    hub: str = ""
    validation: int = 5000
    max_length: int = 256
    rename: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w+", self.name):
            raise ValueError(
                f"a task's name is letters, digits and underscores, not {self.name!r}: runs and"
                " their files are named task-model-seed"
            )
        if isinstance(self.columns, str) or not 1 <= len(self.columns) <= 2:
            raise ValueError(
                f"a task has one or two columns of text, as ('text',), not {self.columns!r}"
            )

    @property
    def regression(self) -> bool:
        return not self.labels

    @property
    def metric(self) -> str:
        return "correlation" if self.regression else "accuracy"

    @property
    def n_outputs(self) -> int:
        return max(1, len(self.labels))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("imdb", ("text",), ("negative", "positive"), "stanfordnlp/imdb"),
        Task(
            "vitaminc",
            ("claim", "evidence"),
            ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO"),
            "tals/vitaminc",
            validation=10_000,
        ),
        Task("ag_news", ("text",), ("World", "Sports", "Business", "Sci/Tech"), "fancyzhx/ag_news"),
        Task(
            "stsb",
            ("sentence1", "sentence2"),
            (),
            "mteb/stsbenchmark-sts",
            validation=1500,
            rename={"score": "label"},
        ),
        *(
            Task(
                name,
                tuple(demo.COLUMNS[name]),
                tuple(demo.LABELS[name] or ()),
                "demo",
                2000,
                demo.MAX_LENGTH,
            )
            for name in demo.TASKS
        ),
    )
}


def add(task: Task) -> Task:
    """Let a task be known by its name: to runs, profiles and notebooks."""
    TASKS[task.name] = task
    return task


def find(task: str | Task) -> Task:
    """A task by name, or the task itself."""
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise ValueError(
            f"unknown task {task!r}; there are {', '.join(TASKS)}. A task of your own is one line:"
            " cats.train.tasks.add(Task(...))"
        )
    return TASKS[task]


def load(
    task: str | Task,
    source: str | Path | None = None,
    seed: int = 0,
    limit: int | dict[str, int] | None = None,
) -> DatasetDict:
    """The task's data as a DatasetDict of train, validation and test, each with its text columns
    and `label`.

    source  a Hub id or a folder; by default the task's own. Demo tasks are generated.
    limit   at most so many rows of each split, taken at random: one number, or one for each split
            by name
    """
    task = find(task)
    source = str(source or task.hub)
    if source == "demo":
        if task.name not in demo.TASKS:
            raise ValueError(
                f"{task.name} cannot be generated: give the path of its data. The demo has"
                f" {', '.join(demo.TASKS)}"
            )
        data = demo.splits(task.name, seed)
    else:
        data = _read(task, source)
    missing = [split for split in ("train", "test") if split not in data]
    if missing:
        raise ValueError(
            f"{source} has no {' and no '.join(missing)} split, only {', '.join(data)}"
        )
    data = DatasetDict(
        {split: check(task, data[split], f"{source} {split}") for split in SPLITS if split in data}
    )
    if "validation" not in data:  # IMDB and AG News: hold some training rows out (Table 2)
        if len(data["train"]) <= task.validation:
            raise ValueError(
                f"{source}: {len(data['train'])} training rows leave none after {task.validation}"
                " for validation"
            )
        cut = data["train"].train_test_split(task.validation, seed=seed)
        data["train"], data["validation"] = cut["train"], cut["test"]
    limits = dict.fromkeys(SPLITS, limit) if not isinstance(limit, dict) else limit
    limits = {"validation": task.validation} | {split: n for split, n in limits.items() if n}
    for split, n in limits.items():
        if n < len(data[split]):
            data[split] = data[split].shuffle(seed=seed).select(range(n))
    return apart(task, data)


def apart(task: Task, data: DatasetDict) -> DatasetDict:
    """No text in two splits: IMDB and STS-B repeat some, and what is calibrated or tested on must
    not be trained on.
    """
    texts = {
        split: list(zip(*(data[split][column][:] for column in task.columns))) for split in SPLITS
    }
    kept, later = {}, set()
    for split in reversed(SPLITS):
        kept[split] = data[split].select(
            [i for i, text in enumerate(texts[split]) if text not in later]
        )
        later.update(texts[split])
    if not len(kept["train"]) and texts["train"]:
        raise ValueError(f"{task.name}: every training text is also in validation or test")
    return DatasetDict({split: kept[split] for split in SPLITS})


def _read(task: Task, source: str) -> DatasetDict:
    """Whatever is at a folder or Hub id, as a DatasetDict, with the Hub's column names undone."""
    folder = Path(source)
    if folder.is_dir():
        files = {
            split: path
            for split in SPLITS
            for path in sorted(folder.glob(f"{split}.*"))
            if path.suffix in READERS
        }
        if not files:
            raise FileNotFoundError(
                f"{folder} holds no train, validation or test file ending in {', '.join(READERS)}"
            )
        readers = {READERS[path.suffix] for path in files.values()}
        if len(readers) > 1:
            raise ValueError(
                f"{folder} mixes formats: {', '.join(path.name for path in files.values())}"
            )
        data = load_dataset(
            readers.pop(), data_files={split: str(path) for split, path in files.items()}
        )
    else:
        try:
            data = load_dataset(source)
        except (
            Exception
        ) as error:  # no network, no such id, gated: they all come as different errors
            raise FileNotFoundError(
                f"the data of {task.name} is not at {source!r}: that is no folder here, and the Hub"
                f" did not give it ({type(error).__name__}). Offline, give the path of a folder"
                " with train.parquet and test.parquet (or .csv, .jsonl) with the columns"
                f" {', '.join((*task.columns, 'label'))}"
            ) from error
    for old, new in task.rename.items():
        data = DatasetDict(
            {s: d.rename_column(old, new) if old in d.column_names else d for s, d in data.items()}
        )
    return data


def read_file(path: str | Path, columns: Sequence[str] = ("text",)) -> Dataset:
    """Unlabelled texts of one file, by its ending; a text file has one text a line, in the column
    `text`.

    What cannot be read as what it is, is refused: a table read as lines of text would calibrate on
    headers and labels.
    """
    path = Path(path)
    kind = path.suffix.lower()
    readers = READERS | {".tsv": "csv", ".txt": "text"}
    if kind not in readers:
        raise ValueError(
            f"{path.name} ends in {kind or 'nothing'}; files ending in {', '.join(readers)} can be"
            " read: rename it if it is one of these, else convert it"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}: give its path from the folder the notebook runs in, or a"
            " whole one"
        )
    options = {"sep": "\t", "quoting": csv.QUOTE_NONE} if kind == ".tsv" else {}
    try:
        data = load_dataset(readers[kind], data_files=str(path), split="train", **options)
    except Exception as error:  # each format has errors of its own, inside one of `datasets`
        raise ValueError(
            f"{path.name} cannot be read as {kind[1:]}: {error.__cause__ or error}"
        ) from error
    missing = [column for column in columns if column not in data.column_names]
    if missing:
        raise ValueError(
            f"{path.name}: no column {', '.join(missing)}; there are"
            f" {', '.join(data.column_names)}: give text_columns"
        )
    return data


def check(task: Task, data: Dataset, where: str = "the data", labelled: bool = True) -> Dataset:
    """The task's columns of a data set, with labels as numbers; refuses what would give a wrong
    table.
    """
    wanted = [*task.columns, *(["label"] if labelled else [])]
    missing = [column for column in wanted if column not in data.column_names]
    if missing:
        raise ValueError(
            f"{where}: no column {', '.join(missing)}; there are {', '.join(data.column_names)}"
        )
    for column in task.columns:
        texts = data[column][:]
        empty = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
        if empty:
            raise ValueError(
                f"{where}: {len(empty)} empty texts in {column}, first in row {empty[0]}: fill or"
                " drop them"
            )
    if not labelled:
        return data.select_columns(wanted)
    labels = data["label"][:]
    if task.regression:
        values: Any = np.array(labels, dtype=float)
        if not np.isfinite(values).all():
            raise ValueError(
                f"{where}: label is missing or not a number in row"
                f" {int(np.argmin(np.isfinite(values)))}"
            )
        kind = Value("float32")
    else:
        index = {name: i for i, name in enumerate(task.labels)}
        values = [index.get(label, label) for label in labels]
        bad = [
            i
            for i, value in enumerate(values)
            if not isinstance(value, int) or not 0 <= value < len(index)
        ]
        if bad:
            raise ValueError(
                f"{where}: row {bad[0]} has label {labels[bad[0]]!r}, which is none of"
                f" {task.name}'s {', '.join(index)}"
            )
        kind = ClassLabel(names=list(task.labels))
    extra = [column for column in ("difficulty",) if column in data.column_names]
    data = data.select_columns([*task.columns, *extra]).add_column("label", values)
    return data.cast_column("label", kind)


def cut(train: Dataset, seed: int = 0) -> DatasetDict:
    """Training data cut 70/10/20 into tune (early heads), scale (temperatures) and meta (meta
    classifiers).
    """
    order = np.random.default_rng(seed).permutation(len(train))
    ends = [round(len(train) * end) for end in np.cumsum(list(CUTS.values()))]
    parts = zip(CUTS, [0, *ends[:-1]], ends)
    return DatasetDict({name: train.select(order[start:end]) for name, start, end in parts})


def altered(
    data: Dataset, columns: Sequence[str], share: float = 0.15, limit: int = 8000, seed: int = 0
) -> Dataset:
    """Unlabelled copies of a data set's texts, at most `limit`, each with about so large a share of
    its words left out: inputs like those F was trained on that F has never seen.
    """
    rng = np.random.default_rng(seed)
    copies: dict[str, list[str]] = {column: [] for column in columns}
    for row in data.select(range(min(limit, len(data)))):
        for column in columns:
            words = row[column].split()
            kept = rng.random(len(words)) >= share
            kept[rng.integers(len(words))] = True
            copies[column].append(" ".join(np.array(words)[kept]))
    return Dataset.from_dict(copies)


def fingerprint(data: Dataset) -> str:
    """A hash of the texts and labels of a data set, in order."""
    columns = (repr((column, data[column][:])).encode() for column in sorted(data.column_names))
    return digest(b"".join(columns))


def from_texts(columns: Sequence[str], texts: Iterable[str | tuple[str, ...]]) -> Dataset:
    """An unlabelled data set from a list of texts, or of tuples where there are two columns."""
    rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    return Dataset.from_dict({column: [row[i] for row in rows] for i, column in enumerate(columns)})
