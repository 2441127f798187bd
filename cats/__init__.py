"""Confident Adaptive Transformers: early exits that provably agree with the full model (Schuster et
al., EMNLP 2021).
"""

from typing import Any

from cats.runtime.cascade import Cascade
from cats.stats.calibrators import METHODS, calibrate, calibrator
from cats.stats.exits import agreement, exit_layers
from cats.stats.groups import by_group, calibrate_groups, group_exits
from cats.stats.measures import MEASURES, measure
from cats.stats.monitor import Monitor, PromiseWarning
from cats.stats.quantiles import (
    CalibrationWarning,
    calibration_size,
    clopper_pearson,
    conformal_quantile,
    smallest_epsilon,
)
from cats.stats.risk import calibrate_risk
from cats.stats.synthetic import Synthetic
from cats.stats.table import ScoreTable
from cats.stats.trials import evaluate, oracle_exits, savings, summary

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """CAT needs torch; everything else here does not, and should not wait for it."""
    if name == "CAT":
        from cats.runtime.cat import CAT

        return CAT
    raise AttributeError(f"module 'cats' has no attribute {name!r}")


__all__ = [
    "CAT",
    "METHODS",
    "MEASURES",
    "Cascade",
    "CalibrationWarning",
    "Monitor",
    "PromiseWarning",
    "ScoreTable",
    "Synthetic",
    "agreement",
    "by_group",
    "calibrate",
    "calibrate_groups",
    "calibrate_risk",
    "calibration_size",
    "calibrator",
    "clopper_pearson",
    "conformal_quantile",
    "evaluate",
    "exit_layers",
    "group_exits",
    "measure",
    "oracle_exits",
    "savings",
    "smallest_epsilon",
    "summary",
]
