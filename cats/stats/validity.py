"""Are the guarantees true? Every claim of the paper against an exact law, with the chance of a
false alarm stated.

A check simulates many calibrations on a `Synthetic` population, whose truth is known, and asks
whether what was seen falls in an interval that it leaves with a probability of at most
`false_alarm` if the claim holds. Each takes the calibrator (or quantile, or bound) as an argument,
so that a broken one can be put in its place: a check that cannot fail is no check. `controls` are
such breakages.
"""

import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from cats.stats.calibrators import (
    CalibrationWarning,
    calibrate,
    clopper_pearson,
    conformal_quantile,
    conformal_rank,
    exact,
    exit_layers,
    first_above,
    most_errors,
    worst_score,
)
from cats.stats.synthetic import Synthetic

# --- exact laws
# --------------------------------------------------------------------------------------------------


def coverage_law(n, epsilon):
    """The law of P(V <= threshold), given the calibration set: Beta(r, n+1-r), for continuous V."""
    rank = conformal_rank(n, 1 - exact(epsilon))
    return stats.beta(rank, n + 1 - rank)


def covered_law(n, n_test, epsilon):
    """The law of the number of covered test inputs over random splits of one fixed pool without
    ties.
    """
    rank = conformal_rank(n, 1 - exact(epsilon))
    return stats.betabinom(n_test, rank, n + 1 - rank)


# --- checks
# --------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One claim put to the test."""

    claim: str
    simulated: str
    law: str  # what the exact law predicts
    seen: float
    low: float
    high: float
    false_alarm: float  # P(seen outside [low, high]) if the claim holds

    @property
    def ok(self):
        return bool(self.low <= self.seen <= self.high)


def as_frame(checks):
    """Checks as the table a reviewer reads."""
    frame = pd.DataFrame(checks, columns=Check._fields)
    frame["verdict"] = ["holds" if check.ok else "FAILS" for check in checks]
    return frame


def count_check(claim, simulated, count, trials, p, alarm, side="both"):
    """A count that is Binomial(trials, p); `side` "low" or "high" when the claim only bounds it on
    that side.
    """
    tail = alarm / 2 if side == "both" else alarm
    law = stats.binom(trials, p)
    low = law.ppf(tail) if side != "high" else 0
    high = law.isf(tail) if side != "low" else trials
    sign = {"both": "=", "low": "≥", "high": "≤"}[side]
    alarm = law.cdf(low - 1) + law.sf(high)
    return Check(
        claim,
        simulated,
        f"probability {sign} {p:.4g}",
        count / trials,
        low / trials,
        high / trials,
        alarm,
    )


def uniform_check(claim, simulated, law, values, alarm):
    """Values that are uniform on (0, 1) if the law holds: the Kolmogorov-Smirnov distance, with its
    exact law.
    """
    distance = stats.kstest(values, "uniform").statistic
    return Check(
        claim,
        simulated,
        f"{law} (KS distance)",
        distance,
        0.0,
        stats.kstwo.isf(alarm, len(values)),
        alarm,
    )


# --- simulation
# --------------------------------------------------------------------------------------------------


class Calibrations(NamedTuple):
    """Many independent calibrations: thresholds (trials, l-1) and the counts of inputs that had a
    say.
    """

    thresholds: np.ndarray
    inconsistent: np.ndarray  # (trials, l-1), calibration inputs inconsistent at each layer
    some: np.ndarray  # (trials,), calibration inputs with an inconsistent layer
    right: np.ndarray  # (trials,), calibration inputs where F is right


def simulate(
    population, method, n, epsilon, trials, seed, calibrate=calibrate, given_right=False, **options
):
    """Calibrate `trials` times on n fresh inputs each; `given_right` keeps only those where F is
    right.
    """
    rng = np.random.default_rng(seed)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # small n is what many checks are about
        for _ in range(trials):
            scores, consistent, hard = population.draw(n, rng)
            right = rng.random(n) < population.p_right[hard]
            extra = {"correct": right} if given_right else {}
            thresholds = calibrate(scores, consistent, epsilon, method=method, **extra, **options)
            results.append(
                (
                    thresholds,
                    (~consistent).sum(axis=0),
                    (~consistent.all(axis=1)).sum(),
                    right.sum(),
                )
            )
    return Calibrations(*map(np.array, zip(*results)))


def _agrees(scores, consistent, thresholds):
    """Whether G = F for each input; thresholds (l-1,), or (n, l-1) with some for each input."""
    padded = np.column_stack([consistent, np.ones(len(scores), bool)])
    return padded[np.arange(len(scores)), first_above(scores, thresholds) - 1]


# --- the claims
# --------------------------------------------------------------------------------------------------


