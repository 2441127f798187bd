"""What an exit saves: multiply-accumulates (MACs) and the naive synchronous time (Sections 5.4 and
6.3, Table 5).

MACs are what `torch.utils.flop_counter` counts, on a model that has shapes and no numbers: the
matrix products of one input alone, done the plain way. ModernBERT's local layers count all pairs of
tokens, as eager attention computes them all and masks, and DeBERTa projects its relative positions
anew for every input (a batch would share that). Norms, activations, softmax, biases, embedding
lookups and rotary angles are not counted, as usual; padding is, if `tokens` counts it. The
precision F runs in changes nothing.

    macs_reduction(backbone, heads, meta, exit_layers, tokens=256)      # 2.66 for Table 5's IMDB,
                                                                        Shared/Meta, 0.90
    amortised_time(exit_layers, backbone.n_layers)                      # 54.53 (percent)
"""

import json
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from cats.model.backbone import Backbone
from cats.model.exits import Heads, Meta


@cache
def counted(kind: type[PretrainedConfig], settings: str, tokens: int) -> tuple[int, ...]:
    """MACs of the embeddings, of each layer and of F's classifier, for a configuration in JSON."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            kind.from_dict(json.loads(settings)), attn_implementation="eager"
        )
        backbone, ids = Backbone(model), torch.zeros((1, tokens), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        state = backbone.start({"input_ids": ids})
        so_far = [0, counter.get_total_flops()]
        for k in range(1, backbone.n_layers + 1):
            state = backbone.step(state, k)
            so_far.append(counter.get_total_flops())
        backbone.finish(state)
        so_far.append(counter.get_total_flops())
    return tuple(flops // 2 for flops in np.diff(so_far).tolist())


def counts(backbone: Backbone, tokens: int) -> tuple[int, ...]:
    """See `counted`."""
    config = backbone.model.config
    kind: Any = type(config)  # it has a hash, as all classes
    return counted(kind, config.to_json_string(use_diff=False), tokens)


def layer_macs(backbone: Backbone, tokens: int) -> list[int]:
    """MACs of each of the l layers for one input of that many tokens."""
    return list(counts(backbone, tokens)[1:-1])


def ends_macs(backbone: Backbone, tokens: int) -> tuple[int, int]:
    """MACs before the first layer and after the last: (projections of the embeddings, pooler and
    classifier of F).
    """
    embeddings, *_, top = counts(backbone, tokens)
    return embeddings, top


def head_macs(heads: Heads) -> list[int]:
    """MACs of each of the l-1 early heads. On average 66,304 for Albert-xlarge and two labels, with
    the history: Section 5.4.
    """
    past = [heads.n_outputs * (k - 1) if heads.history else 0 for k in range(1, heads.early + 1)]
    return [(heads.width + logits) * heads.d_e + heads.d_e * heads.n_outputs for logits in past]


def meta_macs(meta: Meta) -> int:
    """MACs of one meta classifier, the same at every layer. 1,920 for two labels and 24 layers:
    Section 5.4.
    """
    return meta.inputs * meta.units + meta.units * 2


def check_exits(exit_layers: ArrayLike, n_layers: int) -> NDArray:
    """Exit layers as an array; refuses those that are no layer, and none at all."""
    exits = np.asarray(exit_layers)
    if not exits.size or not ((1 <= exits) & (exits <= n_layers)).all():
        raise ValueError(
            f"exit layers have to be in 1..{n_layers}, and at least one, got {exit_layers!r}"
        )
    return exits


def macs_by_exit(
    backbone: Backbone, heads: Heads, meta: Meta | None, tokens: int, uses_meta: bool = True
) -> NDArray:
    """MACs of an input of `tokens` tokens that exits at layer 1 … l, (l,).

    An input that exits at layer k pays the embeddings, layers 1..k, and the heads and meta
    classifiers 1..min(k, l-1); one that exits at l pays F's own classifier too. Without
    `uses_meta`, as for softmax scores, `meta` is not looked at and may be None.
    """
    l = backbone.n_layers
    parts: list[Any] = [heads, meta] if uses_meta else [heads]
    for part in parts:
        if part.early != l - 1:
            raise ValueError(
                f"{type(part).__name__} for {part.early} early layers, but the model has {l - 1}"
            )
    embeddings, top = ends_macs(backbone, tokens)
    layers = np.array(layer_macs(backbone, tokens), float)
    added = np.array([*head_macs(heads), 0]) + (meta_macs(parts[1]) if uses_meta else 0) * (
        np.arange(l) < l - 1
    )
    return embeddings + np.cumsum(layers + added) + top * (np.arange(l) == l - 1)


def macs_reduction(
    backbone: Backbone,
    heads: Heads,
    meta: Meta | None,
    exit_layers: ArrayLike,
    tokens: int,
    uses_meta: bool = True,
) -> float:
    """|F| / |G|, the right half of Table 5, for inputs that exit at these layers (n,). All 36
    published numbers are 24 / layers: what is not a layer hardly counts.
    """
    exits = check_exits(exit_layers, backbone.n_layers)
    by_exit = macs_by_exit(backbone, heads, meta, tokens, uses_meta)
    return sum(counts(backbone, tokens)) / float(by_exit[exits - 1].mean())


class Times(NamedTuple):
    """Milliseconds of a model's parts; the defaults are Section 5.4's, of Albert-xlarge on an A100.

    ends  what is before the first layer and after the last
    """

    layer: float = 0.85
    ends: float = 1.92
    head: float = 0.20
    meta: float = 0.11


A100 = Times()


def amortised_time(exit_layers: ArrayLike, n_layers: int, times: Times = A100) -> float:
    """100 · T_G / T_F of the naive synchronous implementation, the left half of Table 5; its
    `times.meta` is 0 where there is no meta classifier.

    T_F = ends + l · layer, and an input that exits at layer k takes ends - head + k · (layer + head
    + meta): F's own classifier, part of `ends`, is counted as the head of layer l, and layer l pays
    for a meta classifier as the others do. Linear in k, so a mean exit layer will do.

    From the layers of Tables 3 and 4 this gives all 36 percentages of Table 5, to the last digit.
    `ends` has to be the 1.92 that 22.32 - 24 · 0.85 leaves. The text's 1.95 does not add up to its
    22.32, and would be off by up to 0.07 points; paying for all of `ends` and k heads by 0.9 or
    more; no meta classifier at layer l by at least 0.29 for STS-B, Independent/Meta, 0.95, where
    23.60 layers mean that at least 60% exit there. The text's break-even layers, 17.6 with meta and
    19.5 without, do pay for all of `ends` (20.40 / 1.16 and 20.40 / 1.05); by the count of Table 5
    they are 17.8 and 19.6.
    """
    exits = check_exits(exit_layers, n_layers)
    each = times.layer + times.head + times.meta
    full = times.ends + n_layers * times.layer
    return float(100 * (times.ends - times.head + exits.mean() * each) / full)
