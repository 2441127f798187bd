"""A cascade of any models: its table, its promise, its costs, and what it does not import."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tiny
from batches import ROOT
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import pipeline

import cats
from cats.train import demo

COSTS = [0.1, 1, 20]


class Noisy:
    """A step that knows the answer, more or less, and counts the inputs it was given."""

    def __init__(self, noise, classes=3):
        self.noise, self.classes, self.seen = noise, classes, 0

    def __call__(self, rows):
        self.seen += len(rows)
        x = np.array(rows)
        noise = np.sin(np.outer(x + 0.5, np.arange(1, self.classes + 1) * 7919.0 * self.noise))
        return 3 * np.eye(self.classes)[x % self.classes] + 4 * self.noise * noise


def made(**options):
    return cats.Cascade([Noisy(1.0), Noisy(0.5), Noisy(0.0)], COSTS, **options)


def test_the_table_holds_what_every_step_says():
    cascade = made()
    table = cascade.table(range(50), labels=np.arange(50) % 3)
    for k, step in enumerate(cascade.steps):
        np.testing.assert_allclose(table.logits[:, k], step(range(50)))
    np.testing.assert_allclose(table.costs, [0.1, 1.1, 21.1])
    assert (table.predictions[:, -1] == table.labels).all() and not table.consistent.all()


@pytest.mark.parametrize("measure", ["sm", "entropy", "kl", "patience"])
def test_runs_as_its_table_says_and_each_step_only_on_what_is_left(measure):
    """The oracle: exits and predictions read from the table of all steps."""
    cascade = made(measure=measure).calibrate(range(400))
    table = cascade.table(range(400, 700))
    bars = cascade.thresholds(0.1)
    expected = cats.exit_layers(table.scores(measure), bars + cascade.margins[measure])
    for step in cascade.steps:
        step.seen = 0
    out = cascade.predict(range(400, 700), 0.1)
    assert (out.exit_layers == expected).all() and len(set(expected)) > 1
    assert (out.predictions == table.predictions[np.arange(300), expected - 1]).all()
    assert [step.seen for step in cascade.steps] == [(expected >= k).sum() for k in (1, 2, 3)]
    np.testing.assert_allclose(cascade.cost(expected), table.costs[expected - 1])
    inside = cats.calibrate(
        cascade.ready.scores(measure),
        cascade.ready.consistent,
        0.1,
        "first_exit",
        margin=cascade.margins[measure],
    )
    np.testing.assert_array_equal(bars, inside)
    some = cascade.predict(range(400, 700), 0.1, exit_layers=[2])
    assert set(some.exit_layers) == {2, 3}


def test_evaluation_and_savings_are_in_costs():
    table = made().calibrate(range(500)).ready
    frame = cats.evaluate(table, ["first_exit", "static", "independent", "oracle"], "sm", [0.1])
    for row in frame[frame.method == "first_exit"].head(3).itertuples():
        keep = cats.stats.trials.split(500, row.trial)
        scores = table.scores("sm")
        taus = cats.calibrate(scores[keep], table.consistent[keep], 0.1, "first_exit")
        exits = cats.exit_layers(scores[~keep], taus)
        assert row.cost == pytest.approx(table.costs[exits - 1].mean())
        assert row.layers == pytest.approx(exits.mean())
    assert (frame["cost"] >= 0.1 - 1e-9).all() and (frame["cost"] <= 21.1 + 1e-9).all()
    found = made().calibrate(range(500)).savings([0.3, 0.05])
    assert (found["cost_low"] <= found["cost"]).all() and (
        found["cost"] <= found["cost_high"]
    ).all()
    plain = cats.ScoreTable(table.logits)
    assert "cost" not in cats.evaluate(plain, "first_exit", "sm", [0.1]) and plain.costs is None


def test_an_audited_input_runs_all_steps():
    cascade, monitor = made().calibrate(range(400)), cats.Monitor(0.9, audit=0.4)
    which = cats.Monitor(0.9, audit=0.4).coin(100)
    out = cascade.predict(range(100), 0.2, monitor=monitor)
    table = cascade.table(range(100))
    np.testing.assert_allclose(monitor.table().logits, table.logits[which])
    wrong = ~cats.agreement(table.consistent, out.exit_layers)
    assert (monitor.audited, monitor.errors) == (which.sum(), wrong[which].sum())


def test_a_real_cheap_model_before_a_real_encoder(tmp_path):
    """TF-IDF and logistic regression, then a transformer from a folder, which answers as its
    pipeline does; a saved table calibrates again.
    """
    folder = tiny.save(tmp_path / "model", ("bad", "good"))
    texts = demo.corpus("sentiment", "validation", 260, noise=0)["text"][:]
    said = pipeline("text-classification", model=str(folder), device="cpu")(texts)
    cheap = make_pipeline(TfidfVectorizer(), LogisticRegression())
    cheap.fit(texts[:100], [one["label"] == "good" for one in said[:100]])
    cascade = cats.Cascade([cheap, folder], [0.01, 1], labels=["bad", "good"])
    cascade.calibrate(texts[100:200])
    everything = cascade.predict(texts[200:], thresholds=[np.inf])
    assert everything.labels.tolist() == [one["label"] for one in said[200:]]
    np.testing.assert_allclose(
        everything.probabilities.max(1), [one["score"] for one in said[200:]], atol=1e-5
    )
    cascade.ready.save(tmp_path / "table.safetensors")
    table = cats.ScoreTable.load(tmp_path / "table.safetensors")
    again = cats.Cascade([cheap, folder], [0.01, 1], table=table)
    np.testing.assert_array_equal(again.thresholds(0.3), cascade.thresholds(0.3))
    pairs = cats.Cascade([cheap, folder], [0, 1]).steps[1]([("a plot", "a film"), ("so", "dull")])
    assert pairs.shape == (2, 2)


LAZY = """
import sys
import numpy as np
import cats

