"""`evaluate` against calibrating and exiting by hand, and the oracle against brute force."""

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import beta

import cats
from cats import METHODS
from cats.stats import choosing
from cats.stats.calibrators import CalibrationSet, exact, naive
from cats.stats.trials import (
    auroc,
    by_layer,
    calibration_error,
    coverage_quantiles,
    group_trials,
    recalibrate,
    risk_trials,
    split,
)

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")


def by_hand(table, method, measure, epsilon, trial, seed):
    """One row of `evaluate`, from the public functions alone."""
    keep = split(len(table), trial, seed)
    scores, consistent, test = table.scores(measure), table.consistent, np.flatnonzero(~keep)
    if method == "oracle":
        exits = cats.oracle_exits(consistent[test], epsilon)
    else:
        exits = cats.exit_layers(
            scores[test], cats.calibrate(scores[keep], consistent[keep], epsilon, method=method)
        )
    agree = [oracles.agrees(consistent[i], k) for i, k in zip(test, exits)]
    said = table.predictions[test, exits - 1]
    row = {"consistency": np.mean(agree), "layers": exits.mean()}
    if table.regression:
        defined = np.ptp(said) > 0
        row["correlation"] = np.corrcoef(said, table.labels[test])[0, 1] if defined else np.nan
    else:
        row["accuracy"] = np.mean(said == table.labels[test])
    row["bound"] = cats.clopper_pearson(sum(agree), len(test), 0.01)
    if method == "naive":
        row["bound"] = naive(CalibrationSet(scores[keep], consistent[keep]), [exact(epsilon)])[1][0]
    return row


def regression_table(n=200):
    rng = np.random.default_rng(1)
    full = rng.normal(2.5, 1, n)
    outputs = full[:, None] + rng.normal(size=(n, 6)) * np.array([1.5, 1, 0.8, 0.5, 0.3, 0])
    return cats.ScoreTable(outputs[..., None], rng.random((n, 5)), full + rng.normal(0, 0.3, n))


PLAIN = {"table": lambda: cats.Synthetic(layers=6).table(200)}  # for tests/mutations.py


@pytest.mark.parametrize(
    "table",
    [cats.Synthetic(layers=6).table(200), regression_table()],
    ids=["classes", "regression"],
)
def test_equals_doing_it_by_hand(table):
    measures, epsilons = ["meta", "patience"], [0.3, 0.05, 0.1]  # unsorted on purpose
    methods = [*METHODS, "oracle"]
    frame = cats.evaluate(table, methods, measures, epsilons, trials=3, seed=7)
    assert len(frame) == len(methods) * 2 * 3 * 3
    for row in frame.itertuples():
        expected = by_hand(table, row.method, row.measure, row.epsilon, row.trial, seed=7)
        for column, value in expected.items():
            assert getattr(row, column) == pytest.approx(value, abs=1e-9, nan_ok=True), (
                row,
                column,
            )


def test_trials_are_splits_that_do_not_depend_on_each_other():
    table = cats.Synthetic(layers=4).table(101)
    few, many = (cats.evaluate(table, "shared_all", "meta", 0.1, trials=t) for t in (2, 5))
    assert many[many.trial < 2].reset_index(drop=True).equals(few)
    masks = [split(101, t) for t in range(5)]
    assert all(mask.sum() == 80 for mask in masks) and len({mask.tobytes() for mask in masks}) == 5
    assert (split(101, 0, seed=1) != masks[0]).any()


def test_unlabelled_tables_have_no_performance():
    table = cats.Synthetic(layers=4).table(100)
    frame = cats.evaluate(cats.ScoreTable(table.logits, table.meta), trials=1)
    assert list(frame) == [
        "method",
        "measure",
        "epsilon",
        "trial",
        "consistency",
        "layers",
        "bound",
    ]


