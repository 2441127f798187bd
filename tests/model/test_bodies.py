"""Bodies: what they compute is near F, an input's answer is its own, and F itself is untouched."""

import pytest
import torch
from builders import CASES, LENGTHS, build, make_batch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cats.model import cost
from cats.model.bodies import BODIES, LANES, Body, Linear8, Linear16, body_of, fastest, in_lanes
from cats.model.exits import Heads, Meta

FAST = [name for name in BODIES if name != "float32"]


def alone(backbone, batch, i):
    """Row i by itself, without padding that F does not need."""
    width = LENGTHS[i] + backbone.extra_padding
    return {name: value[i : i + 1, :width] for name, value in batch.items()}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("case", CASES)
def test_a_body_is_near_f_and_f_is_left_alone(case, name):
    full = build(case)
    before = {key: value.clone() for key, value in full.model.state_dict().items()}
    batch, body = make_batch(full), Body(full, name)
    ours, theirs = body.states(batch), full.states(batch)
    spread = theirs["logits"].std()
    assert 0 < (ours["logits"] - theirs["logits"]).abs().max() < spread / 4
    assert ours["logits"].dtype == ours["mean"].dtype == torch.float32
    after = full.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert body.fingerprint == Body(full, name).fingerprint != full.fingerprint
    assert (body.device, body.precision, body.n_layers) == (full.device, name, full.n_layers)


def rounds_by_batch():
    """Whether matrices in bfloat16 give a row other bits alone than among others here: then no
    padding helps, and what a CAT measures of it is all there is.
    """
    torch.manual_seed(0)
    x, linear = torch.randn(160, 48).bfloat16(), nn.Linear(48, 96).bfloat16()
    with torch.no_grad():
        return not torch.equal(torch.cat([linear(part) for part in x.split(1)]), linear(x))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("case", CASES)
def test_an_input_does_not_depend_on_its_neighbours(case, name):
    """Its states are the same numbers alone as among others, in whatever width; but for what
    DeBERTa's convolution rounds in float32, which may move an 8-bit number by one.
    """
    if name == "bfloat16" and rounds_by_batch():
        pytest.skip("this processor's kernels round by batch")
    full = build(case)
    batch, body = make_batch(full), Body(full, name)
    together, plain = body.states(batch), full.states(batch)
    apart = [body.states(alone(full, batch, i)) for i in range(len(LENGTHS))]
    for what in ("cls", "mean", "logits"):
        off = (torch.cat([one[what] for one in apart]) - together[what]).abs().max()
        nearly = 0.5 if (case, name) == ("deberta-conv", "int8") else 1e-3
        assert off <= nearly * (together[what] - plain[what]).abs().max()


