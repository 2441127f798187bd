"""Consistency, performance and layers over random trials (Section 5.3), for every method, measure
and epsilon at once.
"""

import math
import warnings

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from tqdm.auto import tqdm

from cats.stats.calibrators import (
    CalibrationSet,
    CalibrationWarning,
    check_scores,
    clopper_pearson,
    find_method,
    naive,
    probability,
    why_not,
)
from cats.stats.table import ScoreTable

ORACLE = "oracle"  # not a calibrator: it sees the answers


def oracle_exits(consistent, epsilon):
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


def split(n, trial, seed=0):
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

    def __init__(self, table, cal):
        n, l = len(table), table.n_layers
        consistent = np.concatenate([cal.consistent, np.ones((n, 1), bool)], axis=1)
        quantities = [consistent, np.broadcast_to(np.arange(1, l + 1), (n, l))]
        self.labels = None
        if table.labels is not None and table.regression:
            self.labels = (
                table.labels - table.labels.mean()
            )  # centred, so that the sums below cancel less
            outputs = table.predictions - table.predictions.mean()
            quantities += [outputs, outputs**2, outputs * self.labels[:, None]]
        elif table.labels is not None:
            quantities.append(table.correct)
        self.quantities = np.stack(quantities, axis=-1).astype(
            float
        )  # (n, l, Q); sums of counts stay exact
        self.events = cal.events
        self.steps = self.events.steps(self.quantities)

    def by_threshold(self, keep):
        """Sums (..., Q) over the kept inputs as a function of a shared threshold."""
        return self.events.curve(self.quantities, self.steps, keep)

    def at_layers(self, keep, layers):
        """The same sums where all inputs leave at one layer (epsilons,)."""
        return self.quantities[keep].sum(axis=0)[layers - 1]

    def at_exits(self, keep, exits):
        """The same sums for given exit layers (epsilons, kept inputs)."""
        rows = np.flatnonzero(keep) * self.quantities.shape[1]
        return self.quantities.reshape(-1, self.quantities.shape[2])[rows + exits - 1].sum(axis=1)

    def columns(self, keep, agree, layers, *rest):
        """The sums as columns of the result."""
        n = np.count_nonzero(keep)
        columns = {"consistency": agree / n, "layers": layers / n}
        if rest and self.labels is not None:
            columns["correlation"] = _pearson(n, *rest, self.labels[keep])
        elif rest:
            columns["accuracy"] = rest[0] / n
        return columns


