"""What a CAT and a Cascade share: thresholds for any ε, calibrator and measure, from the table of
their calibration inputs.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cats.stats import calibrators
from cats.stats.measures import MEASURES
from cats.stats.quantiles import Bools, Floats
from cats.stats.table import ScoreTable
from cats.stats.trials import savings

EPSILON = 0.05  # where none is given
MEASURED = 32  # calibration inputs on which margins are measured
SPARE = 4.0  # times the largest difference seen


class Calibrated:
    """Whatever leaves early by thresholds.

    measure   the confidence it leaves by, unless a call names another
    margins   by how much a measure's scores may be off where it runs
    choosing  inputs to choose by, which do not calibrate
    """

    kind = "a CAT"  # as errors name it
    measure: str
    margins: dict[str, float]
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
        (counted from 1). Inputs leave where their score is above them by more than `margin`.

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
        found = self._sorted(measure or self.measure, columns, method)
        thresholds = np.full(early, np.inf)
        thresholds[[*columns]] = calibrators.thresholds_from(found, epsilon, method, **options)
        return thresholds

    def _check_method(self, method: str, options: Mapping[str, Any]) -> None:
        """Refuse a method that cannot promise anything here."""

    def _sorted(
        self, measure: str, columns: tuple[int, ...], method: str
    ) -> calibrators.CalibrationSet:
        """The calibration statistics of these columns, sorted once."""
        key = self.check_measure(measure), columns, self.margin(measure, method)
        if key not in self._sets:
            scores, consistent = self.calibration.scores(measure), self.consistent
            last = range(scores.shape[1], consistent.shape[1])  # its own, where that is not F
            self._sets[key] = calibrators.CalibrationSet(
                scores[:, columns], consistent[:, [*columns, *last]], key[2]
            )
        return self._sets[key]

    def margin(self, measure: str, method: str) -> float:
        """How far above its threshold a score must be for an input to leave: 0 for methods that
        count the table's own exits, which cannot take it into account.
        """
        found = calibrators.METHODS.get(method)
        return self.margins.get(measure, 0.0) if found is None or found.margins else 0.0

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
