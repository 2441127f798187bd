"""Are the guarantees true? Every claim of the paper against an exact law, with the chance of a
false alarm stated.

A check simulates many calibrations on a `Synthetic` population, whose truth is known, and asks
whether what was seen falls in an interval that it leaves with a probability of at most
`false_alarm` if the claim holds. Each has a `Setting` of its own, of which a call changes what it
names, and takes the calibrator (or quantile, or bound) as an argument, so that a broken one can be
put in its place: a check that cannot fail is no check. `controls` are such breakages.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pandas as pd
from scipy import stats

from cats.stats.calibrators import (
    METHODS,
    CalibrationSet,
    CalibrationWarning,
    calibrate,
    naive,
)
from cats.stats.exits import agreement, exit_layers, first_above, worst_score
from cats.stats.groups import calibrate_groups
from cats.stats.quantiles import (
    Bools,
    Floats,
    Ints,
    Number,
    clopper_pearson,
    conformal_quantile,
    conformal_rank,
    coverage_band,
    exact,
)
from cats.stats.risk import calibrate_risk, worst_loss
from cats.stats.synthetic import Synthetic
from cats.stats.table import ScoreTable

Quantile = Callable[[Floats, Number], float]

# --- exact laws, with ranks of their own: a wrong one in the package must not be forgiven here


@lru_cache(maxsize=4096)
def rank_of(n: int, level: Number) -> int:
    """The smallest r with r/(n+1) >= level, found by counting."""
    wanted = exact(level)
    return next(r for r in range(n + 2) if Fraction(r, n + 1) >= wanted)


def errors_allowed(n: int, epsilon: float, delta: float) -> int:
    """The largest m with P(Binomial(n, epsilon) <= m) <= delta, found by adding up; -1 if none."""
    return int(np.searchsorted(np.cumsum(stats.binom.pmf(np.arange(n), n, epsilon)), delta)) - 1


def coverage_law(n: int, epsilon: float) -> Any:
    """The law of P(V <= threshold) over draws of the calibration set: Beta(r, n+1-r), for V without
    ties.
    """
    rank = rank_of(n, 1 - exact(epsilon))
    return stats.beta(rank, n + 1 - rank)


def covered_law(n: int, n_test: int, epsilon: float) -> Any:
    """The law of the number of covered test inputs over random splits of one fixed pool without
    ties.
    """
    rank = rank_of(n, 1 - exact(epsilon))
    return stats.betabinom(n_test, rank, n + 1 - rank)


# --- checks


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
    def ok(self) -> bool:
        return bool(self.low <= self.seen <= self.high)


def as_frame(checks: Sequence[Check]) -> pd.DataFrame:
    """Checks as the table a reviewer reads."""
    frame = pd.DataFrame(checks, columns=Check._fields)
    frame["verdict"] = ["holds" if check.ok else "FAILS" for check in checks]
    return frame


def count_check(
    claim: str,
    simulated: str,
    count: int,
    trials: int,
    p: float,
    alarm: float,
    side: str = "both",
) -> Check:
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


def uniform_check(claim: str, simulated: str, law: str, values: Floats, alarm: float) -> Check:
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


class Setting(NamedTuple):
    """How a claim is simulated: every check has a setting of its own, and takes other values of
    these by name.
    """

    population: Synthetic = Synthetic()
    n: int = 100  # calibration inputs
    epsilon: float = 0.1
    delta: float = 0.05
    trials: int = 4000
    seed: int = 0
    alarm: float = 1e-5  # the chance of a false alarm that is allowed

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers, from the first one on."""
        return np.random.default_rng(self.seed)

    def told(self, *more: str) -> str:
        """What is simulated, as the table of checks says it."""
        return ", ".join([f"{self.trials:,} calibrations, n={self.n}, ε={self.epsilon}", *more])

    def counted(
        self, claim: str, simulated: str, count: int, p: float, side: str = "both"
    ) -> Check:
        """A check of how many of the trials had what the claim gives a probability of p."""
        return count_check(claim, simulated, count, self.trials, p, self.alarm, side)


P = ParamSpec("P")
T = TypeVar("T")


def setting(**own: Any) -> Callable[[Callable[Concatenate[Setting, P], T]], Callable[..., T]]:
    """Give a function that is first told its Setting these values in it; a call may change them."""

    def decorate(function: Callable[Concatenate[Setting, P], T]) -> Callable[..., T]:
        @wraps(function)
        def run(*arguments: Any, **options: Any) -> T:
            given = {name: options.pop(name) for name in Setting._fields if name in options}
            with warnings.catch_warnings(action="ignore", category=CalibrationWarning):
                # small n is what many checks are about
                return function(Setting(**own | given), *arguments, **options)

        return run

    return decorate