@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 999),
    epsilon=st.sampled_from([0.05, 0.2, 0.34, 0.5, 0.9]),
)
@settings(deadline=None)
def test_no_rule_beats_the_oracle(n, seed, epsilon):
    consistent = np.random.default_rng(seed).random((n, 3)) < 0.5
    exits = cats.oracle_exits(consistent, epsilon)
    assert exits.sum() == oracles.oracle_layers(consistent, epsilon)
    wrong = sum(not oracles.agrees(c, k) for c, k in zip(consistent, exits))
    assert wrong <= epsilon * n


def test_the_oracle_needs_the_fewest_layers():
    table = cats.Synthetic(layers=6).table(500)
    frame = cats.evaluate(table, [*METHODS, "oracle"], ["meta"], [0.1], trials=5)
    layers = frame.pivot(index="trial", columns="method", values="layers")
    consistent = frame.pivot(index="trial", columns="method", values="consistency") >= 0.9
    for method in METHODS:
        assert (layers[method] >= layers["oracle"])[consistent[method]].all()


def test_refusals_are_reported():
    with pytest.warns(
        cats.CalibrationWarning, match="meta, 2 of 2 trials: first_exit cannot promise epsilon=0.01"
    ):
        cats.evaluate(cats.Synthetic(layers=4).table(50), "first_exit", "meta", 0.01, trials=2)


