"""Families of encoders: what differs between one Hugging Face model and the next, and nothing else.

How to add one. Read the `forward` of its model and of its encoder in transformers, and write down
where it differs from BERT, as a subclass of `Bert` or of the family it is nearest to:

    layers      where the layers are
    embed       token ids to the first layer's input
    context     what the layers need besides the hidden state
    apply       how one layer is called
    classify    last hidden state to logits
    and the attributes, which say how its inputs are padded and how long they may be

The decorator names it by its `config.model_type`. One that differs in nothing, as CamemBERT from
RoBERTa, is one line, in a file of your own as well as here:

    family("camembert")(Roberta)

The test to pass: stepping through all layers gives the logits of the model itself. A line in
`CASES` of tests/builders.py puts it through that, and through a running CAT.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
)

Context = dict[str, Any]  # what the layers of a family ask for, by name
FAMILIES: dict[str, type["Bert"]] = {}


def family(*model_types: str) -> Callable[[type["Bert"]], type["Bert"]]:
    """Register a class under the `config.model_type` of the models it drives."""

    def register(found: type["Bert"]) -> type["Bert"]:
        FAMILIES.update(dict.fromkeys(model_types, found))
        return found

    return register


@family("bert")
class Bert:
    """BERT, and the parts that the other families share with it."""

    # columns of padding that every row must end in, for its answer not to depend on the other rows
    # of its batch
    extra_padding = 0
    # whether the position of the first token is the padding id and one more, and not 0
    counts_from_padding = False
    # whether a new classifier only learns if what it reads is put on unit scale
    standardise = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.base: Any = model.base_model
        self.config: Any = model.config

    @property
    def max_tokens(self) -> int:
        """The longest input the position embeddings allow, without the padding that must follow."""
        positions = getattr(self.config, "max_position_embeddings", None) or 512
        first = self.config.pad_token_id + 1 if self.counts_from_padding else 0
        return positions - first - self.extra_padding

    def layers(self) -> Sequence[nn.Module]:
        """The l layers in the order in which they are applied."""
        return self.base.encoder.layer

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        """Input of the first layer, (rows, tokens, d)."""
        return self.base.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)

    def context(self, hidden: Tensor, mask: Tensor, padded: bool) -> Context:
        """What the layers need besides `hidden`, as keyword arguments: it follows from shape and
        padding, if there is any.
        """
        # without padding there is nothing to mask, and building a mask takes a twentieth of a layer
        return {
            "attention_mask": (
                create_bidirectional_mask(self.config, hidden, mask) if padded else None
            )
        }

    def context_of(
        self, context: Context, select: Callable[[Tensor], Tensor], hidden: Tensor, mask: Tensor
    ) -> Context:
        """The context of some rows, with padding, whose hidden states and mask these are; `select`
        takes them from a tensor.
        """
        width = hidden.shape[1]
        whole = context["attention_mask"] if list(context) == ["attention_mask"] else None
        # (rows, 1, tokens, tokens): cutting takes a fifth of the time of building
        if isinstance(whole, Tensor) and whole.dim() == 4:
            return {"attention_mask": select(whole[..., :width, :width])}
        return self.context(hidden, mask, True)

    def apply(self, layer: Any, hidden: Tensor, mask: Tensor, context: Context) -> Tensor:
        """One layer, (rows, tokens, d) to the same."""
        out = layer(hidden, **context)
        return out[0] if isinstance(out, tuple) else out

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Logits of the model's own classifier, (rows, C)."""
        return self.model.classifier(self.model.dropout(self.base.pooler(hidden)))


@family("albert")
class Albert(Bert):
    """A layer is one pass through a layer group. Groups are shared: with one group, all l layers
    are the same module.
    """

    def layers(self) -> Sequence[nn.Module]:
        groups, l = self.base.encoder.albert_layer_groups, self.config.num_hidden_layers
        return [groups[int(i / (l / len(groups)))] for i in range(l)]

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        return self.base.encoder.embedding_hidden_mapping_in(
            super().embed(input_ids, token_type_ids, mask)
        )

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        pooled = self.base.pooler_activation(self.base.pooler(hidden[:, 0]))  # (rows, d)
        return self.model.classifier(self.model.dropout(pooled))