class Calibrations(NamedTuple):
    """Many independent calibrations: thresholds (trials, l-1) and the counts of inputs that had a
    say.
    """

    thresholds: np.ndarray
    inconsistent: np.ndarray  # (trials, l-1), calibration inputs inconsistent at each layer
    some: np.ndarray  # (trials,), calibration inputs with an inconsistent layer
    right: np.ndarray  # (trials,), calibration inputs where F is right


@lru_cache(maxsize=16)
def simulate(
    at: Setting,
    method: str,
    calibrate: Callable[..., Floats] = calibrate,
    given_right: bool = False,
    **options: Any,
) -> Calibrations:
    """Calibrate many times, on fresh inputs each time; `given_right` keeps only those where F is
    right. Several checks look at the same calibrations: the last ones are kept.
    """
    rng = at.rng
    results = []
    for _ in range(at.trials):
        scores, consistent, hard = at.population.draw(at.n, rng)
        right = rng.random(at.n) < at.population.p_right[hard]
        extra = {"correct": right} if given_right else {}
        thresholds = calibrate(scores, consistent, at.epsilon, method=method, **extra, **options)
        results.append(
            (
                thresholds,
                (~consistent).sum(axis=0),
                (~consistent.all(axis=1)).sum(),
                right.sum(),
            )
        )
    return Calibrations(*map(np.array, zip(*results)))


# --- the claims


@setting(n=20, trials=20_000)
def lemma_a1(at: Setting, level: Number = 0.9, quantile: Quantile = conformal_quantile) -> Check:
    """Lemma A.1: a fresh value is at most the inflated quantile with probability r/(n+1), r =
    ⌈level·(n+1)⌉.
    """
    values = at.rng.standard_normal((at.trials, at.n + 1))
    covered = sum(row[-1] <= quantile(row[:-1], level) for row in values)
    p = min(rank_of(at.n, level), at.n + 1) / (at.n + 1)
    return at.counted("Lemma A.1", f"{at.trials:,} samples of n={at.n}, level {level}", covered, p)


@setting(n=400, delta=0.01)
def proposition_31(
    at: Setting, t: float = 0.85, bound: Callable[..., Any] = clopper_pearson
) -> Check:
    """Proposition 3.1: the Clopper-Pearson bound lies below the true consistency with probability
    at least 1-delta.
    """
    rng, thresholds = at.rng, np.full(at.population.layers - 1, t)
    truth = 1 - at.population.risk(thresholds)
    agree = np.empty(at.trials, int)
    for i in range(at.trials):
        scores, consistent, _ = at.population.draw(at.n, rng)
        agree[i] = agreement(consistent, first_above(scores, thresholds)).sum()
    possible = np.arange(at.n + 1)
    # when the bound has to lie below the truth, whatever computes it
    below = stats.binom.sf(possible - 1, at.n, truth) >= at.delta
    # exact, and at least 1-delta, as s is discrete
    p = stats.binom.pmf(possible, at.n, truth)[below].sum()
    held = (bound(agree, at.n, at.delta) <= truth).sum()
    simulated = f"{at.trials:,} samples of n={at.n}, fixed threshold {t}, δ={at.delta}"
    return at.counted("Proposition 3.1", simulated, held, min(p, 1.0))


@setting()
def proposition_41(
    at: Setting,
    inputs: int = 200_000,
    exits: Callable[..., Ints] = exit_layers,
    statistic: Callable[..., Floats] = worst_score,
) -> Check:
    """Proposition 4.1: G differs from F only where some inconsistent layer lies outside the
    predicted set.
    """
    rng = at.rng
    scores, consistent, _ = at.population.draw(inputs, rng)
    scores = np.round(scores, 2)  # ties: an exit needs a score strictly above its threshold
    violations = 0
    for rows in np.array_split(np.arange(inputs), 200):
        t = np.round(rng.random(), 2)
        left_at = exits(scores[rows], np.full(at.population.layers - 1, t))
        wrong = ~agreement(consistent[rows], left_at)
        violations += int((wrong & ~(statistic(scores[rows], consistent[rows]) > t)).sum())
    simulated = f"{inputs:,} inputs, 200 thresholds, scores with ties"
    return Check(
        "Proposition 4.1", simulated, "no input with G ≠ F and V ≤ t", violations, 0, 0, 0.0
    )


def first_exit_inclusion(**options: Any) -> Check:
    """The inclusion behind `first_exit`: G differs from F only where an inconsistent record exceeds
    the threshold.
    """
    check = proposition_41(statistic=partial(worst_score, only_records=True), **options)
    return check._replace(claim="first_exit: inclusion")


