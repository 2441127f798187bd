"""Cascade: layers need not be layers. Any models, cheap to dear, with the same promise.

    cascade = Cascade([tfidf, "user/small-encoder", "user/large-encoder"], costs=[0.01, 1, 10])
    cascade.calibrate(texts)  # unlabelled; every model runs on all of them, once
    out = cascade.predict(more_texts, epsilon=0.05)  # each model on what is left
    cascade.savings()  # in costs

The last model is F. What the others say takes the place of early layers: their logits are a
ScoreTable, so that calibrators, measures and `cats.evaluate` apply as they are. This file needs no
torch; a step that does imports it when the first input gets there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax
from tqdm.auto import tqdm

from cats.runtime.calibrated import EPSILON, MEASURED, SPARE, Calibrated
from cats.runtime.inputs import Arrays, Predictions
from cats.stats.measures import MEASURES, find_measure
from cats.stats.monitor import Monitor
from cats.stats.quantiles import Floats
from cats.stats.table import TAU, ScoreTable

TOGETHER = 1024  # inputs that a step is given at a time

Step = Callable[[list[Any]], Any]  # inputs to logits (n, C)


class Cascade(Calibrated):
    """Models that answer one after the other, until one is sure enough.

    steps    cheap to dear, the last is F. Each one is a function of a list of inputs that gives
             logits (n, C); a model with `predict_proba`, as scikit-learn's; or the folder or Hub id
             of a sequence classifier, which is loaded when it is first needed
    costs    what each step costs an input that gets there, in any unit
    labels   names of the classes
    measure  confidence of a step: sm (p max), diff, entropy, kl or patience
    table    a ScoreTable of calibration inputs that `calibrate` has made before
    """

    kind = "a cascade"

    def __init__(
        self,
        steps: Sequence[Any],
        costs: Sequence[float],
        *,
        labels: Sequence[str] | None = None,
        measure: str = "sm",
        table: ScoreTable | None = None,
        tau: float = TAU,
    ) -> None:
        if len(steps) < 2 or len(costs) != len(steps):
            raise ValueError(
                f"a cascade has at least two steps and a cost for each, got {len(steps)} steps and"
                f" {len(costs)} costs"
            )
        self.steps: list[Step] = [step_of(one) for one in steps]
        self.costs, self.tau = [float(cost) for cost in costs], float(tau)
        if not all(0 <= cost < np.inf for cost in self.costs):
            raise ValueError(f"costs must be finite numbers of at least 0, got {list(costs)}")
        self.names = None if labels is None else dict(enumerate(labels))
        self.measure = self.check_measure(measure)
        self.margins, self._sets = {}, {}
        self.ready: ScoreTable | None = table
        if table is not None:
            self.margins = dict(table.metadata.get("margins", {}))
            if table.n_layers != len(self.steps) or table.metadata.get("costs") != self.costs:
                raise ValueError("this table is of another cascade: its steps or costs differ")

    def __repr__(self) -> str:
        n = "not calibrated" if self.ready is None else f"{len(self.ready)} calibration inputs"
        return f"Cascade({len(self.steps)} steps, costs {self.costs}, {n}, {self.measure})"

    @classmethod
    def measures(cls) -> list[str]:
        """The measures it can exit by: no meta classifier reads other models."""
        return [name for name in super().measures() if name != "meta"]

    @property
    def calibration(self) -> ScoreTable:
        """The table of the calibration inputs."""
        if self.ready is None:
            raise ValueError("this cascade is not calibrated: call calibrate(inputs) first")
        return self.ready

    # --- calibration

    def table(
        self, inputs: Iterable[Any], labels: Sequence[Any] | None = None, progress: bool = False
    ) -> ScoreTable:
        """What every step says of all these inputs: a ScoreTable for `cats.evaluate`, with the
        steps' costs in its metadata.
        """
        rows = list(inputs)
        quiet = {} if progress else {"disable": True}  # else TQDM_DISABLE says
        bar = tqdm(range(len(self.steps)), desc="steps", **quiet)
        columns = [self._run(k, rows) for k in bar]
        sizes = {column.shape[1] for column in columns}
        if len(sizes) > 1:
            raise ValueError(f"the steps know different numbers of classes: {sorted(sizes)}")
        return ScoreTable(np.stack(columns, axis=1), None, labels, {"costs": self.costs}, self.tau)

    def calibrate(self, inputs: Iterable[Any], progress: bool = False) -> "Cascade":
        """Keep the table of these inputs, unlabelled and seen by no step in training: thresholds
        for any ε come from it. Returns itself.
        """
        rows = list(inputs)
        found = self.table(rows, progress=progress)
        self.margins = self._measured(rows[:MEASURED], found)
        found.metadata["margins"] = self.margins
        self.ready, self._sets = found, {}
        return self

    def _measured(self, rows: list[Any], table: ScoreTable) -> dict[str, float]:
        """By how much scores change where an input runs alone, measure by measure: a threshold is
        an input's score, and a step may compute in other arithmetic for other batches.
        """
        before_f = range(len(self.steps) - 1)
        alone = np.stack(
            [np.concatenate([self._run(k, [row]) for row in rows]) for k in before_f], 1
        )
        other = ScoreTable(np.concatenate([alone, table.logits[: len(rows), -1:]], 1), tau=self.tau)
        margins = {}
        for name in self.measures():
            if MEASURES[name].needs_classes and table.regression:
                continue
            off = np.abs(other.scores(name) - table.scores(name)[: len(rows)]).max()
            margins[name] = 0.0 if name == "patience" else SPARE * max(float(off), 1e-7)
        return margins

    # --- running

    def predict(
        self,
        inputs: Iterable[Any],
        epsilon: float | None = None,
        *,
        method: str = "first_exit",
        measure: str | None = None,
        thresholds: Sequence[float] | Floats | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> Predictions:
        """Predictions that agree with the last step as often as the method promises. A step runs
        only on the inputs that are left; `exit_layers` are the steps they left at, counted from 1.

        thresholds   (l-1,) to use instead of calibrated ones
        monitor      a cats.Monitor: inputs that its coin chooses run all steps
        """
        rows, l = list(inputs), len(self.steps)
        measure = self.check_measure(measure or self.measure)
        if thresholds is None:
            if epsilon is None:
                epsilon = monitor.level if monitor else EPSILON
            if monitor and monitor.step and not 0 < epsilon < 1:  # steered to all steps, or to one
                limits = np.full(l - 1, -np.inf if epsilon else np.inf)
            else:
                found = self.thresholds(epsilon, method, measure, **options)
                limits = self.limits(found, measure, method)
        else:
            limits = np.asarray(thresholds, float)
        if limits.shape != (l - 1,) or np.isnan(limits).any():
            raise ValueError(f"{l} steps need {l - 1} thresholds, none of them NaN, got {limits}")
        audited = monitor.coin(len(rows)) if monitor else np.zeros(len(rows), bool)
        exits, scores = np.full(len(rows), l), np.ones(len(rows))
        so_far: Floats | None = None  # (n, l, C), NaN where a step did not run
        for k in range(1, l + 1):
            runs = np.flatnonzero((exits == l) | audited)
            logits = self._run(k - 1, [rows[i] for i in runs])
            if so_far is None:
                so_far = np.full((len(rows), l, logits.shape[1]), np.nan)
            so_far[runs, k - 1] = logits
            if k < l and len(runs):
                found = find_measure(measure).score(so_far[runs, :k], l - 1, self.tau)
                leaves = (found > limits[k - 1]) & (exits[runs] == l)
                exits[runs[leaves]], scores[runs[leaves]] = k, found[leaves]
        assert so_far is not None
        if monitor and audited.any():
            monitor.watch(ScoreTable(so_far[audited], tau=self.tau), exits[audited], measure)
        at = so_far[np.arange(len(rows)), exits - 1]
        regression = at.shape[1] == 1
        values = at[:, 0] if regression else at.argmax(axis=1)
        arrays = Arrays(values, exits, scores, at if regression else softmax(at, axis=1))
        names = self.names or {i: str(i) for i in range(at.shape[1])}
        return Predictions.of(arrays, None if regression else names)

    def cost(self, exits: Any) -> Floats:
        """What inputs that left at these steps have cost, (n,)."""
        return np.cumsum(self.costs)[np.asarray(exits) - 1]

    def _run(self, k: int, rows: list[Any]) -> Floats:
        """Logits (n, C) of the k-th step, counted from 0; none where there are no inputs."""
        parts = [rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER)]
        if not parts:
            width = 1 if self.ready is None else self.ready.n_classes
            return np.empty((0, width))
        found = [np.asarray(self.steps[k](part), dtype=float) for part in parts]
        for part, logits in zip(parts, found):
            if logits.ndim != 2 or len(logits) != len(part) or not np.isfinite(logits).all():
                raise ValueError(
                    f"step {k + 1} must give finite logits (n, C) for its {len(part)} inputs, got"
                    f" an array {logits.shape}"
                )
        return np.concatenate(found)


def step_of(model: Any) -> Step:
    """A function of inputs to logits, from whatever a step may be."""
    if isinstance(model, str | Path):
        return Encoder(model)
    if hasattr(model, "predict_proba"):
        return lambda rows: log_probabilities(model.predict_proba(rows))
    if callable(model):
        return model
    raise TypeError(
        "a step is a function of a list of inputs, a model with predict_proba, or the folder or Hub"
        f" id of a classifier; got {model!r:.80}"
    )


def log_probabilities(probabilities: Any) -> Floats:
    """Logits whose softmax these are; 0 becomes the smallest number there is.

    >>> softmax(log_probabilities([[0.25, 0.75], [0.0, 1.0]]), axis=1).round(9).tolist()
    [[0.25, 0.75], [0.0, 1.0]]
    """
    p = np.asarray(probabilities, float)
    return np.log(np.maximum(p, np.finfo(float).tiny))


class Encoder:
    """A sequence classifier of transformers as a step, loaded (and torch imported) when it is first
    called.

    model     its folder or Hub id
    options   those of transformers' pipelines, as device, batch_size or revision
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.model, self.options = model, {"batch_size": 32} | options
        self.pipe: Any = None

    def __call__(self, rows: list[Any]) -> Floats:
        if self.pipe is None:
            from transformers import pipeline

            options = {"top_k": None, "function_to_apply": "none", "truncation": True}
            model = str(self.model)
            self.pipe = pipeline(
                "text-classification",
                model=model,
                trust_remote_code=False,
                **options,
                **self.options,
            )
        place = self.pipe.model.config.label2id
        order = sorted(range(len(rows)), key=lambda i: len(str(rows[i])))  # little padding
        found = np.empty((len(rows), len(place)))
        for i, answer in zip(order, self.pipe([as_input(rows[i]) for i in order])):
            for one in answer:
                found[i, place[one["label"]]] = one["score"]
        return found


def as_input(row: Any) -> Any:
    """A text, or a pair as pipelines take it."""
    if isinstance(row, tuple | list) and len(row) == 2:
        return {"text": row[0], "text_pair": row[1]}
    return dict(row) if isinstance(row, Mapping) else row
