"""What is timed and what is not, by a clock that counts work: every row that goes through a layer
is one second.
"""

import numpy as np
import pytest
import torch

from cats.paper import timing

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


def test_time_by_exit_is_interpolated_between_the_layers_measured(cat):
    np.testing.assert_allclose(timing.by_exit(cat, 3, 1, every=2)["sm"], [1 / 4, 2 / 4, 3 / 4, 1])


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