def lemma_a1(n=20, level=0.9, trials=20_000, seed=0, alarm=1e-5, quantile=conformal_quantile):
    """Lemma A.1: a fresh value is at most the inflated quantile with probability r/(n+1), r =
    ⌈level·(n+1)⌉.
    """
    values = np.random.default_rng(seed).standard_normal((trials, n + 1))
    covered = sum(row[-1] <= quantile(row[:-1], level) for row in values)
    p = min(conformal_rank(n, level), n + 1) / (n + 1)
    return count_check(
        "Lemma A.1", f"{trials:,} samples of n={n}, level {level}", covered, trials, p, alarm
    )


def proposition_31(
    population=Synthetic(),
    n=400,
    t=0.85,
    delta=0.01,
    trials=4000,
    seed=0,
    alarm=1e-5,
    bound=clopper_pearson,
):
    """Proposition 3.1: the Clopper-Pearson bound lies below the true consistency with probability
    at least 1-delta.
    """
    rng, thresholds = np.random.default_rng(seed), np.full(population.layers - 1, t)
    truth = 1 - population.risk(thresholds)
    agree = np.empty(trials, int)
    for i in range(trials):
        scores, consistent, _ = population.draw(n, rng)
        agree[i] = _agrees(scores, consistent, thresholds).sum()
    possible = np.arange(n + 1)
    below = (
        stats.binom.sf(possible - 1, n, truth) >= delta
    )  # when the bound has to lie below the truth, whatever computes it
    p = stats.binom.pmf(possible, n, truth)[
        below
    ].sum()  # exact, and at least 1-delta, as s is discrete
    held = (bound(agree, n, delta) <= truth).sum()
    simulated = f"{trials:,} samples of n={n}, fixed threshold {t}, δ={delta}"
    return count_check("Proposition 3.1", simulated, held, trials, min(p, 1.0), alarm)


def proposition_41(
    population=Synthetic(), inputs=200_000, seed=0, exits=exit_layers, statistic=worst_score
):
    """Proposition 4.1: G differs from F only where some inconsistent layer lies outside the
    predicted set.
    """
    rng = np.random.default_rng(seed)
    scores, consistent, _ = population.draw(inputs, rng)
    scores = np.round(scores, 2)  # ties: an exit needs a score strictly above its threshold
    violations = 0
    for rows in np.array_split(np.arange(inputs), 200):
        t = np.round(rng.random(), 2)
        padded = np.column_stack([consistent[rows], np.ones(len(rows), bool)])
        wrong = ~padded[
            np.arange(len(rows)), exits(scores[rows], np.full(population.layers - 1, t)) - 1
        ]
        violations += int((wrong & ~(statistic(scores[rows], consistent[rows]) > t)).sum())
    simulated = f"{inputs:,} inputs, 200 thresholds, scores with ties"
    return Check(
        "Proposition 4.1", simulated, "no input with G ≠ F and V ≤ t", violations, 0, 0, 0.0
    )


def first_exit_inclusion(population=Synthetic(), inputs=200_000, seed=0, exits=exit_layers):
    """The inclusion behind `first_exit`: G differs from F only where an inconsistent record exceeds
    the threshold.
    """
    check = proposition_41(
        population, inputs, seed, exits, lambda s, c: worst_score(s, c, only_records=True)
    )
    return check._replace(claim="first_exit: inclusion")


def marginal(
    method,
    population=Synthetic(),
    n=100,
    epsilon=0.1,
    trials=4000,
    seed=0,
    alarm=1e-5,
    tested=None,
    claim=None,
    **options,
):
    """P(G(x) = F(x)) >= 1-epsilon over calibration set and test input; `tested` is another test
    population.
    """
    thresholds = simulate(population, method, n, epsilon, trials, seed, **options).thresholds
    scores, consistent, _ = (tested or population).draw(trials, np.random.default_rng([seed, 1]))
    agree = _agrees(scores, consistent, thresholds).sum()
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, one test input each"
    return count_check(
        claim or f"{method}: P(G=F) ≥ 1-ε", simulated, agree, trials, 1 - epsilon, alarm, side="low"
    )


def relative_accuracy(
    population=Synthetic(), n=100, epsilon=0.1, trials=4000, seed=0, alarm=1e-5, **options
):
    """Calibrated where F is right, G agrees with F there with probability at least 1-epsilon."""
    found = simulate(
        population, "first_exit", n, epsilon, trials, seed, given_right=True, **options
    )
    rng = np.random.default_rng([seed, 1])
    scores, consistent, hard = population.draw(trials, rng)
    right = rng.random(trials) < population.p_right[hard]
    agree = _agrees(scores, consistent, found.thresholds)[right].sum()
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, test inputs where F is right"
    claim = "labelled: P(G=F | F=Y) ≥ 1-ε"
    return count_check(claim, simulated, agree, right.sum(), 1 - epsilon, alarm, side="low")


