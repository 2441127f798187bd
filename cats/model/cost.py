"""What an exit saves: multiply-accumulates (MACs) and the naive synchronous time (Sections 5.4 and
6.3, Table 5).

MACs are counted from shapes, nothing is run: each matrix once per token, and the two products of
attention. Norms, activations, softmax, biases, embedding lookups and rotary angles are not counted,
as usual; padding is, if `tokens` counts it. It is the work of one input alone, done the plain way:
ModernBERT's local layers count all pairs of tokens, as eager attention computes them all and masks,
and DeBERTa projects its relative positions anew for every input (a batch would share that).

    macs_reduction(backbone, heads, meta, exit_layers, tokens=256)      # 2.66 for Table 5's IMDB,
                                                                        Shared/Meta, 0.90
    amortised_time(exit_layers, backbone.n_layers)                      # 54.53 (percent)
"""

import numpy as np
from torch import nn

QUERIES = {
    "query": 1,
    "query_proj": 1,
    "q": 1,
    "q_lin": 1,
    "Wqkv": 3,
}  # a Linear of this name: how many matrices are fused in it


def matrices(module):
    """The matrices that `module` multiplies by: name to nn.Linear, without those that MobileBERT
    makes but may not use.
    """
    idle = set()
    for part in module.modules():
        if getattr(part, "use_bottleneck_attention", False) and hasattr(part, "attention"):
            idle.add(part.attention.dense)
        if (
            hasattr(part, "embedding_transformation")
            and not part.trigram_input
            and part.embedding_size == part.hidden_size
        ):
            idle.add(part.embedding_transformation)
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part not in idle
    }


def size(linear):
    """MACs of one vector through a matrix."""
    return linear.in_features * linear.out_features


def relative_macs(layer, tokens):
    """What the relative positions of DeBERTa v2 and v3 add to a layer.

    The 2·span position vectors, and not the tokens, go through their own matrices or through those
    of queries and keys. Then every query meets every position (c2p) and every key meets every
    position (p2c).
    """
    total = 0
    for part in layer.modules():
        if getattr(part, "relative_attention", False):
            positions, kinds = 2 * part.pos_ebd_size, {"c2p", "p2c"} & set(part.pos_att_type)
            own = [
                getattr(part, name)
                for name in ("pos_key_proj", "pos_query_proj")
                if hasattr(part, name)
            ]
            shared = [part.query_proj, part.key_proj] if part.share_att_key else []
            total += sum(map(size, own)) * (positions - tokens)  # they were counted once per token
            total += (
                sum(map(size, shared)) * positions
                + len(kinds) * tokens * positions * part.all_head_size
            )
    return total


def layer_macs(backbone, tokens):
    """MACs of each of the l layers for one input of that many tokens. Refuses a layer whose
    attention it does not find.
    """
    macs = []
    for k, layer in enumerate(backbone.layers, 1):
        linears = matrices(layer)
        width = 0  # of attention; an ALBERT layer may hold several
        for name, linear in linears.items():
            fused = QUERIES.get(name.split(".")[-1])
            width += linear.out_features // fused if fused else 0
        if not width:
            raise TypeError(
                f"no attention found in layer {k} of {backbone.family}: which of"
                f" {', '.join(linears)} makes queries?"
            )
        products = 2 * tokens**2 * width  # queries with keys, and weights with values
        macs.append(
            tokens * sum(map(size, linears.values())) + products + relative_macs(layer, tokens)
        )
    conv = getattr(getattr(backbone.model.base_model, "encoder", None), "conv", None)
    if conv is not None:  # DeBERTa's, beside the first layer
        macs[0] += tokens * conv.conv.weight.numel()
    return macs


def ends_macs(backbone, tokens):
    """MACs before the first layer and after the last: (projections of the embeddings, pooler and
    classifier of F).
    """
    inside = {part for layer in backbone.layers for part in layer.modules()}
    outside = {
        name: size(part) for name, part in matrices(backbone.model).items() if part not in inside
    }
    embeddings = sum(macs for name, macs in outside.items() if "embed" in name)
    return (
        tokens * embeddings,
        sum(outside.values()) - embeddings,
    )  # F classifies one vector, not every token


