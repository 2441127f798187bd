"""Every calibrator against the paper's pseudo-code, and properties that hold whatever the data."""

import warnings
from fractions import Fraction
from math import inf

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cats
from cats.stats.calibrators import METHODS, CalibrationSet, naive, same_for_all_layers
from cats.stats.exits import records, worst_score
from cats.stats.groups import length_groups
from cats.stats.measures import from_nines, nines
from cats.stats.quantiles import (
    coverage_band,
    crossing_probability,
    exact,
    most_errors,
    sorted_quantiles,
)
from cats.stats.risk import loss_at, worst_loss

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
SEQUENCE = np.linspace(1, 0, 21)
OPTIONS = {
    "ltt": {"sequence": SEQUENCE, "delta": 0.3},
    "pac": {"delta": 0.3},
    "band": {"delta": 0.3},
}
EPSILONS = st.sampled_from([0.01, 0.05, 0.07, 0.1, 0.2, 0.25, 1 / 3, 0.5, 0.9])


@st.composite
def cases(draw, max_n=30):
    """Tiny calibration sets, with ties, with layers never or always inconsistent, with nothing or
    everything consistent.
    """
    n, early = draw(st.integers(1, max_n)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.random((n, early))
    if draw(st.booleans()):
        scores = np.round(scores * 4) / 4  # many ties
    rates = rng.choice([0.0, 0.5, 0.9, 1.0], size=early)
    return scores, rng.random((n, early)) < rates


def exits(case, method, epsilon, **options):
    return cats.exit_layers(
        case[0],
        cats.calibrate(*case, epsilon, method=method, **(OPTIONS.get(method, {}) | options)),
    )


@pytest.mark.parametrize("method", METHODS)
@given(case=cases(), epsilon=EPSILONS)
@settings(max_examples=60, deadline=None)
def test_equals_the_pseudo_code(method, case, epsilon):
    fast = cats.calibrate(*case, epsilon, method=method, **OPTIONS.get(method, {}))
    slow = getattr(oracles, method)(*case, epsilon, **OPTIONS.get(method, {}))
    np.testing.assert_array_equal(fast, slow)


@given(
    case=cases(),
    thresholds=st.lists(st.sampled_from([-inf, 0.0, 0.25, 0.5, 0.75, inf]), min_size=6, max_size=6),
)
def test_exits_equal_the_pseudo_code(case, thresholds):
    scores, thresholds = case[0], thresholds[: case[0].shape[1]]
    assert cats.exit_layers(scores, thresholds).tolist() == [
        oracles.predict(row, thresholds) for row in scores
    ]


@given(
    values=st.lists(st.integers(0, 9), min_size=0, max_size=40),
    level=st.decimals("0.01", "1", places=2),
)
def test_quantile_equals_its_definition(values, level):
    assert cats.conformal_quantile(np.array(values, float), level) == oracles.quantile(
        values, Fraction(level)
    )
    assert cats.conformal_quantile(np.array(values, float), float(level)) == oracles.quantile(
        values, Fraction(level)
    )


def test_rank_is_exact_for_decimal_levels():
    assert 0.07 * 100 > 7  # the trap
    assert cats.conformal_quantile(np.arange(1.0, 100), 0.07) == 7
    assert cats.conformal_quantile(np.arange(1.0, 20), 0.95) == 19
    assert cats.conformal_quantile(np.arange(1.0, 19), 0.95) == inf
    assert exact(np.float64(0.07)) == exact(0.07) == Fraction(7, 100)
    for n in (9, 99, 999):
        for epsilon in (0.07, 0.1, 0.29, 0.57):
            values = np.arange(1.0, n + 1)
            consistent = np.zeros((n, 1), bool)
            rank = -((Fraction(str(epsilon)) - 1) * (n + 1) // 1)
            assert cats.calibrate(values[:, None], consistent, epsilon)[0] == (
                rank if rank <= n else inf
            )


@given(case=cases(), epsilon=EPSILONS)
@settings(deadline=None)
def test_pointwise_order(case, epsilon):
    """first_exit leaves no later than shared_all, and that no later than shared."""
    first, every, shared = (
        exits(case, method, epsilon) for method in ("first_exit", "shared_all", "shared")
    )
    assert (first <= every).all() and (every <= shared).all()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "naive"])