@setting()
def marginal(
    at: Setting,
    method: str,
    tested: Synthetic | None = None,
    claim: str | None = None,
    **options: Any,
) -> Check:
    """P(G(x) = F(x)) >= 1-epsilon over calibration set and test input; `tested` is another test
    population.
    """
    thresholds = simulate(at, method, **options).thresholds
    rng = np.random.default_rng([at.seed, 1])
    scores, consistent, _ = (tested or at.population).draw(at.trials, rng)
    agree = agreement(consistent, first_above(scores, thresholds)).sum()
    simulated = at.told("one test input each")
    return at.counted(
        claim or f"{method}: P(G=F) ≥ 1-ε", simulated, agree, 1 - at.epsilon, side="low"
    )


@setting(population=Synthetic(layers=2, right=(0.0, 0.95)))
def relative_accuracy(at: Setting, given_right: bool = True, **options: Any) -> Check:
    """Calibrated where F is right, G agrees with F there with probability at least 1-epsilon.

    In this population F is right on hard inputs more often, so that calibrating on all inputs
    (given_right=False) must fail; and with a single early layer G differs from F wherever V > τ.
    """
    found = simulate(at, "first_exit", given_right=given_right, **options)
    truth = 1 - at.population.risk(found.thresholds, given_right=True)
    # one test input a calibration: a coin with the true probability
    agree = int((np.random.default_rng([at.seed, 1]).random(at.trials) < truth).sum())
    simulated = at.told("one test input each where F is right")
    return at.counted("labelled: P(G=F | F=Y) ≥ 1-ε", simulated, agree, 1 - at.epsilon, side="low")


@setting()
def coverages(at: Setting, method: str, **options: Any) -> tuple[Floats, Floats]:
    """The true coverage P(V <= threshold) of each calibration, and the same made uniform by its
    exact Beta law.

    `shared` counts only the inputs with an inconsistent layer, m of them, so its law is Beta(r(m),
    m+1-r(m)).
    """
    found = simulate(at, method, **options)
    covered = at.population.coverage(found.thresholds[:, 0], method)
    sizes = found.some if method == "shared" else np.full(at.trials, at.n)
    ranks = np.array([rank_of(int(size), 1 - exact(at.epsilon)) for size in sizes])
    return covered, stats.beta.cdf(covered, ranks, sizes + 1 - ranks)


@setting()
def coverage(at: Setting, method: str, claim: str | None = None, **options: Any) -> Check:
    """Over draws of the calibration set, the coverage of V follows a Beta law exactly."""
    _, uniform = coverages(method, **at._asdict(), **options)
    law = (
        "Beta(r, m+1-r), m inputs with an inconsistent layer"
        if method == "shared"
        else "Beta(r, n+1-r)"
    )
    simulated = at.told("true coverage")
    return uniform_check(claim or f"{method}: law of coverage", simulated, law, uniform, at.alarm)


@setting(n=800, epsilon=0.5, trials=2000)
def independent_coverage(at: Setting, layer: int = 3, **options: Any) -> Check:
    """Theorem 4.4, one layer of it: the coverage of the inconsistent scores at layer k follows
    Beta(r, n_k+1-r).
    """
    found = simulate(at, "independent", **options)
    level = 1 - exact(at.epsilon) / (at.population.layers - 1)
    sizes = found.inconsistent[:, layer - 1]
    ranks = np.array([rank_of(int(size), level) for size in sizes])
    if (ranks > sizes).any():
        raise ValueError(
            "n is too small: some quantile is infinite and its coverage no longer continuous"
        )
    covered = at.population.coverage(found.thresholds, "independent")[:, layer - 1]
    simulated = at.told(f"layer {layer}")
    uniform = stats.beta.cdf(covered, ranks, sizes + 1 - ranks)
    return uniform_check(
        "Theorem 4.4: law at one layer", simulated, "Beta(r, n_k+1-r)", uniform, at.alarm
    )


@setting(n=50)
def pac_law(at: Setting, **options: Any) -> Check:
    """`pac`: the coverage of V misses 1-epsilon with probability BinomCDF(m; n, epsilon) <= delta,
    exactly.
    """
    thresholds = simulate(at, "pac", delta=at.delta, **options).thresholds
    misses = (at.population.coverage(thresholds[:, 0], "first_exit") < 1 - at.epsilon).sum()
    p = stats.binom.cdf(errors_allowed(at.n, at.epsilon, at.delta), at.n, at.epsilon)
    simulated = at.told(f"δ={at.delta}", "true coverage")
    return at.counted("pac: P(coverage < 1-ε)", simulated, misses, p)


