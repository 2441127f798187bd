"""Thresholds for early exits, with finite-sample guarantees (Section 4 of the paper, and three
calibrators beyond it).

| method        | what it promises               | why                                            |
|---------------|--------------------------------|------------------------------------------------|
| `static`      | nothing                        | one layer for all inputs                       |
| `threshold`   | nothing                        | exit when the score exceeds 1-epsilon          |
| `naive`       | the bound it reports           | Proposition 3.1, Clopper-Pearson on one half   |
| `independent` | P(G = F) >= 1-epsilon          | Theorem 4.4, one quantile a layer, Bonferroni  |
| `shared`      | also given an inconsistent one | Theorem 4.6, quantile of the worst wrong score |
| `shared_all`  | P(G = F) >= 1-epsilon          | over all inputs, -inf where nothing is wrong   |
| `first_exit`  | P(G = F) >= 1-epsilon          | the first layer above a threshold is a record  |
| `pac`         | P(risk <= epsilon) >= 1-delta  | binomial tail on the statistic of `first_exit` |
| `ltt`         | P(risk <= epsilon) >= 1-delta  | fixed-sequence tests of the true risk          |

Scores are "higher = more confident". Column k-1 belongs to layer k; an input exits at the first
layer whose score is strictly above that layer's threshold, else at the last layer l. All ranks are
integers computed in exact arithmetic.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from numbers import Real
from typing import NamedTuple

import numpy as np
from scipy import stats


class CalibrationWarning(UserWarning):
    """The data cannot promise what was asked for; the answer is the safe one."""


# --- levels and ranks
# ---------------------------------------------------------------------------------------------


def exact(number):
    """The fraction a number stands for: a float means the decimal it prints as, so 0.07 is 7/100.

    >>> exact(0.07)
    Fraction(7, 100)
    """
    if type(number) is Fraction:
        return number
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (Real, Decimal)):
        raise TypeError(f"expected a number, got {number!r} of type {type(number).__name__}")
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number!r}")
    return Fraction(number) if isinstance(number, (int, Decimal)) else Fraction(repr(float(number)))


def probability(number, name):
    """`number` as an exact fraction strictly between 0 and 1."""
    try:
        value = exact(number)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {number!r}")
    return value


def conformal_rank(n, level):
    """The rank ⌈level·(n+1)⌉ of the inflated quantile of n values (Lemma A.1); n+1 stands for
    infinity.
    """
    level = exact(level)
    return -(-level.numerator * (n + 1) // level.denominator)


def conformal_quantile(values, level):
    """The ⌈level·(n+1)⌉-th smallest of n values, `inf` where that rank exceeds n (Lemma A.1).

    If a further value is exchangeable with these, it is at most the result with probability at
    least `level`.

    >>> conformal_quantile([1., 2., 3., 4., 5., 6., 7., 8., 9.], 0.9)
    9.0
    >>> conformal_quantile([1., 2., 3., 4., 5., 6., 7., 8.], 0.9)  # eight values cannot promise it
    inf
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 1:
        raise ValueError(f"values must be one-dimensional, got shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError("values hold NaN: a quantile of them means nothing")
    if not 0 < exact(level) <= 1:
        raise ValueError(f"level must lie in (0, 1], got {level!r}")
    rank = conformal_rank(len(values), level)
    return float(np.partition(values, rank - 1)[rank - 1]) if rank <= len(values) else math.inf


@lru_cache(maxsize=4096)
def most_errors(n, epsilon, delta):
    """The largest m with BinomCDF(m; n, epsilon) <= delta, -1 if there is none.

    Seeing at most m errors in n independent trials rejects "the risk exceeds epsilon" at level
    delta.
    """
    epsilon, delta = float(epsilon), float(delta)
    m = (
        int(stats.binom.ppf(delta, n, epsilon)) if n else 0
    )  # the smallest m whose CDF reaches delta ...
    return m if stats.binom.cdf(m, n, epsilon) <= delta else m - 1  # ... which may overshoot it


def calibration_size(epsilon, delta=None):
    """The smallest calibration set that can promise epsilon; with delta, that can promise it to
    that confidence.

    For `shared` it counts the inputs with an inconsistent layer, for `independent` pass
    omega_k·epsilon and read it per layer; `first_exit` and `shared_all` count all inputs; `pac` and
    `ltt` need delta.

    >>> calibration_size(0.05), calibration_size(0.05, delta=0.01)
    (19, 90)
    """
    epsilon = probability(epsilon, "epsilon")
    if delta is None:
        return math.ceil(1 / epsilon) - 1
    delta = probability(delta, "delta")
    n = max(
        1, math.ceil(math.log(delta) / math.log1p(-epsilon)) - 1
    )  # (1-epsilon)^n <= delta, up to rounding
    while most_errors(n, epsilon, delta) < 0:
        n += 1
    return n


def smallest_epsilon(n, delta=None):
    """The smallest epsilon that n calibration points can promise (with delta: to that confidence).

    >>> smallest_epsilon(99)
    0.01
    """
    if n < 1:
        return 1.0
    return 1 / (n + 1) if delta is None else -math.expm1(math.log(probability(delta, "delta")) / n)


def clopper_pearson(successes, n, delta=0.01):
    """Proposition 3.1: a lower bound that the true success rate exceeds with probability at least
    1-delta.
    """
    successes, n = np.asarray(successes), np.asarray(n)
    if (successes < 0).any() or (successes > n).any():
        raise ValueError(f"successes must lie between 0 and n, got {successes} of {n}")
    bound = stats.beta.ppf(
        float(probability(delta, "delta")), np.maximum(successes, 1), n - successes + 1
    )
    return np.where(successes > 0, bound, 0.0)[()]


# --- what the calibrators look at
# ---------------------------------------------------------------------------------


def check_scores(scores, consistent=None):
    """Scores as a finite float array (n, l-1), `consistent` as the boolean array beside it."""
    scores = np.asarray(scores)
    if scores.dtype.kind not in "fiu":
        raise TypeError(f"scores must be numbers, got an array of {scores.dtype}")
    if scores.ndim != 2 or scores.shape[1] == 0:
        raise ValueError(
            f"scores must have shape (n, l-1) with at least one early layer, got {scores.shape}"
        )
    scores = scores.astype(float, copy=False)
    if not np.isfinite(scores).all():
        row, layer = np.argwhere(~np.isfinite(scores))[0]
        raise ValueError(
            f"scores must be finite: input {row} has {scores[row, layer]} at layer {layer + 1}"
        )
    if consistent is None:
        return scores
    consistent = np.asarray(consistent)
    if consistent.dtype != bool:
        raise TypeError(
            f"consistent must be boolean, got {consistent.dtype}: is it F_k(x) = F(x) and not a"
            " score?"
        )
    if consistent.shape != scores.shape:
        raise ValueError(
            f"scores {scores.shape} and consistent {consistent.shape} must have the same shape (n,"
            " l-1)"
        )
    return scores, consistent


def records(scores):
    """Whether a layer's score exceeds every earlier layer's, (n, l-1): only there can a shared
    threshold exit.
    """
    earlier = np.maximum.accumulate(scores, axis=1)[:, :-1]
    return np.concatenate([np.ones((len(scores), 1), bool), scores[:, 1:] > earlier], axis=1)


def worst_score(scores, consistent, only_records=False):
    """V, the largest score of an inconsistent layer (M_max of Section 4.2.2), -inf where there is
    none: shape (n,).

    With `only_records` the maximum runs over inconsistent records alone, which is still enough: the
    first layer above t is a record, so G_t differs from F only if an inconsistent record exceeds t.
    """
    wrong = ~consistent & records(scores) if only_records else ~consistent
    return np.where(wrong, scores, -np.inf).max(axis=1)


class ExitEvents:
    """Every threshold at which the exit of some input moves, sorted: exact step functions of a
    shared threshold.

    An input leaves its record at layer j for its next record (or the last layer) as soon as t
    reaches the score at j. A total such as the number of consistent inputs is therefore a
    cumulative sum over events, for all t at once.
    """

    def __init__(self, scores):
        row, layer = np.nonzero(records(scores))  # row by row, layers ascending
        last = np.append(row[1:] != row[:-1], True)
        target = np.where(last, scores.shape[1], np.append(layer[1:], 0))
        order = np.argsort(scores[row, layer], kind="stable")
        self.score = scores[row, layer][order]
        self.row, self.layer, self.target = row[order], layer[order], target[order]

    def steps(self, quantity):
        """What each event adds to the total of `quantity` (n, l, ...)."""
        return quantity[self.row, self.target] - quantity[self.row, self.layer]

    def curve(self, quantity, steps, keep):
        """The total of quantity[i, exit layer of i] over the kept inputs, as a function of a shared
        threshold.
        """
        inside = keep[self.row]
        score = self.score[inside]
        totals = np.concatenate([quantity[keep, 0].sum(axis=0)[None], steps[inside]]).cumsum(axis=0)
        return lambda t: totals[np.searchsorted(score, t, side="right")]


class CalibrationSet:
    """Scores and consistency with what the calibrators need sorted once; `part` restricts it
    without sorting again.
    """

    def __init__(self, scores, consistent):
        self.scores, self.consistent = check_scores(scores, consistent)
        self.keep, self.whole, self._cache = np.ones(len(self.scores), bool), self, {}

    def part(self, keep):
        """The same set restricted to the inputs where the mask `keep` holds."""
        part = object.__new__(CalibrationSet)
        part.scores, part.consistent = self.scores, self.consistent
        part.keep, part.whole, part._cache = keep, self.whole, {}
        return part

    @property
    def n(self):
        return int(np.count_nonzero(self.keep))

    @property
    def early(self):
        return self.scores.shape[1]

    def _sorted(self, name, make):
        """Sorted values by name, with the rows they belong to; a part filters what the whole has
        sorted.
        """
        if name not in self._cache:
            if self is self.whole:
                values, rows = make()
                order = np.argsort(values, kind="stable")
            else:
                values, rows = self.whole._sorted(name, make)
                order = self.keep[rows]
            self._cache[name] = values[order], rows[order]
        return self._cache[name]

    def worst(self, only_records=False):
        """Sorted V of all inputs."""
        make = lambda: (
            worst_score(self.scores, self.consistent, only_records),
            np.arange(len(self.scores)),
        )
        return self._sorted(("worst", only_records), make)[0]

    def worst_given_some(self):
        """Sorted V of the inputs with at least one inconsistent layer."""

        def make():
            rows = np.flatnonzero(~self.consistent.all(axis=1))
            return worst_score(self.scores[rows], self.consistent[rows]), rows

        return self._sorted("worst given some", make)[0]

    @cached_property
    def inconsistent(self):
        """Scores of the inconsistent layers, layer by layer and sorted within each, and how many
        each layer has.
        """
        if not hasattr(self.whole, "_inconsistent"):
            whole = self.whole
            column, row = np.nonzero(~self.consistent.T)
            order = np.lexsort((self.scores[row, column], column))
            whole._inconsistent = column[order], row[order], self.scores[row, column][order]
        column, row, values = self.whole._inconsistent
        inside = self.keep[row]
        return values[inside], np.bincount(column[inside], minlength=self.early)

    @cached_property
    def events(self):
        return self.whole.events if self is not self.whole else ExitEvents(self.scores)

    @cached_property
    def _errors(self):
        if self is not self.whole:
            return self.whole._errors
        wrong = np.concatenate(
            [~self.consistent, np.zeros((len(self.scores), 1), bool)], axis=1
        ).astype(np.int64)
        return wrong, self.events.steps(wrong)

    def errors(self, thresholds):
        """The number of inputs with G_t != F at every shared threshold t: the true risk, which need
        not be monotone.
        """
        return self.events.curve(*self._errors, self.keep)(thresholds)


# --- the calibrators: each maps (calibration set, epsilons) to thresholds (len(epsilons), l-1)
# ---------------------


def _quantiles(values, levels):
    """Conformal quantiles of sorted values."""
    ranks = np.array([conformal_rank(len(values), level) for level in levels])
    return np.append(values, np.inf)[np.minimum(ranks - 1, len(values))]


def _same_for_all_layers(cal, thresholds):
    return np.repeat(np.asarray(thresholds, dtype=float)[:, None], cal.early, axis=1)


def _static(cal, epsilons):
    agree = cal.n - cal.inconsistent[1]
    thresholds = np.full((len(epsilons), cal.early), np.inf)
    for row, epsilon in zip(thresholds, epsilons):
        enough = np.flatnonzero(agree >= math.ceil((1 - epsilon) * cal.n))
        if cal.n and len(enough):
            row[enough[0] :] = -np.inf
    return thresholds


def _threshold(cal, epsilons):
    return _same_for_all_layers(cal, [float(1 - epsilon) for epsilon in epsilons])


def naive(cal, epsilons, delta=0.01, seed=0):
    """Section 3.3: the smallest threshold that is consistent enough on one half, and Proposition
    3.1's bound on the other.

    Returns thresholds (len(epsilons), l-1) and the lower bounds (len(epsilons),) on the true
    consistency.
    """
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(cal.keep))
    half = np.zeros_like(cal.keep)
    half[rows[: len(rows) // 2]] = True
    tune, rest = cal.part(half), cal.part(cal.keep & ~half)
    if tune.n == 0:  # a single input: nothing to tune on
        return np.full((len(epsilons), cal.early), np.inf), np.zeros(len(epsilons))
    candidates = np.concatenate([[-np.inf], np.unique(tune.events.score[half[tune.events.row]])])
    errors = tune.errors(candidates)
    best = [candidates[np.argmax(errors <= math.floor(epsilon * tune.n))] for epsilon in epsilons]
    bounds = clopper_pearson(rest.n - rest.errors(np.array(best)), rest.n, delta)
    return _same_for_all_layers(cal, best), np.atleast_1d(bounds)


def _naive(cal, epsilons, delta=0.01, seed=0):
    return naive(cal, epsilons, delta, seed)[0]


def _independent(cal, epsilons, weights=None):
    if weights is None:
        weights = [Fraction(1, cal.early)] * cal.early
    weights = [exact(weight) for weight in weights]
    if len(weights) != cal.early:
        raise ValueError(f"{len(weights)} weights for {cal.early} early layers")
    if min(weights) < 0 or abs(sum(weights) - 1) > Fraction(1, 10**9):
        raise ValueError(
            f"weights must be at least 0 and sum to 1, they sum to {float(sum(weights))}"
        )
    levels = {weight: [1 - weight * epsilon for epsilon in epsilons] for weight in set(weights)}
    values, counts = cal.inconsistent
    layers = np.split(values, np.cumsum(counts)[:-1])
    return np.stack(
        [_quantiles(layer, levels[weight]) for layer, weight in zip(layers, weights)], axis=1
    )


def _shared(cal, epsilons):
    return _same_for_all_layers(
        cal, _quantiles(cal.worst_given_some(), [1 - epsilon for epsilon in epsilons])
    )


def _shared_all(cal, epsilons):
    return _same_for_all_layers(cal, _quantiles(cal.worst(), [1 - epsilon for epsilon in epsilons]))


def _first_exit(cal, epsilons):
    return _same_for_all_layers(
        cal, _quantiles(cal.worst(only_records=True), [1 - epsilon for epsilon in epsilons])
    )


def _pac(cal, epsilons, delta=0.01):
    delta = probability(delta, "delta")
    worst = cal.worst(only_records=True)
    allowed = [most_errors(cal.n, epsilon, delta) for epsilon in epsilons]
    return _same_for_all_layers(cal, [worst[cal.n - 1 - m] if m >= 0 else np.inf for m in allowed])


# A sequence fixed before any data is seen: dense where scores are probabilities, coarse far
# outside, strict to loose.
FIXED_SEQUENCE = np.unique(
    np.concatenate(
        [1 / (1 + np.exp(-np.linspace(-16, 16, 1281))), np.sinh(np.linspace(-14, 14, 1401))]
    )
)[::-1]


def _ltt(cal, epsilons, delta=0.01, sequence=None):
    delta = probability(delta, "delta")
    sequence = FIXED_SEQUENCE if sequence is None else np.asarray(sequence, dtype=float)
    if sequence.ndim != 1 or not len(sequence) or not (np.diff(sequence) < 0).all():
        raise ValueError(
            "sequence must be one-dimensional and strictly decreasing, from strict to loose"
        )
    errors = cal.errors(sequence)
    thresholds = []
    for epsilon in epsilons:
        # the binomial p-value is at most delta exactly when the errors are at most this many
        failed = np.append(errors > most_errors(cal.n, epsilon, delta), True)
        rejected = int(np.argmax(failed))  # how many nulls fall before the first that stands
        thresholds.append(sequence[rejected - 1] if rejected else np.inf)
    return _same_for_all_layers(cal, thresholds)


class Method(NamedTuple):
    """A calibrator: how its thresholds are found, what shape they have, and what it promises."""

    thresholds: Callable
    form: str  # "one" threshold for all layers, "each" layer its own, or one fixed "layer"
    guarantee: str  # "none", "bound", "marginal" or "pac"


METHODS = {
    "static": Method(_static, "layer", "none"),
    "threshold": Method(_threshold, "one", "none"),
    "naive": Method(_naive, "one", "bound"),
    "independent": Method(_independent, "each", "marginal"),
    "shared": Method(_shared, "one", "marginal"),
    "shared_all": Method(_shared_all, "one", "marginal"),
    "first_exit": Method(_first_exit, "one", "marginal"),
    "pac": Method(_pac, "one", "pac"),
    "ltt": Method(_ltt, "one", "pac"),
}


def find_method(name, options=()):
    """The calibrator of that name; says what there is when there is none, or when an option is not
    its own.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    known = list(inspect.signature(METHODS[name].thresholds).parameters)[2:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"{name} takes {', '.join(known) or 'no options'}, not {', '.join(unknown)}"
        )
    return METHODS[name]


def why_not(cal, epsilon, method, thresholds, options):
    """Why a calibrator with a guarantee answered `inf`, and how many calibration points it would
    need; else None.
    """
    shut = np.flatnonzero(np.isposinf(thresholds))
    if METHODS[method].guarantee == "none" or not len(shut):
        return None
    if method == "independent":
        weights = options.get("weights")
        shares = [Fraction(1, cal.early) if weights is None else exact(weights[k]) for k in shut]
        need = max(calibration_size(share * epsilon) if share else math.inf for share in shares)
        have = cal.inconsistent[1][shut].min()
        what = (
            f"inputs inconsistent at a layer (layers {', '.join(str(k + 1) for k in shut)} stay"
            " shut)"
        )
    elif method == "shared":
        what, have, need = (
            "inputs with an inconsistent layer",
            len(cal.worst_given_some()),
            calibration_size(epsilon),
        )
    elif METHODS[method].guarantee == "pac":
        what, have, need = "inputs", cal.n, calibration_size(epsilon, options.get("delta", 0.01))
    else:
        what, have, need = "inputs", cal.n, 2 if method == "naive" else calibration_size(epsilon)
    if have >= need:  # ltt alone: the strictest threshold of its sequence already errs too often
        what += " and fewer errors among the most confident of them"
    return (
        f"{method} cannot promise epsilon={float(epsilon):g}: it needs at least {need} {what},"
        f" there are {have}; threshold inf"
    )


def calibrate(scores, consistent, epsilon, method="shared", *, correct=None, **options):
    """Thresholds (l-1,) under which the early-exit model G agrees with F as often as the method
    promises.

    >>> scores = np.array([[.1, .9], [.8, .9], [.3, .2], [.6, .7]])
    >>> consistent = np.array([[False, True], [True, True], [False, False], [True, True]])
    >>> calibrate(scores, consistent, 0.4, method="first_exit")
    array([0.1, 0.1])

    scores      (n, l-1), higher = more confident; unlabelled calibration inputs, never trained on
    consistent  (n, l-1), whether F_k(x) = F(x)
    epsilon     the tolerated rate of G != F, in (0, 1)
    method      one of METHODS
    correct     (n,), whether F is right: calibrate on those inputs alone. Then P(G = F | F = Y) >=
                1-epsilon, so that P(G = Y) >= (1-epsilon)·P(F = Y); agreement on all inputs only
                gives P(G = Y) >= P(F = Y) - epsilon
    options     `weights` for independent; `delta` for naive, pac, ltt; `seed` for naive; `sequence`
                for ltt

    What `naive` promises is a bound, which `cats.stats.calibrators.naive` and the column `bound` of
    `evaluate` give. Where the data cannot promise epsilon the thresholds are `inf`, with a
    CalibrationWarning that says what is missing.
    """
    cal = CalibrationSet(scores, consistent)
    if correct is not None:
        correct = np.asarray(correct)
        if correct.dtype != bool or correct.shape != (cal.n,):
            raise TypeError(
                f"correct must be a boolean array of shape ({cal.n},), got {correct.dtype}"
                f" {correct.shape}"
            )
        cal = cal.part(correct)
    return thresholds_from(cal, epsilon, method, stacklevel=3, **options)


def thresholds_from(cal, epsilon, method, stacklevel=2, **options):
    """`calibrate` from a CalibrationSet: asked for another epsilon, it sorts nothing again."""
    calibrator = find_method(method, options)
    epsilon = probability(epsilon, "epsilon")
    thresholds = calibrator.thresholds(cal, [epsilon], **options)[0]
    reason = why_not(cal, epsilon, method, thresholds, options)
    if reason:
        warnings.warn(reason, CalibrationWarning, stacklevel=stacklevel)
    return thresholds


def exit_layers(scores, thresholds):
    """Where each input leaves (Eq. 2): the first layer, counted from 1, with a score strictly above
    its threshold, else l.

    >>> exit_layers([[.2, .9], [.6, .9], [.2, .3]], [.5, .5])
    array([2, 1, 3])
    """
    scores = check_scores(scores)
    thresholds = np.asarray(thresholds, dtype=float)
    if thresholds.shape != scores.shape[1:]:
        raise ValueError(
            f"scores {scores.shape} need {scores.shape[1]} thresholds, got shape {thresholds.shape}"
        )
    if np.isnan(thresholds).any():
        raise ValueError("thresholds hold NaN")
    return first_above(scores, thresholds)


def first_above(scores, thresholds):
    """`exit_layers` without the checks."""
    above = np.ones(
        (len(scores), scores.shape[1] + 1), bool
    )  # the last layer always takes what is left
    np.greater(scores, thresholds, out=above[:, :-1])
    return above.argmax(axis=1) + 1
