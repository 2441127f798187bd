"""The runtime: exits in the loop equal exits from the ScoreTable, rows come back in order, folders
that disagree are refused.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from builders import CASES, build, even, make_batch  # tiny random models of every family
from hypothesis import given
from hypothesis import strategies as st

import cats
from cats import CAT
from cats._io import digest, module_digest, write_json
from cats.model.backbone import Backbone
from cats.model.exits import READS, Heads, Meta, log_odds, predicted, score, vectors
from cats.paper import timing
from cats.runtime.loop import starting
from cats.runtime.scorer import Scorer, top_two
from cats.stats.exits import records, worst_score
from cats.stats.measures import nines
from cats.stats.table import ScoreTable
from cats.train import tasks
from cats.train.finetune import new_model, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
ROWS = 33


def random_cat(backbone, history=False, drop=(), n=ROWS, reads="cls", odds=False):
    """A CAT with random heads, a batch of inputs, and the ScoreTable of those inputs."""
    torch.manual_seed(1)
    early, classes = backbone.n_layers - 1, backbone.num_labels
    heads = Heads(early, backbone.hidden_size, classes, history=history, reads=reads)
    heads.requires_grad_(False)
    heads.w_p *= 3
    heads.w_o *= 3
    heads.temperature.copy_(torch.rand(early) + 0.5)
    if history:
        heads.w_h.normal_()
    meta = Meta(early, heads.d_e, classes, drop, odds=odds).requires_grad_(False)
    meta.w_2 *= 4
    lengths = torch.randint(2, 18, (n,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = make_batch(backbone, lengths, 20)
    if "pair" in reads:
        batch["second"] = torch.tensor([1 + length // 3 for length in lengths])
    states = backbone.states(batch)
    read = vectors(reads, *(states[name] for name in reads.split("+")))
    logits, scores = score(heads, meta, read)
    logits = torch.cat([logits, states["logits"][:, None]], 1)
    table = ScoreTable(logits.numpy(), scores.numpy())
    return CAT(backbone, None, heads, meta, table), batch


def in_batches(cat, batch, size, thresholds, measure):
    """The batch in pieces of `size`, some of them side by side, put together again."""
    pieces = [
        {name: value[i : i + size] for name, value in batch.items()} for i in range(0, ROWS, size)
    ]
    groups = [cat.run(pieces[i : i + 5], thresholds, measure) for i in range(0, len(pieces), 5)]
    return [np.concatenate(column) for column in zip(*groups)]


def patterns(scores):
    """All leave at the first layer, all at the last, and thresholds in the widest gap between
    scores, so that none is near.
    """
    early = scores.shape[1]
    middle = []
    for k in range(early):
        values = np.unique(scores[:, k])
        gaps = np.diff(values) if len(values) > 1 else np.array([0.0])
        i = len(gaps) // 4 + np.argmax(gaps[len(gaps) // 4 :])
        middle.append((values[i] + values[min(i + 1, len(values) - 1)]) / 2)
    return {
        "first": np.full(early, -np.inf),
        "last": np.full(early, np.inf),
        "mixed": np.array(middle),
    }


def check_agreement(cat, batch, measure, sizes=(1, 2, 7, 32)):
    """Every exit and prediction against the table; returns how many inputs left at each layer under
    `mixed`.
    """
    scores, mismatches = cat.table.scores(measure), 0
    for thresholds in patterns(scores).values():
        expected = cats.exit_layers(scores, thresholds)
        for size in sizes:
            logits, exits, confidences = in_batches(cat, batch, size, thresholds, measure)
            mismatches += (exits != expected).sum()
            np.testing.assert_allclose(
                logits, cat.table.logits[np.arange(ROWS), expected - 1], atol=2e-4
            )
            early = expected < cat.backbone.n_layers
            np.testing.assert_allclose(
                confidences[early], scores[np.arange(ROWS), expected - 1 - ~early][early], atol=2e-4
            )
            assert (confidences[~early] == 1).all()
    assert mismatches == 0
    return np.bincount(expected, minlength=cat.backbone.n_layers + 1)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("case", CASES)
def test_exits_equal_the_table_for_every_family(case, reads):
    cat, batch = random_cat(build(case), reads=reads)
    counts = check_agreement(cat, batch, "meta")
    assert (counts > 0).sum() >= 2  # the mixed pattern is mixed


@pytest.mark.parametrize("measure", CAT.measures())
def test_exits_equal_the_table_for_every_measure(measure):
    check_agreement(*random_cat(build("albert")), measure, sizes=(1, 7))


@pytest.mark.parametrize(
    "options",
    [{"history": True}, {"drop": ("history",)}, {"drop": ("hidden", "pmax")}, {"odds": True}],
    ids=str,
)
def test_exits_equal_the_table_for_every_option(options):
    check_agreement(*random_cat(build("bert"), **options), "meta", sizes=(7,))
    check_agreement(*random_cat(build("bert"), **options), "sm", sizes=(7,))


finite = st.integers(-800, 800).map(
    lambda i: i / 8
)  # closer than that, softmax may tie in float32 where the logits do not


@given(st.lists(finite, min_size=2, max_size=6, unique=True))
def test_the_top_two_are_what_the_tensors_say(logits):
    """Plain Python against the tensors it stands in for."""
    which, confidence, margin, odds = top_two(logits)
    assert odds == pytest.approx(log_odds(torch.tensor(logits, dtype=float)).item(), rel=1e-9)
    prediction, _, margins = predicted(torch.tensor([logits]))
    assert prediction[0].tolist() == [float(which == c) for c in range(1, len(logits))]
    np.testing.assert_allclose([confidence, margin], margins[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("measure", CAT.measures())
def test_a_nan_never_exits(measure):
    """An input whose early states are not numbers goes on to F, whatever the threshold."""
    cat, _ = random_cat(build("bert"))
    x = torch.randn(3, cat.heads.width)
    x[1] = torch.nan
    scorer = Scorer(cat, measure, 3)
    for k in (1, 2):
        _, scores = scorer(k, x)
        assert np.isnan(scores).tolist() == [False, True, False]


def test_a_wrong_compaction_would_be_noticed(monkeypatch):
    """The agreement test has power: keeping the wrong rows changes what it compares."""
    cat, batch = random_cat(build("bert"))
    keep = Backbone.keep
    monkeypatch.setattr(
        Backbone, "keep", lambda self, state, rows, trim=True: keep(self, state, rows[::-1], trim)
    )
    with pytest.raises(AssertionError):
        check_agreement(cat, batch, "meta", sizes=(32,))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 16, 32])
@pytest.mark.parametrize("easy", [0.1, 0.5, 0.8])
def test_never_more_rows_run_than_the_batch_size_nor_wait_than_twice_that(
    batch_size, easy, monkeypatch
):
    """A layer then needs no more memory than F's with batches of this size, and what waits is
    little beside it.
    """
    (cat, _), begun, gone, step = random_cat(build("bert")), 0, 0, Backbone.step  # 4 layers
    exits = np.random.default_rng(0).geometric(easy, 20 * batch_size).clip(max=3)

    def batches():
        nonlocal begun
        for ids in torch.zeros(len(exits), 2, dtype=torch.long).split(batch_size):
            assert begun - gone <= 2 * batch_size  # they wait
            begun += len(ids)
            yield {"input_ids": ids}

    def counted(self, state, k):
        assert 0 < len(state.hidden) <= batch_size  # they run
        return step(self, state, k)

    def decide(k, scores, rows):
        nonlocal gone
        leaves = [exits[row] == k for row in rows]
        gone += sum(leaves)
        return leaves

    monkeypatch.setattr(Backbone, "step", counted)
    assert (cat.run(batches(), np.full(3, np.inf), decide=decide)[1] == exits).all()


@pytest.mark.parametrize("architecture", ["BERT 12 x 384", "MobileBERT 24 x 512"])
def test_a_cat_holds_no_more_tensors_than_f(architecture):
    cat = timing.untrained(architecture)
    held = lambda which, rows, tokens: timing.live(even(cat, which, rows, tokens))
    most = held("full", 16, 40)
    assert held("early", 16, 40) <= most
    assert held("early", 32, 40) > most  # larger batches would be seen
    # of short texts whole batches start: a tenth more, of a few megabytes
    assert held("early", 16, 16) <= 1.1 * held("full", 16, 16)


def test_what_starts_together_leaves_room_for_what_waits():
    assert starting(32, 64) == 24 and starting(1, 64) == 1
    assert starting(32, 16) == 32 and starting(32, 17) == 24
    assert starting(1, 10_000) == 1


@pytest.mark.parametrize("streak", [0, 1, 2])
def test_a_score_equal_to_its_threshold_does_not_exit(streak):
    """The rule is strict, and with patience ties are no accident: a calibrated threshold is itself
    a score.
    """
    cat, batch = random_cat(build("bert"))
    scores, thresholds = cat.table.scores("patience"), np.full(3, streak / 3)
    assert (scores == streak / 3).any()
    np.testing.assert_array_equal(
        cat.run([batch], thresholds, "patience")[1], cats.exit_layers(scores, thresholds)
    )


# --- on text, with a real tokenizer ---


@pytest.fixture(scope="module")
def demo():
    """A CAT fitted on an untrained demo model: it need not be good, only to agree with its F."""
    torch.manual_seed(0)
    task = tasks.find("sentiment")
    data = tasks.load(task, limit={"train": 200, "validation": 100, "test": 60})
    backbone, tokenizer = Backbone(new_model("demo", task)), tokenizer_of("demo")
    texts = {split: part["text"][:] for split, part in data.items()}
    cat = CAT.fit(
        backbone,
        texts["train"],
        texts["validation"],
        tokenizer=tokenizer,
        max_length=40,
        about={"task": "sentiment"},
    )
    return cat, texts


def full(cat, texts):
    """What F itself says."""
    batch = cat.tokenizer(texts, padding=True, truncation=True, max_length=40, return_tensors="pt")
    with torch.no_grad():
        return cat.backbone.model(**batch).logits.numpy()


def test_predict_keeps_the_order_and_the_promise_on_calibration_inputs(demo):
    cat, texts = demo
    assert len(cat.table) == 100 and cat.about["tuning"] == 200 and not cat.about["labelled"]
    reference = full(cat, texts["test"])
    slow = cat.predict(texts["test"], epsilon=0.005)  # too small: everything runs all layers
    np.testing.assert_allclose(
        slow.probabilities, torch.softmax(torch.tensor(reference), -1), atol=1e-5
    )
    assert (
        (slow.predictions == reference.argmax(1)).all()
        and (slow.exit_layers == 12).all()
        and (slow.confidences == 1).all()
    )
    for batch_size in (1, 7, 60):
        out = cat.predict(texts["test"], epsilon=0.2, batch_size=batch_size)
        again = cat.predict(texts["test"][::-1], epsilon=0.2, batch_size=batch_size)
        np.testing.assert_array_equal(out.exit_layers, again.exit_layers[::-1])
        np.testing.assert_array_equal(out.predictions, again.predictions[::-1])
    # on its own calibration inputs at most the promised share is wrong
    own = cat.predict(texts["validation"], epsilon=0.2)
    assert (own.predictions == full(cat, texts["validation"]).argmax(1)).mean() >= 0.78
    predictions, exits, confidences, _ = out
    assert len(predictions) == len(exits) == len(confidences) == 60


def test_too_small_an_epsilon_warns(demo):
    with pytest.warns(cats.CalibrationWarning, match="at least 999 inputs, there are 100"):
        demo[0].predict(demo[1]["test"][:3], epsilon=0.001)


@pytest.mark.parametrize(
    "method",
    [
        "shared",
        "shared_all",
        "first_exit",
        "pac",
        "ltt",
        "independent",
        "static",
        "threshold",
        "naive",
    ],
)
def test_any_calibrator_at_call_time(demo, method):
    cat, _ = demo
    expected = cats.calibrate(cat.table.scores("meta"), cat.table.consistent, 0.3, method=method)
    np.testing.assert_array_equal(cat.thresholds(0.3, method), expected)
    assert len(cat.predict(demo[1]["test"][:5], 0.3, method=method).predictions) == 5


def test_a_subset_of_layers_is_calibrated_by_itself(demo):
    cat, texts = demo
    thresholds = cat.thresholds(0.2, exit_layers=[6, 3, 9])
    expected = cats.calibrate(
        cat.table.scores("meta")[:, [2, 5, 8]],
        cat.table.consistent[:, [2, 5, 8]],
        0.2,
        method="first_exit",
    )
    np.testing.assert_array_equal(thresholds[[2, 5, 8]], expected)
    assert np.isinf(np.delete(thresholds, [2, 5, 8])).all()
    for measure in ("meta", "sm"):
        out = cat.predict(texts["test"], 0.3, exit_layers=[3, 6, 9], measure=measure)
        assert set(out.exit_layers) <= {3, 6, 9, 12}
    for bad in ([], [0], [12]):
        with pytest.raises(ValueError, match="among 1 … 11"):
            cat.thresholds(0.2, exit_layers=bad)


def test_odd_inputs(demo):
    cat, texts = demo
    assert len(cat.predict([], 0.2).predictions) == 0
    out = cat.predict(["", "word " * 100_000, texts["test"][0]], 0.2)
    assert np.isfinite(out.probabilities).all()
    assert out.predictions[2] == cat.predict([texts["test"][0]], 0.2).predictions[0]
    for bad, message in (
        ("one text", "not one string"),
        ([3], "number 0"),
        (["a", ("a", "b")], "number 1"),
        ([("a", "b", "c")], "pairs"),
    ):
        with pytest.raises(TypeError, match=message):
            cat.predict(bad)
    with pytest.raises(ValueError, match="exit by meta, sm"):
        cat.predict(texts["test"][:2], 0.2, measure="random")
    with pytest.raises(TypeError, match="inputs of 1 text, got 2"):
        cat.predict([("a", "b")])
    for bad in (0.5, [0.5] * 10, [0.5] * 12, [np.nan] * 11):
        with pytest.raises(ValueError, match="needs 11 thresholds"):
            cat.predict(["a"], thresholds=bad)
    with pytest.raises(TypeError, match="delta would have no effect"):
        cat.predict(["a"], thresholds=[0.5] * 11, delta=0.1)


def test_fit_refuses(demo):
    cat, texts = demo
    with pytest.raises(TypeError, match="1 and calibration inputs 2 texts"):
        CAT.fit(cat.backbone, texts["train"], [("a", "b")] * 20, tokenizer=cat.tokenizer)
    with pytest.raises(ValueError, match="class numbers from 0 to 1"):
        CAT.fit(
            cat.backbone,
            texts["train"],
            texts["validation"],
            labels=np.arange(200),
            recipe="paper",
            tokenizer=cat.tokenizer,
        )
    with pytest.raises(TypeError, match="reads no labels"):
        CAT.fit(cat.backbone, texts["train"], texts["validation"], labels=np.zeros(200, int))
    with pytest.raises(ValueError, match="at least 10 tuning texts"):
        CAT.fit(cat.backbone, texts["train"][:3], texts["validation"], tokenizer=cat.tokenizer)
    with pytest.raises(ValueError, match="5 calibration texts are also tuning texts"):
        CAT.fit(cat.backbone, texts["train"], texts["train"][:5], tokenizer=cat.tokenizer)


@pytest.mark.parametrize("measure", CAT.measures())
def test_a_tie_at_the_threshold_breaks_no_promise(demo, measure):
    """Thresholds are calibration scores. Met again, alone or in any batch, an input that counted as
    right at its threshold must not leave there wrong: {G ≠ F} lies in {V > threshold}.
    """
    cat, texts = demo
    margin = cat.margin(measure, "first_exit")
    assert margin.any() == (measure != "patience") and margin.max() < 1e-2  # of a nine
    table = cat.table
    spread = nines(table.scores(measure)) if margin.any() else table.scores(measure)
    v = worst_score(table.scores(measure), table.consistent, records(spread, margin))
    again = [*texts["validation"], *texts["validation"][:20] * 3]  # some texts come often
    rows = [*range(100), *[*range(20)] * 3]
    for epsilon in (0.05, 0.1, 0.3):
        t = cat.thresholds(epsilon, measure=measure)[0]
        assert t in v or t == np.inf
        for batch_size in (1, 32):
            out = cat.predict(again, epsilon, batch_size, measure=measure)
            wrong = out.predictions != table.predictions[rows, -1]
            assert not (wrong & ~(v[rows] > t)).any()


def test_savings_are_read_from_inputs_that_do_not_calibrate(demo):
    cat, _ = demo
    assert len(cat.choosing) == 20 and len(cat.table) == 100
    expected = cats.savings(cat.choosing, "meta", [0.1], "first_exit")
    assert cat.savings([0.1]).equals(expected)


def test_mixed_precision_is_part_of_the_promise(demo):
    cat, texts = demo
    low = CAT.fit(
        cat.backbone,
        texts["train"],
        texts["validation"],
        tokenizer=cat.tokenizer,
        autocast="bfloat16",
        head_options={"epochs": 1},
        meta_options={"epochs": 1},
    )
    batch = cat.tokenizer(texts["test"], padding=True, return_tensors="pt")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reference = cat.backbone.model(**batch).logits.float().numpy()
    out = low.predict(texts["test"], 0.005)
    np.testing.assert_allclose(
        out.probabilities, torch.softmax(torch.tensor(reference), -1), atol=2e-2
    )
    # heads and scores stay in float32, so early exits are those of the calibration table, but for
    # scores within rounding of F
    thresholds = np.full(11, np.median(low.table.scores("meta")))
    own = low.predict(texts["validation"], thresholds=thresholds)
    assert (
        own.exit_layers.min() < 12
        and (own.exit_layers == cats.exit_layers(low.table.scores("meta"), thresholds)).mean() > 0.9
    )


def test_pairs_and_regression():
    torch.manual_seed(0)
    task = tasks.find("similarity")
    data = tasks.load(task, limit={"train": 120, "validation": 60, "test": 30})
    texts = {
        split: list(zip(part["sentence1"][:], part["sentence2"][:])) for split, part in data.items()
    }
    backbone, tokenizer = Backbone(new_model("demo-shared", task)), tokenizer_of("demo")
    cat = CAT.fit(
        backbone,
        texts["train"],
        texts["validation"],
        labels=data["train"]["label"][:],
        recipe="paper",
        tokenizer=tokenizer,
        tau=0.1,
    )
    out = cat.predict(texts["test"], 0.1)
    assert (
        out.predictions.shape == (30,)
        and out.predictions.dtype == np.float32
        and cat.table.tau == 0.1
        and cat.about["labelled"]
    )


# --- keeping it ---


@pytest.fixture(scope="module")
def saved(demo, tmp_path_factory):
    return demo[0].save_pretrained(tmp_path_factory.mktemp("cats") / "mine")


def test_round_trip(demo, saved, tmp_path):
    cat, texts = demo
    back = CAT.from_pretrained(saved)
    for epsilon in (0.05, 0.3):
        a, b = cat.predict(texts["test"], epsilon), back.predict(texts["test"], epsilon)
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)
    assert sorted(path.name for path in saved.iterdir()) == [
        "README.md",
        "backbone",
        "calibration.safetensors",
        "cat.json",
        "choosing.safetensors",
        "heads.safetensors",
        "meta.safetensors",
    ]
    card = (saved / "README.md").read_text()
    assert (
        "the 100 calibration inputs" in card
        and "smallest ε it can promise is **0.0099**" in card
        and "tuning: 200" in card
    )
    # by reference: the backbone stays where it is, the tokenizer does not
    back.tokenizer.model_max_length, back.tokenizer.truncation_side = 33, "left"
    reference = back.save_pretrained(tmp_path / "thin", backbone=False)
    assert (
        not (reference / "backbone").exists()
        and CAT.from_pretrained(reference).tokenizer.model_max_length == 33
        and CAT.from_pretrained(reference).tokenizer.truncation_side == "left"
    )
    assert (
        CAT.from_pretrained(reference).predict(texts["test"], 0.3).exit_layers == b.exit_layers
    ).all()
    assert (
        CAT.from_pretrained(reference, backbone=saved / "backbone").thresholds(0.3)
        == back.thresholds(0.3)
    ).all()


def changed(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_changed_file_is_refused(saved, tmp_path):
    folder = changed(saved, tmp_path)
    data = bytearray((folder / "calibration.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "calibration.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="missing or was changed"):
        CAT.from_pretrained(folder)


def test_another_backbone_is_refused(saved, tmp_path):
    folder = changed(saved, tmp_path)
    torch.manual_seed(5)
    new_model("demo", tasks.find("sentiment")).save_pretrained(folder / "backbone")
    with pytest.raises(ValueError, match="not the one this CAT was made for"):
        CAT.from_pretrained(folder)


def test_parts_of_two_cats_are_refused(saved, tmp_path):
    folder = changed(saved, tmp_path)
    (folder / "heads.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        CAT.from_pretrained(folder)
    back = CAT.from_pretrained(saved)
    with pytest.raises(ValueError, match="12, 6, 12 and 12 layers"):
        CAT(back.backbone, back.tokenizer, Heads(5, 64, 2), back.meta, back.table)
    with pytest.raises(ValueError, match="hidden size"):
        heads = Heads(11, 63, 2, reads="cls+mean", recipe="distilled")
        back.meta.heads = module_digest(heads)
        CAT(back.backbone, back.tokenizer, heads, back.meta, back.table)


def test_saving_what_cannot_be_saved_leaves_the_old_cat_alone(demo, saved, tmp_path):
    folder = changed(saved, tmp_path)
    assert not demo[0].backbone.model.name_or_path
    with pytest.raises(ValueError, match="not loaded from anywhere"):
        demo[0].save_pretrained(folder, backbone=False)
    assert (CAT.from_pretrained(folder).thresholds(0.3) == demo[0].thresholds(0.3)).all()


def test_another_tokenizer_is_refused(saved, tmp_path):
    folder = changed(saved, tmp_path)
    (folder / "backbone/tokenizer.json").write_text(
        (folder / "backbone/tokenizer.json").read_text().replace("good", "bad")
    )
    with pytest.raises(ValueError, match="missing or was changed"):
        CAT.from_pretrained(folder)


def test_a_half_precision_backbone_comes_back_as_it_was(saved, demo, tmp_path):
    texts, quick = demo[1], {"head_options": {"epochs": 1}, "meta_options": {"epochs": 1}}
    half = Backbone.from_pretrained(saved / "backbone", dtype=torch.bfloat16)
    (tmp_path / "work/calibration").mkdir(parents=True)
    (tmp_path / "work/calibration/mine.txt").write_text("not yours")
    cat = CAT.fit(
        half,
        texts["train"],
        texts["validation"],
        tokenizer=demo[0].tokenizer,
        max_length=40,
        folder=tmp_path / "work",
        **quick,
    )
    assert (
        tmp_path / "work/calibration/mine.txt"
    ).exists()  # a folder that is given is not ours to clear
    folder = cat.save_pretrained(tmp_path / "half")
    for back in (CAT.from_pretrained(folder), CAT.from_pretrained(folder, backbone=half)):
        assert (
            back.predict(texts["test"], 0.3).exit_layers
            == cat.predict(texts["test"], 0.3).exit_layers
        ).all()


def test_a_cat_of_before_counts_its_margins_in_scores(saved, tmp_path):
    folder, now = changed(saved, tmp_path), CAT.from_pretrained(saved)
    content = json.loads((folder / "cat.json").read_text())
    content |= {"format": "cats.CAT/4", "margins": {"meta": 0.125}}
    del content["unit"], content["digest"]
    write_json(folder / "cat.json", content | {"digest": digest(content)})
    back = CAT.from_pretrained(folder)
    thresholds = back.thresholds(0.3)
    expected = cats.calibrate(
        back.table.scores("meta"), back.table.consistent, 0.3, "first_exit", margin=0.125
    )
    assert (back.unit, now.unit) == ("score", "nines")
    np.testing.assert_array_equal(thresholds, expected)
    np.testing.assert_array_equal(back.limits(thresholds), thresholds + 0.125)
    again = CAT.from_pretrained(back.save_pretrained(tmp_path / "again"))
    np.testing.assert_array_equal(again.limits(again.thresholds(0.3)), thresholds + 0.125)


def test_folders_that_hold_no_cat(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="no CAT"):
        CAT.from_pretrained(tmp_path)
    folder = changed(saved, tmp_path)
    card = json.loads((folder / "cat.json").read_text())
    (folder / "cat.json").write_text(json.dumps(card | {"format": "other"}))
    with pytest.raises(ValueError, match="expected 'cats.CAT/6'"):
        CAT.from_pretrained(folder)