def cheap(rows):
    return np.array([[len(row), 3.0] for row in rows])

cascade = cats.Cascade([cheap, sys.argv[1]], [0.01, 1])
out = cascade.predict(["a long text", "b"] * 3, thresholds=[0.6])
assert (out.exit_layers == 1).all() and cascade.cost(out.exit_layers).sum() < 0.07
print([name for name in ("torch", "transformers") if name in sys.modules])
out = cascade.predict(["text", "a long text"], thresholds=[0.9])
assert out.exit_layers.tolist() == [2, 1]
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_torch_is_imported_when_the_first_input_gets_there(tmp_path):
    folder = tiny.save(tmp_path / "model")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAZY, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[]", "['torch', 'transformers']"], done.stderr


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: cats.Cascade([Noisy(1)], [1]), ValueError, "at least two steps"),
        (lambda: cats.Cascade([Noisy(1)] * 2, [1, -1]), ValueError, "at least 0"),
        (lambda: cats.Cascade([Noisy(1), 3], [1, 1]), TypeError, "a step is a function"),
        (lambda: made(measure="meta"), ValueError, "not by 'meta'"),
        (lambda: made().predict([1]), ValueError, "call calibrate"),
        (lambda: made().predict([1], thresholds=[1]), ValueError, "3 steps need 2"),
        (
            lambda: cats.Cascade([Noisy(1, 2), Noisy(0)], [1, 1]).table([1]),
            ValueError,
            r"different numbers of classes: \[2, 3\]",
        ),
        (
            lambda: cats.Cascade([lambda rows: [1, 2], Noisy(0)], [1, 1]).table([1, 2]),
            ValueError,
            "step 1 must give finite logits",
        ),
        (
            lambda: cats.Cascade([Noisy(1)] * 2, [1, 2], table=made().table(range(9))),
            ValueError,
            "another cascade",
        ),
    ],
)
def test_bad_steps_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
