"""A CAT on a body that is only nearly F: the loop is its table, the promise is about F in float32,
files come back.

Other batches and other padding move a body's scores and logits: in bfloat16 by its few digits, in 8
bits where float32's rounding moves a number over a half. So equality of loop and table is claimed,
and tested, for what lies further from a threshold than that: zero mismatches there, and for all
inputs whatsoever the inclusion that the promise rests on, {G ≠ F} in {V > threshold}.
"""

import json

import numpy as np
import pytest
import tiny
import torch
from builders import CASES, build, make_batch
from hypothesis import given
from hypothesis import strategies as st

import cats
from cats import CAT
from cats._io import module_digest
from cats.model.bodies import Body, body_of
from cats.model.exits import Heads, Meta, score
from cats.runtime.calibrated import LEAST, SPARE
from cats.stats.exits import records, worst_score
from cats.stats.measures import NINES, nines
from cats.stats.table import ScoreTable

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
FAST, SIZES, ROWS = ("bfloat16", "int8"), (1, 2, 7, 32), 33


def random_cat(case, name):
    """A CAT on a body, with random heads; a batch of inputs and their table."""
    full, body = build(case), body_of(build(case), name)
    torch.manual_seed(1)
    early, classes = full.n_layers - 1, full.num_labels
    heads = Heads(early, full.hidden_size, classes).requires_grad_(False)
    meta = Meta(early, heads.d_e, classes).requires_grad_(False)
    heads.w_p *= 3
    heads.w_o *= 3
    meta.w_2 *= 4
    lengths = torch.randint(2, 18, (ROWS,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = make_batch(full, lengths, 20)
    with torch.inference_mode():
        states = body.states(batch)
        logits, scores = score(heads, meta, states["cls"].float())
        logits = torch.cat([logits, states["logits"][:, None]], 1)
        said = full.states(batch)["logits"]
    table = ScoreTable(logits.numpy(), scores.numpy(), full=said.numpy())
    return CAT(full, None, heads, meta, table, body=name), batch


def in_pieces(cat, batch, size, thresholds, decide=None):
    """The batch in pieces, each padded to its longest row."""
    pieces = []
    for i in range(0, ROWS, size):
        longest = int(batch["attention_mask"][i : i + size].sum(1).max())
        width = longest + cat.backbone.extra_padding
        pieces.append({key: value[i : i + size, :width] for key, value in batch.items()})
    return cat.run(pieces, thresholds, "meta", decide)


def seen(cat, batch, size):
    """Scores of all layers as the loop computes them, (n, l-1)."""
    found = np.full((ROWS, cat.backbone.n_layers - 1), np.nan)

    def look(k, scores, rows):
        found[rows, k - 1] = scores
        return [False] * len(rows)

    logits, _, _ = in_pieces(cat, batch, size, np.full(found.shape[1], np.inf), look)
    return found, logits


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("case", CASES)
def test_exits_equal_the_table_for_every_family_and_body(case, name):
    cat, batch = random_cat(case, name)
    scores = cat.table.scores("meta")
    runs = {size: seen(cat, batch, size) for size in SIZES}
    # as `fit` measures it, with its factor to spare: rows that leave change the padding of others
    margin = SPARE * (max(np.abs(found - scores).max() for found, _ in runs.values()) + 1e-6)
    off = max(np.abs(last - cat.table.logits[:, -1]).max() for _, last in runs.values())
    # rounding, not another computation
    assert margin < 0.15 * SPARE and off < 0.1 * cat.table.full.std()
    mismatches = compared = 0
    for level in np.quantile(scores, [0.01, 0.3, 0.5, 0.7, 0.9]):
        thresholds = np.full(scores.shape[1], level)
        clear = (np.abs(scores - level) > margin).all(axis=1)  # no score is near
        expected = cats.exit_layers(scores, thresholds)
        for size in SIZES:
            _, exits, _ = in_pieces(cat, batch, size, thresholds)
            mismatches += int((exits != expected)[clear].sum())
            compared += int(clear.sum())
            # what the promise rests on, for all inputs, near or not
            _, exits, _ = in_pieces(cat, batch, size, thresholds + margin)
            above = np.concatenate([scores > level, np.ones((ROWS, 1), bool)], axis=1)
            assert above[np.arange(ROWS), exits - 1].all()
            earlier = np.maximum.accumulate(scores, axis=1)
            before = np.where(exits > 1, earlier[np.arange(ROWS), exits - 2], -np.inf)
            assert (before <= level + 2 * margin).all()
    assert mismatches == 0 and compared > 0


@pytest.mark.parametrize("name", FAST)
def test_where_nothing_leaves_f_itself_answers(name):
    cat, batch = random_cat("bert", name)
    logits, exits, _ = in_pieces(cat, batch, 7, np.full(3, np.inf))
    np.testing.assert_allclose(logits, cat.table.full, atol=1e-5)
    assert (exits == 4).all() and np.abs(logits - cat.table.logits[:, -1]).max() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_where_the_last_layer_is_in_doubt_f_itself_answers(case):
    """And nowhere else: half of the rows are in doubt here, in batches of other widths."""
    cat, batch = random_cat(case, "bfloat16")
    top = np.sort(cat.table.logits[:, -1], axis=-1)
    gaps = top[:, -1] - top[:, -2]
    cat.slack[-1] = float(np.median(gaps)) / 2
    clear = np.abs(gaps - 2 * cat.slack[-1]) > 0.1 * gaps.std()  # the same whatever the rounding
    doubt = cat.in_doubt(cat.table.logits[:, -1])
    level = np.quantile(cat.table.scores("meta").max(1), 0.3)  # most reach the last layer
    for size in SIZES:
        logits, exits, _ = in_pieces(cat, batch, size, np.full(cat.backbone.n_layers - 1, level))
        last = (exits == cat.backbone.n_layers) & clear
        assert (last & doubt).any() and (last & ~doubt).any()
        np.testing.assert_allclose(logits[last & doubt], cat.table.full[last & doubt], atol=1e-5)
        assert np.abs(logits - cat.table.full)[last & ~doubt].max() > 1e-4


numbers = st.integers(-20, 20).map(lambda i: i / 4)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=6, max_size=6), st.data())
def test_surely_consistent_is_consistent_however_the_logits_are_off(rows, data):
    """Against an oracle that moves each logit by as much as it may, either way."""
    logits = np.array(rows).reshape(2, 3, 3)  # two inputs, three layers
    said = np.array(data.draw(st.lists(numbers, min_size=6, max_size=6))).reshape(2, 3)
    off = np.array(data.draw(st.lists(st.sampled_from([0.1, 0.4, 1.1]), min_size=3, max_size=3)))
    table = ScoreTable(logits, full=said)
    sure = table.surely_consistent(off)
    for i, k in np.ndindex(2, 3):
        worst = logits[i, k] + off[k]
        answer = table.reference[i]
        worst[answer] -= 2 * off[k]
        others = np.delete(worst, answer)
        assert sure[i, k] == bool((worst[answer] > others).all())
    assert not (sure & ~table.consistent).any()