def coverages(method, population=Synthetic(), n=100, epsilon=0.1, trials=4000, seed=0, **options):
    """The true coverage P(V <= threshold) of each calibration, and the same made uniform by its
    exact Beta law.

    `shared` counts only the inputs with an inconsistent layer, m of them, so its law is Beta(r(m),
    m+1-r(m)).
    """
    found = simulate(population, method, n, epsilon, trials, seed, **options)
    covered = population.coverage(found.thresholds[:, 0], method)
    sizes = found.some if method == "shared" else np.full(trials, n)
    ranks = np.array([conformal_rank(int(size), 1 - exact(epsilon)) for size in sizes])
    return covered, stats.beta.cdf(covered, ranks, sizes + 1 - ranks)


def coverage(
    method,
    population=Synthetic(),
    n=100,
    epsilon=0.1,
    trials=4000,
    seed=0,
    alarm=1e-5,
    claim=None,
    **options,
):
    """Given the calibration set, the coverage of V follows a Beta law exactly."""
    _, uniform = coverages(method, population, n, epsilon, trials, seed, **options)
    law = (
        "Beta(r, m+1-r), m inputs with an inconsistent layer"
        if method == "shared"
        else "Beta(r, n+1-r)"
    )
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, true coverage"
    return uniform_check(claim or f"{method}: law of coverage", simulated, law, uniform, alarm)


def independent_coverage(
    population=Synthetic(), layer=3, n=800, epsilon=0.5, trials=2000, seed=0, alarm=1e-5, **options
):
    """Theorem 4.4, one layer of it: the coverage of the inconsistent scores at layer k follows
    Beta(r, n_k+1-r).
    """
    found = simulate(population, "independent", n, epsilon, trials, seed, **options)
    level = 1 - exact(epsilon) / (population.layers - 1)
    sizes = found.inconsistent[:, layer - 1]
    ranks = np.array([conformal_rank(int(size), level) for size in sizes])
    if (ranks > sizes).any():
        raise ValueError(
            "n is too small: some quantile is infinite and its coverage no longer continuous"
        )
    covered = population.coverage(found.thresholds, "independent")[:, layer - 1]
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, layer {layer}"
    uniform = stats.beta.cdf(covered, ranks, sizes + 1 - ranks)
    return uniform_check(
        "Theorem 4.4: law at one layer", simulated, "Beta(r, n_k+1-r)", uniform, alarm
    )


def pac_law(
    population=Synthetic(),
    n=300,
    epsilon=0.1,
    delta=0.05,
    trials=4000,
    seed=0,
    alarm=1e-5,
    **options,
):
    """`pac`: the coverage of V misses 1-epsilon with probability BinomCDF(m; n, epsilon) <= delta,
    exactly.
    """
    thresholds = simulate(
        population, "pac", n, epsilon, trials, seed, delta=delta, **options
    ).thresholds
    misses = (population.coverage(thresholds[:, 0], "first_exit") < 1 - epsilon).sum()
    p = stats.binom.cdf(most_errors(n, epsilon, delta), n, epsilon)
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, δ={delta}, true coverage"
    return count_check("pac: P(coverage < 1-ε)", simulated, misses, trials, p, alarm)


def high_probability(
    method,
    population=Synthetic(),
    n=300,
    epsilon=0.1,
    delta=0.05,
    trials=4000,
    seed=0,
    alarm=1e-5,
    **options,
):
    """P(true risk > epsilon) <= delta, for `pac` and `ltt`."""
    thresholds = simulate(
        population, method, n, epsilon, trials, seed, delta=delta, **options
    ).thresholds
    misses = (population.risk(thresholds) > epsilon).sum()
    simulated = f"{trials:,} calibrations, n={n}, ε={epsilon}, δ={delta}, true risk"
    return count_check(
        f"{method}: P(risk > ε) ≤ δ", simulated, misses, trials, delta, alarm, side="high"
    )


def tuned_bound(
    population=Synthetic(skill=0.3),
    n=100,
    epsilon=0.1,
    delta=0.1,
    trials=1000,
    seed=0,
    alarm=1e-5,
    same_data=False,
):
    """Section 3.3: thresholds tuned on one sample (Eq. 3), Proposition 3.1's bound from a second
    one.

    The bound exceeds the true consistency with probability at most delta. With `same_data` it comes
    from the sample the thresholds were tuned on: the mistake the paper warns of.
    """
    rng, missed = np.random.default_rng(seed), 0
    for _ in range(trials):
        tune, rest = population.draw(n, rng)[:2], population.draw(n, rng)[:2]
        thresholds = _tune(*tune, epsilon, rng)
        scores, consistent = tune if same_data else rest
        bound = clopper_pearson(_agrees(scores, consistent, thresholds).sum(), n, delta)
        missed += int(bound > 1 - population.risk(thresholds))
    where = "the tuning sample" if same_data else "a second sample"
    simulated = (
        f"{trials:,} times: best of 200 thresholds on n={n}, bound from {where}, ε={epsilon},"
        f" δ={delta}"
    )
    return count_check(
        "Proposition 3.1 after tuning", simulated, missed, trials, delta, alarm, side="high"
    )


