"""Where inputs leave, whether G = F there, and the statistics of it that calibration looks at.

Scores are "higher = more confident". Column k-1 belongs to layer k; an input exits at the first
layer whose score is strictly above that layer's threshold, else at the last layer l.
"""

from collections.abc import Callable
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cats.stats.quantiles import Bools, Floats, Ints


@overload
def check_scores(scores: ArrayLike) -> Floats: ...
@overload
def check_scores(scores: ArrayLike, consistent: ArrayLike) -> tuple[Floats, Bools]: ...
def check_scores(scores: ArrayLike, consistent: ArrayLike | None = None) -> Any:
    """Scores as a finite float array (n, l-1), and beside it `consistent` as a boolean array,
    (n, l-1) or (n, l).
    """
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
    if consistent.shape not in (scores.shape, (len(scores), scores.shape[1] + 1)):
        raise ValueError(
            f"scores {scores.shape} and consistent {consistent.shape} must have the same shape (n,"
            " l-1); a body that is only nearly F has one more column, for its last layer"
        )
    return scores, consistent


def exit_layers(scores: ArrayLike, thresholds: ArrayLike) -> Ints:
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


def first_above(scores: Floats, thresholds: Floats) -> Ints:
    """`exit_layers` without the checks; thresholds may also be (n, l-1), some for each input."""
    # the last layer always takes what is left
    above = np.ones((len(scores), scores.shape[1] + 1), bool)
    np.greater(scores, thresholds, out=above[:, :-1])
    return above.argmax(axis=1) + 1


def agreement(consistent: ArrayLike, exits: ArrayLike) -> Bools:
    """Whether G = F for inputs that leave at these layers, counted from 1: shape (n,).

    >>> agreement([[True, False], [False, True], [False, False]], [2, 2, 3])
    array([False,  True,  True])

    Leaving at the last layer is agreeing, since it is F. Where it is not (`consistent` has a column
    for it, too) that column says.
    """
    consistent, exits = np.asarray(consistent), np.asarray(exits)
    if consistent.dtype != bool or consistent.ndim != 2:
        raise TypeError(
            f"consistent must be a boolean array (n, l-1), got {consistent.dtype}"
            f" {consistent.shape}"
        )
    if exits.shape != consistent.shape[:1] or exits.dtype.kind not in "iu":
        raise ValueError(
            f"exits must be {len(consistent)} layers counted from 1, got {exits.dtype}"
            f" {exits.shape}"
        )
    if len(exits) and not (1 <= exits.min() and exits.max() <= consistent.shape[1] + 1):
        raise ValueError(
            f"exits must lie in 1..{consistent.shape[1] + 1}, got {exits.min()}..{exits.max()}"
        )
    return with_last(consistent, consistent.shape[1])[np.arange(len(exits)), exits - 1]


def with_last(consistent: Bools, early: int) -> Bools:
    """`consistent` with a column for the last layer, (n, l): that layer is F unless there is such a
    column already.
    """
    if consistent.shape[1] > early:
        return consistent
    return np.concatenate([consistent, np.ones((len(consistent), 1), bool)], axis=1)


def records(scores: Floats, margin: float | Floats = 0.0) -> Bools:
    """Whether a layer's score exceeds every earlier layer's, (n, l-1): only there can a shared
    threshold exit.

    With a margin m, one for all layers or (l-1,) one each, these are near-records, s_k >
    s_j - 2·m_j for all j < k: a runtime whose scores are off by up to m, and which exits where its
    score > threshold + m, can leave only there. (It leaves at k, so s_k > t; it stayed at j < k, so
    s_j <= t + 2·m_j.)
    """
    least = scores
    if np.any(margin):  # rounded down: a layer too many costs little, one too few would break it
        least = np.nextafter(scores - 2 * np.asarray(margin), -np.inf)
    earlier = np.maximum.accumulate(least, axis=1)[:, :-1]
    return np.concatenate([np.ones((len(scores), 1), bool), scores[:, 1:] > earlier], axis=1)


def worst_score(
    scores: Floats,
    consistent: Bools,
    only_records: bool | Bools = False,
    margin: float | Floats = 0.0,
) -> Floats:
    """V, the largest score of an inconsistent layer (M_max of Section 4.2.2), -inf where there is
    none: shape (n,).

    With `only_records` the maximum runs over inconsistent records alone, which is still enough: the
    first layer above t is a record, so G_t differs from F only if an inconsistent record exceeds t.
    A margin widens it to near-records (see `records`); without `only_records` it changes nothing.
    Near-records found elsewhere may be given as a mask (n, l-1).
    Where `consistent` has a column for the last layer, V = +inf for inputs on which that is wrong:
    no threshold makes them agree.
    """
    before_last = consistent[:, : scores.shape[1]]
    where = records(scores, margin) if only_records is True else only_records
    wrong = ~before_last if where is False else ~before_last & where
    worst = np.where(wrong, scores, -np.inf).max(axis=1)
    if consistent.shape[1] > scores.shape[1]:
        worst[~consistent[:, -1]] = np.inf
    return worst


class ExitEvents:
    """Every threshold at which the exit of some input moves, sorted: exact step functions of a
    shared threshold.

    An input leaves its record at layer j for its next record (or the last layer) as soon as t
    reaches the score at j. A total such as the number of consistent inputs is therefore a
    cumulative sum over events, for all t at once.
    """

    def __init__(self, scores: Floats) -> None:
        row, layer = np.nonzero(records(scores))  # row by row, layers ascending
        last = np.append(row[1:] != row[:-1], True)
        target = np.where(last, scores.shape[1], np.append(layer[1:], 0))
        order = np.argsort(scores[row, layer], kind="stable")
        self.score: Floats = scores[row, layer][order]
        self.row, self.layer, self.target = row[order], layer[order], target[order]

    def steps(self, quantity: NDArray[Any]) -> NDArray[Any]:
        """What each event adds to the total of `quantity` (n, l, ...)."""
        return quantity[self.row, self.target] - quantity[self.row, self.layer]

    def curve(
        self, quantity: NDArray[Any], steps: NDArray[Any], keep: Bools
    ) -> Callable[[Floats], NDArray[Any]]:
        """The total of quantity[i, exit layer of i] over the kept inputs, as a function of a shared
        threshold.
        """
        inside = keep[self.row]
        score = self.score[inside]
        totals = np.concatenate([quantity[keep, 0].sum(axis=0)[None], steps[inside]]).cumsum(axis=0)
        return lambda t: totals[np.searchsorted(score, t, side="right")]
