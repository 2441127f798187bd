"""The monitor: its false alarms over all time, its power, and a state that survives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import cats
from cats.stats.monitor import Monitor, false_alarms


def slow_evidence(errors, epsilon, bets):
    """The games of all bets, input by input."""
    games = np.ones(len(bets))
    peak = 1.0
    for wrong in errors:
        games *= 1 + bets * (wrong - epsilon)
        peak = max(peak, games.mean())
    return games.mean(), peak


@given(
    errors=st.lists(st.booleans(), max_size=40),
    epsilon=st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    cut=st.integers(0, 40),
)
def test_equals_the_games_input_by_input(errors, epsilon, cut):
    monitor = Monitor(epsilon)
    assert (monitor.bets > 0).all() and (monitor.bets < 1 / epsilon).all()
    for part in (errors[:cut], errors[cut:]):
        monitor.update(np.array(part, bool))
    evidence, peak = slow_evidence(errors, epsilon, monitor.bets)
    assert monitor.evidence == pytest.approx(evidence) and monitor.peak == pytest.approx(peak)
    assert (monitor.audited, monitor.errors) == (len(errors), sum(errors))


def test_the_game_is_fair_where_the_promise_holds_exactly():
    for epsilon in (0.01, 0.05, 0.5):
        for bet in Monitor(epsilon).bets:
            mean = epsilon * (1 + bet * (1 - epsilon)) + (1 - epsilon) * (1 - bet * epsilon)
            assert mean == pytest.approx(1)


def test_false_alarms_ever_are_rarer_than_delta_and_peeking_at_a_binomial_test_is_not():
    """Binomial(1000, 0.1) upper limit with false alarm 1e-6; the control tests at every input."""
    first = false_alarms(0.05, 0.1, inputs=2000, trials=1000)
    assert (first > 0).sum() <= stats.binom.isf(1e-6, 1000, 0.1)
    rng, t = np.random.default_rng(0), np.arange(1, 2001)
    limit = stats.binom.isf(0.1, t, 0.05)  # more errors than this reject at 0.1, t fixed
    peeked = ((rng.random((1000, 2000)) < 0.05).cumsum(axis=1) > limit).any(axis=1).sum()
    assert peeked > stats.binom.isf(1e-6, 1000, 0.1)


def test_a_broken_promise_is_found():
    first = false_alarms(0.05, 0.01, inputs=3000, trials=200, risk=0.1)
    assert (first > 0).all() and np.median(first) < 500
    assert (false_alarms(0.05, 0.01, inputs=3000, trials=200, risk=0.02) == 0).all()


def test_coins_do_not_depend_on_how_many_are_asked_for():
    one, many = Monitor(0.1, audit=0.3, seed=4), Monitor(0.1, audit=0.3, seed=4)
    few = np.concatenate([one.coin(7), one.coin(1), one.coin(992)])
    assert (few == many.coin(1000)).all() and 230 < few.sum() < 370
    assert (few != Monitor(0.1, audit=0.3, seed=5).coin(1000)).any()
    assert Monitor(0.1, audit=1).coin(50).all()


def test_state_survives_a_file_and_merges():
    rng = np.random.default_rng(0)
    whole, first, second = (Monitor(0.1, step=0.01) for _ in range(3))
    errors = rng.random(300) < 0.12
    whole.update(errors)
    first.update(errors[:100])
    first.coin(10)
    back = Monitor.from_json(first.to_json())
    assert back.to_json() == first.to_json() and (back.coin(5) == first.coin(5)).all()
    second.update(errors[100:])
    both = first.merge(second)
    assert (both.audited, both.errors) == (whole.audited, whole.errors)
    assert both.evidence == pytest.approx(whole.evidence)
    assert both.running == pytest.approx(whole.running)
    with pytest.raises(ValueError, match="do not merge"):
        whole.merge(Monitor(0.2))
    with pytest.raises(ValueError, match="not a monitor"):
        Monitor.from_json("{}")


def test_merged_workers_keep_delta():
    """Four workers merged after every 100 inputs of each: Binomial(300, 0.1), alarm 1e-6."""
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(300):
        workers, any_alarm = [Monitor(0.05, 0.1) for _ in range(4)], False
        for _ in range(4):
            for worker in workers:
                worker.update(rng.random(100) < 0.05)
            any_alarm |= workers[0].merge(*workers[1:]).alarm
        alarms += any_alarm
    assert alarms <= stats.binom.isf(1e-6, 300, 0.1)


def test_adaptive_mode_keeps_the_rate_of_errors_as_inputs_drift():
    """|mean error - epsilon| <= (1 + step)/(step·T), whatever comes (Gibbs and Candès 2021)."""
    rng, monitor, step, wrong = np.random.default_rng(0), Monitor(0.1, step=0.02), 0.02, 0
    for t in range(4000):  # a population that gets harder: errors at three times the level asked
        wrong += (error := bool(rng.random() < min(1, (1 + 2 * t / 4000) * monitor.level)))
        monitor.update([error])
    assert abs(wrong / 4000 - 0.1) <= (1 + step) / (step * 4000)
    still = Monitor(0.1)
    still.update([True] * 50)
    assert still.level == 0.1


def test_audited_rows_calibrate_again():
    scores, consistent, _ = cats.Synthetic(layers=5).draw(200, np.random.default_rng(0))
    monitor = Monitor(0.1)
    with pytest.raises(ValueError, match="no audited rows"):
        monitor.calibration()
    for part in np.array_split(np.arange(200), 3):
        exits = cats.exit_layers(scores[part], np.full(4, 0.9))
        monitor.observe(scores[part], consistent[part], exits)
    exits = cats.exit_layers(scores, np.full(4, 0.9))
    assert monitor.errors == (~cats.agreement(consistent, exits)).sum()
    found = cats.calibrate(*monitor.calibration(), 0.1, "first_exit")
    assert (found == cats.calibrate(scores, consistent, 0.1, "first_exit")).all()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: Monitor(0), ValueError, "epsilon"),
        (lambda: Monitor(0.1, delta=2), ValueError, "delta"),
        (lambda: Monitor(0.1, audit=0), ValueError, "audit"),
        (lambda: Monitor(0.1, step=-1), ValueError, "step"),
        (lambda: Monitor(0.1).update([0, 1]), TypeError, "boolean"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
