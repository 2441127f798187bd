"""ScoreTable: what it derives, what it refuses, and files that come back whole or not at all."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.special import softmax

import cats
from cats import MEASURES, ScoreTable
from cats.stats.measures import NEEDS_CLASSES
from cats.stats.trials import by_layer


def make_table():
    return cats.Synthetic(layers=5, classes=4).table(50)


def make_regression():
    rng = np.random.default_rng(0)
    return ScoreTable(rng.normal(2, 1, (30, 4, 1)), rng.random((30, 3)), rng.normal(2, 1, 30))


PLAIN = {"table": make_table, "regression": make_regression}  # for tests/mutations.py
table, regression = (pytest.fixture(make, name=name) for name, make in PLAIN.items())


def slow_scores(table, measure):
    """Each measure for one input and layer at a time."""
    n, l, classes = table.logits.shape
    out = np.zeros((n, l - 1))
    for i in range(n):
        p = np.exp(table.logits[i].astype(float))
        p /= p.sum(axis=1, keepdims=True)
        said, streak = table.logits[i].argmax(axis=1), 0
        for k in range(l - 1):
            streak = streak + 1 if k and said[k] == said[k - 1] else 0
            first, second = sorted(p[k])[-1], sorted(p[k])[-2]
            out[i, k] = {
                "sm": first,
                "diff": first - second,
                "entropy": 1 + sum(q * np.log(q) for q in p[k]) / np.log(classes),
                "kl": np.exp(-sum(a * np.log(a / b) for a, b in zip(p[k - 1], p[k]))) if k else 0,
                "patience": streak / (l - 1),
            }[measure]
    return out


@pytest.mark.parametrize("measure", ["sm", "diff", "entropy", "kl", "patience"])
def test_measures_equal_the_slow_ones(table, measure):
    np.testing.assert_allclose(table.scores(measure), slow_scores(table, measure), atol=1e-12)


def test_every_measure_is_a_score_in_the_unit_interval(table):
    for measure in MEASURES:
        scores = table.scores(measure)
        assert scores.shape == (50, 4) and scores.min() >= 0 and scores.max() <= 1
    assert (table.scores("random", seed=1) == table.scores("random", seed=1)).all()
    assert (table.scores("random", seed=1) != table.scores("random", seed=2)).any()


def test_consistent_and_correct(table, regression):
    said = table.logits.argmax(axis=-1)
    assert (table.consistent == (said[:, :-1] == said[:, [-1]])).all()
    assert (table.correct == (said == table.labels[:, None])).all()
    output = regression.logits[..., 0]
    assert (regression.consistent == (abs(output[:, :-1] - output[:, [-1]]) <= 0.5)).all()
    assert not regression.consistent.all() and regression.consistent.any()
    assert (ScoreTable(regression.logits, regression.meta, tau=9).consistent).all()


def test_within_tau_means_up_to_it():
    output = np.array([[[1.0], [1.25], [1.75], [1.5]]])
    table = ScoreTable(output, tau=0.25)
    assert table.consistent.tolist() == [[False, True, True]]


@pytest.mark.parametrize("measure", NEEDS_CLASSES)
def test_softmax_measures_refuse_regression(regression, measure):
    with pytest.raises(ValueError, match="regression table"):
        regression.scores(measure)
    assert regression.scores("patience").shape == regression.scores("meta").shape == (30, 3)


def test_a_layer_is_scored_from_the_layers_so_far(table, regression):
    """A runtime that has seen k layers gives the table's score of layer k, bit for bit."""
    for one in (table, regression):
        for name, entry in MEASURES.items():
            if entry.function is None or (entry.needs_classes and one.regression):
                continue
            scores = one.scores(name)
            for k in range(1, one.n_layers):
                reads = k if entry.reads is None else min(k, entry.reads)
                part = one.logits[:, k - reads : k]
                seen = entry.score(part, one.n_layers - 1, one.tau)
                assert (seen == scores[:, k - 1]).all(), (name, k)