@given(case=cases(), pair=st.tuples(EPSILONS, EPSILONS))
@settings(max_examples=30, deadline=None)
def test_monotone_in_epsilon(method, case, pair):
    strict, loose = (exits(case, method, epsilon) for epsilon in sorted(pair))
    assert (loose <= strict).all()


@given(case=cases(), pair=st.tuples(EPSILONS, EPSILONS))
def test_naive_threshold_monotone_in_epsilon(case, pair):
    strict, loose = (exits(case, "naive", epsilon) for epsilon in sorted(pair))
    assert (loose <= strict).all()


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m != "naive"]
)  # naive splits by row, at random
@given(case=cases(), epsilon=EPSILONS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_row_order_does_not_matter(method, case, epsilon, seed):
    order = np.random.default_rng(seed).permutation(len(case[0]))
    shuffled = case[0][order], case[1][order]
    np.testing.assert_array_equal(
        exits(case, method, epsilon)[order], exits(shuffled, method, epsilon)
    )


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m != "threshold"]
)  # 1-epsilon is a score by itself
@given(case=cases(), epsilon=EPSILONS)
@settings(max_examples=30, deadline=None)
def test_increasing_transforms_do_not_matter(method, case, epsilon):
    def transform(x):
        return np.exp(3 * x) - 7

    options = {"sequence": transform(SEQUENCE)} if method == "ltt" else {}
    moved = transform(case[0]), case[1]
    np.testing.assert_array_equal(
        exits(case, method, epsilon), exits(moved, method, epsilon, **options)
    )


@given(case=cases(), t=st.sampled_from([-inf, 0.0, 0.25, 0.4, 0.5, 0.75, 1.0, inf]))
def test_wrong_exits_lie_inside_the_controlled_event(case, t):
    scores, consistent = case
    wrong = [
        not oracles.agrees(c, oracles.predict(s, [t] * len(s))) for s, c in zip(scores, consistent)
    ]
    for only_records in (False, True):
        assert (worst_score(scores, consistent, only_records) > t)[wrong].all()
    assert CalibrationSet(scores, consistent).errors(np.array([t]))[0] == sum(wrong)


@given(case=cases(), seed=st.integers(0, 99))
def test_part_equals_a_fresh_set(case, seed):
    keep = np.random.default_rng(seed).random(len(case[0])) < 0.6
    part, fresh = CalibrationSet(*case).part(keep), CalibrationSet(case[0][keep], case[1][keep])
    levels = [Fraction(1, 10), Fraction(1, 3)]
    for name, method in METHODS.items():
        np.testing.assert_array_equal(
            method.thresholds(part, levels), method.thresholds(fresh, levels), err_msg=name
        )
    np.testing.assert_array_equal(naive(part, levels)[1], naive(fresh, levels)[1])


def test_records():
    scores = np.array([[0.5, 0.5, 0.7, 0.6, 0.8]])
    assert records(scores).tolist() == [[True, False, True, False, True]]


def test_first_exit_ignores_what_cannot_exit():
    scores, consistent = np.array([[0.9, 0.8]] * 20), np.array([[True, False]] * 20)
    assert cats.calibrate(scores, consistent, 0.05, method="shared_all")[0] == 0.8
    assert cats.calibrate(scores, consistent, 0.05, method="first_exit")[0] == -inf


def test_nothing_or_everything_consistent():
    scores = np.random.default_rng(0).random((40, 3))
    every, none = np.ones_like(scores, bool), np.zeros_like(scores, bool)
    for method in ("shared_all", "first_exit", "pac"):  # V = -inf everywhere: leave at once
        assert (exits((scores, every), method, 0.2) == 1).all()
    for method in ("shared", "independent"):  # no inconsistent input to learn from: no promise
        assert (exits((scores, every), method, 0.2) == 4).all()
    assert (exits((scores, every), "static", 0.2) == 1).all() and (
        exits((scores, none), "static", 0.2) == 4
    ).all()
    for method in ("shared", "shared_all", "first_exit"):
        kept = exits((scores, none), method, 0.2) == 4
        assert kept.sum() >= np.ceil(0.8 * 41)  # the promised rank of the calibration inputs stay