@pytest.fixture(scope="module")
def any_cat():
    return random_cat("bert", "bfloat16")[0]


@given(rows=st.lists(st.tuples(numbers, numbers, numbers), min_size=4, max_size=4), data=st.data())
def test_what_the_last_layer_gets_right_stays_right_however_it_is_rounded(any_cat, rows, data):
    """A row is answered by its rounded logits, or by F where these are in doubt: wherever
    calibration counts the last layer as consistent, that is F's answer.
    """
    cat, logits, off = any_cat, np.array(rows).reshape(4, 1, 3), 0.375  # sums are exact
    said = np.array(data.draw(st.lists(numbers, min_size=12, max_size=12))).reshape(4, 3)
    cat.table = ScoreTable(logits.repeat(4, axis=1), np.zeros((4, 3)), full=said)
    cat.slack = [off] * 4
    moved = st.lists(st.sampled_from([-off, 0.0, off]), min_size=12, max_size=12)
    rounded = logits[:, 0] + np.array(data.draw(moved)).reshape(4, 3)
    answers = np.where(cat.in_doubt(rounded), cat.table.reference, rounded.argmax(1))
    right = cat.consistent[:, -1]
    assert (answers == cat.table.reference)[right].all()
    assert (right == cat.table.consistent[:, -1]).all()


def test_regression_is_sure_within_tau_less_what_may_be_off():
    logits = np.array([[[1.0], [1.3], [1.0]], [[0.5], [1.45], [1.0]]])
    table = ScoreTable(logits, full=np.array([[1.0], [1.0]]), tau=0.5)
    assert table.consistent.all()
    assert table.surely_consistent([0.1] * 3).tolist() == [[True] * 3, [False, False, True]]


