"""Streams under a monitor: the quick simulation against the Monitor itself, and MAPIE's risk
monitoring on the same stream.
"""

import numpy as np
import pytest
from mapie.exchangeability_testing import RiskMonitoring
from scipy import stats

import cats
from cats.paper import watching


@pytest.fixture(scope="module")
def table():
    return cats.Synthetic(layers=6).table(1500, seed=3)


def test_thresholds_are_those_of_the_calibrators(table):
    """On the same draw of calibration inputs; and the boundary is the last threshold that keeps."""
    population = watching.Population(table)
    for name, delta in (("pac", 0.1), ("first_exit", None)):
        found = population.draw(np.random.default_rng(5), 0.1, 300, delta)
        rows = np.random.default_rng(5).choice(1500, 300)
        options = {} if delta is None else {"delta": delta}
        scores, consistent = table.scores("meta")[rows], table.consistent[rows]
        assert found == cats.calibrate(scores, consistent, 0.1, name, **options)[0]
        wrong, exits = population.at(found)
        expected = cats.exit_layers(table.scores("meta"), np.full(5, found))
        assert (exits == expected).all()
        assert (wrong == ~cats.agreement(table.consistent, expected)).all()
    risk = population.at(population.boundary(0.1))[0].mean()
    assert 0.09 < risk <= 0.1


def test_alarms_are_those_of_the_monitor_and_of_the_test_at_each_look():
    rng = np.random.default_rng(0)
    errors = rng.random((40, 600)) < np.linspace(0.03, 0.2, 40)[:, None]
    found = watching.alarms(errors, cats.Monitor(0.05, 0.01))
    for row, first, naive in zip(errors, found["monitor"], found["p-values"]):
        monitor = cats.Monitor(0.05, 0.01)
        alarms = [monitor.update([wrong]) for wrong in row]
        assert first == (alarms.index(True) + 1 if True in alarms else 0)
        looks = range(watching.LOOK, 601, watching.LOOK)
        rejected = [t for t in looks if stats.binom.sf(row[:t].sum() - 1, t, 0.05) <= 0.01]
        assert naive == (rejected[0] if rejected else 0)


def test_a_shift_is_found_sooner_where_more_is_audited(table):
    population = watching.Population(table)
    hard = population.worst > np.quantile(population.worst, 0.7, method="inverted_cdf")
    found = watching.delays(population, hard, 0.1, 0.1, 400, [0.1, 1.0], 4000, 500, 1000, 20, 0)
    shown = watching.delays_table(found.assign(task="synthetic", part="hard"))
    late = shown.set_index(["shift", "audit"])["median"]
    assert late["sudden", 1.0] < late["sudden", 0.1] < np.inf
    assert late["sudden", 1.0] < late["slow", 1.0]
    again = watching.recalibrated(population, hard, 0.1, 0.1, 400, 20, 0)
    assert again["shifted"] < 0.9 <= again["recalibrated"]


def mapie_alarm(errors, epsilon, delta):
    """When MAPIE's time-uniform lower bound on the risk first exceeds ε; 0 for never. It spends
    half its level on reference data, of which there are none here.
    """
    watch = RiskMonitoring("accuracy", test_level=2 * delta, threshold=epsilon, warn=False)
    watch.update(np.zeros(len(errors), int), errors.astype(int))
    assert watch.online_risk_sequence_history.tolist() == errors.astype(float).tolist()
    over = watch.online_risk_lower_bound_sequence_history > epsilon
    return int(over.argmax()) + 1 if over.any() else 0


def test_beside_mapie_on_the_same_stream():
    """Both are valid for ever, so neither raises an alarm on a quiet stream (each of 20 with
    probability δ = 0.001 at most: 0.04 together, seeded); both find a broken promise, ours sooner.
    """
    rng, epsilon, delta = np.random.default_rng(1), 0.05, 0.001
    quiet = rng.random((20, 1000)) < epsilon
    broken = rng.random((20, 1000)) < 0.15
    ours = watching.alarms(np.concatenate([quiet, broken]), cats.Monitor(epsilon, delta))["monitor"]
    theirs = np.array([mapie_alarm(row, epsilon, delta) for row in (*quiet, *broken)])
    assert not ours[:20].any() and not theirs[:20].any()
    assert ours[20:].all() and theirs[20:].all()
    assert np.median(ours[20:]) < np.median(theirs[20:])