@setting(n=300)
def high_probability(at: Setting, method: str, **options: Any) -> Check:
    """P(true risk > epsilon) <= delta, for `pac` and `ltt`."""
    thresholds = simulate(at, method, delta=at.delta, **options).thresholds
    misses = (at.population.risk(thresholds) > at.epsilon).sum()
    simulated = at.told(f"δ={at.delta}", "true risk")
    return at.counted(f"{method}: P(risk > ε) ≤ δ", simulated, misses, at.delta, side="high")


@setting(population=Synthetic(skill=0.3), delta=0.1, trials=1000)
def tuned_bound(at: Setting, same_data: bool = False) -> Check:
    """Section 3.3: thresholds tuned on one sample (Eq. 3), Proposition 3.1's bound from a second
    one.

    The bound exceeds the true consistency with probability at most delta. With `same_data` it comes
    from the sample the thresholds were tuned on: the mistake the paper warns of.
    """
    rng, missed = at.rng, 0
    for _ in range(at.trials):
        tune, rest = at.population.draw(at.n, rng)[:2], at.population.draw(at.n, rng)[:2]
        thresholds = _tune(*tune, at.epsilon, rng)
        scores, consistent = tune if same_data else rest
        agree = agreement(consistent, first_above(scores, thresholds)).sum()
        bound = clopper_pearson(agree, at.n, at.delta)
        missed += int(bound > 1 - at.population.risk(thresholds))
    where = "the tuning sample" if same_data else "a second sample"
    simulated = (
        f"{at.trials:,} times: best of 200 thresholds on n={at.n}, bound from {where},"
        f" ε={at.epsilon}, δ={at.delta}"
    )
    return at.counted("Proposition 3.1 after tuning", simulated, missed, at.delta, side="high")


def _tune(
    scores: Floats,
    consistent: Bools,
    epsilon: float,
    rng: np.random.Generator,
    candidates: int = 200,
) -> Floats:
    """Eq. 3 by random search, each layer with a threshold of its own: fewest layers among the
    consistent enough.
    """
    thresholds = rng.random((candidates, 1, scores.shape[1])) ** 0.25  # mostly strict
    many = first_above(
        np.tile(scores, (candidates, 1)), np.repeat(thresholds[:, 0], len(scores), axis=0)
    )
    agree = agreement(np.tile(consistent, (candidates, 1)), many)
    right = agree.reshape(candidates, -1).mean(axis=1)
    layers = np.where(right >= 1 - epsilon, many.reshape(candidates, -1).mean(axis=1), np.inf)
    return thresholds[layers.argmin(), 0]


@setting(trials=2000)
def random_splits(at: Setting, values: Floats, claim: str = "random splits of one pool") -> Check:
    """Over random splits of a fixed pool of values without ties the number covered is BetaBinomial,
    on any data.
    """
    rng, n_test = at.rng, len(values) - at.n
    counts = covered_counts(values, at.n, n_test, at.epsilon, at.trials, rng)
    return covered_check(claim, counts, at.n, n_test, at.epsilon, rng, at.alarm)


def covered_counts(
    values: Floats,
    n: int,
    n_test: int,
    epsilon: float,
    trials: int,
    rng: np.random.Generator,
    quantile: Quantile = conformal_quantile,
    seen: int = 0,
) -> Ints:
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


def covered_check(
    claim: str,
    counts: Ints,
    n: int,
    n_test: int,
    epsilon: float,
    rng: np.random.Generator,
    alarm: float,
) -> Check:
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


def untied(table: ScoreTable, measure: str = "meta", seed: int = 0) -> Floats:
    """V of `first_exit` for every input of a table, with ties broken at random: scores become ranks
    in the whole table, and inputs without an inconsistent record (V = -inf) get random places below
    them.
    """
    scores, rng = table.scores(measure), np.random.default_rng(seed)
    ranks = np.empty(scores.shape)
    ranks.flat[np.lexsort((rng.random(scores.size), scores.ravel()))] = np.arange(scores.size)
    values = worst_score(ranks, table.consistent, only_records=True)
    return np.where(np.isneginf(values), -1 - rng.random(len(values)), values)


# --- claims beyond the paper, and remarks


@setting()
def remark_43(at: Setting, inputs: int = 50_000, exits: Callable[..., Ints] = exit_layers) -> Check:
    """Remark 4.3: the exit is the first layer outside the set C of Eq. 4, and layers after it need
    not be known.

    C is built in full for every input; then all scores after the exit are replaced at random, and
    the exit must stay.
    """
    rng, layers = at.rng, at.population.layers
    scores, _, _ = at.population.draw(inputs, rng)
    scores = np.round(scores, 2)
    thresholds = np.round(rng.random(layers - 1) ** 0.5, 2)
    inside = np.column_stack([scores <= thresholds, np.zeros(inputs, bool)])  # C, and l outside it
    first = (~inside).argmax(axis=1) + 1
    after = np.arange(1, layers) > first[:, None]
    unknown = np.where(after, rng.random(scores.shape), scores)
    moved = (exits(scores, thresholds) != first) | (exits(unknown, thresholds) != first)
    return Check(
        "Remark 4.3: C need not be built",
        f"{inputs:,} inputs, scores after the exit replaced",
        "no exit moves",
        float(moved.sum()),
        0,
        0,
        0.0,
    )