# --- fitted on text


@pytest.fixture(scope="module", params=FAST)
def fitted(request):
    return tiny.fit(body=request.param)


def said(cat, texts):
    """What F in float32 says."""
    batch = cat.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return cat.backbone.model(**batch).logits


def test_calibration_compares_all_layers_with_f(fitted):
    table, texts = fitted.table, tiny.texts()
    assert table.consistent.shape == (40, 3) and fitted.choosing is None
    expected = said(fitted, texts["calibration"])
    np.testing.assert_allclose(table.full, expected, atol=1e-5)
    assert np.abs(table.logits[:, -1] - table.full).max() > 1e-5  # the body's own
    # heads were fitted on this body's states
    with torch.no_grad():
        states = fitted.engine.states(
            fitted.tokenizer(texts["calibration"][:1], return_tensors="pt")
        )
    assert fitted.heads.reads == "mean"
    early = score(fitted.heads, fitted.meta, states["mean"].float())[0][0]
    np.testing.assert_allclose(early, table.logits[0, :-1], atol=1e-4)
    assert len(fitted.slack) == 3 and min(fitted.slack) > 0


@pytest.mark.parametrize("measure", CAT.measures())
def test_a_tie_at_the_threshold_breaks_no_promise(fitted, measure):
    """{G ≠ F} lies in {V > threshold} on the calibration inputs, whose scores thresholds are."""
    texts, scores = tiny.texts()["calibration"], fitted.table.scores(measure)
    margin = fitted.margin(measure, "first_exit")
    spread = nines(scores) if margin.any() else scores
    v = worst_score(scores, fitted.consistent, records(spread, margin))
    for epsilon in (0.1, 0.3, 0.6):
        t = fitted.thresholds(epsilon, measure=measure)[0]
        for size in (1, 7, 32):
            out = fitted.predict(texts, epsilon, size, measure=measure)
            wrong = out.predictions != fitted.table.reference
            assert not (wrong & ~(v > t)).any()


@pytest.mark.parametrize("measure", CAT.measures())
def test_limits_lie_above_thresholds_by_what_scores_may_be_off(fitted, measure, monkeypatch):
    thresholds, margin = np.array([0.3, 0.9]), fitted.margins.get(measure, [0.0, 0.0])
    above = nines(fitted.limits(thresholds, measure)) - nines(thresholds)
    np.testing.assert_allclose(above, np.minimum(margin, NINES - nines(thresholds)), atol=1e-12)
    assert (fitted.limits(thresholds, measure, "ltt") == thresholds).all()  # takes none
    assert np.isinf(fitted.limits([np.inf, 1 - 1e-7], "meta")).all()
    with monkeypatch.context() as patch:
        patch.setattr(fitted, "unit", "score")
        np.testing.assert_allclose(fitted.limits(thresholds, measure), thresholds + margin)


def test_a_body_too_far_from_f_is_not_run(fitted):
    """Its last layer made wrong on a third of the inputs: F itself runs, and it says so."""
    table, texts = fitted.table, tiny.texts()["test"]
    full = table.full.copy()
    full[::3] = -full[::3]
    far = ScoreTable(table.logits, table.meta, None, {}, table.tau, full)
    cat = CAT(
        fitted.backbone,
        fitted.tokenizer,
        fitted.heads,
        fitted.meta,
        far,
        body=fitted.body,
        texts=1,
        max_length=fitted.max_length,
    )
    with pytest.warns(cats.CalibrationWarning, match="last layer differs from F"):
        out = cat.predict(texts, 0.1)
    expected = torch.softmax(said(cat, texts), -1)
    np.testing.assert_allclose(out.probabilities, expected, atol=1e-5)
    assert (out.exit_layers == 3).all()
    assert (cat.predict(texts, 0.6).exit_layers < 3).any()  # that much may be promised