def test_a_layer_never_inconsistent_stays_shut_under_independent():
    scores, consistent = np.random.default_rng(0).random((500, 2)), np.zeros((500, 2), bool)
    consistent[:, 1] = True
    thresholds = cats.calibrate(scores, consistent, 0.2, method="independent")
    assert np.isfinite(thresholds[0]) and thresholds[1] == inf


def test_weights_of_independent():
    scores, consistent = np.random.default_rng(0).random((300, 3)), np.zeros((300, 3), bool)
    weights = [0.5, 0.3, 0.2]
    fast = cats.calibrate(scores, consistent, 0.2, method="independent", weights=weights)
    np.testing.assert_array_equal(fast, oracles.independent(scores, consistent, 0.2, weights))
    assert (
        cats.calibrate(scores, consistent, 0.2, method="independent", weights=[1, 0, 0])[1] == inf
    )
    for bad in ([0.5, 0.5], [0.5, 0.4, 0.2], [1.5, -0.5, 0.0]):
        with pytest.raises(ValueError, match="weights"):
            cats.calibrate(scores, consistent, 0.2, method="independent", weights=bad)


def test_calibrating_where_the_full_model_is_right():
    rng = np.random.default_rng(0)
    scores, consistent, right = rng.random((60, 3)), rng.random((60, 3)) < 0.5, rng.random(60) < 0.7
    for method in METHODS:
        given_right = cats.calibrate(scores, consistent, 0.2, method=method, correct=right)
        np.testing.assert_array_equal(
            given_right, cats.calibrate(scores[right], consistent[right], 0.2, method=method)
        )
    with pytest.raises(TypeError, match="correct"):
        cats.calibrate(scores, consistent, 0.2, correct=right[:-1])


@pytest.mark.parametrize("delta", [0.1, 0.01])
@pytest.mark.parametrize("epsilon", [0.3, 0.1, 0.05, 0.01])
def test_smallest_calibration_sets(epsilon, delta):
    n, m = cats.calibration_size(epsilon), cats.calibration_size(epsilon, delta)
    for size, method, options in ((n, "shared_all", {}), (m, "pac", {"delta": delta})):
        for short in (0, 1):
            scores = np.random.default_rng(0).random((size - short, 1))
            thresholds = cats.calibrate(
                scores, np.zeros_like(scores, bool), epsilon, method=method, **options
            )
            assert np.isfinite(thresholds[0]) == (not short)
    assert cats.smallest_epsilon(n) <= epsilon < cats.smallest_epsilon(n - 1)
    assert cats.smallest_epsilon(m, delta) <= epsilon < cats.smallest_epsilon(m - 1, delta)


def test_most_errors_equals_the_exact_sum():
    for n, epsilon, delta in (
        (10, 0.3, 0.2),
        (50, 0.1, 0.05),
        (89, 0.05, 0.01),
        (90, 0.05, 0.01),
        (150, 0.07, 0.01),
    ):
        within = [
            m
            for m in range(n)
            if oracles.binomial_cdf(m, n, Fraction(str(epsilon))) <= Fraction(str(delta))
        ]
        assert most_errors(n, epsilon, delta) == (within[-1] if within else -1)


def test_clopper_pearson_solves_its_equation():
    for s, n in ((1, 1), (5, 9), (95, 100), (100, 100)):
        bound = Fraction(float(cats.clopper_pearson(s, n, 0.05)))
        assert float(1 - oracles.binomial_cdf(s - 1, n, bound)) == pytest.approx(0.05)
    assert cats.clopper_pearson(0, 10) == 0
    with pytest.raises(ValueError):
        cats.clopper_pearson(11, 10)


WARNINGS = {
    "shared": r"at least 99 inputs with an inconsistent layer, there are 10;",
    "shared_all": r"at least 99 inputs, there are 10;",
    "first_exit": r"at least 99 inputs, there are 10;",
    "independent": (
        r"at least 199 inputs inconsistent at a layer \(layers 1, 2 stay shut\), there are 10;"
    ),
    "pac": r"at least 459 inputs, there are 10;",
    "ltt": r"at least 459 inputs, there are 10;",
    "band": r"at least 762 inputs, there are 10;",
    "crc": r"at least 99 inputs, there are 10;",
}