@family("mobilebert")
class MobileBert(Bert):
    """The embeddings also read the next token, and [PAD] is not zero there. So in transformers
    itself, and here, the answer for a text changes with padding or none after it (not with how
    much): every row ends in one column of padding.

    Its [CLS] reaches 100: a linear layer on that learns nothing at a rate that suits the encoder.
    """

    extra_padding = 1
    standardise = True


@family("roberta", "xlm-roberta")
class Roberta(Bert):
    """RoBERTa and XLM-R: the classifier does its own pooling. Positions count from the padding id,
    inside the embeddings.
    """

    counts_from_padding = True

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.model.classifier(hidden)


@family("electra")
class Electra(Roberta):
    """RoBERTa's pooling, BERT's positions; the embeddings may be narrower than the layers."""

    counts_from_padding = False

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        hidden = super().embed(input_ids, token_type_ids, mask)
        return (
            self.base.embeddings_project(hidden)
            if hasattr(self.base, "embeddings_project")
            else hidden
        )


@family("mpnet")
class MPNet(Roberta):
    """One relative position bias, computed once and added in every layer."""

    def context(self, hidden: Tensor, mask: Tensor, padded: bool) -> Context:
        return super().context(hidden, mask, padded) | {
            "position_bias": self.base.encoder.compute_position_bias(hidden)
        }


@family("distilbert")
class DistilBert(Bert):
    """No token types, no pooler."""

    def layers(self) -> Sequence[nn.Module]:
        return self.base.transformer.layer

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        return self.base.embeddings(input_ids)

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        pooled = nn.functional.relu(self.model.pre_classifier(hidden[:, 0]))  # (rows, d)
        return self.model.classifier(self.model.dropout(pooled))


@family("deberta-v2")
class DebertaV2(Bert):
    """DeBERTa v2 and v3: relative positions in every layer, a mask of pairs, and perhaps a
    convolution beside the first layer.
    """

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        return self.base.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, mask=mask)

    def context(self, hidden: Tensor, mask: Tensor, padded: bool) -> Context:
        encoder = self.base.encoder
        return {
            "attention_mask": encoder.get_attention_mask(mask),  # (rows, 1, tokens, tokens)
            "relative_pos": encoder.get_rel_pos(hidden),  # (1, tokens, tokens)
            "rel_embeddings": encoder.get_rel_embedding(),  # (2 * span, d)
        }

    def apply(self, layer: Any, hidden: Tensor, mask: Tensor, context: Context) -> Tensor:
        out = super().apply(layer, hidden, mask, context)
        encoder = self.base.encoder
        if encoder.conv is not None and layer is encoder.layer[0]:
            # reads the embeddings: they are zero at padding, so trimming is safe
            out = encoder.conv(hidden, out, mask)
        return out

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.model.classifier(self.model.dropout(self.model.pooler(hidden)))


@family("modernbert")
class ModernBert(Bert):
    """Two kinds of layers, global and local, each with its own mask and its own rotary positions;
    one norm after the last.
    """

    def layers(self) -> Sequence[nn.Module]:
        return self.base.layers

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, mask: Tensor) -> Tensor:
        return self.base.embeddings(input_ids)

    def context(self, hidden: Tensor, mask: Tensor, padded: bool) -> Context:
        masks = {
            "full_attention": create_bidirectional_mask,
            "sliding_attention": create_bidirectional_sliding_window_mask,
        }
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]  # (1, tokens)
        padding = mask if padded else None
        return {
            kind: {
                "attention_mask": masks[kind](self.config, hidden, padding),
                "position_embeddings": self.base.rotary_emb(hidden, positions, kind),
            }
            for kind in set(self.config.layer_types)
        }

    def apply(self, layer: Any, hidden: Tensor, mask: Tensor, context: Context) -> Tensor:
        return layer(hidden, **context[layer.attention_type])

    def classify(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.base.final_norm(hidden)
        if self.config.classifier_pooling == "mean":
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)  # (rows, d)
        else:
            pooled = hidden[:, 0]
        return self.model.classifier(self.model.drop(self.model.head(pooled)))
