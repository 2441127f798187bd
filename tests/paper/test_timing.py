"""What is timed and what is not, by a clock that counts work: every row that goes through a layer
is one second.
"""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from cats.paper import efficiency, timing

TINY = {
    "model_type": "bert",
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


@pytest.fixture
def cat(monkeypatch):
    """A CAT of four layers, and the clock set to its work."""
    monkeypatch.setitem(timing.ARCHITECTURES, "tiny", TINY)
    cat, work = timing.untrained("tiny"), [0]

    def count(layer, inputs, output):
        work[0] += len(inputs[0])

    for layer in cat.backbone.layers:
        layer.register_forward_hook(count)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: work[0])
    return cat


@pytest.mark.parametrize("batch_size, beside", [(1, 1), (1, 4), (4, 1), (8, 4)])
def test_each_model_is_charged_its_own_work_and_all_of_it(cat, batch_size, beside):
    rng = np.random.default_rng(0)
    patterns = {name: rng.integers(1, 5, 24) for name in "abcde"}
    for name, found in timing.replays(
        cat, patterns, 3, batch_size, repeats=2, beside=beside
    ).items():
        assert (found.full.sum(axis=1) == 24 * 4).all() and (
            found.early.sum(axis=1) == patterns[name].sum()
        ).all()
        assert found.share == patterns[name].mean() / 4
        np.testing.assert_allclose(found.ratios, [found.share] * 2)
        if batch_size == 1:
            np.testing.assert_array_equal(found.early, [patterns[name]] * 2)


@pytest.mark.parametrize("brief", [False, True])
def test_time_by_exit_is_interpolated_between_the_layers_measured(cat, brief):
    curves = timing.by_exit(cat, 3, 1, every=2, brief=brief)
    np.testing.assert_allclose(curves["sm"], [1 / 4, 2 / 4, 3 / 4, 1])


def test_methods_that_leave_alike_are_timed_once(cat):
    rng = np.random.default_rng(0)
    one, other = rng.integers(1, 5, (2, 40))
    methods = {"pac/meta": one, "ltt/meta": one, "shared/sm": one, "shared/meta": other}
    exits = {(task, 0.9, name): found for task in "ab" for name, found in methods.items()}
    found = efficiency.replayed(cat, exits, 32, 3, 2, 4)
    assert list(found) == list(exits)
    assert len({id(replay) for replay in found.values()}) == 3
    assert found["a", 0.9, "pac/meta"] is found["b", 0.9, "ltt/meta"]
    for key, replay in found.items():
        np.testing.assert_allclose(replay.ratios, [exits[key][:32].mean() / 4] * 2)
    alike = {(task, 0.9, "pac/meta"): one for task in "abc"}  # fewer patterns than tasks
    assert len({id(replay) for replay in efficiency.replayed(cat, alike, 8, 3, 2, 4).values()}) == 1


def test_tensors_held_are_counted_where_most_are_held():
    def run():
        first = torch.zeros(1000)
        second = torch.zeros(2000)
        del first, second
        torch.zeros(2500)

    assert 12_000 <= timing.live(run) < 12_500


def test_a_measurement_says_where_and_when(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "model name\t: Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz\nflags\t\t: fpu avx2 avx512f\n"
    )
    assert torch.get_num_threads() == 1  # as conftest sets it
    assert timing.machine(info) == "1 thread of Intel Xeon Gold 6130 CPU with AVX512"
    assert timing.machine(tmp_path / "none").startswith("1 thread of ")
    assert (
        set(timing.measured_here(3)) == {"machine", "date", "repeats"}
        and timing.measured_here(3)["repeats"] == 3
    )


def test_an_interval_of_the_median_holds_as_often_as_it_says():
    """Ten ratios of a skewed law: ranks 2 and 9 hold with probability 1 - 2·11/1024 = 0.979. Over
    4,000 draws a count outside of its 1e-6 quantiles would be an alarm.
    """
    draws = np.random.default_rng(0).exponential(size=(4000, 10))
    found = np.array([timing.interval(draw) for draw in draws])
    held = int(((found[:, 1] <= np.log(2)) & (np.log(2) <= found[:, 2])).sum())
    low, high = binom.ppf([1e-6, 1 - 1e-6], 4000, 1 - 22 / 1024)
    assert low <= held <= high
    assert timing.interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)  # too few for more


def test_a_faster_way_with_more_layers_is_noticed():
    one = np.ones((10, 1))
    made = lambda time, share: timing.Replay(one, time * one, share)
    assert timing.contradictions({"a": made(0.3, 0.2), "b": made(0.5, 0.4)}) == []
    assert timing.contradictions({"a": made(0.3, 0.2), "b": made(0.2, 0.4)}) == [("b", "a")]


def test_ways_take_turns_with_the_reference(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(name, takes):
        def run():
            order.append(name)
            clock[0] += takes

        return run

    ways = {"fast": work("fast", 1.0), "slow": work("slow", 6.0)}
    ratios, whole = timing.in_turns(ways, work("F", 4.0), repeats=2, beside=1)
    assert whole == 4 and (ratios["fast"] == 0.25).all() and (ratios["slow"] == 1.5).all()
    assert order == ["F", "fast", "slow", *["F", "fast", "F", "slow"] * 2]