def _pearson(n, total, squares, products, labels):
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
    table,
    methods=("shared", "first_exit"),
    measures=("meta",),
    epsilons=(0.05, 0.1),
    trials=25,
    seed=0,
    *,
    delta=0.01,
    options=None,
    progress=False,
):
    """A tidy frame of what each calibrator achieves on random 80/20 splits of a table.

    >>> evaluate(table, ["shared", "first_exit"], ["sm", "meta"], [0.05, 0.1])  # doctest: +SKIP

    methods   names of calibrators, or "oracle": the fewest layers any rule could use on the test
              part
    options   options of single methods, such as {"pac": {"delta": 0.1}}
    delta     confidence of the column `bound`

    One row per method, measure, epsilon and trial, with the share of test inputs on which G = F
    (consistency), accuracy (for regression: correlation), mean exit layer (layers), and `bound`:
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
    calibrators = {
        name: None if name == ORACLE else find_method(name, options.get(name, {}))
        for name in methods
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
    columns, refused = {}, {}
    bar = tqdm(total=len(measures) * trials, desc="trials", disable=not progress)
    for i, measure in enumerate(measures):
        cal = CalibrationSet(table.scores(measure), table.consistent)
        outcomes = _Outcomes(table, cal)
        for trial in range(trials):
            keep = split(len(table), trial, seed)
            part, test = cal.part(keep), ~keep
            scores, by_threshold = (
                cal.scores[test].T.copy(),
                outcomes.by_threshold(test),
            )  # scores (l-1, test inputs)
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


def _exits(scores, thresholds):
    """Exit layers (epsilons, inputs) of scores (l-1, inputs) for all rows of thresholds (epsilons,
    l-1) at once.
    """
    stays = np.ones((len(thresholds), scores.shape[1]), bool)
    exits = np.ones(stays.shape, int)
    for k in range(len(scores)):
        stays &= scores[k] <= thresholds[:, k, None]
        exits += stays
    return exits


def _thresholds(part, levels, name, options, delta):
    """Thresholds for all levels, and the bounds the method reports, if it does."""
    if name == "naive":
        return naive(part, levels, **{"delta": delta} | options)
    return find_method(name).thresholds(part, levels, **options), None


def _note_refusals(refused, part, levels, name, measure, thresholds, options):
    """Count the trials in which a calibrator could not promise epsilon, with the first reason
    given.
    """
    for level, row in zip(levels, thresholds):
        if np.isposinf(row).any():
            key = name, measure, level
            count, reason = (
                refused[key] if key in refused else (0, why_not(part, level, name, row, options))
            )
            if reason:
                refused[key] = count + 1, reason


def _bounds(agree, n, delta):
    """Proposition 3.1 for an array of counts; few of them differ, and the bound is slow."""
    counts, inverse = np.unique(agree, return_inverse=True)
    return clopper_pearson(counts, n, delta)[inverse].reshape(agree.shape)


def summary(frame, low=0.16, high=0.84):
    """Means over trials with the 16th and 84th percentile, as the paper shades them."""
    keys = ["method", "measure", "epsilon"]
    values = [column for column in frame.columns if column not in keys + ["trial"]]
    grouped = frame.groupby(keys, sort=False)[values]
    parts = {"mean": grouped.mean(), "low": grouped.quantile(low), "high": grouped.quantile(high)}
    return pd.concat(parts, axis=1).swaplevel(axis=1).sort_index(axis=1)


# --- layer by layer
# -------------------------------------------------------------------------------------------------


def auroc(scores, positive):
    """The probability that a positive input scores above a negative one (ties count half); NaN if
    either kind is missing.
    """
    positive = np.asarray(positive, bool)
    n, m = positive.sum(), (~positive).sum()
    if not n or not m:
        return np.nan
    return (rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m)


def calibration_error(confidence, right, bins=15):
    """Expected calibration error (Guo et al. 2017): mean gap between confidence and accuracy over
    equal bins.
    """
    index = np.minimum((np.asarray(confidence) * bins).astype(int), bins - 1)
    gaps = np.bincount(index, confidence, bins) - np.bincount(index, right, bins)
    return np.abs(gaps).sum() / len(index)


def by_layer(table, temperature=None):
    """One row a layer: consistency, accuracy (or correlation), AUROC of M_k and of p max for
    consistency, calibration error.

    With the heads' temperatures (l-1,) the calibration error before temperature scaling is given,
    too.
    """
    consistent, predictions, rows = table.consistent, table.predictions, []
    correct = None if table.labels is None else table.correct
    softmax = None if table.regression else table.scores("sm")
    plain = None
    if temperature is not None and not table.regression:
        unscaled = table.logits.astype(float)
        unscaled[:, :-1] *= np.asarray(temperature)[:, None]
        plain = ScoreTable(unscaled, table.meta).scores("sm")
    for k in range(table.n_layers - 1):
        row = {"layer": k + 1, "consistency": consistent[:, k].mean()}
        if table.labels is not None and table.regression:
            row["correlation"] = np.corrcoef(predictions[:, k], table.labels)[0, 1]
        elif table.labels is not None:
            row["accuracy"] = correct[:, k].mean()
        row["auroc_meta"] = auroc(table.meta[:, k], consistent[:, k])
        if softmax is not None:
            row["auroc_sm"] = auroc(softmax[:, k], consistent[:, k])
        if softmax is not None and table.labels is not None:
            if plain is not None:
                row["ece_before"] = calibration_error(plain[:, k], correct[:, k])
            row["ece"] = calibration_error(softmax[:, k], correct[:, k])
        rows.append(row)
    return pd.DataFrame(rows)


def recalibrate(table, n, settings, epsilons, trials=50, seed=0, measure="meta"):
    """Calibrate on n random inputs, again and again, and look at all the others: a tidy frame, a
    row a trial.

    settings   (method, delta) of methods with one threshold for all layers; delta is None where the
               method has none
    Columns: method, delta, epsilon, trial, n, threshold (`inf` where n is too small), risk, layers.
    """
    cal, depth = (
        CalibrationSet(table.scores(measure), table.consistent),
        np.indices(table.logits.shape[:2])[1] + 1,
    )
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
