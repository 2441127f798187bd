"""What a CAT and a Cascade share: thresholds for any ε, calibrator and measure, from the table of
their calibration inputs.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cats.stats import calibrators
from cats.stats.measures import MEASURES, from_nines, nines
from cats.stats.quantiles import Bools, Floats
from cats.stats.table import ScoreTable
from cats.stats.trials import savings

EPSILON = 0.05  # where none is given
# Calibration inputs on which margins are measured, and by what factor they exceed the largest
# difference seen. On bge-small in bfloat16 batches of 2 and 7 rows moved an input's scores by at
# most 1.12 times as much as it was moved alone and among 32, the two that are measured.
MEASURED = 128
SPARE = 2.0
# The least room on a body, in nines; in logits it is the same times ln 10. Most inputs keep their
# bits there in every batch, and one in fifty moves by far more than so few inputs may show: of
# 1,500 on bge-small, in batches of 1, 7 and 32, by at most 0.0006 in bfloat16 and 0.0005 in 8 bits.
LEAST = 0.003


class Calibrated:
    """Whatever leaves early by thresholds.

    measure   the confidence it leaves by, unless a call names another
    margins   by how much a measure's scores may be off where it runs: (l-1,), or one for all layers
    unit      what margins are counted in: scores, or, of measures that are shares, their `nines`
    choosing  inputs to choose by, which do not calibrate
    """

    kind = "a CAT"  # as errors name it
    measure: str
    margins: dict[str, Any]
    unit: str = "score"
    choosing: ScoreTable | None = None
    _sets: dict[Any, calibrators.CalibrationSet]  # sorted once, by measure, columns and margin

    @property
    def calibration(self) -> ScoreTable:
        """The table of the calibration inputs."""
        raise NotImplementedError

    @property
    def consistent(self) -> Bools:
        """What calibration counts as F_k = F, (n, l-1), or (n, l) where the last layer is not F."""
        return self.calibration.consistent

    @classmethod
    def measures(cls) -> list[str]:
        """The measures it can exit by."""
        return [name for name, found in MEASURES.items() if found.at_runtime]

    @classmethod
    def check_measure(cls, measure: str) -> str:
        """The measure, if it can exit by it."""
        if measure not in cls.measures():
            able = ", ".join(cls.measures())
            raise ValueError(f"{cls.kind} can exit by {able}, not by {measure!r}")
        return measure

    def thresholds(
        self,
        epsilon: float = EPSILON,
        method: str = "first_exit",
        measure: str | None = None,
        exit_layers: Iterable[int] | None = None,
        **options: Any,
    ) -> Floats:
        """Thresholds (l-1,) from the calibration inputs; `inf` at layers not in `exit_layers`
        (counted from 1). Inputs leave where their score exceeds the `limits` of these.

        The guarantee holds for any subset of layers that was chosen without looking at the
        calibration inputs: they are calibrated as if there were no others.
        """
        early = self.calibration.n_layers - 1
        layers = list(range(1, early + 1))
        if exit_layers is not None:
            if not isinstance(exit_layers, Iterable) or isinstance(exit_layers, str):
                raise TypeError(
                    f"exit_layers must be a list of layers among 1 … {early}, as [{early}], got"
                    f" {exit_layers!r}"
                )
            layers = sorted(set(exit_layers))
        if not layers or not 1 <= layers[0] <= layers[-1] <= early:
            raise ValueError(f"exit_layers must be among 1 … {early}, got {exit_layers}")
        self._check_method(method, options)
        columns = tuple(layer - 1 for layer in layers)
        measure = self.check_measure(measure or self.measure)
        found = self._sorted(measure, columns, method)
        thresholds = np.full(early, np.inf)
        thresholds[[*columns]] = calibrators.thresholds_from(found, epsilon, method, **options)
        return thresholds

    def limits(
        self, thresholds: Floats, measure: str | None = None, method: str = "first_exit"
    ) -> Floats:
        """What a score has to exceed for an input to leave, (l-1,): thresholds, and room for by how
        much scores may be off.
        """
        measure = self.check_measure(measure or self.measure)
        margin = self.margin(measure, method)
        if self._in_nines(measure, method):
            return from_nines(nines(thresholds) + margin)
        return np.asarray(thresholds, dtype=float) + margin

    def _check_method(self, method: str, options: Mapping[str, Any]) -> None:
        """Refuse a method that cannot promise anything here."""

    def _sorted(
        self, measure: str, columns: tuple[int, ...], method: str
    ) -> calibrators.CalibrationSet:
        """The calibration statistics of these columns, sorted once."""
        margin = self.margin(measure, method)
        margin = margin[[*columns]] if margin.ndim else margin
        key = measure, columns, margin.tobytes()
        if key not in self._sets:
            scores, consistent = self.calibration.scores(measure), self.consistent
            last = range(scores.shape[1], consistent.shape[1])  # its own, where that is not F
            self._sets[key] = calibrators.CalibrationSet(
                scores[:, columns],
                consistent[:, [*columns, *last]],
                margin,
                nines(scores[:, columns]) if self._in_nines(measure, method) else None,
            )
        return self._sets[key]

    def margin(self, measure: str, method: str) -> Floats:
        """By how much scores may be off, in `unit`, (l-1,) or one for all layers: 0 for methods
        that count the table's own exits, which cannot take it into account.
        """
        found = calibrators.METHODS.get(method)
        matters = found is None or found.margins
        return np.asarray(self.margins.get(measure, 0.0) if matters else 0.0, dtype=float)

    def _in_nines(self, measure: str, method: str) -> bool:
        """Whether there is a margin, and it is counted in nines: without one, scores above NINES
        are still told apart.
        """
        counted = self.unit == "nines" and MEASURES[measure].share
        return counted and bool(self.margin(measure, method).any())

    def savings(
        self,
        epsilons: Sequence[float] = (0.2, 0.1, 0.05, 0.02, 0.01),
        method: str = "first_exit",
        measure: str | None = None,
        **options: Any,
    ) -> pd.DataFrame:
        """Layers, or costs, to expect at each ε, with intervals: see cats.savings. Read from the
        inputs that were kept to choose by; from the calibration inputs where there are none, and
        then only `band` allows to choose by it.
        """
        table = self.calibration if self.choosing is None else self.choosing
        with warnings.catch_warnings(action="ignore", category=calibrators.CalibrationWarning):
            return savings(table, measure or self.measure, epsilons, method, **options)