def spread(n: int, layers: int, rng: np.random.Generator) -> tuple[Floats, Bools]:
    """Inputs for which the union bound of Theorem 4.4 is an equality: every early layer is wrong,
    and one of them, at random, scores above all the others.
    """
    scores = rng.random((n, layers - 1))
    scores[np.arange(n), rng.integers(layers - 1, size=n)] += 1
    return scores, np.zeros((n, layers - 1), bool)


@setting(n=199, epsilon=0.4)
def tight_union(
    at: Setting,
    weights: Sequence[float] | None = None,
    layers: int = 5,
    calibrate: Callable[..., Floats] = calibrate,
    claim: str = "Theorem 4.4 where it is tight",
) -> Check:
    """Theorem 4.4 where the union bound loses nothing: P(G != F) = Σ (1 - r_k/(n+1)) exactly, with
    any weights (Remark 4.5).
    """
    rng, n, agree = at.rng, at.n, 0
    for _ in range(at.trials):
        scores, consistent = spread(n + 1, layers, rng)
        taus = calibrate(scores[:n], consistent[:n], at.epsilon, "independent", weights=weights)
        agree += int(agreement(consistent[n:], first_above(scores[n:], taus))[0])
    shares = [exact(1) / (layers - 1)] * (layers - 1)
    if weights is not None:
        shares = [exact(weight) for weight in weights]
    ranks = [rank_of(n, 1 - share * exact(at.epsilon)) for share in shares]
    p = 1 - sum(1 - rank / (n + 1) for rank in ranks)
    return at.counted(claim, at.told("all layers wrong", "one test input"), agree, p)


@setting(n=59, trials=3000)
def tuned_weights(at: Setting, layers: int = 9, same_data: bool = False) -> Check:
    """Remark 4.5: weights may be tuned on a development set that does not calibrate.

    The tuned weight opens the layer that seems to need the lowest threshold. With `same_data` it is
    tuned on the calibration set: the mistake.
    """
    rng, n, agree = at.rng, at.n, 0
    for _ in range(at.trials):
        scores, dev = rng.random((n + 1, layers - 1)), rng.random((n, layers - 1))
        wrong = np.zeros((n, layers - 1), bool)
        looked_at = scores[:n] if same_data else dev
        best = np.quantile(looked_at, 1 - at.epsilon, axis=0).argmin()
        weights = list(np.eye(layers - 1)[best])  # the other layers stay shut
        taus = calibrate(scores[:n], wrong, at.epsilon, "independent", weights=weights)
        agree += int((scores[n] <= taus).all())
    p = rank_of(n, 1 - exact(at.epsilon)) / (n + 1)
    where = "the calibration set" if same_data else "a development set"
    return at.counted("Remark 4.5: tuned weights", at.told(f"weights tuned on {where}"), agree, p)


def lottery(n: int, layers: int, risk: float, rng: np.random.Generator) -> tuple[Floats, Bools]:
    """Inputs that all leave at one layer, which the threshold picks; every early layer is wrong on
    the same share of inputs, each on its own. Whatever looks good was luck.
    """
    scores = np.tile(np.arange(1, layers) / layers, (n, 1))
    return scores, rng.random((n, layers - 1)) >= risk


@setting(delta=0.1, trials=2000)
def naive_bound(
    at: Setting,
    risk: float = 0.2,
    layers: int = 21,
    method: Callable[..., tuple[Floats, Floats]] = naive,
) -> Check:
    """What `naive` reports exceeds the true consistency with probability at most delta.

    Its threshold is tuned among layers of which some look better than they are (`lottery`).
    """
    rng, missed = at.rng, 0
    for trial in range(at.trials):
        cal = CalibrationSet(*lottery(at.n, layers, risk, rng))
        thresholds, bounds = method(cal, [exact(at.epsilon)], at.delta, seed=trial)
        leaves = first_above(cal.scores[:1], thresholds[0])[0] < layers
        missed += int(bounds[0] > (1 - risk if leaves else 1))
    simulated = at.told(f"δ={at.delta}", "its own bound")
    return at.counted("naive: P(bound > truth) ≤ δ", simulated, missed, at.delta, side="high")


