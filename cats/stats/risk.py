"""`crc`: thresholds that bound the expected loss of G against F, for losses that are numbers, not
only right or wrong (conformal risk control, Angelopoulos et al. 2022).

With L_i(t) the largest loss of a record of input i whose score exceeds t, clipped at the bound B:
it falls as t rises, and the loss at the exit is at most L_i(t), since an exit is such a record. The
threshold is the smallest t with (Σ L_i(t) + B)/(n+1) <= alpha, and E[loss(G, F)] <= alpha over
draws of calibration set and new input, which have to be exchangeable. With the loss 1{F_k != F} and
B = 1 it is `first_exit`, threshold for threshold.

For regression it gives what agreement within tau cannot: E|G - Y| <= E|F - Y| + alpha.
"""

import math
import warnings
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from cats.stats.calibrators import CalibrationSet, calibrator, same_for_all_layers
from cats.stats.exits import check_scores, records
from cats.stats.quantiles import (
    Bools,
    CalibrationWarning,
    Floats,
    Ints,
    Number,
    calibration_size,
    exact,
)


def check_losses(losses: ArrayLike, shape: tuple[int, ...]) -> Floats:
    """Losses of each layer against F, (n, l-1), or (n, l) where the last layer is not quite F."""
    losses = np.asarray(losses)
    if losses.dtype.kind not in "fiub":
        raise TypeError(f"losses must be numbers, got an array of {losses.dtype}")
    if losses.shape not in (shape, (shape[0], shape[1] + 1)):
        raise ValueError(f"scores {shape} need losses of the same shape, got {losses.shape}")
    losses = losses.astype(float)
    if not (np.isfinite(losses).all() and (losses >= 0).all()):
        raise ValueError("losses must be finite and at least 0")
    return losses


def worst_loss(scores: Floats, losses: Floats, t: float, margin: float | Floats = 0.0) -> Floats:
    """L(t) of each input, (n,): the largest loss of a record (with a margin: a near-record) whose
    score exceeds t, 0 if there is none; the last layer's, if that is larger.
    """
    return _above(scores, losses, records(scores, margin), t)


def _above(scores: Floats, losses: Floats, where: Bools, t: float) -> Floats:
    before_last = losses[:, : scores.shape[1]]
    worst = np.where(where & (scores > t), before_last, 0.0).max(axis=1)
    return np.maximum(worst, losses[:, -1]) if losses.shape[1] > scores.shape[1] else worst


def risk_threshold(
    scores: Floats, losses: Floats, alpha: Fraction, bound: Fraction, where: Bools
) -> float:
    """The smallest t with (Σ L_i(t) + bound)/(n+1) <= alpha; `inf` if there is none.

    where  the (near-)records, (n, l-1)
    """
    losses = np.minimum(losses, float(bound))
    budget = alpha * (len(scores) + 1) - bound

    def within(t: float) -> bool:
        found = _above(scores, losses, where, t).tolist()
        total = math.fsum(found)
        if abs(total - float(budget)) > 1e-9 * max(1.0, total):
            return total <= budget
        # nearly a tie, which rounding must not decide: losses are the decimals they print as
        return sum(map(exact, found), Fraction()) <= budget

    if not within(math.inf):
        return math.inf
    moves = where & (losses[:, : scores.shape[1]] > 0)  # elsewhere nothing changes
    candidates = np.concatenate([[-np.inf], np.unique(scores[moves])])
    low, high = 0, len(candidates) - 1  # at the largest candidate nothing is left above it
    while low < high:
        middle = (low + high) // 2
        if within(float(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    return float(candidates[low])


@calibrator("crc", form="one", guarantee="marginal", margins=True, bodies=True)
def _crc(
    cal: CalibrationSet,
    epsilons: Sequence[Fraction],
    losses: ArrayLike | None = None,
    bound: Number = 1,
) -> Floats:
    """losses  of every input of the whole set, so that parts of it can be taken."""
    given = (~cal.agrees).astype(float) if losses is None else losses
    kept = check_losses(given, cal.scores.shape)[cal.keep]
    found = [
        risk_threshold(cal.scores[cal.keep], kept, epsilon, _bound(bound), cal.near[cal.keep])
        for epsilon in epsilons
    ]
    return same_for_all_layers(cal, found)


def _bound(bound: Number) -> Fraction:
    try:
        value = exact(bound)
    except (TypeError, ValueError) as error:
        raise type(error)(f"bound: {error}") from None
    if value <= 0:
        raise ValueError(f"bound must be positive, got {bound!r}")
    return value


def calibrate_risk(
    scores: ArrayLike,
    losses: ArrayLike,
    alpha: Number,
    bound: Number = 1,
    *,
    margin: float | Floats = 0.0,
) -> Floats:
    """Thresholds (l-1,) under which the expected loss of G against F is at most alpha.

    >>> scores = np.array([[.1, .9], [.8, .9], [.3, .2], [.6, .7]])
    >>> calibrate_risk(scores, [[.5, 0.], [.1, 0.], [.9, .2], [0., 0.]], alpha=0.4)
    array([0.1, 0.1])

    scores  (n, l-1), higher = more confident
    losses  (n, l-1), of each layer's prediction against F's, such as `ScoreTable.losses()`
    alpha   the tolerated expected loss, in the loss's own unit
    bound   the largest possible loss, known beforehand (not the largest seen); larger losses are
            taken for it, and the promise is then for the clipped loss
    margin  as for `calibrate`

    Where n inputs cannot promise alpha, which takes n >= bound/alpha - 1, the thresholds are `inf`.
    """
    scores = check_scores(scores)
    losses = check_losses(losses, scores.shape)
    level, most = exact(alpha), _bound(bound)
    if level <= 0:
        raise ValueError(f"alpha must be positive, got {alpha!r}")
    found = risk_threshold(scores, losses, level, most, records(scores, margin))
    if math.isinf(found) and found > 0:
        need = calibration_size(level / most)
        why = f"it needs at least {need} inputs, there are {len(scores)}"
        if len(scores) >= need:
            why = "the last layer alone loses too much: let F itself run"
        warnings.warn(
            f"crc cannot promise a loss of {float(level):g}: {why}; threshold inf",
            CalibrationWarning,
            stacklevel=2,
        )
    return np.full(scores.shape[1], found)


def loss_at(losses: ArrayLike, exits: ArrayLike) -> Floats:
    """The loss of inputs that leave at these layers, counted from 1: (n,). The last layer's is 0
    unless `losses` has a column for it.
    """
    losses, exits = np.asarray(losses, dtype=float), np.asarray(exits)
    padded = np.concatenate([losses, np.zeros((len(losses), 1))], axis=1)
    rows: Ints = np.arange(len(losses))
    return padded[rows, exits - 1]