@pytest.mark.parametrize("method", WARNINGS)
def test_too_few_points_warn_with_the_number_needed(method):
    scores = np.random.default_rng(0).random((10, 2))
    with pytest.warns(cats.CalibrationWarning, match=WARNINGS[method]):
        assert (cats.calibrate(scores, np.zeros((10, 2), bool), 0.01, method=method) == inf).all()


def test_enough_points_do_not_warn():
    scores = np.random.default_rng(0).random((500, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            cats.calibrate(scores, scores > 0.5, 0.1, method=method)


SCORES, CONSISTENT = np.zeros((4, 2)), np.zeros((4, 2), bool)
BAD = [
    *[
        ((SCORES, CONSISTENT, e), {}, ValueError, "epsilon")
        for e in (0, 1, -0.1, 1.5, float("nan"), inf)
    ],
    *[((SCORES, CONSISTENT, e), {}, TypeError, "epsilon") for e in ("0.1", None, True, [0.1])],
    ((np.full((4, 2), np.nan), CONSISTENT, 0.1), {}, ValueError, "input 0 has nan at layer 1"),
    ((np.full((4, 2), inf), CONSISTENT, 0.1), {}, ValueError, "finite"),
    ((SCORES[0], CONSISTENT[0], 0.1), {}, ValueError, r"shape \(n, l-1\)"),
    ((np.zeros((4, 0)), np.zeros((4, 0), bool), 0.1), {}, ValueError, "early layer"),
    ((SCORES, CONSISTENT[:3], 0.1), {}, ValueError, "same shape"),
    ((SCORES, CONSISTENT.astype(int), 0.1), {}, TypeError, "boolean"),
    ((SCORES.astype(str), CONSISTENT, 0.1), {}, TypeError, "numbers"),
    (
        (SCORES, CONSISTENT, 0.1),
        {"method": "magic"},
        ValueError,
        "unknown method 'magic'; there are static",
    ),
    (
        (SCORES, CONSISTENT, 0.1),
        {"method": "shared", "delta": 0.1},
        TypeError,
        "shared takes no options, not delta",
    ),
    ((SCORES, CONSISTENT, 0.1), {"method": "pac", "delta": 2}, ValueError, "delta"),
    ((SCORES, CONSISTENT, 0.1), {"method": "naive", "delta": float("nan")}, ValueError, "delta"),
    (
        (SCORES, CONSISTENT, 0.1),
        {"method": "ltt", "sequence": [0.1, 0.2]},
        ValueError,
        "decreasing",
    ),
]


@pytest.mark.parametrize("arguments, options, error, message", BAD)
def test_bad_input_is_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        cats.calibrate(*arguments, **options)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: cats.exit_layers(SCORES, [0.1]), ValueError, "need 2 thresholds"),
        (lambda: cats.exit_layers(SCORES, [0.1, np.nan]), ValueError, "NaN"),
        (lambda: cats.conformal_quantile([1.0, np.nan], 0.5), ValueError, "NaN"),
        (lambda: cats.conformal_quantile([[1.0]], 0.5), ValueError, "one-dimensional"),
        (lambda: cats.conformal_quantile([1.0], 0), ValueError, "level"),
        (lambda: cats.calibration_size(0), ValueError, "epsilon"),
    ],
)
def test_bad_input_elsewhere(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- agreement and the registry


@given(case=cases(), seed=st.integers(0, 99), own_last=st.booleans())
def test_agreement_equals_the_slow_one(case, seed, own_last):
    scores, consistent = case
    rng, n = np.random.default_rng(seed), len(scores)
    last = rng.random(n) < 0.5 if own_last else np.ones(n, bool)
    given = np.column_stack([consistent, last]) if own_last else consistent
    exits = rng.integers(1, scores.shape[1] + 2, n)
    slow = [
        bool(last[i]) if k > scores.shape[1] else oracles.agrees(consistent[i], k)
        for i, k in enumerate(exits)
    ]
    assert cats.agreement(given, exits).tolist() == slow


@pytest.mark.parametrize(
    "consistent, exits, error, message",
    [
        (CONSISTENT, [1, 2, 3, 4], ValueError, r"1\.\.3, got 1\.\.4"),
        (CONSISTENT, [0, 1, 2, 3], ValueError, r"1\.\.3, got 0\.\.3"),
        (CONSISTENT, [1, 2], ValueError, "4 layers counted from 1"),
        (CONSISTENT, [1.0, 2.0, 3.0, 3.0], ValueError, "counted from 1"),
        (CONSISTENT.astype(int), [1, 1, 1, 1], TypeError, "boolean"),
    ],
)
def test_agreement_refuses_what_are_no_exits(consistent, exits, error, message):
    with pytest.raises(error, match=message):
        cats.agreement(consistent, exits)


@pytest.fixture
def cautious():
    """A calibrator from outside, in a few lines."""

    @cats.calibrator("cautious", form="one", guarantee="marginal")
    def cautious(cal, epsilons, part=2):
        levels = [1 - epsilon / part for epsilon in epsilons]
        return same_for_all_layers(cal, sorted_quantiles(cal.worst(), levels))

    yield "cautious"
    del METHODS["cautious"]


def test_a_calibrator_from_outside_calibrates_and_is_evaluated(cautious):
    table = cats.Synthetic(layers=5).table(300)
    scores, consistent = table.scores(), table.consistent
    found = cats.calibrate(scores, consistent, 0.2, cautious)
    np.testing.assert_array_equal(found, cats.calibrate(scores, consistent, 0.1, "shared_all"))
    found = cats.calibrate(scores, consistent, 0.4, cautious, part=4)
    np.testing.assert_array_equal(found, cats.calibrate(scores, consistent, 0.1, "shared_all"))
    frame = cats.evaluate(table, [cautious, "shared_all"], "meta", [0.1, 0.2], trials=2)
    layers = frame.set_index(["method", "epsilon", "trial"]).sort_index()["layers"]
    assert layers["cautious", 0.2].equals(layers["shared_all", 0.1])
    with pytest.raises(TypeError, match="cautious takes part, not delta"):
        cats.calibrate(scores, consistent, 0.2, cautious, delta=0.1)
    with pytest.warns(cats.CalibrationWarning, match="cautious cannot promise epsilon=0.01"):
        cats.calibrate(scores[:9], consistent[:9], 0.01, cautious)
    with pytest.raises(ValueError, match="form must be"):
        cats.calibrator("other", form="many", guarantee="none")


# --- band


@given(n=st.integers(1, 7), seed=st.integers(0, 999), exactly=st.booleans())
@settings(deadline=None)
def test_crossing_equals_the_law_of_counts(n, seed, exactly):
    size = np.random.default_rng(seed).integers(1, n + 1)
    levels = np.sort(np.random.default_rng(seed).random(size))
    slow = 1 - oracles.stays_above(n, (1 - levels)[::-1])
    assert crossing_probability(n, levels) == pytest.approx(slow, abs=1e-12)


def test_crossing_in_closed_form():
    a, b = 0.3, 0.6
    assert crossing_probability(1, np.array([a])) == pytest.approx(1 - a)
    assert crossing_probability(2, np.array([a])) == pytest.approx((1 - a) ** 2)
    # both uniforms up to b, and not both above a
    assert 1 - crossing_probability(2, np.array([a, b])) == pytest.approx(b**2 - (b - a) ** 2)
    assert crossing_probability(2, np.array([a, 1.0])) == pytest.approx((1 - a) ** 2)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 41])