def test_summary_has_mean_and_percentiles():
    frame = cats.evaluate(cats.Synthetic(layers=4).table(300), ["shared", "first_exit"], trials=9)
    one = frame[(frame.method == "shared") & (frame.epsilon == 0.1)].layers
    row = cats.summary(frame).loc[("shared", "meta", 0.1), "layers"]
    assert row["mean"] == pytest.approx(one.mean()) and row["low"] == pytest.approx(
        one.quantile(0.16)
    )


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"methods": ["magic"]}, ValueError, "unknown method"),
        ({"measures": ["magic"]}, ValueError, "unknown measure"),
        ({"epsilons": [0.1, 2]}, ValueError, "epsilon"),
        ({"trials": 0}, ValueError, "trial"),
        ({"options": {"pac": {"delta": 0.1}}}, ValueError, "not among the methods"),
        ({"options": {"shared": {"delta": 0.1}}}, TypeError, "no options"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        cats.evaluate(cats.Synthetic(layers=3).table(20), **({"methods": ["shared"]} | change))


def test_auroc_and_calibration_error_equal_the_slow_ones():
    rng = np.random.default_rng(0)
    scores, positive = np.round(rng.random(60), 1), rng.random(60) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    assert auroc(scores, positive) == pytest.approx(np.mean(pairs))
    assert np.isnan(auroc(scores, np.ones(60, bool)))
    confidence, error = rng.random(200), 0
    right = rng.random(200) < confidence**2
    for b in range(15):
        inside = (confidence >= b / 15) & ((confidence < (b + 1) / 15) | (b == 14))
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert calibration_error(confidence, right) == pytest.approx(error)


def test_report_by_layer():
    table = cats.Synthetic(layers=5).table(400)
    report, temperature = by_layer(table), np.array([2.0, 1.0, 0.5, 1.0])
    assert report["consistency"].tolist() == pytest.approx(table.consistent.mean(axis=0))
    assert (
        report["auroc_meta"] > report["auroc_sm"]
    ).all()  # the synthetic softmax is the noisier one
    before = by_layer(table, temperature)["ece_before"]
    assert before[1] == pytest.approx(report["ece"][1]) and before[0] != pytest.approx(
        report["ece"][0]
    )
    assert "correlation" in by_layer(regression_table()) and "ece" not in by_layer(
        regression_table()
    )


def test_recalibrate_is_calibrate_on_part_of_a_table():
    """Each row against `calibrate` on the inputs drawn and exits of all the others."""
    table, methods = (
        cats.Synthetic(layers=5).table(120),
        [
            ("first_exit", None),
            ("shared", None),
            ("pac", 0.1),
        ],
    )
    frame = recalibrate(table, 40, methods, [0.01, 0.2], trials=3, seed=7)
    assert (
        len(frame) == 3 * 3 * 2 and np.isinf(frame[(frame["epsilon"] == 0.01)]["threshold"]).all()
    )
    agree = np.column_stack([table.consistent, np.ones(len(table), bool)])
    for row in frame.itertuples():
        keep = np.random.default_rng([7, row.trial]).permutation(len(table)) < 40
        options = {"delta": 0.1} if row.method == "pac" else {}
        taus = cats.calibrate(
            table.scores()[keep], table.consistent[keep], row.epsilon, row.method, **options
        )
        exits = cats.exit_layers(table.scores()[~keep], taus)
        assert taus[0] == row.threshold and np.isclose(exits.mean(), row.layers)
        assert np.isclose(1 - agree[~keep][np.arange(80), exits - 1].mean(), row.risk)


def test_delta_is_the_confidence_of_every_bound():
    table = cats.Synthetic(layers=4).table(400)
    strict, loose = (
        cats.evaluate(table, ["naive", "shared"], ["meta"], [0.1], 3, delta=delta)
        .groupby("method")["bound"]
        .mean()
        for delta in (0.01, 0.2)
    )
    assert (strict < loose).all()


def test_the_worst_group_is_that_of_by_group():
    table = cats.Synthetic(layers=5).table(150)
    said = table.predictions[:, -1]
    methods = ["first_exit", "independent", "static", "oracle"]
    frame = cats.evaluate(table, methods, "meta", [0.1, 0.3], trials=2, groups=said)
    plain = cats.evaluate(table, methods, "meta", [0.1, 0.3], trials=2)
    assert frame.drop(columns="worst_group").equals(plain)
    for row in frame[frame["method"] != "oracle"].itertuples():
        keep = split(150, row.trial)
        scores, consistent = table.scores(), table.consistent
        taus = cats.calibrate(scores[keep], consistent[keep], row.epsilon, row.method)
        exits = cats.exit_layers(scores[~keep], taus)
        worst = cats.by_group(consistent[~keep], exits, said[~keep])["consistency"][0]
        assert row.worst_group == pytest.approx(worst)
    with pytest.raises(ValueError, match="groups must have shape"):
        cats.evaluate(table, groups=said[:3])


def test_savings_leave_one_out_and_use_all_inputs():
    """At n = 100 and ε = 0.01 an 80 % split cannot promise anything; all 100 can."""
    table = cats.Synthetic(layers=6, skill=4).table(100)
    frame = cats.savings(table, epsilons=[0.01, 0.1, 0.3])
    scores, consistent = table.scores(), table.consistent
    for row in frame.itertuples():
        exits = []
        for i in range(100):
            rest = np.arange(100) != i
            taus = cats.calibrate(scores[rest], consistent[rest], row.epsilon, "first_exit")
            exits.append(oracles.predict(scores[i], taus))
        assert row.layers == pytest.approx(np.mean(exits))
        assert row.low <= row.layers <= row.high
        assert row.threshold == cats.calibrate(scores, consistent, row.epsilon, "first_exit")[0]
    assert frame["layers"][0] < 6 and np.isfinite(frame["threshold"][0])
    short = cats.savings(table.take(np.arange(99)), epsilons=[0.01])  # 98 could not: by all 99
    assert short["layers"][0] < 6


@pytest.mark.parametrize("method", ["shared", "shared_all", "first_exit", "pac", "band"])
def test_coverage_quantiles_are_those_of_an_order_statistic(method):
    scores = np.random.default_rng(0).permutation(200).astype(float)[:, None]
    cal = CalibrationSet(scores, np.zeros((200, 1), bool))  # V are the ranks themselves
    tau = int(cats.calibrate(scores, np.zeros((200, 1), bool), 0.1, method)[0])
    found = coverage_quantiles(cal, 0.1, method)
    np.testing.assert_allclose(found, beta.ppf([0.05, 0.5, 0.95], tau + 1, 200 - tau))
    assert (coverage_quantiles(cal, 0.001, method) == 1).all()  # infinite: always covered
    assert np.isnan(coverage_quantiles(cal, 0.1, "ltt")).all()


# --- choosing, losses and groups over trials


def test_sets_of_layers_are_calibrated_as_their_columns():
    table = cats.Synthetic(layers=6).table(60)
    scores, consistent = np.round(table.scores(), 1), table.consistent  # with ties
    subsets = np.array([[0, 2, 4], [1, 2, 3], [0, 1, 4]])
    values = choosing.subset_values(scores, consistent, subsets)
    for j, columns in enumerate(subsets):
        slow = oracles.first_exit_values(scores[:, columns], consistent[:, columns])
        assert values[:, j].tolist() == slow
        taus = np.array([0.5, 0.7, 0.9])
        exits = choosing.subset_exits(scores, subsets, taus)[:, j]
        few = cats.exit_layers(scores[:, columns], np.full(3, taus[j]))
        assert exits.tolist() == [[*(columns + 1), 6][k - 1] for k in few]


def test_choosing_after_looking_breaks_the_promise_and_choosing_apart_does_not():
    """On layers that are all alike, whatever looks best was luck (false alarm below 1e-6 by normal
    bounds on 60 trials; seeded).
    """
    rng = np.random.default_rng(0)
    consistent = rng.random((4000, 12)) < 0.8
    logits = np.zeros((4000, 13, 2))
    logits[..., 0] = 1
    logits[:, :-1][~consistent] = [0, 1]
    table = cats.ScoreTable(logits, rng.random((4000, 12)))
    frame = choosing.choosing_layers(table, choosing.Draws(60, trials=60), 0.1)
    risk = frame.groupby("way")["risk"].agg(["mean", "sem"])
    low, high = risk["mean"] - 5 * risk["sem"], risk["mean"] + 5 * risk["sem"]
    assert low[choosing.LOOKED] > 0.1 > low[choosing.APART]
    assert high[choosing.BAND] < 0.1 < high[choosing.FIXED] + 0.05


def test_choosing_epsilon_reads_the_same_rows_as_recalibrate():
    table, epsilons = cats.Synthetic(layers=5).table(400), [0.05, 0.1, 0.2, 0.3]
    draws = choosing.Draws(200, trials=3, delta=0.1)
    frame = choosing.choosing_epsilon(table, draws, ["first_exit", "band"], epsilons)
    settings = [("first_exit", None), ("band", 0.1)]
    every = recalibrate(table, 200, settings, epsilons, trials=3)
    for row in frame.itertuples():
        mine = every[(every["method"] == row.method) & (every["trial"] == row.trial)]
        at = mine[mine["epsilon"] == row.epsilon].iloc[0]
        assert row.risk == pytest.approx(at["risk"]) and row.layers == pytest.approx(at["layers"])
        assert row.excess == pytest.approx((mine["risk"] - mine["epsilon"]).max())


def test_losses_and_groups_over_trials():
    table = regression_table()
    frame = risk_trials(table, [0.1, 0.5], bound=8, trials=2)
    for row in frame.itertuples():
        keep = split(len(table), row.trial)
        losses = np.abs(table.predictions[:, :-1] - table.predictions[:, -1:])
        taus = cats.calibrate_risk(table.scores()[keep], losses[keep], row.alpha, 8)
        exits = cats.exit_layers(table.scores()[~keep], taus)
        said = table.predictions[~keep, exits - 1]
        assert row.loss == pytest.approx(np.abs(said - table.predictions[~keep, -1]).mean())
        assert row.error == pytest.approx(np.abs(said - table.labels[~keep]).mean())
        assert row.layers == exits.mean()
    table = cats.Synthetic(layers=5).table(300)
    said = table.predictions[:, -1]
    frame = group_trials(table, said, 0.2, trials=2)
    layers = frame.groupby("way")["layers"].mean()
    assert layers["the largest for all"] >= layers["a threshold a group"]
    assert set(frame["group"]) == set(said) and len(frame) == 2 * 3 * len(set(said))
    with pytest.raises(ValueError, match="no loss 'difference' for classes"):
        table.losses("difference")
    p = softmax(table.logits.astype(float), axis=-1)
    slow = [[sum(abs(p[i, k] - p[i, -1])) / 2 for k in range(4)] for i in range(300)]
    np.testing.assert_allclose(table.losses(), slow)