def head_macs(heads):
    """MACs of each of the l-1 early heads. On average 66,304 for Albert-xlarge and two labels, with
    the history: Section 5.4.
    """
    past = [heads.n_outputs * (k - 1) if heads.history else 0 for k in range(1, heads.early + 1)]
    return [(heads.width + logits) * heads.d_e + heads.d_e * heads.n_outputs for logits in past]


def meta_macs(meta):
    """MACs of one meta classifier, the same at every layer. 1,920 for two labels and 24 layers:
    Section 5.4.
    """
    return meta.inputs * meta.units + meta.units * 2


def check_exits(exit_layers, n_layers):
    """Exit layers as an array; refuses those that are no layer, and none at all."""
    exits = np.asarray(exit_layers)
    if not exits.size or not ((1 <= exits) & (exits <= n_layers)).all():
        raise ValueError(
            f"exit layers have to be in 1..{n_layers}, and at least one, got {exit_layers!r}"
        )
    return exits


def macs(backbone, heads, meta, exit_layers, tokens, uses_meta=True):
    """Mean MACs per input of G, for inputs of `tokens` tokens that exit at these layers (n,).

    An input that exits at layer k pays the embeddings, layers 1..k, and the heads and meta
    classifiers 1..min(k, l-1); one that exits at l pays F's own classifier too. Without
    `uses_meta`, as for softmax scores, `meta` is not looked at and may be None.
    """
    exits, l = check_exits(exit_layers, backbone.n_layers), backbone.n_layers
    for early in [heads, meta] if uses_meta else [heads]:
        if early.early != l - 1:
            raise ValueError(
                f"{type(early).__name__} for {early.early} early layers, but the model has {l - 1}"
            )
    embeddings, top = ends_macs(backbone, tokens)
    layers = np.array(layer_macs(backbone, tokens), float)
    early = np.array([*head_macs(heads), 0]) + (meta_macs(meta) if uses_meta else 0) * (
        np.arange(l) < l - 1
    )
    by_exit = embeddings + np.cumsum(layers + early) + top * (np.arange(l) == l - 1)  # (l,)
    return float(by_exit[exits - 1].mean())


def macs_reduction(backbone, heads, meta, exit_layers, tokens, uses_meta=True):
    """|F| / |G|, the right half of Table 5. All 36 published numbers are 24 / layers: what is not a
    layer hardly counts.
    """
    full = sum(ends_macs(backbone, tokens)) + sum(layer_macs(backbone, tokens))
    return full / macs(backbone, heads, meta, exit_layers, tokens, uses_meta)


def amortised_time(exit_layers, n_layers, layer=0.85, ends=1.92, head=0.20, meta=0.11):
    """100 · T_G / T_F of the naive synchronous implementation, the left half of Table 5; give
    `meta=0` where there is none.

    Times are milliseconds; the defaults are Section 5.4's, of Albert-xlarge on an A100. T_F = ends
    + l · layer, and an input that exits at layer k takes ends - head + k · (layer + head + meta):
    F's own classifier, part of `ends`, is counted as the head of layer l, and layer l pays for a
    meta classifier as the others do. Linear in k, so a mean exit layer will do.

    From the layers of Tables 3 and 4 this gives all 36 percentages of Table 5, to the last digit.
    `ends` has to be the 1.92 that 22.32 - 24 · 0.85 leaves. The text's 1.95 does not add up to its
    22.32, and would be off by up to 0.07 points; paying for all of `ends` and k heads by 0.9 or
    more; no meta classifier at layer l by at least 0.29 for STS-B, Independent/Meta, 0.95, where
    23.60 layers mean that at least 60% exit there. The text's break-even layers, 17.6 with meta and
    19.5 without, do pay for all of `ends` (20.40 / 1.16 and 20.40 / 1.05); by the count of Table 5
    they are 17.8 and 19.6.
    """
    exits = check_exits(exit_layers, n_layers)
    return float(
        100 * (ends - head + exits.mean() * (layer + head + meta)) / (ends + n_layers * layer)
    )