@pytest.mark.parametrize("delta", [0.3, 0.01])
def test_band_crosses_with_probability_delta(n, delta):
    bounds = coverage_band(n, delta)
    assert len(bounds) == n - (n + 2) // 2 + 1 and (np.diff(bounds) > 0).all()
    assert 1 - oracles.stays_above(n, bounds) == pytest.approx(delta, rel=1e-6)
    assert 1 - oracles.stays_above(n, bounds) <= delta


def test_band_large_sets_take_under_a_second_and_agree_with_simulation():
    bounds = coverage_band(1000, 0.1)
    top = np.sort(np.random.default_rng(0).random((2000, 1000)), axis=1)[:, -len(bounds) :]
    missed = (top < bounds).any(axis=1).sum()  # Binomial(2000, 0.1), false alarm 1e-9
    assert 125 <= missed <= 284


def test_choices_share_delta():
    scores, consistent = np.random.default_rng(0).random((300, 3)), np.zeros((300, 3), bool)
    five = cats.calibrate(scores, consistent, 0.2, "band", delta=0.1, choices=5)
    one = cats.calibrate(scores, consistent, 0.2, "band", delta=0.02)
    assert (five == one).all() and (five > cats.calibrate(scores, consistent, 0.2, "pac")).all()
    with pytest.raises(ValueError, match="choices"):
        cats.calibrate(scores, consistent, 0.2, "band", choices=0)


