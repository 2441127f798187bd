"""The explorer in a notebook: ε on a slider, on all inputs of a table.

widget.explore(calibration, test)
"""

import io
import warnings
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cats.paper import style
from cats.paper.explorer import EPSILONS, METHODS, PARTS
from cats.stats.calibrators import CalibrationSet, thresholds_from
from cats.stats.exits import agreement, exit_layers
from cats.stats.quantiles import CalibrationWarning
from cats.stats.table import ScoreTable


def draw(calibration: CalibrationSet, test: ScoreTable, method: str, epsilon: float) -> Figure:
    """Where the test inputs leave, and in the title what was promised and what was seen."""
    # where all layers run the picture shows it
    with warnings.catch_warnings(action="ignore", category=CalibrationWarning):
        thresholds = thresholds_from(calibration, epsilon, method)
    exits = exit_layers(test.scores(), thresholds)
    same = agreement(test.consistent, exits)
    layers = np.arange(1, test.n_layers + 1)
    figure, axis = plt.subplots(figsize=(6, 2.4), layout="constrained")
    bottom: Any = 0
    for part, colour, name in ((same, "#0072B2", "G = F"), (~same, "#D55E00", "G ≠ F")):
        share = np.bincount(exits[part], minlength=test.n_layers + 1)[1:] / len(exits)
        axis.bar(layers, share, bottom=bottom, color=colour, label=name)
        bottom = bottom + share
    axis.axvline(exits.mean(), color="black", linestyle="--", linewidth=1)
    axis.set(
        xlabel=f"exit layer (of {test.n_layers}); dashed: the mean, {exits.mean():.2f}",
        ylabel="share of inputs",
        title=f"{method}, ε = {epsilon:g}: G = F on {same.mean():.1%} of {len(test):,} test inputs",
    )
    axis.legend()
    return figure


def explore(
    calibration: ScoreTable, test: ScoreTable, method: str = "first_exit", epsilon: float = 0.1
) -> Any:
    """A slider for ε and a choice of calibrator above the picture of `draw`."""
    cal = CalibrationSet(calibration.scores(), calibration.consistent)
    notches = sorted({e / PARTS for e in EPSILONS} | {epsilon}, reverse=True)
    look = {"description_width": "initial"}
    slider = ipywidgets.SelectionSlider(
        options=[(f"{value:g}", value) for value in notches],
        value=epsilon,
        description="ε",
        continuous_update=False,
        style=look,
    )
    names = list(style.looks(dict.fromkeys((*METHODS, method))))
    choice = ipywidgets.Dropdown(options=names, value=method, description="calibrator", style=look)

    # an image and not captured output: nothing but a notebook's page has to answer for it
    picture = ipywidgets.Image(format="png")

    def show(_: Any = None) -> None:
        figure, file = draw(cal, test, choice.value, slider.value), io.BytesIO()
        figure.savefig(file, format="png")
        plt.close(figure)
        picture.value = file.getvalue()

    for control in (slider, choice):
        control.observe(show, "value")
    show()
    return ipywidgets.VBox([ipywidgets.HBox([slider, choice]), picture])
