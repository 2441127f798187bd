"""Levels, ranks and quantiles in exact arithmetic (Lemma A.1), and the binomial bounds beside them
(Proposition 3.1).
"""

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import betainccinv, betaincinv, gammaln

Number = int | float | Fraction | Decimal | np.integer | np.floating
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]


class CalibrationWarning(UserWarning):
    """The data cannot promise what was asked for; the answer is the safe one."""


def exact(number: Any) -> Fraction:
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


SMALLEST = Fraction(1, 10**15)  # of an epsilon or delta: below, numbers and data run out


def probability(number: Any, name: str) -> Fraction:
    """`number` as an exact fraction strictly between 0 and 1."""
    try:
        value = exact(number)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {number!r}")
    if value < SMALLEST:
        raise ValueError(f"{name}={number!r} is less than any number of inputs can promise")
    return value


def conformal_rank(n: int, level: Number) -> int:
    """The rank ⌈level·(n+1)⌉ of the inflated quantile of n values (Lemma A.1); n+1 stands for
    infinity.
    """
    level = exact(level)
    return -(-level.numerator * (n + 1) // level.denominator)


def conformal_quantile(values: ArrayLike, level: Number) -> float:
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


def sorted_quantiles(values: Floats, levels: Sequence[Fraction]) -> Floats:
    """`conformal_quantile` of sorted values, for several levels."""
    ranks = np.array([conformal_rank(len(values), level) for level in levels])
    return np.append(values, np.inf)[np.minimum(ranks - 1, len(values))]


@lru_cache(maxsize=4096)
def most_errors(n: int, epsilon: Number, delta: Number) -> int:
    """The largest m with BinomCDF(m; n, epsilon) <= delta, -1 if there is none.

    Seeing at most m errors in n independent trials rejects "the risk exceeds epsilon" at level
    delta.
    """
    epsilon, delta = float(epsilon), float(delta)
    # the smallest m whose CDF reaches delta, which may overshoot it
    m = int(stats.binom.ppf(delta, n, epsilon)) if n else 0
    return m if stats.binom.cdf(m, n, epsilon) <= delta else m - 1


def calibration_size(epsilon: Number, delta: Number | None = None) -> int:
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
    # (1-epsilon)^n <= delta, up to rounding
    n = max(1, math.ceil(math.log(delta) / math.log1p(-epsilon)) - 1)
    while most_errors(n, epsilon, delta) < 0:
        n += 1
    return n


def smallest_epsilon(n: int, delta: Number | None = None) -> float:
    """The smallest epsilon that n calibration points can promise (with delta: to that confidence).

    >>> smallest_epsilon(99)
    0.01
    """
    if n < 1:
        return 1.0
    return 1 / (n + 1) if delta is None else -math.expm1(math.log(probability(delta, "delta")) / n)


def clopper_pearson(successes: ArrayLike, n: ArrayLike, delta: Number = 0.01) -> Any:
    """Proposition 3.1: a lower bound that the true success rate exceeds with probability at least
    1-delta, over draws of n independent inputs.
    """
    successes, n = np.asarray(successes), np.asarray(n)
    if (successes < 0).any() or (successes > n).any():
        raise ValueError(f"successes must lie between 0 and n, got {successes} of {n}")
    bound = stats.beta.ppf(
        float(probability(delta, "delta")), np.maximum(successes, 1), n - successes + 1
    )
    return np.where(successes > 0, bound, 0.0)[()]


# --- a band that holds at all ranks at once


def crossing_probability(n: int, levels: Floats) -> float:
    """P(the j-th smallest of n uniforms exceeds levels[j-1] for some j), for rising levels.

    Let N(t) count the uniforms up to t. The first j with N(a_j) < j has N(a_j) = j-1, since the one
    before had at least j-1; from there on the other n-j+1 are uniform on (a_j, 1). So the chances
    f_j of a first crossing solve, row by row (Steck 1971; O(J²)),

    P(N(a_j) = j-1) = Σ_{i<=j} f_i · P(Binomial(n-i+1, (a_j-a_i)/(1-a_i)) = j-i).
    """
    j = np.arange(1, len(levels) + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(levels < 1, (n - j + 1) * np.log1p(-levels), 0.0)
        start = gammaln(n + 1) - gammaln(j) + (j - 1) * np.log(levels)  # log of P(N(a_j) = j-1) ...
    end = left - gammaln(n - j + 2)  # ... is start + end
    factorials = gammaln(j + 1.0)  # log 1!, log 2!, ...
    first = np.zeros(len(levels))
    for row in range(len(levels)):
        if levels[row] >= 1:  # nothing exceeds 1
            break
        first[row] = math.exp(start[row] + end[row])
        if row:
            steps = j[:row][::-1]
            log_p = steps * np.log(levels[row] - levels[:row])
            log_p -= factorials[:row][::-1]
            log_p -= end[:row] - end[row]
            np.exp(log_p, out=log_p)
            first[row] -= first[:row] @ log_p
    return float(first.sum())


@lru_cache(maxsize=256)
def band_level(n: int, delta: Number) -> float:
    """The local level η: with b_k = Beta(k, n+1-k).ppf(η), all order statistics of n uniforms from
    the middle rank up stay at or above their b_k with probability 1-delta.

    0.4 s at n = 5,000 on an idle core; what was found is kept.
    """
    target = math.log(probability(delta, "delta"))
    ranks = np.arange(1, n - math.ceil((n + 1) / 2) + 2)  # of 1-U: its smallest is U's largest

    def log_crossing(log_eta: float) -> float:
        levels = betainccinv(ranks, n + 1 - ranks, math.exp(log_eta))
        return math.log(max(crossing_probability(n, levels), 1e-300))

    # log P is nearly linear in log η with a slope a little below 1: secants, a few steps
    x, y = target - 2.0, log_crossing(target - 2.0)
    slope = 1.0
    for _ in range(50):
        if abs(y - target) < 1e-10:
            break
        step = (target - y) / slope
        new_x = min(x + step, target)
        new_y = log_crossing(new_x)
        if new_x != x and (new_y - y) / (new_x - x) > 0.1:
            slope = (new_y - y) / (new_x - x)
        x, y = new_x, new_y
    return math.exp(x - 1e-9)  # on the safe side of the last digits


@lru_cache(maxsize=64)
def coverage_band(n: int, delta: Number) -> Floats:
    """b_k for the ranks k = ⌈(n+1)/2⌉ … n: lower bounds on the coverage of the k-th smallest value,
    which all hold at once with probability 1-delta, over draws of n independent values.

    >>> coverage_band(4, 0.1).round(4)  # ranks 3 and 4
    array([0.2678, 0.4978])
    """
    if n < 1:
        return np.empty(0)
    ranks = np.arange(math.ceil((n + 1) / 2), n + 1)
    bounds = betaincinv(ranks, n + 1 - ranks, band_level(n, delta))
    bounds.flags.writeable = False
    return bounds