# --- margins: scores in units of 1/64, so that sums are exact


@st.composite
def rounded(draw):
    """A calibration set, a margin, for all layers or one each, and what a runtime sees: scores off
    by at most the margin.
    """
    scores, consistent = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    scores, layers = np.round(scores * 64) / 64, scores.shape[1]
    units = draw(st.integers(0, 6))
    if draw(st.booleans()):
        units = rng.integers(0, 7, layers)
    seen = scores + rng.integers(-units, units + 1, scores.shape) / 64
    return scores, consistent, units / 64, seen


@given(case=rounded(), t=st.integers(-3, 67))
@settings(max_examples=200)
def test_runtime_exits_lie_inside_the_controlled_event(case, t):
    scores, consistent, margin, seen = case
    exits = cats.exit_layers(seen, np.full(scores.shape[1], t / 64 + margin))
    wrong = ~cats.agreement(consistent, exits)
    for only_records in (False, True):
        assert (worst_score(scores, consistent, only_records, margin) > t / 64)[wrong].all()
    loss = loss_at((~consistent).astype(float), exits)
    assert (worst_loss(scores, (~consistent).astype(float), t / 64, margin) >= loss).all()


def test_without_the_margin_an_exit_escapes():
    scores, consistent = np.array([[0.5, 0.40625]]), np.array([[True, False]])
    seen, t = np.array([[0.4375, 0.46875]]), 0.375  # off by 1/16: it stays at 1, leaves at 2
    exits = cats.exit_layers(seen, [t + 0.0625, t + 0.0625])
    assert exits[0] == 2 and not cats.agreement(consistent, exits)[0]
    assert not worst_score(scores, consistent, True)[0] > t
    assert not worst_score(scores, consistent, True, margin=0.03125)[0] > t  # half of it
    assert worst_score(scores, consistent, True, margin=0.0625)[0] > t


@given(case=rounded(), epsilon=EPSILONS)
@settings(deadline=None)
def test_margins_only_make_thresholds_stricter(case, epsilon):
    scores, consistent, margin, _ = case
    for method in ("shared", "shared_all", "independent", "first_exit", "pac", "band", "crc"):
        plain = cats.calibrate(scores, consistent, epsilon, method)
        wide = cats.calibrate(scores, consistent, epsilon, method, margin=margin)
        assert (wide >= plain).all()
        if method.startswith("shared") or method == "independent" or not np.any(margin):
            assert (wide == plain).all()


shares = st.one_of(st.floats(0, 1), st.floats(0, 7).map(lambda power: 1 - 10**-power))