@pytest.fixture
def variance():
    """A measure from outside, in a few lines."""

    @cats.measure("variance", reads=1)
    def variance(logits):
        return softmax(logits[:, -1], axis=-1).var(axis=-1)

    yield "variance"
    del MEASURES["variance"]


def test_a_measure_from_outside_scores_and_is_evaluated(table, regression, variance):
    expected = softmax(table.logits[:, :-1].astype(float), axis=-1).var(axis=-1)
    np.testing.assert_array_equal(table.scores(variance), expected)
    frame = cats.evaluate(table, "shared_all", ["sm", variance], 0.2, trials=2)
    assert set(frame["measure"]) == {"sm", "variance"}
    with pytest.raises(ValueError, match="variance needs class probabilities"):
        regression.scores(variance)


def test_measures_that_do_not_fit_are_refused(table):
    with pytest.raises(TypeError, match="perhaps early and tau"):
        cats.measure("odd")(lambda logits, later: logits)
    try:
        cats.measure("wide")(lambda logits: logits)
        with pytest.raises(ValueError, match="one score an input"):
            table.scores("wide")
    finally:
        del MEASURES["wide"]


def test_tables_without_meta_scores(tmp_path, table):
    bare = ScoreTable(table.logits, labels=table.labels, metadata={"task": "x"})
    back = ScoreTable.load(bare.save(tmp_path / "t.safetensors"))
    assert back.meta is None and back.sha256 == bare.sha256 != table.sha256
    assert (back.scores("sm") == table.scores("sm")).all() and len(back.take([0, 3])) == 2
    assert (back.scores("random") == table.scores("random")).all()
    assert "auroc_meta" not in by_layer(back) and "auroc_sm" in by_layer(back)
    cats.evaluate(back, "shared_all", ["sm"], 0.2, trials=1)
    with pytest.raises(ValueError, match="no meta scores: use another measure"):
        back.scores("meta")


def test_unknown_measure(table):
    with pytest.raises(ValueError, match="unknown measure 'softmax'; there are meta, sm"):
        table.scores("softmax")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_round_trip(tmp_path, table, dtype):
    made = ScoreTable(
        table.logits.astype(dtype),
        table.meta.astype(dtype),
        table.labels,
        {"task": "x", "seed": 3},
        tau=0.25,
    )
    back = ScoreTable.load(made.save(tmp_path / "new" / "table.safetensors"))
    for name in ("logits", "meta", "labels"):
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name))
    assert back.metadata == made.metadata and back.tau == 0.25 and back.logits.dtype == dtype
    assert [path.name for path in (tmp_path / "new").iterdir()] == [
        "table.safetensors"
    ]  # nothing left aside
    first = (tmp_path / "new" / "table.safetensors").read_bytes()
    assert made.save(tmp_path / "again.safetensors").read_bytes() == first


def test_unlabelled_round_trip(tmp_path, table):
    back = ScoreTable.load(ScoreTable(table.logits, table.meta).save(tmp_path / "t.safetensors"))
    assert back.labels is None and (back.consistent == table.consistent).all()
    with pytest.raises(ValueError, match="no labels"):
        _ = back.correct


def test_a_failed_write_leaves_the_old_file(tmp_path, table):
    path = table.save(tmp_path / "t.safetensors")
    before = path.read_bytes()
    table.metadata["odd"] = object()  # JSON cannot hold it
    with pytest.raises(TypeError):
        table.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_take(table):
    part = table.take(np.arange(50) % 2 == 0)
    assert (
        len(part) == 25
        and (part.consistent == table.consistent[::2]).all()
        and part.sha256 != table.sha256
    )


LOGITS, META, LABELS = np.zeros((4, 3, 2)), np.zeros((4, 2)), np.zeros(4, int)


