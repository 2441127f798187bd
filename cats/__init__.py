"""Confident Adaptive Transformers: early exits that provably agree with the full model (Schuster et
al., EMNLP 2021).
"""

from cats.stats.calibrators import (
    METHODS,
    CalibrationWarning,
    calibrate,
    calibration_size,
    clopper_pearson,
    conformal_quantile,
    exit_layers,
    smallest_epsilon,
)
from cats.stats.measures import MEASURES
from cats.stats.synthetic import Synthetic
from cats.stats.table import ScoreTable
from cats.stats.trials import evaluate, oracle_exits, summary

__version__ = "0.1.0"


def __getattr__(name):
    """CAT needs torch; everything else here does not, and should not wait for it."""
    if name == "CAT":
        from cats.runtime.cat import CAT

        return CAT
    raise AttributeError(f"module 'cats' has no attribute {name!r}")


__all__ = [
    "CAT",
    "METHODS",
    "MEASURES",
    "CalibrationWarning",
    "ScoreTable",
    "Synthetic",
    "calibrate",
    "calibration_size",
    "clopper_pearson",
    "conformal_quantile",
    "evaluate",
    "exit_layers",
    "oracle_exits",
    "smallest_epsilon",
    "summary",
]
