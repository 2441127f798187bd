"""The widget of 00_start draws what the calibrators say, and moves."""

import numpy as np
import pytest

import cats
from cats.paper import explorer, store, widget


@pytest.fixture(scope="module")
def tables():
    return [store.table("stsb", "bge-small-en-v1.5", split) for split in ("validation", "test")]


def test_the_bars_are_the_exits(tables):
    calibration, test = tables
    cal = cats.stats.calibrators.CalibrationSet(calibration.scores(), calibration.consistent)
    figure = widget.draw(cal, test, "shared", 0.1)
    thresholds = cats.calibrate(calibration.scores(), calibration.consistent, 0.1, "shared")
    exits = cats.exit_layers(test.scores(), thresholds)
    heights = np.array([bar.get_height() for bar in figure.axes[0].patches]).reshape(2, -1)
    shares = np.bincount(exits, minlength=test.n_layers + 1)[1:] / len(test)
    assert np.allclose(heights.sum(axis=0), shares)
    same = cats.agreement(test.consistent, exits).mean()
    assert np.isclose(heights[0].sum(), same) and f"{same:.1%}" in figure.axes[0].get_title()


def test_every_calibrator_can_be_chosen(tables):
    shown = widget.explore(*tables, epsilon=0.07)
    slider, choice = shown.children[0].children
    assert slider.value == 0.07 and set(choice.options) == set(explorer.METHODS)
    before = shown.children[1].value
    slider.value, choice.value = 0.0011, "pac"  # too little for so small an ε: all layers run
    assert bytes(before).startswith(b"\x89PNG") and shown.children[1].value != before