@setting(n=30, delta=0.2)
def ltt_law(at: Setting, risk: float = 0.12, calibrate: Callable[..., Floats] = calibrate) -> Check:
    """`ltt` along two thresholds: it certifies one with probability BinomCDF(m; n, risk) exactly,
    where `risk` is that of the first.

    The second, looser threshold has no risk at all (a confident layer 2 errs, layer 1 never does),
    and yet may not be tried once the first has failed.
    """
    rng, n, found = at.rng, at.n, 0
    options = {"delta": at.delta, "sequence": [0.8, 0.4]}
    for _ in range(at.trials):
        scores = np.tile([0.5, 0.9], (n, 1))
        consistent = np.column_stack([np.ones(n, bool), rng.random(n) >= risk])
        taus = calibrate(scores, consistent, at.epsilon, "ltt", **options)
        found += int(np.isfinite(taus[0]))
    p = stats.binom.cdf(errors_allowed(n, at.epsilon, at.delta), n, risk)
    simulated = at.told(f"δ={at.delta}", f"risk {risk}", "then 0")
    return at.counted("ltt: law of its first test", simulated, found, p)


@setting(n=150, delta=0.1, trials=3000)
def band_law(at: Setting, method: str = "band") -> Check:
    """`band`: with probability 1-delta exactly the coverage of V is at least 1-epsilon at every
    epsilon <= ½ at once.

    Its bounds b_k are the levels at which the threshold moves, so these epsilons are all there are.
    Another `method` is read at the epsilon where it looks worst: what choosing after looking does.
    """
    rng, missed = at.rng, 0
    bounds = coverage_band(at.n, exact(at.delta))
    levels = [1 - exact(bound) for bound in bounds]
    for _ in range(at.trials):
        cal = CalibrationSet(*at.population.draw(at.n, rng)[:2])
        taus = METHODS[method].thresholds(cal, levels, delta=at.delta)[:, 0]
        missed += int((at.population.coverage(taus, "first_exit") < bounds).any())
    simulated = (
        f"{at.trials:,} calibrations, n={at.n}, δ={at.delta}, true coverage at all {len(bounds)} ε"
    )
    return at.counted(f"{method}: P(coverage < 1-ε at some ε)", simulated, missed, at.delta)


@setting(n=15)
def expected_loss(
    at: Setting, alpha: float = 0.1, calibrate: Callable[..., Floats] = calibrate_risk
) -> Check:
    """`crc`: E[L(τ)] <= alpha for the monotone loss L, and so for the loss at the exit.

    A wrong answer costs 1 or, on every other input, a half. The loss of one test input a
    calibration becomes a coin with that probability, so that the count is binomial.
    """
    rng, n, count = at.rng, at.n, 0
    for _ in range(at.trials):
        scores, consistent, _ = at.population.draw(n + 1, rng)
        losses = ~consistent * rng.choice([0.5, 1], size=(n + 1, 1))
        taus = calibrate(scores[:n], losses[:n], alpha, 1)
        count += int(rng.random() < worst_loss(scores[n:], losses[n:], taus[0])[0])
    simulated = f"{at.trials:,} calibrations, n={n}, α={alpha}, one test input each"
    return at.counted("crc: E[loss] ≤ α", simulated, count, alpha, side="high")


@setting(n=400, trials=1500)
def group_coverage(at: Setting, by_group: bool = True) -> Check:
    """Groups: the coverage of V among the hardest inputs follows Beta(r, m+1-r), m of them in the
    calibration set.

    With by_group=False one threshold for all is read in that group: it must fail there.
    """
    rng, uniform = at.rng, []
    hardest, last = at.population.harder(), len(at.population.difficulty) - 1
    for _ in range(at.trials):
        scores, consistent, hard = at.population.draw(at.n, rng)
        if by_group:
            tau = calibrate_groups(scores, consistent, hard, at.epsilon)[last][0]
        else:
            tau = calibrate(scores, consistent, at.epsilon, "first_exit")[0]
        m = int((hard == last).sum())
        rank = rank_of(m, 1 - exact(at.epsilon))
        if rank > m:
            continue  # too few: that group runs all layers
        uniform.append(stats.beta.cdf(hardest.coverage(tau, "first_exit"), rank, m + 1 - rank))
    claim, simulated = "groups: law of coverage in one", at.told("the hardest tenth")
    return uniform_check(claim, simulated, "Beta(r, m+1-r)", np.array(uniform), at.alarm)


