"""`predict(monitor=…)`: what is audited, what it costs, what the monitor is told, and what to do
after an alarm.
"""

import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tiny
from batches import ROOT

import cats
from cats.model.backbone import Backbone
from cats.runtime import inputs
from cats.train import demo, tasks
from cats.train.run import table_of
from cats.train.states import extract

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
TEXTS = demo.corpus("sentiment", "validation", 90, noise=0)["text"][:]


@pytest.fixture(scope="module")
def cat():
    return tiny.fit()


def table(cat, texts, folder):
    """The oracle: the ScoreTable of these texts, made as in training."""
    texts = [text if isinstance(text, tuple) else (text,) for text in texts]
    columns = tuple(f"text{i + 1}" for i in range(len(texts[0])))
    rows = tasks.from_texts(columns, texts)
    states = extract(cat.backbone, cat.tokenizer, rows, columns, folder, max_length=cat.max_length)
    return table_of(states, cat.heads, cat.meta, None, {}, cat.table.tau)


def spread(cat, texts, folder):
    """Thresholds at which some inputs leave at every layer."""
    scores = table(cat, texts, folder).scores("meta")
    return np.quantile(scores, 0.6, axis=0)


@pytest.mark.parametrize("measure", ["meta", "sm", "patience"])
@pytest.mark.parametrize("task", ["sentiment", "similarity"])
def test_audited_rows_are_those_of_a_score_table(task, measure, tmp_path):
    if task == "similarity" and measure == "sm":
        return  # a number has no softmax
    model = tiny.model() if task == "sentiment" else tiny.model(["score"])
    cat = tiny.fit(model, task)
    texts = tiny.texts(task)["test"]
    expected = table(cat, texts, tmp_path / "states")
    bars = np.quantile(expected.scores(measure), 0.6, axis=0)
    plain = cat.predict(texts, thresholds=bars, measure=measure)
    assert measure == "patience" or len(set(plain.exit_layers)) == 3
    for batch_size in (1, 5, 32):
        monitor = cats.Monitor(0.2, audit=0.5, seed=3)
        which = cats.Monitor(0.2, audit=0.5, seed=3).coin(len(texts))
        assert 4 < which.sum() < 20
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cats.PromiseWarning)
            out = cat.predict(texts, None, batch_size, **watched(bars, measure, monitor))
        for a, b in zip(out, plain):  # what is answered does not change
            np.testing.assert_allclose(a, b, atol=1e-5)
        found = monitor.table()
        np.testing.assert_allclose(found.logits, expected.take(which).logits, atol=1e-4)
        assert (found.consistent == expected.consistent[which]).all()
        scores, consistent = monitor.calibration()
        np.testing.assert_allclose(scores, expected.scores(measure)[which], atol=1e-4)
        agree = cats.agreement(expected.consistent[which], plain.exit_layers[which])
        assert (monitor.audited, monitor.errors) == (which.sum(), (~agree).sum())
        assert monitor.layers == (3 - plain.exit_layers[which]).sum()


def watched(bars, measure, monitor):
    return {"thresholds": bars, "measure": measure, "monitor": monitor}


def test_an_audit_costs_the_layers_after_the_exit_and_no_more(cat, tmp_path, monkeypatch):
    """Rows through layers are counted: those of the plain call, and l - exit for each audit; an
    input that reaches the last layer costs nothing.
    """
    ran = []
    step = Backbone.step

    def counted(self, state, k):
        ran.append(len(state.hidden))
        return step(self, state, k)

    monkeypatch.setattr(Backbone, "step", counted)
    bars = spread(cat, TEXTS, tmp_path / "states")
    for thresholds in (bars, [np.inf, np.inf]):
        ran.clear()
        out = cat.predict(TEXTS, thresholds=thresholds)
        plain = sum(ran)
        assert plain == out.exit_layers.sum()
        ran.clear()
        monitor = cats.Monitor(0.9, audit=0.3)
        cat.predict(TEXTS, thresholds=thresholds, monitor=monitor)
        which = cats.Monitor(0.9, audit=0.3).coin(len(TEXTS))
        assert sum(ran) - plain == (3 - out.exit_layers[which]).sum() == monitor.layers


def test_layers_that_nobody_leaves_at_are_audited_too(cat, tmp_path):
    expected = table(cat, TEXTS, tmp_path / "states")
    monitor = cats.Monitor(0.9, audit=1)
    cat.predict(TEXTS, 0.5, exit_layers=[2], monitor=monitor)
    np.testing.assert_allclose(monitor.table().meta, expected.meta, atol=1e-4)


def test_streams_and_pipelines_are_audited_alike(cat, tmp_path, monkeypatch):
    bars = spread(cat, TEXTS, tmp_path / "states")
    monitors = [cats.Monitor(0.9, audit=0.4, seed=1) for _ in range(3)]
    cat.predict(TEXTS, thresholds=bars, monitor=monitors[0])
    monkeypatch.setattr(inputs.windows, "__defaults__", (16,))
    answers = cat(iter(TEXTS), thresholds=bars, monitor=monitors[1])
    assert next(answers) and not monitors[1].audited  # answers first
    assert len(list(answers)) == len(TEXTS) - 1
    cat(TEXTS, thresholds=bars, monitor=monitors[2])
    for other in monitors[1:]:
        assert other.to_json() == monitors[0].to_json()