@pytest.mark.parametrize(
    "parts, error, message",
    [
        ((LOGITS[0], META, LABELS), ValueError, r"shape \(n, l, C\)"),
        ((LOGITS[:, :1], META[:, :0], LABELS), ValueError, "l >= 2"),
        ((LOGITS, META[:3], LABELS), ValueError, "meta must have shape"),
        ((LOGITS, np.zeros((4, 3)), LABELS), ValueError, "meta must have shape"),
        ((LOGITS, META, LABELS[:2]), ValueError, "labels must have shape"),
        ((LOGITS, META, LABELS + 2), ValueError, r"0\.\.1, got 2\.\.2"),
        ((LOGITS, META, LABELS - 1), ValueError, r"0\.\.1"),
        ((LOGITS, META, LABELS.astype(float)), TypeError, "integers"),
        ((LOGITS.astype(int), META, LABELS), TypeError, "floating point"),
        ((LOGITS + np.nan, META, LABELS), ValueError, "NaN"),
        ((LOGITS, META + np.inf, LABELS), ValueError, "infinite"),
        ((LOGITS[..., :1], META, np.full(4, np.nan)), ValueError, "finite"),
    ],
)
def test_parts_that_disagree_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        ScoreTable(*parts)


def test_broken_files_are_refused(tmp_path, table):
    path = table.save(tmp_path / "t.safetensors")
    whole, broken = path.read_bytes(), tmp_path / "broken.safetensors"
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            ScoreTable.load(broken)
    broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit of the last array
    with pytest.raises(ValueError, match="changed after it was written|do not fit"):
        ScoreTable.load(broken)
    with pytest.raises(FileNotFoundError, match="no ScoreTable at"):
        ScoreTable.load(tmp_path / "missing.safetensors")

    arrays = load_file(path)
    header = {"format": "cats.ScoreTable/1", "tau": 0.5, "sha256": "", "metadata": {}}
    save_file(arrays, broken)
    with pytest.raises(ValueError, match="not a ScoreTable"):
        ScoreTable.load(broken)
    save_file(arrays, broken, {"cats": "[1]"})
    with pytest.raises(ValueError, match="has .1. as its header"):
        ScoreTable.load(broken)
    save_file({"meta": arrays["meta"]}, broken, {"cats": json.dumps(header)})
    with pytest.raises(ValueError, match="holds"):
        ScoreTable.load(broken)
    save_file(arrays | {"meta": arrays["meta"][:-1]}, broken, {"cats": json.dumps(header)})
    with pytest.raises(ValueError, match="do not fit together.*meta must have shape"):
        ScoreTable.load(broken)


def test_other_byte_orders_and_changed_metadata(tmp_path, table):
    """Big-endian arrays come back as they were; a byte of the metadata does not go unnoticed."""
    swapped = ScoreTable(table.logits.astype(">f4"), table.meta.astype(">f4"), table.labels)
    assert ScoreTable.load(swapped.save(tmp_path / "big")).sha256 == swapped.sha256
    path = ScoreTable(table.logits, table.meta, metadata={"task": "imdb"}).save(tmp_path / "t")
    path.write_bytes(path.read_bytes().replace(b"imdb", b"imdc", 1))
    with pytest.raises(ValueError, match="was changed"):
        ScoreTable.load(path)
    path.write_bytes(path.read_bytes().replace(b'{\\"', b"{\\x", 1))
    with pytest.raises(ValueError, match="not a whole"):
        ScoreTable.load(path)


@pytest.mark.parametrize("regression", [False, True])
def test_performance_is_accuracy_or_correlation(table, regression):
    if regression:
        rng = np.random.default_rng(3)
        labels = rng.normal(size=40)
        outputs = labels[:, None, None] + rng.normal(size=(40, 3, 1))
        table = ScoreTable(outputs, labels=labels)
    for k in range(1, table.n_layers + 1):
        pairs = list(zip(table.predictions[:, k - 1], table.labels))
        if regression:
            g, y = (np.array(column) - np.mean(column) for column in zip(*pairs))
            expected = (g * y).sum() / np.sqrt((g**2).sum() * (y**2).sum())
        else:
            expected = sum(g == y for g, y in pairs) / len(pairs)
        assert table.performance(k) == pytest.approx(expected)
    assert table.metric == ("correlation" if regression else "accuracy")
    with pytest.raises(ValueError, match="no labels"):
        ScoreTable(table.logits).performance(1)