@setting(n=300, trials=3000)
def nearly_f(at: Setting, wrong: float = 0.03, last: bool = True) -> Check:
    """A body whose last layer differs from F on a share `wrong` of the inputs: the coverage of V,
    (1-wrong)·P(V <= τ), follows Beta(r, n+1-r) all the same.

    With last=False its last layer is taken for F: the mistake.
    """
    rng, covered = at.rng, np.empty(at.trials)
    for i in range(at.trials):
        scores, consistent, _ = at.population.draw(at.n, rng)
        own = np.column_stack([consistent, rng.random(at.n) >= wrong])
        taus = calibrate(scores, own if last else consistent, at.epsilon, "first_exit")
        covered[i] = (1 - wrong) * at.population.coverage(taus[0], "first_exit")
    claim = "a body that is nearly F: law of coverage"
    simulated = at.told(f"last layer wrong on {wrong:.0%}")
    uniform = coverage_law(at.n, at.epsilon).cdf(covered)
    return uniform_check(claim, simulated, "Beta(r, n+1-r)", uniform, at.alarm)


@setting(population=Synthetic(layers=6))
def repeated_text(
    at: Setting,
    share: float = 0.2,
    off: float = 1e-6,
    margin: float | None = None,
    claim: str = "margin: P(G=F) ≥ 1-ε at a tie",
) -> Check:
    """One text makes up a share of the traffic, and the runtime's scores are off by up to `off`.

    The text is wrong where it scores highest, so the threshold is its own score, and a runtime that
    rounds the other way leaves there. Calibrated with the margin, and exiting where score >
    threshold + margin, the promise holds; with margin=0 it does not.
    """
    rng, n, agree = at.rng, at.n, 0
    margin = off if margin is None else margin
    text = np.full(at.population.layers - 1, 0.999)  # three layers as sure as the measure can say
    text[:-3] = 0.5
    wrong = text > 0.9
    for _ in range(at.trials):
        scores, consistent, _ = at.population.draw(n + 1, rng)
        same = rng.random(n + 1) < share
        scores[same], consistent[same] = text, ~wrong
        taus = calibrate(scores[:n], consistent[:n], at.epsilon, "first_exit", margin=margin)
        seen = scores[n:] + off * rng.uniform(-1, 1, scores[n:].shape)
        agree += int(agreement(consistent[n:], first_above(seen, taus + margin))[0])
    simulated = at.told(f"one text is {share:.0%}", f"scores off by {off}")
    return at.counted(claim, simulated, agree, 1 - at.epsilon, side="low")