@given(scores=st.lists(st.tuples(shares, shares, shares), min_size=1, max_size=4), data=st.data())
@settings(max_examples=200)
def test_a_margin_in_nines_leaves_the_exits_inside_the_controlled_event(scores, data):
    """A runtime whose scores have up to `margin` more or fewer nines, and leaves above the limits
    in scores: the slow way, exits one by one.
    """
    scores = np.array(scores)
    consistent = np.array(data.draw(st.lists(st.booleans(), min_size=scores.size, max_size=99)))
    consistent = consistent[: scores.size].reshape(scores.shape)
    margin = np.array(data.draw(st.tuples(*[st.sampled_from([0.01, 0.2, 1.5])] * 3)))
    moves = st.lists(st.sampled_from([-1, -0.5, 0, 0.5, 1]), min_size=scores.size, max_size=99)
    moved = np.array(data.draw(moves))[: scores.size].reshape(scores.shape)
    seen = 1 - 10 ** -np.maximum(nines(scores) + 0.999 * margin * moved, 0)
    t = data.draw(st.sampled_from([*scores.ravel(), 0.5]))
    cal = CalibrationSet(scores, consistent, margin, nines(scores))
    limits = from_nines(nines(np.full(3, t)) + margin)
    for i, exits in enumerate(cats.exit_layers(seen, limits)):
        if exits < 4 and not consistent[i, exits - 1]:
            assert cal.worst(True).max() > t and worst_score(scores, consistent, cal.near)[i] > t


def test_nines_and_back():
    scores = np.array([-np.inf, 0.0, 0.3, 0.9, 0.999, 1 - 2e-5])
    np.testing.assert_allclose(from_nines(nines(scores)), scores)
    assert nines([1 - 1e-7, 1.0, np.inf]).tolist() == [5.0] * 3
    assert from_nines([5.0, 6.0, np.inf]).tolist() == [inf] * 3


def test_margins_are_refused_where_they_would_not_help():
    for method in ("ltt", "naive"):
        with pytest.raises(ValueError, match=f"{method} cannot take a margin"):
            cats.calibrate(SCORES, CONSISTENT, 0.1, method, margin=0.1)
    for bad in (-0.1, inf, float("nan"), [0.1] * 7, [0.1, -0.1]):
        with pytest.raises(ValueError, match="margin must be"):
            cats.calibrate(SCORES, CONSISTENT, 0.1, "first_exit", margin=bad)


# --- a body that is only nearly F


@given(case=cases(), epsilon=EPSILONS, seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_last_layer_that_is_wrong_counts_as_infinite(case, epsilon, seed):
    scores, consistent = case
    last = np.random.default_rng(seed).random(len(scores)) < 0.9
    own = np.column_stack([consistent, last])
    values = np.where(last, oracles.first_exit_values(scores, consistent), inf)
    found = cats.calibrate(scores, own, epsilon, "first_exit")
    assert found[0] == oracles.quantile(values, oracles.level(epsilon))
    crc = cats.calibrate(scores, own, epsilon, "crc")
    assert crc[0] == found[0]
    same = np.column_stack([consistent, np.ones(len(scores), bool)])
    for method in METHODS:  # a last column that is always right changes nothing
        np.testing.assert_array_equal(
            cats.calibrate(scores, same, epsilon, method),
            cats.calibrate(scores, consistent, epsilon, method),
        )


def test_too_many_wrong_last_layers_say_so():
    scores, consistent = np.random.default_rng(0).random((99, 2)), np.ones((99, 2), bool)
    for wrong, finite in ((9, True), (10, False)):  # at most ⌊ε(n+1)⌋ - 1 = 9
        own = np.column_stack([consistent, np.arange(99) >= wrong])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tau = cats.calibrate(scores, own, 0.1, "first_exit")[0]
        assert (tau < inf) == finite == (not caught)
    assert "last layer differs from F on 10 of 99 inputs" in str(caught[0].message)
    assert "let F itself run" in str(caught[0].message)
    with pytest.raises(ValueError, match="independent takes the last layer for F"):
        cats.calibrate(scores, own, 0.1, "independent")
    cal = CalibrationSet(scores, own)
    assert cal.lost == 10 and cal.errors(np.array([inf]))[0] == 10


# --- losses


@given(case=rounded(), alpha=EPSILONS, seed=st.integers(0, 99), own_last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_risk_equals_its_definition(case, alpha, seed, own_last):
    scores, consistent, margin, _ = case
    rng = np.random.default_rng(seed)
    losses = rng.choice([0.0, 0.3, 0.7, 1.0, 2.5], (len(scores), scores.shape[1] + own_last))
    for bound in (1, 2.5):
        found = cats.calibrate_risk(scores, losses, alpha, bound, margin=margin)
        slow = oracles.crc(scores, consistent, alpha, losses, bound, margin)
        np.testing.assert_array_equal(found, slow)


@given(case=rounded(), epsilon=EPSILONS)
@settings(deadline=None)
def test_risk_of_zero_and_one_is_first_exit(case, epsilon):
    scores, consistent, margin, _ = case
    found = cats.calibrate_risk(scores, ~consistent, epsilon, margin=margin)
    first = cats.calibrate(scores, consistent, epsilon, "first_exit", margin=margin)
    np.testing.assert_array_equal(found, first)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"losses": CONSISTENT[:3]}, ValueError, "same shape"),
        ({"losses": SCORES - 1}, ValueError, "at least 0"),
        ({"losses": SCORES + np.nan}, ValueError, "finite"),
        ({"losses": SCORES.astype(str)}, TypeError, "numbers"),
        ({"alpha": 0}, ValueError, "alpha must be positive"),
        ({"bound": -1}, ValueError, "bound must be positive"),
    ],
)
def test_bad_losses_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        cats.calibrate_risk(**({"scores": SCORES, "losses": SCORES, "alpha": 0.1} | change))