def test_which_body_may_predict(fitted):
    texts = tiny.texts()["test"]
    out = fitted.predict(texts, 0.5, body="float32")
    np.testing.assert_allclose(out.probabilities, torch.softmax(said(fitted, texts), -1), atol=1e-5)
    called = fitted(texts, epsilon=0.5, body="float32")  # as a pipeline
    assert [one["exit_layer"] for one in called] == out.exit_layers.tolist()
    own = fitted.predict(texts, 0.5, body=fitted.body)
    assert (own.exit_layers == fitted.predict(texts, 0.5).exit_layers).all()
    other = next(name for name in FAST if name != fitted.body)
    with pytest.raises(ValueError, match=f"fitted on the body '{fitted.body}'"):
        fitted.predict(texts, 0.5, body=other)
    for method in ("independent", "ltt", "shared_all"):
        if cats.stats.calibrators.METHODS[method].bodies:
            fitted.predict(texts, 0.5, method=method)
        else:
            with pytest.raises(ValueError, match="takes the last layer for F"):
                fitted.predict(texts, 0.5, method=method)
    with pytest.raises(TypeError, match="a monitor compares with the last layer that runs"):
        fitted.predict(texts, monitor=cats.Monitor(0.5))
    with pytest.raises(ValueError, match="need 3 columns"):
        fitted.predict(texts, 0.5, method="crc", losses=fitted.table.losses()[:, :2])
    assert len(fitted.predict(texts, 0.5, method="crc", losses=fitted.table.losses())[0]) == 24


def test_a_body_is_kept_with_its_cat(fitted, tmp_path):
    texts = tiny.texts()["test"]
    folder = fitted.save_pretrained(tmp_path / "cat")
    kept = json.loads((folder / "cat.json").read_text())
    assert kept["format"] == "cats.CAT/6" and kept["body"] == fitted.body
    assert kept["backbone"]["dtype"] == "float32"
    back = CAT.from_pretrained(folder)
    assert isinstance(back.engine, Body) and back.engine.fingerprint == fitted.engine.fingerprint
    assert back.slack == fitted.slack and fitted.body in repr(back)
    ours, theirs = back.predict(texts, 0.3), fitted.predict(texts, 0.3)
    assert list(ours.labels) == list(theirs.labels)
    assert list(ours.exit_layers) == list(theirs.exit_layers)
    for one, other in zip(ours, theirs):  # float32 of F, where asked, depends on where weights lie
        np.testing.assert_allclose(one, other, rtol=1e-6)
    card = (folder / "README.md").read_text()
    assert f"layers run in {fitted.body}; F is the model in float32" in card
    assert back.to("cpu") is back


def test_fit_chooses_and_refuses():
    cat = tiny.fit(body="auto")
    assert cat.body in ("float32", *FAST) and set(cat.about["bodies"]) == {"float32", *FAST}
    with pytest.raises(ValueError, match="one of float32, bfloat16, int8"):
        tiny.fit(body="int4")
    with pytest.raises(ValueError, match="autocast='bfloat16' is for F itself"):
        tiny.fit(body="int8", autocast="bfloat16")
    half = tiny.model().bfloat16()
    with pytest.raises(ValueError, match="made of a model in float32"):
        tiny.fit(half, body="int8")
    plain = tiny.fit(body="float32")
    assert plain.engine is plain.backbone and plain.table.full is None
    with pytest.raises(ValueError, match="do not belong together"):
        CAT(plain.backbone, None, plain.heads, plain.meta, plain.table, body="int8")


@pytest.mark.parametrize("name", FAST)
def test_a_run_on_a_body_is_calibrated_against_f(name, tmp_path):
    """With heads that read means of it, fitted on the run's own states of F, and kept there."""
    place = tiny.save(tmp_path / "model")
    run = tiny.run(place, tmp_path / "run", fine_tuned=True, recipe="distilled")
    plain = CAT.from_run(run)
    made = lambda: {f: f.stat().st_mtime_ns for f in run.folder.glob("states/*/*.safetensors")}
    before, cat = made(), CAT.from_run(run, body=name)
    assert before and made() == before
    assert (plain.heads.reads, cat.heads.reads) == ("cls+mean", "mean")
    again = CAT.from_run(run, body=name)
    assert module_digest(again.heads) == module_digest(cat.heads)
    paper = CAT.from_run(run.by("paper"), body=name)
    assert paper.heads is not cat.heads and paper.heads.reads == "cls"  # it reads nothing else
    np.testing.assert_array_equal(cat.table.full, plain.table.logits[:, -1])
    assert cat.table.consistent.shape == (20, 3) and cat.unit == "nines"
    assert min(cat.margins["meta"] + cat.margins["sm"]) >= LEAST and min(cat.slack) > 2 * LEAST
    texts = list(run.data["validation"]["text"])
    assert len(cat.predict(texts, 0.5).labels) == 20