class Claims:
    """All claims by section, as notebook 11 shows them: `Claims(population, trials)("shared")`."""

    def __init__(
        self,
        population: Synthetic = Synthetic(),
        trials: int = 4000,
        alarm: float = 1e-5,
        seed: int = 0,
    ) -> None:
        self.population, self.trials = population, trials
        self.common: dict[str, Any] = {"seed": seed, "alarm": alarm}  # checks with a population
        self.here = {"population": population, **self.common}  # of their own, and the others

    def __call__(self, section: str) -> list[Check]:
        """The checks of one section."""
        return list(getattr(self, "_" + section.replace(" ", "_"))())

    def _quantile(self) -> Iterator[Check]:
        for n, level in ((20, 0.9), (8, 0.9), (99, 0.93)):
            check = lemma_a1(level, n=n, trials=5 * self.trials, **self.common)
            yield check._replace(claim=f"{check.claim}, n = {n}, level {level}")

    def _bound(self) -> Iterator[Check]:
        yield proposition_31(trials=self.trials, **self.here)
        yield tuned_bound(trials=max(self.trials // 4, 200), **self.common)
        yield naive_bound(trials=self.trials // 2, **self.common)

    def _inclusion(self) -> Iterator[Check]:
        yield proposition_41(**self.here)
        yield first_exit_inclusion(**self.here)
        yield remark_43(**self.here)

    def _independent(self) -> Iterator[Check]:
        few = {"trials": self.trials // 2}
        yield independent_coverage(**few, **self.here)
        claim = "Theorem 4.4: P(G=F) ≥ 1-ε"
        yield marginal("independent", n=1000, epsilon=0.3, claim=claim, **few, **self.here)
        yield tight_union(**few, **self.common)
        uneven = [0.1, 0.2, 0.3, 0.4]
        yield tight_union(uneven, claim="Theorem 4.4, uneven weights", **few, **self.common)
        yield tuned_weights(**few, **self.common)

    def _shared(self) -> Iterator[Check]:
        for method in ("shared", "shared_all", "first_exit"):
            name = "Theorem 4.6" if method == "shared" else method
            both = {"trials": self.trials, **self.here}
            yield coverage(method, claim=f"{name}: law of coverage", **both)
            yield marginal(method, claim=f"{name}: P(G=F) ≥ 1-ε", **both)

    def _high_probability(self) -> Iterator[Check]:
        for method, law in (("pac", pac_law), ("ltt", ltt_law)):
            yield law(trials=self.trials, **self.common)
            yield high_probability(method, trials=self.trials, **self.here)
        yield band_law(trials=self.trials // 2, **self.here)

    def _labelled(self) -> Iterator[Check]:
        yield relative_accuracy(trials=self.trials, **self.common)

    def _beyond(self) -> Iterator[Check]:
        yield expected_loss(trials=self.trials, **self.here)
        yield group_coverage(trials=max(self.trials // 8, 200), **self.here)
        yield nearly_f(trials=self.trials // 2, **self.here)
        yield repeated_text(trials=self.trials, **self.common)

    def _splits(self) -> Iterator[Check]:
        rng = np.random.default_rng(self.common["seed"])
        scores, consistent, _ = self.population.draw(1000, rng)
        pool = worst_score(scores, consistent)
        none = np.isneginf(pool)  # ties at -∞ are broken below all scores
        pool[none] = -np.random.default_rng(self.common["seed"]).random(none.sum())
        yield random_splits(pool, n=500, trials=self.trials // 2, **self.common)


# --- what must fail


def quantile_without_infinity(values: Floats, level: Number) -> float:
    """The empirical quantile, as most libraries have it: no ∞, rank ⌈level·n⌉."""
    rank = conformal_rank(len(values) - 1, level)
    return float(np.sort(values)[rank - 1])


def quantile_off_by_one(values: Floats, level: Number) -> float:
    """One rank too low."""
    rank = conformal_rank(len(values), level) - 1
    return float(np.sort(values)[rank - 1]) if rank <= len(values) else np.inf


def naive_without_second_half(
    cal: CalibrationSet, epsilons: Sequence[Any], delta: float, seed: int = 0
) -> tuple[Floats, Floats]:
    """`naive` with its bound from the half it was tuned on."""
    thresholds, _ = naive(cal, epsilons, delta, seed)
    rows = np.random.default_rng(seed).permutation(cal.n)
    tuned = np.isin(np.arange(cal.n), rows[: cal.n // 2])
    agree = agreement(cal.consistent, first_above(cal.scores, thresholds[0]))[tuned]
    return thresholds, np.array([clopper_pearson(agree.sum(), len(agree), delta)])


def risk_without_bound(scores: Floats, losses: Floats, alpha: float, bound: float) -> Floats:
    """`crc` from the plain mean loss, without the bound added for the new input."""
    n = len(scores)
    return calibrate_risk(scores, losses, alpha + exact(bound) / (n + 1), bound)


def without_stop(*arguments: Any, delta: float, sequence: Sequence[float]) -> Floats:
    """`ltt` that goes on after a test has failed."""
    for t in reversed(sequence):
        taus = calibrate(*arguments, delta=delta, sequence=[t])
        if np.isfinite(taus[0]):
            break
    return taus


def controls(seed: int = 0, alarm: float = 1e-5) -> list[Check]:
    """Breakages that the checks above must catch: the check that has to fail for each."""
    # a meta classifier separates better where it was trained
    trained_on = Synthetic(skill=Synthetic().skill + 2)
    common: dict[str, Any] = {"seed": seed, "alarm": alarm}
    found = {
        "no ∞ in the quantile": lemma_a1(n=8, quantile=quantile_without_infinity, **common),
        "rank off by one": lemma_a1(quantile=quantile_off_by_one, **common),
        "a bound without its margin": proposition_31(bound=lambda s, n, delta: s / n, **common),
        "tuned and bounded on the same data": tuned_bound(trials=200, same_data=True, **common),
        "naive's bound from its tuning half": naive_bound(
            trials=300, method=naive_without_second_half, **common
        ),
        "weights tuned on the calibration set": tuned_weights(same_data=True, **common),
        "meta calibrated on its training data": marginal(
            "first_exit", population=trained_on, tested=Synthetic(), **common
        ),
        "test inputs harder than calibration": marginal(
            "first_exit", tested=Synthetic().harder(), **common
        ),
        "labelled, but calibrated on all inputs": relative_accuracy(given_right=False, **common),
        "ltt without its stop": ltt_law(trials=200, calibrate=without_stop, **common),
        "ε chosen after looking, with pac": band_law(trials=300, method="pac", **common),
        "crc without the bound": expected_loss(calibrate=risk_without_bound, **common),
        "one threshold for all, read in a hard group": group_coverage(
            trials=60, by_group=False, **common
        ),
        "the last layer of another body taken for F": nearly_f(trials=300, last=False, **common),
        "no margin at a tie": repeated_text(trials=2000, margin=0.0, **common),
    }
    return [check._replace(claim=claim) for claim, check in found.items()]
