"""Tasks: any source gives the same data, and what would give a wrong table is refused."""

import numpy as np
import pytest
from datasets import Dataset

from cats.train import tasks
from cats.train.tasks import TASKS, Task, check, cut, load, read_file

TASK = Task("mine", ("text",), ("no", "yes"), validation=3)
ROWS = {"text": [f"text {i}" for i in range(20)], "label": [i % 2 for i in range(20)]}


def folder(path, kind, rows=ROWS, splits=("train", "test"), apart=True):
    path.mkdir()
    for split in splits:
        data = Dataset.from_dict(
            rows | ({"text": [f"{split} {text}" for text in rows["text"]]} if apart else {})
        )
        {"parquet": data.to_parquet, "csv": data.to_csv, "jsonl": data.to_json}[kind](
            path / f"{split}.{kind}"
        )
    return path


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_local_files_of_every_kind(tmp_path, kind):
    data = load(TASK, folder(tmp_path / "d", kind))
    assert {split: len(part) for split, part in data.items()} == {
        "train": 17,
        "validation": 3,
        "test": 20,
    }
    assert (
        data["test"]["text"][:] == [f"test {text}" for text in ROWS["text"]]
        and data["test"]["label"][:] == ROWS["label"]
    )
    assert sorted(data["train"]["text"][:] + data["validation"]["text"][:]) == sorted(
        f"train {text}" for text in ROWS["text"]
    )


@pytest.mark.parametrize("limit", [None, 12])
def test_no_text_is_in_two_splits(tmp_path, limit):
    """A text that comes twice stays in the split that is used last: what is tested or calibrated on
    is not trained on.
    """
    path = folder(tmp_path / "d", "csv", splits=tasks.SPLITS)
    for split, extra in (
        ("train", ["both", "twice", "twice", "test text 1"]),
        ("validation", ["both", "test text 2"]),
    ):
        rows = Dataset.from_csv(str(path / f"{split}.csv")).to_list()
        rows[: len(extra)] = [{"text": text, "label": 0} for text in extra]
        Dataset.from_list(rows).to_csv(path / f"{split}.csv")
    data = load(
        TASK, path, limit={split: limit for split in tasks.SPLITS} if limit else {"validation": 20}
    )
    texts = {split: data[split]["text"][:] for split in tasks.SPLITS}
    assert not any(
        set(texts[a]) & set(texts[b])
        for a, b in (("train", "validation"), ("train", "test"), ("validation", "test"))
    )
    if not limit:
        assert [len(texts[split]) for split in tasks.SPLITS] == [18, 19, 20]
        assert texts["train"].count("twice") == 2 and "both" in texts["validation"]


def test_nothing_left_to_train_on(tmp_path):
    with pytest.raises(ValueError, match="every training text is also in validation or test"):
        load(TASK, folder(tmp_path / "d", "csv", apart=False))


def test_a_task_of_your_own_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"unknown task 'mine'.*tasks.add"):
        tasks.find("mine")
    monkeypatch.setitem(TASKS, "mine", None)  # gone afterwards
    assert tasks.add(TASK) is tasks.find("mine")
    assert len(load("mine", folder(tmp_path / "d", "csv"))["train"]) == 17
    with pytest.raises(ValueError, match="letters, digits and underscores, not 'my-own'"):
        Task("my-own", ("text",))
    with pytest.raises(ValueError, match="one or two columns of text"):
        Task("mine", "text")


def test_label_names_become_numbers(tmp_path):
    rows = ROWS | {"label": ["yes" if i % 2 else "no" for i in range(20)]}
    assert load(TASK, folder(tmp_path / "d", "csv", rows))["test"]["label"][:] == ROWS["label"]


def test_limits_and_validation_sizes(tmp_path):
    source = folder(tmp_path / "d", "parquet", splits=tasks.SPLITS)
    assert {s: len(d) for s, d in load(TASK, source).items()} == {
        "train": 20,
        "validation": 3,
        "test": 20,
    }
    assert {s: len(d) for s, d in load(TASK, source, limit=5).items()} == {
        "train": 5,
        "validation": 5,
        "test": 5,
    }
    assert {s: len(d) for s, d in load(TASK, source, limit={"train": 7}).items()} == {
        "train": 7,
        "validation": 3,
        "test": 20,
    }
    assert (
        load(TASK, source, seed=1, limit=5)["train"]["text"][:]
        == load(TASK, source, seed=1, limit=5)["train"]["text"][:]
    )


@pytest.mark.parametrize("n", [0, 1, 7, 100, 1001])
def test_training_data_is_cut_70_10_20(n):
    parts = cut(Dataset.from_dict({"i": list(range(n))}), seed=3)
    assert sorted(i for part in parts.values() for i in part["i"][:]) == list(range(n))
    assert np.allclose(
        [len(parts[name]) for name in tasks.CUTS], np.array([0.7, 0.1, 0.2]) * n, atol=1
    )


