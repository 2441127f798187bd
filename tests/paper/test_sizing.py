"""What cats.paper.sizing predicts from shapes, against models and files that exist."""

import pytest
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

from cats.model.backbone import Backbone
from cats.paper import sizing, timing
from cats.train.run import Run

TINY = {
    "ALBERT-base 12 x 768": {
        "model_type": "albert",
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
    "BERT 12 x 384": {
        "model_type": "bert",
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
}


@pytest.mark.parametrize(
    "hub, name",
    [("albert-base-v2", "ALBERT-base 12 x 768"), ("bge-small-en-v1.5", "BERT 12 x 384")],
)
def test_shapes_alone_count_as_the_model_itself_does(monkeypatch, hub, name):
    """Parameters, and the bytes that autograd keeps: on the meta device and on a model with
    weights.
    """
    monkeypatch.setitem(timing.ARCHITECTURES, name, TINY[name])
    shaped = sizing.shaped(f"someone/{hub}", 3)
    real = Backbone(
        AutoModelForSequenceClassification.from_config(
            shaped.model.config, attn_implementation="eager"
        )
    )
    assert sizing.parameters(shaped) == sizing.parameters(real) and shaped.num_labels == 3
    assert sizing.kept_bytes(shaped, 4, 16) == sizing.kept_bytes(real, 4, 16)
    assert not real.model.training  # a Backbone has no dropout, before and after
    assert sizing.kept_bytes(shaped, 8, 16) > 1.9 * sizing.kept_bytes(
        shaped, 4, 16
    )  # rows add up; a mask or two does not grow


def test_what_autograd_keeps_is_near_the_textbook():
    shaped = sizing.shaped("bge-small-en-v1.5")
    layer = sizing.kept_bytes(shaped, 1, 64) / shaped.n_layers
    d, tokens, heads, inner = 384, 64, 12, 1536
    # what the textbook counts of a layer in float32: inputs of six matrices, attention twice,
    # activation, two norms; dropout masks come on top
    least = 4 * (tokens * (6 * d + 2 * inner) + 2 * heads * tokens**2)
    assert least < layer < 3 * least


def bytes_of(path):
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())


def test_disk_is_what_the_files_hold(tmp_path):
    sizes = {"train": 90, "validation": 40, "test": 30}
    run = Run(
        "sentiment",
        folder=tmp_path,
        limit=sizes,
        training={"epochs": 1},
        head_options={"epochs": 1},
        meta_options={"epochs": 1},
    )
    run.table("validation")
    found = {
        part: sum(map(bytes_of, (tmp_path / "states" / part).glob("*.safetensors")))
        for part in ("tune", "scale", "meta")
    }
    assert sum(found.values()) == sizing.states_bytes(run.backbone, 90)
    assert bytes_of(run.home / "validation.safetensors") == sizing.table_bytes(run.backbone, 40)


def test_hours_follow_from_the_count():
    """Twice the data takes twice the time and disk; memory does not know how much data there is."""
    backbone = sizing.shaped("albert-base-v2")
    once, twice = (sizing.stages(backbone, n, n, 32, 3).set_index("stage") for n in (1000, 2000))
    assert (twice["hours"] / once["hours"]).round(9).eq(2).all() and (
        once["memory"] == twice["memory"]
    ).all()
    assert once.loc["fine-tuning", "hours"] == pytest.approx(9 * once.loc["extraction", "hours"])
    assert once.loc["extraction", "hours"] == pytest.approx(
        1000 * 2 * sizing.full_macs(backbone, 32) / 1e14 / 3600
    )
