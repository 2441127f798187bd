"""Promises for groups: P(G = F | group) >= 1-epsilon, where a promise on average would let a rare,
hard group pay for the others.
"""

import warnings
from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from cats.stats.calibrators import METHODS, CalibrationSet, thresholds_from
from cats.stats.exits import agreement, check_scores, first_above
from cats.stats.quantiles import Bools, CalibrationWarning, Floats, Ints, Number, clopper_pearson


def _check_groups(groups: ArrayLike, n: int) -> NDArray[Any]:
    groups = np.asarray(groups)
    if groups.shape != (n,):
        raise ValueError(f"groups must name one group an input, shape ({n},), got {groups.shape}")
    if groups.dtype.kind == "f" and np.isnan(groups).any():
        raise ValueError("groups hold NaN: every input needs a group")
    return groups


def calibrate_groups(
    scores: ArrayLike,
    consistent: ArrayLike,
    groups: ArrayLike,
    epsilon: Number,
    method: str = "first_exit",
    *,
    by: str = "input",
    margin: ArrayLike = 0.0,
    **options: Any,
) -> dict[Hashable, Floats]:
    """Thresholds (l-1,) for each group, under which P(G = F | group) keeps the method's promise.

    >>> rng = np.random.default_rng(0)
    >>> scores, consistent = rng.random((200, 2)), rng.random((200, 2)) < 0.7
    >>> found = calibrate_groups(scores, consistent, np.arange(200) % 2, 0.1)
    >>> {int(group): taus.round(2).tolist() for group, taus in found.items()}
    {0: [0.87, 0.87], 1: [0.82, 0.82]}

    groups  (n,), one an input: its source, its length in bins, a column of the data
    by      "input": the group is known from the input, before any layer runs. One calibration a
            group, on its own inputs. "prediction": the group is F's own answer (a class), unknown
            where an input exits. One calibration a class over the inputs F puts there, and the
            largest threshold for all: what it covers is covered for every class at once

    A group too small for epsilon says so and gets `inf`: its inputs run all layers. By prediction
    one such class holds up all.
    """
    if by not in ("input", "prediction"):
        raise ValueError(f"by must be 'input' or 'prediction', got {by!r}")
    cal = CalibrationSet(scores, consistent, margin)
    names = _check_groups(groups, cal.n)
    found: dict[Hashable, Floats] = {}
    for name in np.unique(names):
        key = name.item() if hasattr(name, "item") else name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CalibrationWarning)
            found[key] = thresholds_from(cal.part(names == name), epsilon, method, **options)
        for warning in caught:
            warnings.warn(f"group {key!r}: {warning.message}", warning.category, stacklevel=2)
    if by == "prediction":
        if METHODS[method].form == "layer":
            raise ValueError(f"{method} has no thresholds to take the largest of")
        largest = np.max(list(found.values()), axis=0)
        found = {key: largest.copy() for key in found}
    return found


def group_exits(scores: ArrayLike, groups: ArrayLike, thresholds: dict[Hashable, Floats]) -> Ints:
    """Where inputs leave (n,), each by the thresholds of its group; a group that was not calibrated
    runs all layers.
    """
    scores = check_scores(scores)
    shut = np.full(scores.shape[1], np.inf)
    names = _check_groups(groups, len(scores))
    rows = [thresholds.get(name, shut) for name in names.tolist()]
    return first_above(scores, np.array(rows).reshape(scores.shape))


def by_group(
    consistent: ArrayLike, exits: ArrayLike, groups: ArrayLike, delta: Number = 0.01
) -> pd.DataFrame:
    """How often G = F in each group, the worst first: group, n, consistency, layers, and a lower
    bound on the true consistency.

    The bounds (Proposition 3.1) hold for all groups at once with probability 1-delta, for
    independent inputs that did not calibrate: each is taken at delta over the number of groups.
    """
    agree: Bools = agreement(consistent, exits)
    frame = pd.DataFrame(
        {"group": _check_groups(groups, len(agree)), "agree": agree, "layers": np.asarray(exits)}
    )
    grouped = frame.groupby("group", sort=True)
    table = pd.DataFrame(
        {
            "n": grouped.size(),
            "consistency": grouped["agree"].mean(),
            "layers": grouped["layers"].mean(),
        }
    )
    share = float(delta) / max(1, len(table))
    table["bound"] = clopper_pearson(grouped["agree"].sum().to_numpy(), table["n"], share)
    return table.sort_values("consistency", kind="stable").reset_index()


def length_groups(lengths: ArrayLike, bins: int = 4) -> Ints:
    """The quarter (or other share) of the lengths each input falls in, 0 the shortest: (n,)."""
    lengths = np.asarray(lengths, dtype=float)
    edges = np.quantile(lengths, np.arange(1, bins) / bins)
    return np.searchsorted(edges, lengths, side="left")