def test_the_four_tasks_of_the_paper():
    assert [
        (t.n_outputs, t.metric) for t in map(TASKS.get, ("imdb", "vitaminc", "ag_news", "stsb"))
    ] == [(2, "accuracy"), (3, "accuracy"), (4, "accuracy"), (1, "correlation")]


@pytest.mark.parametrize(
    "rows, message",
    [
        ({"text": ["a"], "label": [2]}, "row 0 has label 2, which is none of mine's no, yes"),
        ({"text": ["a", "b"], "label": [0, -1]}, "row 1 has label -1"),
        ({"text": ["a"], "label": ["maybe"]}, "label 'maybe'"),
        ({"text": ["a", " "], "label": [0, 1]}, "1 empty texts in text, first in row 1"),
        ({"text": ["a", None], "label": [0, 1]}, "empty texts"),
        ({"body": ["a"], "label": [0]}, "no column text; there are body, label"),
        ({"text": ["a"]}, "no column label"),
    ],
)
def test_bad_rows_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        check(TASK, Dataset.from_dict(rows), "here")


def test_bad_regression_labels_are_refused():
    with pytest.raises(ValueError, match="label is missing or not a number in row 1"):
        check(
            Task("score", ("text",)),
            Dataset.from_dict({"text": ["a", "b"], "label": [1.0, float("nan")]}),
        )


def test_bad_sources_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="Offline, give the path of a folder with train.parquet.*columns text, label",
    ):
        load("imdb")
    with pytest.raises(ValueError, match="unknown task 'imbd'; there are imdb"):
        load("imbd")
    with pytest.raises(ValueError, match="cannot be generated"):
        load("imdb", "demo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no train"):
        load(TASK, tmp_path / "empty")
    with pytest.raises(ValueError, match="has no train split"):
        load(TASK, folder(tmp_path / "test only", "csv", splits=("test",)))
    with pytest.raises(ValueError, match="leave none"):
        load(Task("big", ("text",), ("no", "yes")), folder(tmp_path / "small", "csv"))
    mixed = folder(tmp_path / "mixed", "csv", splits=("train",))
    Dataset.from_dict(ROWS).to_json(mixed / "test.jsonl")
    with pytest.raises(ValueError, match="mixes formats"):
        load(TASK, mixed)


TEXTS = ['He said "no', 'a "quoted" word', "plain, with a comma", 'and "so on']


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv", "jsonl", "txt", "CSV"])
def test_a_file_of_texts_is_read_as_what_it_is(tmp_path, kind):
    path, data = (
        tmp_path / f"texts.{kind}",
        Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0, 1]}),
    )
    writers = {"parquet": data.to_parquet, "csv": data.to_csv, "jsonl": data.to_json}
    if kind == "tsv":  # no quotes there: a text that opens one must not swallow the rows after it
        path.write_text("text\tlabel\n" + "".join(f"{text}\t0\n" for text in TEXTS))
    elif kind == "txt":
        path.write_text("".join(f"{text}\n" for text in TEXTS))
    else:
        writers[kind.lower()](path)
    assert read_file(path)["text"][:] == TEXTS


def test_a_file_of_texts_that_cannot_be_read_is_refused(tmp_path):
    for name, content in (("texts.xlsx", b"PK"), ("texts", b"a\n"), ("texts.csv.gz", b"\x1f\x8b")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} ends in .*can be read: rename it"):
            read_file(tmp_path / name)
    (tmp_path / "texts.parquet").write_text("text,label\na,0\n")
    with pytest.raises(
        ValueError, match="texts.parquet cannot be read as parquet: Parquet magic bytes not found"
    ):
        read_file(tmp_path / "texts.parquet")
    (tmp_path / "texts.tsv").write_text("sentence\tlabel\na\t0\n")
    with pytest.raises(
        ValueError, match="texts.tsv: no column text; there are sentence, label: give text_columns"
    ):
        read_file(tmp_path / "texts.tsv")
    with pytest.raises(FileNotFoundError, match="there is no file .*nowhere.txt"):
        read_file(tmp_path / "nowhere.txt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_altered_copies_leave_words_out_and_nothing_else(share):
    columns = tasks.find("similarity").columns
    data = tasks.load("similarity", limit={"train": 300})["train"]
    copies = tasks.altered(data, columns, share, limit=200, seed=1)
    assert copies.column_names == list(columns) and len(copies) == 200
    words = kept = 0
    for row, copy in zip(data, copies):
        for column in copies.column_names:
            left, whole = copy[column].split(), iter(row[column].split())
            assert left and all(word in whole for word in left)  # in their order
            words, kept = words + len(row[column].split()), kept + len(left)
    # false alarm below 1e-6 by Hoeffding, beside the one word that always stays
    assert -0.03 <= kept / words - (1 - share) <= 0.03 + share * 400 / words