def test_an_alarm_says_what_to_do_and_recalibration_is_one_call(cat, tmp_path):
    """Thresholds that let everything go at once break the promise; on the audited rows of F itself
    the CAT is calibrated anew, and agrees as its table says.
    """
    monitor = cats.Monitor(0.05, audit=1)
    assert "no alarm" in repr(monitor)
    with pytest.warns(cats.PromiseWarning, match="recalibrated") as seen:
        cat.predict(TEXTS, thresholds=[-np.inf, -np.inf], monitor=monitor)
    assert monitor.alarm and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cat.predict(TEXTS, thresholds=[-np.inf, -np.inf], monitor=monitor)  # said once
    again = cats.Monitor(0.05, audit=1)
    cat.predict(TEXTS, thresholds=[np.inf, np.inf], monitor=again)
    assert (again.audited, again.errors, again.layers) == (len(TEXTS), 0, 0)
    new = cat.recalibrated(again)
    np.testing.assert_array_equal(new.table.logits, again.table().logits)
    expected = table(cat, TEXTS, tmp_path / "states")
    bars = cats.calibrate(expected.scores("meta"), expected.consistent, 0.2, "first_exit")
    np.testing.assert_allclose(new.thresholds(0.2), bars, atol=1e-4)
    assert len(cat.recalibrated(again, last=30).table) == 30
    back = cats.CAT.from_pretrained(new.save_pretrained(tmp_path / "cat"))
    assert back.table.sha256 == new.table.sha256
    with pytest.raises(ValueError, match="another model"):
        tiny.fit(tiny.model(layers=4)).recalibrated(again)
    with pytest.raises(ValueError, match="exits by meta, not by sm"):
        cat.predict(TEXTS, 0.5, measure="sm", monitor=again)


def test_adaptive_mode_steers_epsilon(cat, monkeypatch):
    """ε moves between windows: with every error it falls, down to all layers, and rises again."""
    monkeypatch.setattr(inputs.windows, "__defaults__", (10,))
    monitor = cats.Monitor(0.3, audit=1, step=0.05)
    used = []
    rule = cat._rule
    monkeypatch.setattr(cat, "_rule", lambda *a: used.append(monitor.level) or rule(*a))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cats.PromiseWarning)
        cat.predict(TEXTS, monitor=monitor)
    assert used[0] == 0.3 and len(set(used)) > 2
    expected = 0.3 + 0.05 * (0.3 * monitor.audited - monitor.errors)
    assert monitor.running == pytest.approx(expected)
    for level, layer in ((-1, 3), (2, 1)):  # all layers, or the first alone
        monitor.running = level
        assert (cat.predict(TEXTS[:3], monitor=monitor).exit_layers == layer).all()
    with pytest.raises(TypeError, match="leave epsilon out"):
        cat.predict(TEXTS, 0.1, monitor=monitor)


KILLED = """
import os, sys, warnings
sys.path[:0] = [sys.argv[3]]
import tiny, cats
from cats.runtime import inputs
inputs.windows.__defaults__ = (10,)
warnings.simplefilter("ignore")
cat = cats.CAT.from_pretrained(sys.argv[1])
monitor = cats.Monitor(0.3, audit=0.5, path=sys.argv[2])
texts = tiny.texts()["test"]
for i, answer in enumerate(cat(iter(texts[monitor.thrown:]), epsilon=0.4, monitor=monitor)):
    if i == 14 and not monitor.thrown > 20:
        os.kill(os.getpid(), 9)
"""


def test_the_state_survives_a_kill(cat, tmp_path):
    """Killed in its second window and started again where its state says: as if never killed."""
    folder, path = cat.save_pretrained(tmp_path / "cat"), tmp_path / "monitor.json"
    command = [sys.executable, "-c", KILLED, folder, path, ROOT / "tests"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads(path.read_text())["thrown"] in (10, 20)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = cats.Monitor(0.3, audit=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cats.PromiseWarning)
        cat.predict(tiny.texts()["test"], 0.4, monitor=whole)
    back = cats.Monitor.load(path)
    assert (back.thrown, back.audited, back.errors) == (24, whole.audited, whole.errors)
    np.testing.assert_allclose(back.table().logits, whole.table().logits, atol=1e-5)


def test_workers_merge_into_one_that_recalibrates(cat):
    workers = [cats.Monitor(0.9, audit=0.5, seed=i) for i in range(2)]
    for worker, part in zip(workers, (TEXTS[:45], TEXTS[45:])):
        cat.predict(part, 0.4, monitor=worker)
    both = workers[0].merge(workers[1])
    assert both.audited == sum(w.audited for w in workers) == len(both.rows) == len(both.table())
    assert len(cat.recalibrated(both).table) == both.audited
