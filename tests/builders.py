"""What several tests share: a tiny random model of every family, batches for it, work to time."""

from functools import cache

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats.model.backbone import Backbone
from cats.runtime.loop import starting

LENGTHS = [17, 3, 9, 12, 5]  # of the rows of every batch
TOKENS = 20  # columns: the last three are padding in every row

BOTH, EAGER = ("sdpa", "eager"), ("eager",)
SMALL = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=40,
    max_position_embeddings=48,
)
RELATIVE = dict(
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=4,
    max_relative_positions=24,
)
MODERN = SMALL | dict(
    num_hidden_layers=5, local_attention=6, global_attn_every_n_layers=3, pad_token_id=0
)
MOBILE = SMALL | dict(embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16)
# case: (model_type, attention implementations, config)
CASES = {
    "albert": ("albert", BOTH, SMALL | dict(embedding_size=16)),
    "albert-groups": (
        "albert",
        BOTH,
        SMALL | dict(embedding_size=16, num_hidden_groups=2, inner_group_num=2),
    ),
    "bert": ("bert", BOTH, SMALL),
    "deberta-v2": ("deberta-v2", EAGER, SMALL | dict(type_vocab_size=2, pooler_hidden_size=32)),
    "deberta-v3": (
        "deberta-v2",
        EAGER,
        SMALL
        | RELATIVE
        | dict(
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_biased_input=False,
            pooler_hidden_size=32,
        ),
    ),
    "deberta-conv": (
        "deberta-v2",
        EAGER,
        SMALL | RELATIVE | dict(conv_kernel_size=3, pooler_hidden_size=32),
    ),
    "distilbert": (
        "distilbert",
        BOTH,
        dict(
            vocab_size=60, dim=32, n_layers=4, n_heads=4, hidden_dim=40, max_position_embeddings=48
        ),
    ),
    "electra": ("electra", BOTH, SMALL | dict(embedding_size=32)),
    "electra-narrow": ("electra", BOTH, SMALL | dict(embedding_size=16)),
    "mobilebert": ("mobilebert", BOTH, MOBILE),
    "modernbert-cls": ("modernbert", BOTH, MODERN | dict(classifier_pooling="cls")),
    "modernbert-mean": ("modernbert", BOTH, MODERN | dict(classifier_pooling="mean")),
    "mpnet": ("mpnet", EAGER, SMALL),
    "roberta": ("roberta", BOTH, SMALL | dict(type_vocab_size=1)),
    "xlm-roberta": ("xlm-roberta", BOTH, SMALL | dict(type_vocab_size=2)),
}


@cache
def build(case, attention=None):
    """A backbone with random weights. Hugging Face starts with zero biases and tiny weights, where
    most mistakes do not show.
    """
    model_type, implementations, options = CASES[case]
    config = AutoConfig.for_model(model_type, num_labels=3, **options)
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation=attention or implementations[0]
    )
    size = (
        0.8 if model_type == "mobilebert" else 1.0
    )  # it has no norms that would keep its states small
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            scale = size * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5)
            p.copy_(
                scale * torch.randn(p.shape, generator=generator)
                + (p.dim() == 1 and name.endswith("weight"))
            )  # norms: near 1
    return Backbone(model)


def make_batch(backbone, lengths=LENGTHS, tokens=TOKENS, left=False, seed=1):
    """Rows of these lengths, padded; two token types where the model knows them."""
    generator = torch.Generator().manual_seed(seed)
    config, rows = backbone.model.config, len(lengths)
    position = torch.arange(tokens).expand(rows, -1)
    length = torch.tensor(lengths)[:, None]
    mask = (position >= tokens - length if left else position < length).long()
    ids = torch.randint(5, config.vocab_size, (rows, tokens), generator=generator)
    batch = {
        "input_ids": torch.where(mask.bool(), ids, config.pad_token_id),
        "attention_mask": mask,
    }
    if getattr(config, "type_vocab_size", 0) > 1:
        batch["token_type_ids"] = mask * (position > length // 2)
    return batch


def even(cat, which, batch_size, tokens=64):
    """F ("full") or the CAT ("early") on four batches' inputs, which exit at all layers alike: to
    run, and measure the memory of.
    """
    cut = lambda size: (
        {"input_ids": ids} for ids in torch.full((4 * batch_size, tokens), 1000).split(size)
    )
    l = cat.backbone.n_layers

    def full():
        with torch.inference_mode():
            [cat.backbone.model(**batch) for batch in cut(batch_size)]

    def early():
        cat.run(
            cut(starting(batch_size, tokens)),
            np.full(l - 1, np.inf),
            decide=lambda k, scores, rows: [row % l + 1 == k for row in rows],
        )

    return {"full": full, "early": early}[which]
