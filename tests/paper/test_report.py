"""Tables beside the paper's: means, cells, grey rows, and what is left out where a task or a
measure is missing.
"""

import json

import numpy as np
import pandas as pd
import pytest
from IPython.display import Markdown

import cats
from cats import evaluate
from cats.paper import report, style

ROWS = ["static", "shared/sm", "shared/meta", "oracle"]


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(0)
    labels = rng.uniform(0, 5, 200)
    logits = labels[:, None, None] + rng.normal(0, [[1], [0.6], [0.3], [0.1]], (200, 4, 1))
    regression = cats.ScoreTable(
        logits, rng.random((200, 3)), labels, {"backbone": "small", "rows": {"train": 7}}
    )
    return {"imdb": cats.Synthetic(layers=5, classes=2).table(300), "stsb": regression}


@pytest.fixture(scope="module")
def frame(tables):
    return report.trials(tables, ROWS, [0.9, 0.8], trials=3)


@pytest.fixture(scope="module")
def numbers(frame):
    paper = pd.DataFrame(
        {
            "task": ["imdb"] * 2,
            "method": ["static", "shared/meta"],
            "target": 0.9,
            "layers": [3.5, 2.25],
            "guaranteed": 77.0,
        }
    )
    return report.beside(frame, paper)


def test_trials_are_those_of_evaluate(tables, frame):
    for row in ("shared/sm", "shared/meta"):
        slow = evaluate(tables["imdb"], "shared", row.partition("/")[2], [0.1, 0.2], trials=3)
        ours = frame[(frame["task"] == "imdb") & (frame["method"] == row)]
        assert np.allclose(ours["layers"], slow["layers"]) and np.allclose(
            ours["consistency"], 100 * slow["consistency"]
        )
    assert list(dict.fromkeys(frame["method"])) == ROWS and list(dict.fromkeys(frame["task"])) == [
        "imdb",
        "stsb",
    ]
    assert set(frame.loc[frame["task"] == "stsb", "method"]) == set(ROWS) - {
        "shared/sm"
    }  # no softmax in a regression
    accuracy = 100 * tables["imdb"].correct[:, -1].mean()
    assert np.allclose(
        frame.loc[frame["task"] == "imdb", "guaranteed"],
        accuracy * frame.loc[frame["task"] == "imdb", "target"],
    )


def test_trials_pass_options_on_and_name_the_task_in_warnings(tables):
    few = {"stsb": tables["stsb"].take(np.arange(10))}
    with pytest.warns(
        cats.CalibrationWarning, match="stsb: meta, 2 of 2 trials: pac cannot promise"
    ):
        report.trials(
            few, ["pac/meta", "static"], [0.9], trials=2, options={"pac": {"delta": 0.001}}
        )


def test_beside_means_and_paper(frame, numbers):
    one = numbers.set_index(["task", "method", "target"]).loc[("imdb", "shared/meta", 0.9)]
    raw = frame[
        (frame["task"] == "imdb") & (frame["method"] == "shared/meta") & (frame["target"] == 0.9)
    ]["layers"]
    assert (
        np.isclose(one["layers"], raw.mean())
        and np.isclose(one["layers_std"], raw.std())
        and one["layers_paper"] == 2.25
    )
    assert numbers["layers_paper"].notna().sum() == 2


def test_layout(numbers):
    shown, grey = report.layout(numbers, ["consistency", "accuracy", "correlation", "layers"])
    titles = [
        f"{task} {value}"
        for task, value in [
            ("IMDB", "consist."),
            ("IMDB", "acc."),
            ("IMDB", "layers"),
            ("STS-B", "consist."),
            ("STS-B", "corr."),
            ("STS-B", "layers"),
        ]
    ]
    assert list(shown) == ["method", *titles]
    assert list(shown["method"]) == ["target 0.90", *ROWS, "target 0.80", *ROWS]
    assert grey == [1, 4, 6, 9]  # static and oracle
    one = numbers.set_index(["task", "method", "target"]).loc[("imdb", "shared/meta", 0.9)]
    assert shown["IMDB layers"][3] == f"{one['layers']:.2f} [2.25]"
    assert shown["IMDB acc."][0] == f"({one['guaranteed']:.2f}) [77.00]"
    assert shown["STS-B layers"][2] == "" and "[" not in "".join(shown["STS-B layers"])


def test_show_saves_or_says_so(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "FIGURES", tmp_path)
    report.show(
        "some_table", numbers, ["layers"], ["imdb"], {"trials": 3}, {"imdb": "a", "stsb": "b"}
    )
    assert json.loads((tmp_path / "some_table.json").read_text())["inputs"] == {"imdb": "a"}
    assert "2.25" in (tmp_path / "some_table.md").read_text() and set(
        pd.read_csv(tmp_path / "some_table.csv")["task"]
    ) == {"imdb"}
    assert (
        isinstance(report.show("none", numbers, ["layers"], ["vitaminc"]), Markdown)
        and not (tmp_path / "none.json").exists()
    )


@pytest.mark.parametrize(
    "name, method",
    [
        ("table3_classification_test", None),
        ("tableC1_naive_dev", "naive"),
        ("tableC2_measures_dev", "shared"),
    ],
)
def test_paper_rows_are_named_and_unique(name, method):
    frame = report.paper(name, method)
    assert not frame.duplicated(report.KEYS).any() and {
        row.partition("/")[0] for row in frame["method"]
    } <= set(cats.METHODS)
    if "guaranteed" in frame:  # (1-epsilon) times one accuracy a task
        full = frame["guaranteed"] / frame["target"]
        assert (full.groupby(frame["task"]).agg(np.ptp) < 0.02).all()


def test_rank_agreement():
    frame = pd.DataFrame(
        {
            "task": "imdb",
            "target": [0.9] * 3 + [0.8] * 3,
            "layers": [1, 2, 3] * 2,
            "layers_paper": [4, 5, 6, 6, 5, 4],
        }
    )
    assert np.allclose(report.rank_agreement(frame), [1, -1])
    assert report.rank_agreement(frame.drop(columns="layers_paper")).empty


def test_layer_shares_and_caveats(tables, numbers):
    figure = report.layer_shares(numbers)
    assert [axis.get_title() for axis in figure.axes] == ["IMDB", "STS-B"]
    assert "small with 4 layers" in report.caveats({"stsb": tables["stsb"]})
    assert "VitaminC" in report.caveats(
        {"vitaminc": tables["stsb"]}
    ) and "on 7 rows" in report.caveats({"ag_news": tables["stsb"]})
