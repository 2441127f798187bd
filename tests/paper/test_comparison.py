"""Agreement is counted from one pass through all layers: what is said there is what each way says
when it runs.
"""

import numpy as np
import pytest
import tiny

from cats.paper import comparison
from cats.train.states import encode

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")


@pytest.fixture(scope="module")
def given():
    """CATs on two bodies, their ways, and rows that are as long as they come."""
    model = tiny.model(layers=4)
    cats = {body: tiny.fit(model, body=body) for body in ("float32", "bfloat16")}
    rows = encode(cats["float32"].tokenizer, [sum(tiny.texts().values(), [])], 48)
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))
    return cats, comparison.ways(cats, rows, (0.5, 0.2, 0.05, 0.002)), rows


def test_answers_of_one_pass_are_those_of_every_run(given):
    cats, ways, rows = given
    found = comparison.answers(cats, ways, rows)
    layers = set()
    for way, said in zip(ways, found):
        run = way.prepare(rows)()
        if run is not None:  # those that wait only take their time
            assert (run.argmax(1) == said).mean() >= (1 if way.body == "float32" else 0.99), way
        if way.exits is not None:
            layers |= {*way.exits(comparison.all_layers(cats[way.body], rows).scores)}
    assert layers == {1, 2, 3, 4}  # they leave everywhere
    assert [way.body for way in ways if way.what == "CAT, bfloat16"][-1] == "float32"  # F itself


def test_a_row_a_way_with_agreement_and_time(given):
    cats, ways, rows = given
    frame = comparison.compare(cats, ways, rows, timed=8, repeats=2)
    assert list(frame["what"]) == [way.what for way in ways]
    assert frame["consistency"].iloc[0] == 1 and frame["relative_time"].iloc[0] == 1
    assert (frame["consistency_low"] <= frame["consistency"]).all()
    promises = frame["promised"].notna() & (frame["setting"] != "")
    assert (frame["chance"].notna() == promises).all() and frame["chance"].max() == 1
    assert (frame["relative_time"] > 0).all() and np.isfinite(frame["milliseconds"]).all()


def test_a_promise_is_held_against_draws_of_calibration_and_test():
    """False alarms at most as often as said, seen in many draws of scores of which each is the
    statistic itself; one that promises half the errors it makes is caught.
    """
    rng, n, n_test, alarm = np.random.default_rng(0), 200, 300, 0.05
    rank = int(np.ceil(0.9 * (n + 1)))
    way = comparison.Way("CAT", 0.1, None, 0.9)
    found = {"kept": 0, "broken": 0}
    for _ in range(400):
        threshold = np.sort(rng.random(n))[rank - 1]
        agree = int((rng.random(n_test) <= threshold).sum())
        found["kept"] += comparison.chance(way, agree, n_test, n) <= alarm
        found["broken"] += comparison.chance(way._replace(setting=0.05), agree, n_test, n) <= alarm
    # 33 or more of 400 at 5 % have a chance of 0.4 %
    assert found["kept"] < 33 and found["broken"] > 200
    assert np.isnan(comparison.chance(way._replace(promised=np.nan), 1, n_test, n))
    assert comparison.chance(way, n_test, n_test, n) == 1
