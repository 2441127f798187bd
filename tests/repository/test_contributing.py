"""The recipes of CONTRIBUTING.md, as written: what they add is evaluated, drawn and found."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from matplotlib.text import Text

import cats
from cats.model.families import FAMILIES
from cats.paper import style
from cats.train import demo, tasks
from cats.train.run import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def added():
    """What the blocks of Python add, by registry; gone afterwards."""
    registries = (cats.METHODS, cats.MEASURES, FAMILIES, tasks.TASKS)
    before = [dict(registry) for registry in registries]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)
    for block in blocks:
        exec(block, {})
    yield [set(registry) - set(old) for registry, old in zip(registries, before)]
    for registry, old in zip(registries, before):
        registry.clear()
        registry.update(old)


def test_the_recipes_work_as_written(added):
    assert added == [{"cautious"}, {"margin"}, {"camembert", "megatron-bert"}, {"spam"}]
    table = cats.Synthetic(layers=4).table(400)
    frame = cats.evaluate(table, ["shared", "cautious"], ["meta", "margin"], [0.1, 0.2], trials=3)
    layers = frame.groupby(["measure", "method"])["layers"].mean().unstack()
    assert (layers["cautious"] >= layers["shared"]).all() and np.isfinite(layers).all(axis=None)
    figure = style.consistency_and_layers(frame, 4, style="measure")
    assert {"cautious", "margin"} <= {text.get_text() for text in figure.findobj(Text)}
    plt.close(figure)


@pytest.mark.parametrize("model_type", ["camembert", "megatron-bert"])
@pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
def test_an_added_family_runs_in_a_cat_on_long_text(added, model_type):
    model = tiny.model(model_type=model_type)
    tuning, calibration, test = ([20 * text for text in part] for part in tiny.texts().values())
    options = {"tokenizer": demo.tokenizer(), "max_length": 10**6}
    cat = cats.CAT.fit(model, tuning, calibration, **options, **tiny.QUICK)
    texts = test[:5]
    whole = cat.predict(texts, epsilon=0.001)  # too small for so few inputs: all layers run
    assert (whole.exit_layers == 3).all()
    tokens = cat.tokenizer(
        texts, truncation=True, max_length=cat.max_length, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**tokens).logits.softmax(-1)
    np.testing.assert_allclose(whole.probabilities, expected, atol=1e-5)
    assert (cat.predict(texts, epsilon=0.5).exit_layers < 3).any()
    added_too = cat.predict(texts, epsilon=0.5, method="cautious", measure="margin")
    assert len(added_too.predictions) == 5 and (added_too.exit_layers <= 3).all()


def test_an_added_task_is_run_evaluated_and_titled(added, tmp_path):
    tiny.model(labels=("no", "yes")).save_pretrained(tmp_path / "tiny")
    demo.tokenizer().save_pretrained(tmp_path / "tiny")
    for split, n in {"train": 60, "validation": 30, "test": 30}.items():
        rows = demo.corpus("sentiment", split, n)
        texts, labels = rows["text"][:], [("ham", "spam")[y] for y in rows["label"][:]]
        frame = pd.DataFrame({"text": texts, "label": labels})
        (tmp_path / "data").mkdir(exist_ok=True)
        frame.to_csv(tmp_path / "data" / f"{split}.csv", index=False)
    run = Run(
        "spam",
        str(tmp_path / "tiny"),
        source=str(tmp_path / "data"),
        folder=tmp_path / "run",
        training={"epochs": 1},
        **tiny.QUICK,
    )
    frame = cats.evaluate(run.table("test"), "first_exit", "meta", [0.2, 0.4], trials=2)
    assert frame["accuracy"].between(0, 1).all() and frame["layers"].between(1, 3).all()
    assert run.backbone.model.config.id2label == {0: "ham", 1: "spam"}
    assert style.title(run.name) == "spam, tiny"
    figure = style.consistency_and_layers(frame.assign(task=run.task.name), 3, by="task")
    assert figure.axes[0].get_title() == "spam"
    plt.close(figure)
