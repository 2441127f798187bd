"""One look for one thing: a method from outside is drawn, too, and nothing is named by a slug."""

import json
import re
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

import cats
from cats.paper import beyond, figures, heads, style

ROOT = Path(__file__).resolve().parents[2]
SLUG = re.compile("|".join([*map(re.escape, style.MODELS), r"\w+-.+-\d+\b", "ag_news|stsb|imdb"]))


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


@pytest.fixture
def cautious():
    """A calibrator from outside, in two lines: `shared` under another name."""
    cats.calibrator("cautious", form="one", guarantee="marginal")(cats.METHODS["shared"].thresholds)
    yield "cautious"
    del cats.METHODS["cautious"]


@pytest.fixture
def frame(cautious):
    table = cats.Synthetic(layers=4).table(200)
    frame = cats.evaluate(table, ["static", cautious, "shared"], ["meta"], [0.1, 0.2], trials=2)
    return frame.assign(task="ag_news", backbone="bge-small-en-v1.5", share=frame["layers"] / 4)


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text)]


def colours(axis):
    return {line.get_color() for line in axis.get_lines() if len(line.get_xdata()) > 1}


def test_a_calibrator_from_outside_is_drawn(frame, cautious):
    figure = style.consistency_and_layers(frame, 4)
    assert cautious in texts(figure)
    assert {style.OTHERS[0], style.METHODS["shared"].colour} <= colours(figure.axes[0])
    columns = ["task", "epsilon", "method", "layer", "share"]
    cells = product(["imdb"], [0.1, 0.2], ["shared", cautious], range(1, 5), [0.25])
    shares = pd.DataFrame(list(cells), columns=columns)
    figure = style.exit_histograms(shares, 4)
    assert cautious in texts(figure) and "IMDB\nshare of inputs" in texts(figure)


def test_looks_are_distinct_and_stay():
    for known in (style.METHODS, style.MEASURES, style.RECIPES, style.MODELS, style.TASKS):
        assert len({look.colour for look in known.values()}) == len(known)
        assert len({look.marker for look in known.values()}) == len(known)
    assert set(cats.METHODS) <= set(style.METHODS)
    assert set(cats.MEASURES) <= set(style.MEASURES)
    both = style.looks(["b", "shared", "a"])
    assert list(both) == ["shared", "b", "a"] and both["a"] != both["b"]
    assert len(style.looks(map(str, range(20)))) == 20  # more than there are colours


def test_no_slug_reaches_a_figure(frame):
    areas = pd.DataFrame(
        [("ag_news", "bge-small-en-v1.5", m, k, 0.5) for m in ("pmax", "new") for k in (1, 2)],
        columns=["task", "backbone", "measure", "layer", "auroc"],
    )
    table = cats.Synthetic(layers=4).table(50)
    pair = heads.title("stsb", "mobilebert-uncased")
    both = {(pair, "paper"): table, (pair, "my own"): table}
    used = heads.layers(both, [0.1, 0.2], trials=1)
    two = pd.concat([frame, frame.assign(backbone="mobilebert-uncased")])
    pairs = {("ag_news", "bge-small-en-v1.5"): table}
    law = pd.DataFrame({"covered": [0, 1], "law": [0, 1], "ag_news bge-small-en-v1.5": [0, 1]})
    drawn = [
        beyond.law_figure(pairs, law),
        beyond.saved_figure(two.assign(percent=50)),
        style.consistency_and_layers(frame, 4, by="task", style="measure"),
        style.consistency_and_layers(two, None, by="task", style="backbone"),
        figures.auroc_by_layer(areas),
        heads.draw(heads.by_layer(both), used),
    ]
    assert [text for figure in drawn for text in texts(figure) if SLUG.search(text)] == []
    assert "STS-B, MobileBERT" in texts(drawn[-1]) and "bge-small" in texts(drawn[3])
    assert SLUG.search("ag_news-bge-small-en-v1.5-0: 256 texts") and SLUG.search("on demo-bert-0")


def test_notebooks_write_titles_in_words():
    """What a notebook writes into a title goes through `style.title` or `style.written`."""
    slug = re.compile(
        r"(?:\btitle\s*=|set_title\w*\()[^\n]*?"
        r"(?<!title\()(?<!written\()\b(run\.name|real\.name|backbone\b(?!\.))"
    )
    assert slug.search("axis.set(title=run.name)") and slug.search('title = f"{backbone}, 3"')
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                found += [(path.stem, hit[0]) for hit in slug.finditer("".join(cell["source"]))]
    assert found == []


def test_the_table_one_sees_has_no_latex_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "FIGURES", tmp_path)
    data = pd.DataFrame({"method": ["shared_all", "static"], "share": ["5 %", "6 %"]})
    shown = style.save_table("some", data, grey=[1]).to_html()
    assert "shared_all" in shown and "\\" not in shown and "gray" in shown
    latex = (tmp_path / "some.tex").read_text()
    assert r"shared\_all" in latex and r"5 \%" in latex


def test_letters_in_a_pdf_stay_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "FIGURES", tmp_path)
    with plt.rc_context():
        style.use_style()
        figure, axis = plt.subplots()
        axis.plot(np.arange(3), label="ε")
        style.save("some", figure)
    assert b"/Type3" not in (tmp_path / "some.pdf").read_bytes()


def test_panels_without_data_go_and_neighbours_carry_their_labels():
    figure, axes = plt.subplots(2, 2, sharex=True, sharey=True)
    for axis in axes.flat[[0, 1, 3]]:
        axis.plot([0, 1], [0, 1])
    axes[1, 0].set(xlabel="x", ylabel="y")
    style.hide_empty(axes)
    assert [axis.get_visible() for axis in axes.flat] == [True, True, False, True]
    assert axes[0, 0].get_xlabel() == "x" and axes[1, 1].get_ylabel() == "y"
    shown = [axes[0, 0].xaxis.label, axes[1, 1].yaxis.label]
    shown += [axes[0, 0].get_xticklabels()[0], axes[1, 1].get_yticklabels()[0]]
    assert all(text.get_visible() for text in shown)
    plt.close(figure)
