"""What happens to a promise when something is chosen after looking at the calibration inputs."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from cats.stats.calibrators import CalibrationSet, find_method
from cats.stats.exits import agreement
from cats.stats.quantiles import Bools, Floats, Ints, Number, conformal_rank, coverage_band, exact
from cats.stats.table import ScoreTable

FIXED, LOOKED, APART, BAND = (
    "fixed beforehand",
    "chosen on the calibration inputs",
    "chosen on other inputs",
    "chosen on the calibration inputs, band",
)


class Draws(NamedTuple):
    """Calibration on n random inputs of a table, again and again; the inputs left are the test.

    measure  the confidence that inputs leave by
    delta    of the methods that know one
    """

    n: int
    trials: int = 100
    seed: int = 0
    measure: str = "meta"
    delta: Number = 0.05

    def orders(self, table: ScoreTable) -> Iterator[tuple[int, Ints]]:
        """The table's rows in random order, trial by trial."""
        for trial in range(self.trials):
            yield trial, np.random.default_rng([self.seed, trial]).permutation(len(table))


def subset_values(scores: Floats, consistent: Bools, subsets: Ints) -> Floats:
    """V of `first_exit` with a few exit layers alone, for many sets of them at once: (n, subsets).

    subsets  (subsets, size), columns in rising order
    """
    best = np.full((len(scores), len(subsets)), -np.inf)
    worst = best.copy()
    for column in subsets.T:
        score = scores[:, column]
        record = score > best
        worst = np.where(record & ~consistent[:, column], score, worst)
        best = np.where(record, score, best)
    return worst


def subset_exits(scores: Floats, subsets: Ints, taus: Floats) -> Ints:
    """Where inputs leave, (n, subsets), each set of layers with its threshold."""
    exits = np.full((len(scores), len(subsets)), scores.shape[1] + 1)
    for column in subsets.T[::-1]:
        exits = np.where(scores[:, column] > taus, column + 1, exits)
    return exits


def _ranked(scores: Floats, consistent: Bools, subsets: Ints) -> Floats:
    """V sorted, with ∞ at the end, for each set of layers: (n+1, subsets)."""
    values = np.sort(subset_values(scores, consistent, subsets), axis=0)
    return np.concatenate([values, np.full((1, len(subsets)), np.inf)])


def choosing_layers(
    table: ScoreTable, draws: Draws, epsilon: Number, size: int = 3
) -> pd.DataFrame:
    """Calibrate with `size` exit layers, the best of all such sets, and look at the inputs left: a
    row a way and trial, with risk and layers.

    The best set is the one that uses fewest layers, judged on the calibration inputs, on n others,
    or not at all (layers evenly spread). `band` shares delta among all sets.
    """
    n, scores, consistent = draws.n, table.scores(draws.measure), table.consistent
    early = table.n_layers - 1
    subsets = np.array(list(combinations(range(early), size)))
    spread = np.linspace(0, early, size + 2)[1:-1].astype(int)
    fixed = int(np.flatnonzero((subsets == spread).all(axis=1))[0])
    rank = conformal_rank(n, 1 - exact(epsilon))
    bounds = coverage_band(n, exact(draws.delta) / len(subsets))
    safe = n - len(bounds) + 1 + int(np.searchsorted(bounds, float(1 - exact(epsilon))))
    rows = []
    for trial, order in draws.orders(table):
        cal, other, rest = order[:n], order[n : 2 * n], order[2 * n :]
        ranked = _ranked(scores[cal], consistent[cal], subsets)
        taus, wide = ranked[min(rank - 1, n)], ranked[min(safe - 1, n)]
        here = subset_exits(scores[cal], subsets, taus).mean(axis=0)
        # apart means apart: even the thresholds that judge are not those of the calibration inputs
        elsewhere = _ranked(scores[other], consistent[other], subsets)[min(rank - 1, n)]
        there = subset_exits(scores[other], subsets, elsewhere).mean(axis=0)
        band = subset_exits(scores[cal], subsets, wide).mean(axis=0)
        ways = {
            FIXED: (fixed, taus),
            LOOKED: (int(here.argmin()), taus),
            APART: (int(there.argmin()), taus),
            BAND: (int(band.argmin()), wide),
        }
        for way, (best, found) in ways.items():
            exits = subset_exits(scores[rest], subsets[[best]], found[[best]])[:, 0]
            risk = 1 - agreement(consistent[rest], exits).mean()
            rows.append((way, trial, n, risk, exits.mean()))
    return pd.DataFrame(rows, columns=["way", "trial", "n", "risk", "layers"])


def choosing_epsilon(
    table: ScoreTable, draws: Draws, methods: Sequence[str], epsilons: Sequence[Number]
) -> pd.DataFrame:
    """Calibrate for many epsilons and take the one behind the largest drop in layers, seen on the
    same inputs: method, trial, epsilon, risk, layers, and `excess`, the largest risk - epsilon over
    all epsilons.

    Methods with one threshold; those that know delta are given it. Risk and layers are those of the
    inputs left.
    """
    cal = CalibrationSet(table.scores(draws.measure), table.consistent)
    depth = np.indices(table.logits.shape[:2])[1] + 1
    steps = cal.events.steps(depth)
    levels = [exact(epsilon) for epsilon in epsilons]
    values = np.array([float(level) for level in levels])
    rows = []
    for trial, order in draws.orders(table):
        keep = order < draws.n
        given, rest = cal.part(keep), cal.part(~keep)
        seen, later = (cal.events.curve(depth, steps, part) for part in (keep, ~keep))
        for method in methods:
            promises = find_method(method).guarantee == "pac"
            options = {"delta": draws.delta} if promises else {}
            taus = find_method(method).thresholds(given, levels, **options)[:, 0]
            best = int(np.argmax(-np.diff(seen(taus)))) + 1
            risks = rest.errors(taus) / rest.n
            layers = later(taus) / rest.n
            rows.append(
                (method, trial, values[best], risks[best], layers[best], (risks - values).max())
            )
    return pd.DataFrame(rows, columns=["method", "trial", "epsilon", "risk", "layers", "excess"])
