"""Consistency, performance and layers over random trials (Section 5.3), for every method, measure
and epsilon at once.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import beta, norm, rankdata
from tqdm.auto import tqdm

from cats.stats.calibrators import (
    CalibrationSet,
    Method,
    calibrate,
    find_method,
    naive,
    why_not,
)
from cats.stats.exits import agreement, check_scores, exit_layers
from cats.stats.groups import by_group, calibrate_groups, group_exits
from cats.stats.quantiles import (
    Bools,
    CalibrationWarning,
    Floats,
    Ints,
    Number,
    clopper_pearson,
    conformal_rank,
    coverage_band,
    most_errors,
    probability,
)
from cats.stats.risk import calibrate_risk, loss_at
from cats.stats.table import ScoreTable

ORACLE = "oracle"  # not a calibrator: it sees the answers


def oracle_exits(consistent: ArrayLike, epsilon: Number) -> Ints:
    """The exits (n,) of the cheapest rule of all: no rule that errs on at most epsilon of these
    inputs uses fewer layers.

    It knows which layers are consistent. Every input leaves at its first consistent layer, except
    the ⌊epsilon·n⌋ that would cost most: they leave at layer 1, wrong.
    """
    consistent = np.asarray(consistent)
    check_scores(np.zeros(consistent.shape), consistent)
    n, early = consistent.shape
    exits = np.where(consistent.any(axis=1), consistent.argmax(axis=1) + 1, early + 1)
    dearest = np.argsort(-exits, kind="stable")[: math.floor(probability(epsilon, "epsilon") * n)]
    exits[dearest] = 1
    return exits


def settled_exits(consistent: ArrayLike, epsilon: float) -> Ints:
    """The exits (n,) of a clairvoyant who waits until the answer has settled: an input leaves at
    the first layer from which on all layers are consistent, except the ⌊epsilon·n⌋ that would cost
    most, which leave at layer 1.

    The oracle may leave at a layer that is right by luck and changes its mind afterwards; no rule
    that reads confidence can count on that.
    """
    consistent = np.asarray(consistent)
    check_scores(np.zeros(consistent.shape), consistent)
    from_here = np.logical_and.accumulate(consistent[:, ::-1], axis=1)[:, ::-1]
    return oracle_exits(from_here, epsilon)


def split(n: int, trial: int, seed: int = 0) -> Bools:
    """The calibration mask (n,) of one trial: a random 80 % of the inputs, the same however many
    trials there are.
    """
    mask = np.zeros(n, bool)
    mask[np.random.default_rng([seed, trial]).permutation(n)[: n * 4 // 5]] = True
    return mask


class _Outcomes:
    """What G yields on part of a table: exact sums of consistency, layers and performance at the
    exits taken.
    """

    def __init__(
        self, table: ScoreTable, cal: CalibrationSet, groups: ArrayLike | None = None
    ) -> None:
        n, l = len(table), table.n_layers
        quantities = [cal.agrees, np.broadcast_to(np.arange(1, l + 1), (n, l))]
        self.costs = table.costs
        if self.costs is not None:
            quantities.append(np.broadcast_to(self.costs, (n, l)))
        self.labels: Floats | None = None
        if table.labels is not None and table.regression:
            # centred, so that the sums below cancel less
            self.labels = table.labels - table.labels.mean()
            outputs = table.predictions - table.predictions.mean()
            quantities += [outputs, outputs**2, outputs * self.labels[:, None]]
        elif table.labels is not None:
            quantities.append(table.correct)
        self.members = np.empty((n, 0), bool)  # (n, groups)
        if groups is not None:
            names = np.asarray(groups)
            if names.shape != (n,):
                raise ValueError(f"groups must have shape (n,) = ({n},), got {names.shape}")
            self.members = names[:, None] == np.unique(names)
            quantities += [cal.agrees & member[:, None] for member in self.members.T]
        # (n, l, Q); sums of counts stay exact
        self.quantities: Floats = np.stack(quantities, axis=-1).astype(float)
        self.events = cal.events
        self.steps = self.events.steps(self.quantities)

    def by_threshold(self, keep: Bools) -> Callable[[Floats], Floats]:
        """Sums (..., Q) over the kept inputs as a function of a shared threshold."""
        return self.events.curve(self.quantities, self.steps, keep)

    def at_layers(self, keep: Bools, layers: Ints) -> Floats:
        """The same sums where all inputs leave at one layer (epsilons,)."""
        return self.quantities[keep].sum(axis=0)[layers - 1]

    def at_exits(self, keep: Bools, exits: Ints) -> Floats:
        """The same sums for given exit layers (epsilons, kept inputs)."""
        rows = np.flatnonzero(keep) * self.quantities.shape[1]
        return self.quantities.reshape(-1, self.quantities.shape[2])[rows + exits - 1].sum(axis=1)

    def columns(
        self, keep: Bools, agree: Floats, layers: Floats, *rest: Floats
    ) -> dict[str, Floats]:
        """The sums as columns of the result."""
        n = int(np.count_nonzero(keep))
        columns = {"consistency": agree / n, "layers": layers / n}
        if self.costs is not None:
            columns["cost"], rest = rest[0] / n, rest[1:]
        if self.members.shape[1]:
            size = self.members[keep].sum(axis=0)
            inside = np.stack(rest[-len(size) :])[size > 0] / size[size > 0, None]
            columns["worst_group"] = inside.min(axis=0)
            rest = rest[: -len(size)]
        if rest and self.labels is not None:
            total, squares, products = rest
            columns["correlation"] = _pearson(n, total, squares, products, self.labels[keep])
        elif rest:
            columns["accuracy"] = rest[0] / n
        return columns


def _pearson(n: int, total: Floats, squares: Floats, products: Floats, labels: Floats) -> Floats:
    """Pearson's correlation from the sums of g, g² and g·y; NaN where the outputs g are all equal
    up to rounding.
    """
    covariance = products - total * labels.sum() / n
    variance = squares - total**2 / n
    spread = labels @ labels - labels.sum() ** 2 / n
    defined = (variance > 1e-12 * squares) & (spread > 0)
    return np.where(
        defined, covariance / np.sqrt(np.where(defined, variance * spread, 1.0)), np.nan
    )


def evaluate(
    table: ScoreTable,
    methods: str | Sequence[str] = ("shared", "first_exit"),
    measures: str | Sequence[str] = ("meta",),
    epsilons: Number | Sequence[Number] = (0.05, 0.1),
    trials: int = 25,
    seed: int = 0,
    *,
    delta: Number = 0.01,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    groups: ArrayLike | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """A tidy frame of what each calibrator achieves on random 80/20 splits of a table.

    >>> evaluate(table, ["shared", "first_exit"], ["sm", "meta"], [0.05, 0.1])  # doctest: +SKIP

    methods   names of calibrators, or "oracle": the fewest layers any rule could use on the test
              part
    options   options of single methods, such as {"pac": {"delta": 0.1}}
    delta     confidence of the column `bound`
    groups    (n,), a group an input, such as `table.predictions[:, -1]` (F's class) or
              `cats.stats.groups.length_groups(lengths)`: adds `worst_group`, the consistency of the
              group that fares worst on the test part

    One row per method, measure, epsilon and trial, with the share of test inputs on which G = F
    (consistency), accuracy (for regression: correlation), mean exit layer (layers), mean cost where
    the table knows what its steps cost (see `ScoreTable.costs`), and `bound`:
    Proposition 3.1's lower bound on the true consistency, to confidence 1-delta, from inputs the
    thresholds have not seen (the test part; for `naive` the half it sets aside, as it reports).
    Trial t is the same split for every method, measure and table of the same length.
    """
    methods = [methods] if isinstance(methods, str) else list(methods)
    measures = [measures] if isinstance(measures, str) else list(measures)
    levels = [
        probability(epsilon, "epsilon")
        for epsilon in np.atleast_1d(np.asarray(epsilons, dtype=object))
    ]
    options = options or {}
    calibrators: dict[str, Method] = {
        name: find_method(name, options.get(name, {})) for name in methods if name != ORACLE
    }
    if set(options) - set(methods):
        raise ValueError(
            f"options for {sorted(set(options) - set(methods))}, which are not among the methods"
            f" {methods}"
        )
    if trials < 1 or len(table) < 2:
        raise ValueError(
            f"needs at least one trial and two inputs, got trials={trials} and {len(table)} inputs"
        )

    shape = (len(measures), trials, len(methods), len(levels))
    columns: dict[str, Floats] = {}
    refused: dict[tuple[str, str, Fraction], tuple[int, str]] = {}
    quiet = {} if progress else {"disable": True}  # else TQDM_DISABLE says
    bar = tqdm(total=len(measures) * trials, desc="trials", **quiet)
    for i, measure in enumerate(measures):
        cal = CalibrationSet(table.scores(measure), table.consistent)
        outcomes = _Outcomes(table, cal, groups)
        for trial in range(trials):
            keep = split(len(table), trial, seed)
            part, test = cal.part(keep), ~keep
            scores = cal.scores[test].T.copy()  # (l-1, test inputs)
            by_threshold = outcomes.by_threshold(test)
            for j, name in enumerate(methods):
                bounds = None
                if name == ORACLE:
                    exits = np.stack(
                        [oracle_exits(cal.consistent[test], level) for level in levels]
                    )
                    sums = outcomes.at_exits(test, exits)
                else:
                    thresholds, bounds = _thresholds(
                        part, levels, name, options.get(name, {}), delta
                    )
                    _note_refusals(
                        refused, part, levels, name, measure, thresholds, options.get(name, {})
                    )
                    if calibrators[name].form == "one":
                        sums = by_threshold(thresholds[:, 0])
                    elif calibrators[name].form == "layer":
                        sums = outcomes.at_layers(test, 1 + np.isposinf(thresholds).sum(axis=1))
                    else:
                        sums = outcomes.at_exits(test, _exits(scores, thresholds))
                found = outcomes.columns(test, *sums.T)
                found["bound"] = np.full(len(levels), np.nan) if bounds is None else bounds
                for column, values in found.items():
                    columns.setdefault(column, np.empty(shape))[i, trial, j] = values
            bar.update()
    bar.close()

    for (_, measure, _), (count, reason) in refused.items():
        warnings.warn(
            f"{measure}, {count} of {trials} trials: {reason}", CalibrationWarning, stacklevel=2
        )
    n_test = len(table) - len(table) * 4 // 5
    agree = np.rint(columns["consistency"] * n_test).astype(int)
    columns["bound"] = np.where(
        np.isnan(columns["bound"]), _bounds(agree, n_test, delta), columns["bound"]
    )
    keys = {
        "measure": measures,
        "trial": range(trials),
        "method": methods,
        "epsilon": [float(e) for e in levels],
    }
    index = pd.MultiIndex.from_product(keys.values(), names=keys.keys())
    frame = pd.DataFrame(
        {column: values.ravel() for column, values in columns.items()}, index
    ).reset_index()
    return frame[["method", "measure", "epsilon", "trial", *columns]]


def savings(
    table: ScoreTable,
    measure: str = "meta",
    epsilons: Sequence[Number] = (0.01, 0.05, 0.1),
    method: str = "first_exit",
    *,
    confidence: Number = 0.9,
    **options: Any,
) -> pd.DataFrame:
    """What a model calibrated on all of a table can expect of new inputs, a row an epsilon.

    threshold            from all n inputs (for methods with one threshold)
    layers, low, high    the mean exit layer of inputs that did not calibrate, and an interval. Each
                         input leaves by thresholds of the others (above 500 inputs: one part of 500
                         is left out at a time). Where one input fewer cannot promise epsilon, by
                         all n
    cost, cost_low, cost_high   the same in costs, where the table knows them
    coverage_low, coverage_median, coverage_high   quantiles of P(V <= threshold) over draws of the
                         calibration set (a Beta law, for V without ties). Consistency is at least
                         that. For `shared` it is among inputs with an inconsistent layer; NaN where
                         no law is known

    The epsilons are for reading: choosing one by its layers takes `band`, or other inputs.
    """
    levels = [probability(epsilon, "epsilon") for epsilon in epsilons]
    calibrator = find_method(method, options)
    cal = CalibrationSet(table.scores(measure), table.consistent)
    n, tail = len(table), float(1 - probability(confidence, "confidence")) / 2
    whole = calibrator.thresholds(cal, levels, **options)
    exits = np.empty((len(levels), n))
    for left_out in np.array_split(np.random.default_rng(0).permutation(n), min(n, 500)):
        keep = np.ones(n, bool)
        keep[left_out] = False
        thresholds = calibrator.thresholds(cal.part(keep), levels, **options)
        shut = np.isposinf(thresholds) & np.isfinite(whole)
        thresholds = np.where(shut.any(axis=1, keepdims=True), whole, thresholds)
        exits[:, left_out] = _exits(cal.scores[left_out].T, thresholds)
    mean, error = exits.mean(axis=1), exits.std(axis=1) / math.sqrt(max(n - 1, 1))
    wide = norm.isf(tail) * error
    frame = pd.DataFrame(
        {
            "epsilon": [float(level) for level in levels],
            "threshold": whole[:, 0] if calibrator.form == "one" else np.nan,
            "layers": mean,
            "low": np.maximum(mean - wide, 1),
            "high": np.minimum(mean + wide, table.n_layers),
        }
    )
    if table.costs is not None:
        paid = table.costs[exits.astype(int) - 1]
        wide = norm.isf(tail) * paid.std(axis=1) / math.sqrt(max(n - 1, 1))
        frame["cost"] = paid.mean(axis=1)
        frame["cost_low"] = np.maximum(frame["cost"] - wide, table.costs[0])
        frame["cost_high"] = np.minimum(frame["cost"] + wide, table.costs[-1])
    laws = [
        coverage_quantiles(cal, level, method, (tail, 0.5, 1 - tail), options) for level in levels
    ]
    frame[["coverage_low", "coverage_median", "coverage_high"]] = np.array(laws)
    return frame


def coverage_quantiles(
    cal: CalibrationSet,
    epsilon: Number,
    method: str,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    options: Mapping[str, Any] | None = None,
) -> Floats:
    """Quantiles of this calibration's coverage P(V <= threshold) over draws of the calibration set.

    The threshold is the k-th smallest of n values: Beta(k, n+1-k), for values without ties; 1 where
    the threshold is infinite; NaN for methods that are no order statistic of V.
    """
    level, options = probability(epsilon, "epsilon"), options or {}
    n = len(cal.worst_given_some()) if method == "shared" else cal.n
    if method in ("shared", "shared_all", "first_exit"):
        rank = conformal_rank(n, 1 - level)
    elif method == "pac":
        rank = n - most_errors(n, level, probability(options.get("delta", 0.01), "delta"))
    elif method == "band":
        share = probability(options.get("delta", 0.01), "delta") / options.get("choices", 1)
        bounds = coverage_band(n, share)
        rank = n - len(bounds) + 1 + int(np.searchsorted(bounds, float(1 - level)))
    else:
        return np.full(len(quantiles), np.nan)
    if rank > n:
        return np.ones(len(quantiles))
    return beta.ppf(quantiles, rank, n + 1 - rank)


def risk_trials(
    table: ScoreTable,
    alphas: Sequence[Number],
    bound: Number = 1,
    kind: str | None = None,
    measure: str = "meta",
    trials: int = 25,
    seed: int = 0,
) -> pd.DataFrame:
    """`crc` on random 80/20 splits: alpha, trial, and on the test part the mean loss of G against
    F, consistency and layers. For labelled regression also the mean |G-Y| and |F-Y|.

    kind, bound   as in `ScoreTable.losses` and `cats.calibrate_risk`
    """
    scores, losses, rows = table.scores(measure), table.losses(kind), []
    for trial in range(trials):
        keep = split(len(table), trial, seed)
        test = np.flatnonzero(~keep)
        for alpha in alphas:
            taus = calibrate_risk(scores[keep], losses[keep], alpha, bound)
            exits = exit_layers(scores[test], taus)
            row = {
                "alpha": float(alpha),
                "trial": trial,
                "loss": loss_at(losses[test], exits).mean(),
                "consistency": agreement(table.consistent[test], exits).mean(),
                "layers": exits.mean(),
            }
            if table.regression and table.labels is not None:
                off = np.abs(table.predictions[test] - table.labels[test, None])
                row |= {"error": off[np.arange(len(test)), exits - 1].mean()}
                row |= {"error_of_F": off[:, -1].mean()}
            rows.append(row)
    return pd.DataFrame(rows)


def group_trials(
    table: ScoreTable,
    groups: ArrayLike,
    epsilon: Number,
    measure: str = "meta",
    trials: int = 25,
    seed: int = 0,
) -> pd.DataFrame:
    """`first_exit` for all inputs together ("one threshold"), by group as if it were known ("a
    threshold a group"), and with the largest threshold ("the largest for all"), on random 80/20
    splits: way, trial, group, n, consistency, layers.
    """
    scores, names, parts = table.scores(measure), np.asarray(groups), []
    for trial in range(trials):
        keep = split(len(table), trial, seed)
        cal = scores[keep], table.consistent[keep]
        every = calibrate(*cal, epsilon, "first_exit")
        each = calibrate_groups(*cal, names[keep], epsilon)
        largest = calibrate_groups(*cal, names[keep], epsilon, by="prediction")
        exits = {
            "one threshold": exit_layers(scores[~keep], every),
            "a threshold a group": group_exits(scores[~keep], names[~keep], each),
            "the largest for all": group_exits(scores[~keep], names[~keep], largest),
        }
        for way, left_at in exits.items():
            found = by_group(table.consistent[~keep], left_at, names[~keep])
            parts.append(found.assign(way=way, trial=trial).drop(columns="bound"))
    return pd.concat(parts, ignore_index=True)


def _exits(scores: Floats, thresholds: Floats) -> Ints:
    """Exit layers (epsilons, inputs) of scores (l-1, inputs) for all rows of thresholds (epsilons,
    l-1) at once.
    """
    stays = np.ones((len(thresholds), scores.shape[1]), bool)
    exits = np.ones(stays.shape, int)
    for k in range(len(scores)):
        stays &= scores[k] <= thresholds[:, k, None]
        exits += stays
    return exits


def _thresholds(
    part: CalibrationSet,
    levels: Sequence[Fraction],
    name: str,
    options: Mapping[str, Any],
    delta: Number,
) -> tuple[Floats, Floats | None]:
    """Thresholds for all levels, and the bounds the method reports, if it does."""
    if name == "naive":
        return naive(part, levels, **{"delta": delta, **options})
    return find_method(name).thresholds(part, levels, **options), None


def _note_refusals(
    refused: dict[tuple[str, str, Fraction], tuple[int, str]],
    part: CalibrationSet,
    levels: Sequence[Fraction],
    name: str,
    measure: str,
    thresholds: Floats,
    options: Mapping[str, Any],
) -> None:
    """Count the trials in which a calibrator could not promise epsilon, with the first reason
    given.
    """
    for level, row in zip(levels, thresholds):
        if np.isposinf(row).any():
            key = name, measure, level
            if key in refused:
                refused[key] = refused[key][0] + 1, refused[key][1]
            elif reason := why_not(part, level, name, row, options):
                refused[key] = 1, reason


def _bounds(agree: Ints, n: int, delta: Number) -> Floats:
    """Proposition 3.1 for an array of counts; few of them differ, and the bound is slow."""
    counts, inverse = np.unique(agree, return_inverse=True)
    return clopper_pearson(counts, n, delta)[inverse].reshape(agree.shape)


def summary(frame: pd.DataFrame, low: float = 0.16, high: float = 0.84) -> pd.DataFrame:
    """Means over trials with the 16th and 84th percentile, as the paper shades them."""
    keys = ["method", "measure", "epsilon"]
    values = [column for column in frame.columns if column not in keys + ["trial"]]
    grouped = frame.groupby(keys, sort=False)[values]
    parts = {"mean": grouped.mean(), "low": grouped.quantile(low), "high": grouped.quantile(high)}
    return pd.concat(parts, axis=1).swaplevel(axis=1).sort_index(axis=1)


# --- layer by layer


def auroc(scores: ArrayLike, positive: ArrayLike) -> float:
    """The probability that a positive input scores above a negative one (ties count half); NaN if
    either kind is missing.
    """
    positive = np.asarray(positive, bool)
    n, m = positive.sum(), (~positive).sum()
    if not n or not m:
        return np.nan
    return (rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m)


def calibration_error(confidence: ArrayLike, right: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error (Guo et al. 2017): mean gap between confidence and accuracy over
    equal bins.
    """
    confidence, right = np.asarray(confidence), np.asarray(right)
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(index, confidence, bins) - np.bincount(index, right, bins)
    return np.abs(gaps).sum() / len(index)


def by_layer(table: ScoreTable, temperature: ArrayLike | None = None) -> pd.DataFrame:
    """One row a layer: consistency, accuracy (or correlation), AUROC of M_k and of p max for
    consistency, calibration error.

    With the heads' temperatures (l-1,) the calibration error before temperature scaling is given,
    too.
    """
    consistent = table.consistent
    rows: list[dict[str, Any]] = []
    correct = None if table.labels is None else table.correct
    softmax = None if table.regression else table.scores("sm")
    plain = None
    if temperature is not None and not table.regression:
        unscaled = table.logits.astype(float)
        unscaled[:, :-1] *= np.asarray(temperature)[:, None]
        plain = ScoreTable(unscaled, table.meta).scores("sm")
    for k in range(table.n_layers - 1):
        row: dict[str, Any] = {"layer": k + 1, "consistency": consistent[:, k].mean()}
        if table.labels is not None:
            row[table.metric] = table.performance(k + 1)
        if table.meta is not None:
            row["auroc_meta"] = auroc(table.meta[:, k], consistent[:, k])
        if softmax is not None:
            row["auroc_sm"] = auroc(softmax[:, k], consistent[:, k])
        if softmax is not None and correct is not None:
            if plain is not None:
                row["ece_before"] = calibration_error(plain[:, k], correct[:, k])
            row["ece"] = calibration_error(softmax[:, k], correct[:, k])
        rows.append(row)
    return pd.DataFrame(rows)


def recalibrate(
    table: ScoreTable,
    n: int,
    settings: Sequence[tuple[str, Number | None]],
    epsilons: Sequence[Number],
    trials: int = 50,
    seed: int = 0,
    measure: str = "meta",
) -> pd.DataFrame:
    """Calibrate on n random inputs, again and again, and look at all the others: a tidy frame, a
    row a trial.

    settings   (method, delta) of methods with one threshold for all layers; delta is None where the
               method has none
    Columns: method, delta, epsilon, trial, n, threshold (`inf` where n is too small), risk, layers.
    """
    cal = CalibrationSet(table.scores(measure), table.consistent)
    depth = np.indices(table.logits.shape[:2])[1] + 1
    steps, rows = cal.events.steps(depth), []
    levels = [probability(epsilon, "epsilon") for epsilon in epsilons]
    for trial in range(trials):
        keep = np.random.default_rng([seed, trial]).permutation(len(table)) < n
        given, rest, layers = cal.part(keep), cal.part(~keep), cal.events.curve(depth, steps, ~keep)
        for method, delta in settings:
            options = {} if delta is None else {"delta": delta}
            found = find_method(method, options).thresholds(given, levels, **options)[:, 0]
            for epsilon, t, errors, total in zip(
                epsilons, found, rest.errors(found), layers(found)
            ):
                rows.append((method, delta, epsilon, trial, n, t, errors / rest.n, total / rest.n))
    return pd.DataFrame(
        rows, columns=["method", "delta", "epsilon", "trial", "n", "threshold", "risk", "layers"]
    )
