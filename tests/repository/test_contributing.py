"""The recipes of CONTRIBUTING.md, as written: what they add is evaluated, drawn and found."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

import cats
from cats.paper import style
from cats.train import tasks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def added():
    """What the blocks of Python add, by registry; gone afterwards."""
    registries = (cats.METHODS, cats.MEASURES, tasks.TASKS)
    before = [dict(registry) for registry in registries]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)
    for block in blocks:
        exec(block, {})
    yield [set(registry) - set(old) for registry, old in zip(registries, before)]
    for registry, old in zip(registries, before):
        registry.clear()
        registry.update(old)


def test_the_recipes_work_as_written(added):
    assert added == [{"cautious"}, {"margin"}, {"spam"}]
    table = cats.Synthetic(layers=4).table(400)
    frame = cats.evaluate(table, ["shared", "cautious"], ["meta", "margin"], [0.1, 0.2], trials=3)
    layers = frame.groupby(["measure", "method"])["layers"].mean().unstack()
    assert (layers["cautious"] >= layers["shared"]).all() and np.isfinite(layers).all(axis=None)
    figure = style.consistency_and_layers(frame, 4, style="measure")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"cautious", "margin"} <= set(legend)
    plt.close(figure)
    assert tasks.find("spam").labels == ("ham", "spam")