@pytest.mark.parametrize("case", ["bert", "mobilebert", "mpnet", "roberta"])
def test_whole_vectors_of_tokens_where_attention_is_the_familys_own(case):
    """From the start, and when those with more tokens leave; as far as positions reach. Elsewhere
    attention alone is padded, and layers run on the tokens there are.
    """
    full = build(case)
    body, positions = Body(full, "bfloat16"), full.max_tokens + full.extra_padding
    together = LANES if case == "mpnet" else 1
    for tokens in (2, 15, 16, 17, full.max_tokens):
        width = tokens + full.extra_padding
        state = body.start(make_batch(full, [tokens, 2], width))
        whole = min(-(-width // together) * together, positions)
        assert state.hidden.shape[1] == state.weights.shape[2] == whole
        left = body.keep(body.step(state, 1), [1])
        least = min(max(2, together), positions)
        assert left.hidden.shape[1] == left.mask.shape[1] == least
        assert left.lengths == [2]


@pytest.mark.parametrize("padded", [False, True])
def test_attention_in_lanes_is_attention(padded):
    """To the same bits as if all of the layer had been padded, and near transformers' own."""
    torch.manual_seed(0)
    layer = Body(build("bert"), "bfloat16").layers[0].attention.self
    sizes = 3, 2, 9, 16  # rows, heads, tokens, a head's numbers
    q, k, v = torch.randn(3, *sizes).bfloat16()
    mask = (torch.arange(9) < torch.tensor([9, 4, 1])[:, None])[:, None, None].expand(3, 1, 9, 9)
    mask = mask if padded else None
    ours, _ = in_lanes(layer, q, k, v, mask)
    theirs, _ = sdpa_attention_forward(layer, q, k, v, mask)
    assert torch.allclose(ours, theirs, atol=0.02) and ours.shape == theirs.shape
    wide = [nn.functional.pad(one, (0, 0, 0, LANES - 9)) for one in (q, k, v)]
    there = torch.ones(3, 1, 9, 9, dtype=torch.bool) if mask is None else mask
    whole = nn.functional.pad(there, (0, LANES - 9, 0, LANES - 9))
    assert torch.equal(ours, sdpa_attention_forward(layer, *wide, whole)[0][:, :9])


def test_a_matrix_in_8_bits_gives_the_same_bits_in_every_batch():
    torch.manual_seed(0)
    linear = nn.Linear(48, 40)
    x = torch.randn(33, 48) * torch.logspace(-3, 3, 33)[:, None]  # rows of all sizes
    ours, theirs = Linear8(linear), linear(x).detach()
    with torch.no_grad():
        whole = ours(x)
        for size in (1, 2, 7, 32):
            assert torch.equal(torch.cat([ours(part) for part in x.split(size)]), whole)
        assert torch.equal(ours(x[:, None]), whole[:, None])
        assert ours(torch.zeros(1, 48)).equal(linear.bias[None])  # no scale to divide by
    sizes = x.abs().amax(1, keepdim=True)
    assert ((whole - theirs).abs() <= 0.02 * sizes + 1e-6).all()


@pytest.mark.skipif(not Linear16.runs(), reason="no such kernel for this processor")
def test_a_matrix_laid_out_for_the_cpu_gives_the_bits_of_the_one_it_was():
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 40).bfloat16(), torch.randn(33, 48).bfloat16()
    ours = Linear16(linear)
    with torch.no_grad():
        for size in (1, 2, 7, 32):
            for part in x.split(size):
                assert torch.equal(ours(part), linear(part))
        assert torch.equal(ours(x[:, None]), linear(x)[:, None])


def test_what_is_laid_out_for_the_cpu_stays_there():
    body = body_of(build("bert"), "bfloat16")
    linear = lambda: type(body.layers[0].output.dense)
    here = Linear16 if Linear16.runs() else nn.Linear
    assert linear() is here
    assert body.to("meta").device.type == "meta" and linear() is nn.Linear
    assert body.to("cpu").device.type == "cpu" and linear() is here


def test_one_scale_for_a_batch_would_not_do():
    """What torch's own dynamic quantisation does: a large neighbour takes a small row's digits."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 40)
    with pytest.warns(DeprecationWarning):
        from torch.ao.quantization import quantize_dynamic

        theirs = quantize_dynamic(nn.Sequential(linear), {nn.Linear})
    x = torch.randn(2, 48) * torch.tensor([[1.0], [100.0]])
    with torch.no_grad():
        assert not torch.allclose(theirs(x)[0], theirs(x[:1])[0], atol=0.1)


def test_a_body_costs_what_f_costs():
    full = build("bert")
    heads, meta = Heads(3, 32, 3), Meta(3, 32, 3)
    expected = cost.macs_reduction(full, heads, meta, [1, 4], tokens=9)
    assert all(
        cost.macs_reduction(Body(full, name), heads, meta, [1, 4], 9) == expected for name in FAST
    )


def test_none_is_f_itself():
    full = build("bert")
    assert body_of(full, None) is full and body_of(full, "float32") is full
    with pytest.raises(ValueError, match="one of float32, bfloat16, int8"):
        body_of(full, "int4")
    with pytest.raises(ValueError, match="runs on CPUs and not on meta"):
        body_of(full, "int8").to("meta")
    half = body_of(full, "bfloat16")
    with pytest.raises(ValueError, match="of a model in bfloat16"):
        Body(half, "int8")


def test_the_fastest_is_taken_of_those_that_agree(monkeypatch):
    """By a clock that says what each body takes, in their order."""
    full, clock = build("bert"), [0.0]
    batches = [make_batch(full)]

    def choose(seconds, **options):
        turn = []

        def now():
            clock[0] += seconds[len(turn) // 2 % 3] * (len(turn) % 2)
            turn.append(0)
            return clock[0]

        monkeypatch.setattr("cats.model.bodies.time.perf_counter", now)
        return fastest(full, batches, **options)[0]

    assert choose([1, 0.5, 0.7], differs=1) == "bfloat16"
    assert choose([1, 0.7, 0.5], differs=1) == "int8"
    assert choose([1, 0.97, 2], differs=1) == "float32"  # not worth it
    found = fastest(full, batches)[1]
    assert found["float32"]["differs"] == 0 and set(found) == set(BODIES)
