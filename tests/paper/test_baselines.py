"""8 bits stay near the model, ONNX Runtime equals it, for every shape; and the model itself is
untouched.
"""

import copy
import logging
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats.paper.baselines import bfloat16, int8, onnx

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
FAMILIES = {
    "bert": SMALL,
    "mobilebert": (
        SMALL | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}
    ),
}
SHAPES = [(1, 2), (1, 64), (2, 2), (3, 1), (7, 33), (32, 8)]


def classifier(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, num_labels=3, **FAMILIES[family])
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for weights in model.parameters():  # as Hugging Face draws them, all logits are nearly 0
        weights.data += 0.1 * torch.randn_like(weights)
    return model


def batch(rows, tokens):
    lengths = torch.randint((tokens + 1) // 2, tokens + 1, (rows, 1))  # real padding, on the right
    mask = (torch.arange(tokens) < lengths).long()
    return {
        "input_ids": torch.randint(1, 100, (rows, tokens)) * mask,
        "attention_mask": mask,
        "token_type_ids": 0 * mask,
    }


def errors(model, fast):
    """Largest difference of the logits in every shape, and the spread of the logits themselves."""
    with torch.no_grad():
        pairs = [(fast(x), model(**x).logits) for x in (batch(*shape) for shape in SHAPES)]
    assert all(ours.shape == theirs.shape and ours.dtype == theirs.dtype for ours, theirs in pairs)
    worst = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    return worst, float(torch.cat([theirs for _, theirs in pairs]).std())


@pytest.mark.parametrize("fast", [bfloat16, int8])
@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_bits_stay_near_and_say_nothing(family, fast):
    model = classifier(family)
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings(action="error"):
        error, spread = errors(model, fast(model))
    assert 0 < error < spread / 2, (error, spread)  # it does quantise, and is no other model
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# the first example has sizes that an exporter likes to take for constants
@pytest.mark.parametrize("family, example", [("bert", (1, 2)), ("mobilebert", (5, 16))])
def test_onnx_equals_torch(family, example):
    model = classifier(family)
    with warnings.catch_warnings(action="error"):
        error, _ = errors(model, onnx(model, batch(*example)))
    assert error < 1e-4


def test_onnx_in_8_bits_stays_near(caplog):
    model = classifier("bert")
    error, spread = errors(model, onnx(model, batch(2, 9), threads=1, bits=8))
    assert 0 < error < spread / 2, (error, spread)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_onnx_refuses():
    for kwargs in ({"batch": batch(2, 9), "bits": 4}, {"batch": batch(2, 1)}):
        with pytest.raises(ValueError, match="8 or 32 bits and two tokens"):
            onnx(classifier("bert"), **kwargs)


def test_half_precision_is_refused():
    with pytest.raises(TypeError, match="torch.float32, not torch.float16"):
        int8(classifier("bert").half())