def test_risk_says_what_it_needs():
    with pytest.warns(cats.CalibrationWarning, match="at least 49 inputs, there are 4"):
        assert (cats.calibrate_risk(SCORES, SCORES, 0.1, bound=5) == inf).all()
    lossy = np.ones((60, 3))
    with pytest.warns(cats.CalibrationWarning, match="the last layer alone loses too much"):
        cats.calibrate_risk(np.zeros((60, 2)), lossy, 0.1)


# --- groups


@given(case=cases(), epsilon=EPSILONS, seed=st.integers(0, 99))
@settings(deadline=None)
def test_groups_are_calibrated_each_on_its_own(case, epsilon, seed):
    scores, consistent = case
    groups = np.random.default_rng(seed).choice(["a", "b", "c"], len(scores))
    found = cats.calibrate_groups(scores, consistent, groups, epsilon)
    for name in set(groups.tolist()):
        mine = groups == name
        alone = cats.calibrate(scores[mine], consistent[mine], epsilon, "first_exit")
        np.testing.assert_array_equal(found[name], alone)
    largest = cats.calibrate_groups(scores, consistent, groups, epsilon, by="prediction")
    assert all((taus == np.max(list(found.values()), axis=0)).all() for taus in largest.values())
    exits = cats.group_exits(scores, groups, found)
    assert exits.tolist() == [oracles.predict(s, found[g]) for s, g in zip(scores, groups)]


def test_small_groups_say_so_and_run_all_layers():
    scores, consistent = np.random.default_rng(0).random((50, 2)), np.ones((50, 2), bool)
    groups = np.where(np.arange(50) < 45, "long", "short")
    with pytest.warns(cats.CalibrationWarning, match="group 'short': .* at least 9 inputs, .* 5;"):
        found = cats.calibrate_groups(scores, consistent, groups, 0.1)
    assert (found["short"] == inf).all() and (found["long"] == -inf).all()
    assert set(cats.group_exits(scores, np.full(50, "new"), found)) == {3}
    with pytest.raises(ValueError, match="by must be"):
        cats.calibrate_groups(scores, consistent, groups, 0.1, by="class")
    with pytest.raises(ValueError, match="one group an input"):
        cats.calibrate_groups(scores, consistent, groups[:3], 0.1)


def test_the_worst_group_comes_first():
    consistent = np.array([[True], [False], [True], [True]])
    frame = cats.by_group(consistent, [1, 1, 2, 1], ["x", "y", "y", "x"])
    assert frame["group"].tolist() == ["y", "x"] and frame["consistency"].tolist() == [0.5, 1.0]
    assert frame["layers"].tolist() == [1.5, 1.0] and (frame["bound"] <= frame["consistency"]).all()
    assert length_groups([5, 1, 3, 9], bins=2).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("method", ["first_exit", "pac", "ltt", "band"])
def test_an_epsilon_beyond_all_data_is_refused(method):
    scores = np.full((5, 2), 0.5)
    with pytest.raises(ValueError, match="less than any number of inputs can promise"):
        cats.calibrate(scores, scores < 1, 1e-320, method=method)