def _tune(scores, consistent, epsilon, rng, candidates=200):
    """Eq. 3 by random search, each layer with a threshold of its own: fewest layers among the
    consistent enough.
    """
    thresholds = rng.random((candidates, 1, scores.shape[1])) ** 0.25  # mostly strict
    above = np.concatenate(
        [scores > thresholds, np.ones((candidates, len(scores), 1), bool)], axis=-1
    )
    exits = above.argmax(axis=-1)  # (candidates, n)
    right = np.column_stack([consistent, np.ones(len(scores), bool)])[
        np.arange(len(scores)), exits
    ].mean(axis=1)
    layers = np.where(right >= 1 - epsilon, exits.mean(axis=1), np.inf)
    return thresholds[layers.argmin(), 0]


def random_splits(
    values, n, epsilon, trials=2000, seed=0, alarm=1e-5, claim="random splits of one pool"
):
    """Over random splits of a fixed pool of values without ties the number covered is BetaBinomial,
    on any data.
    """
    rng = np.random.default_rng(seed)
    counts = covered_counts(values, n, len(values) - n, epsilon, trials, rng)
    return covered_check(claim, counts, n, len(values) - n, epsilon, rng, alarm)


def covered_counts(values, n, n_test, epsilon, trials, rng, quantile=conformal_quantile, seen=0):
    """How many of n_test inputs are covered by the quantile of n others, one number a random split
    of a pool of values.

    quantile, seen   for controls: a wrong quantile; test inputs that were calibrated on, so many of
                     them
    """
    counts = np.empty(trials, int)
    for i in range(trials):
        drawn = rng.permutation(values)[: n + n_test]
        counts[i] = (drawn[n - seen :][:n_test] <= quantile(drawn[:n], 1 - exact(epsilon))).sum()
    return counts


def covered_check(claim, counts, n, n_test, epsilon, rng, alarm):
    """Counts against their BetaBinomial law: a discrete law becomes uniform when its jumps are
    filled at random.
    """
    law, jitter = covered_law(n, n_test, epsilon), rng.random(len(counts))
    uniform = law.cdf(counts - 1) + jitter * law.pmf(counts)
    return uniform_check(
        claim,
        f"{len(counts):,} splits, n={n}, {n_test} test, ε={epsilon}",
        "BetaBinomial",
        uniform,
        alarm,
    )


def untied(table, measure="meta", seed=0):
    """V of `first_exit` for every input of a table, with ties broken at random: scores become ranks
    in the whole table, and inputs without an inconsistent record (V = -inf) get random places below
    them.
    """
    scores, rng = table.scores(measure), np.random.default_rng(seed)
    ranks = np.empty(scores.shape)
    ranks.flat[np.lexsort((rng.random(scores.size), scores.ravel()))] = np.arange(scores.size)
    values = worst_score(ranks, table.consistent, only_records=True)
    return np.where(np.isneginf(values), -1 - rng.random(len(values)), values)


# --- what must fail
# -----------------------------------------------------------------------------------------------


def quantile_without_infinity(values, level):
    """The empirical quantile, as most libraries have it: no ∞, rank ⌈level·n⌉."""
    rank = conformal_rank(len(values) - 1, level)
    return float(np.sort(values)[rank - 1])


def quantile_off_by_one(values, level):
    """One rank too low."""
    rank = conformal_rank(len(values), level) - 1
    return float(np.sort(values)[rank - 1]) if rank <= len(values) else np.inf


def controls(seed=0, alarm=1e-5):
    """Breakages that the checks above must catch: the check that has to fail for each."""
    trained_on = Synthetic(
        skill=Synthetic().skill + 2
    )  # a meta classifier separates better where it was trained
    common = {"seed": seed, "alarm": alarm}
    return [
        lemma_a1(quantile=quantile_without_infinity, **common)._replace(
            claim="no ∞ in the quantile"
        ),
        lemma_a1(quantile=quantile_off_by_one, **common)._replace(claim="rank off by one"),
        proposition_31(bound=lambda s, n, delta: s / n, **common)._replace(
            claim="a bound without its margin"
        ),
        tuned_bound(same_data=True, **common)._replace(claim="tuned and bounded on the same data"),
        marginal(
            "first_exit",
            trained_on,
            tested=Synthetic(),
            claim="meta calibrated on its training data",
            **common,
        ),
        marginal(
            "first_exit",
            tested=Synthetic().harder(),
            claim="test inputs harder than calibration",
            **common,
        ),
    ]
