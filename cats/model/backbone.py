"""The full model F, one layer at a time (Section 3 of the paper).

A fine-tuned Hugging Face classifier is driven from outside, with Hugging Face's own modules:
embeddings, then l layers, then its own classifier. Between two layers the caller may read the [CLS]
vectors, and let the rows that have exited leave the batch.

    backbone = Backbone.from_pretrained("path/to/a-fine-tuned-albert")
    state = backbone.start(tokenizer(texts, padding=True, return_tensors="pt"))
    for k in range(1, backbone.n_layers):            # layers are 1-based
        state = backbone.step(state, k)
        early = heads[k](backbone.cls(state))        # F_k(x), (rows, C)
        state = backbone.keep(state, ~exits(early))  # the rows that have not exited go on, in a
        smaller batch
    state = backbone.step(state, backbone.n_layers)
    logits = backbone.finish(state)                  # F_l = F

How to add a family. Read the `forward` of its model and of its encoder in transformers, and write
down where it differs from BERT, as a subclass of `Bert`: `layers` (where they are), `embed` (token
ids to the first layer's input), `context` (what the layers need besides the hidden state), `apply`
(how one layer is called) and `head` (last hidden state to logits). Then name it in `FAMILIES` by
its `config.model_type`. One that differs in nothing, as CamemBERT from RoBERTa, is one line:
`FAMILIES["camembert"] = Roberta`. The test to pass: stepping through all layers gives the logits of
the model itself. Add a line to the table in its test file.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
)
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
)

from cats._io import digest
from cats.model.exits import vectors

# --------------------------------------------------------------------------------------------------
# Families: what differs between one Hugging Face encoder and the next, and nothing else


class Bert:
    """BERT, MobileBERT, and the parts that the other families share with them.

    MobileBERT's embeddings also read the next token, and [PAD] is not zero there. So in
    transformers itself, and here, its answer for a text changes with padding or none after it (not
    with how much): let every row end in at least one column of padding.
    """

    def __init__(self, model):
        self.model, self.base, self.config = model, model.base_model, model.config

    def layers(self):
        """The l layers in the order in which they are applied."""
        return self.base.encoder.layer

    def embed(self, input_ids, token_type_ids, mask):
        """Input of the first layer, (rows, tokens, d)."""
        return self.base.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)

    def context(self, hidden, mask, padded):
        """What the layers need besides `hidden`, as keyword arguments: it follows from shape and
        padding, if there is any.
        """
        # without padding there is nothing to mask, and building a mask takes a twentieth of a layer
        return {
            "attention_mask": (
                create_bidirectional_mask(self.config, hidden, mask) if padded else None
            )
        }

    def fewer(self, context, select, hidden, mask):
        """The context of some rows, with padding, whose hidden states and mask these are; `select`
        takes them from a tensor.
        """
        width, whole = (
            hidden.shape[1],
            (context["attention_mask"] if list(context) == ["attention_mask"] else None),
        )
        if (
            isinstance(whole, Tensor) and whole.dim() == 4
        ):  # (rows, 1, tokens, tokens): cutting takes a fifth of the time of building
            return {"attention_mask": select(whole[..., :width, :width])}
        return self.context(hidden, mask, True)

    def apply(self, layer, hidden, mask, context):
        """One layer, (rows, tokens, d) to the same."""
        out = layer(hidden, **context)
        return out[0] if isinstance(out, tuple) else out

    def head(self, hidden, mask):
        """Logits of the model's own classifier, (rows, C)."""
        return self.model.classifier(self.model.dropout(self.base.pooler(hidden)))


class Albert(Bert):
    """A layer is one pass through a layer group. Groups are shared: with one group, all l layers
    are the same module.
    """

    def layers(self):
        groups, l = self.base.encoder.albert_layer_groups, self.config.num_hidden_layers
        return [groups[int(i / (l / len(groups)))] for i in range(l)]

    def embed(self, input_ids, token_type_ids, mask):
        return self.base.encoder.embedding_hidden_mapping_in(
            super().embed(input_ids, token_type_ids, mask)
        )

    def head(self, hidden, mask):
        pooled = self.base.pooler_activation(self.base.pooler(hidden[:, 0]))  # (rows, d)
        return self.model.classifier(self.model.dropout(pooled))


class Roberta(Bert):
    """RoBERTa and XLM-R: the classifier does its own pooling. Positions count from the padding id,
    inside the embeddings.
    """

    def head(self, hidden, mask):
        return self.model.classifier(hidden)


class Electra(Roberta):
    """The embeddings may be narrower than the layers."""

    def embed(self, input_ids, token_type_ids, mask):
        hidden = super().embed(input_ids, token_type_ids, mask)
        return (
            self.base.embeddings_project(hidden)
            if hasattr(self.base, "embeddings_project")
            else hidden
        )


class MPNet(Roberta):
    """One relative position bias, computed once and added in every layer."""

    def context(self, hidden, mask, padded):
        return super().context(hidden, mask, padded) | {
            "position_bias": self.base.encoder.compute_position_bias(hidden)
        }


class DistilBert(Bert):
    """No token types, no pooler."""

    def layers(self):
        return self.base.transformer.layer

    def embed(self, input_ids, token_type_ids, mask):
        return self.base.embeddings(input_ids)

    def head(self, hidden, mask):
        pooled = nn.functional.relu(self.model.pre_classifier(hidden[:, 0]))  # (rows, d)
        return self.model.classifier(self.model.dropout(pooled))


class DebertaV2(Bert):
    """DeBERTa v2 and v3: relative positions in every layer, a mask of pairs, and perhaps a
    convolution beside the first layer.
    """

    def embed(self, input_ids, token_type_ids, mask):
        return self.base.embeddings(input_ids=input_ids, token_type_ids=token_type_ids, mask=mask)

    def context(self, hidden, mask, padded):
        encoder = self.base.encoder
        return {
            "attention_mask": encoder.get_attention_mask(mask),  # (rows, 1, tokens, tokens)
            "relative_pos": encoder.get_rel_pos(hidden),  # (1, tokens, tokens)
            "rel_embeddings": encoder.get_rel_embedding(),  # (2 * span, d)
        }

    def apply(self, layer, hidden, mask, context):
        out = super().apply(layer, hidden, mask, context)
        encoder = self.base.encoder
        if encoder.conv is not None and layer is encoder.layer[0]:
            out = encoder.conv(
                hidden, out, mask
            )  # reads the embeddings: they are zero at padding, so trimming is safe
        return out

    def head(self, hidden, mask):
        return self.model.classifier(self.model.dropout(self.model.pooler(hidden)))


class ModernBert(Bert):
    """Two kinds of layers, global and local, each with its own mask and its own rotary positions;
    one norm after the last.
    """

    def layers(self):
        return self.base.layers

    def embed(self, input_ids, token_type_ids, mask):
        return self.base.embeddings(input_ids)

    def context(self, hidden, mask, padded):
        masks = {
            "full_attention": create_bidirectional_mask,
            "sliding_attention": create_bidirectional_sliding_window_mask,
        }
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]  # (1, tokens)
        return {
            kind: {
                "attention_mask": masks[kind](self.config, hidden, mask),
                "position_embeddings": self.base.rotary_emb(hidden, positions, kind),
            }
            for kind in set(self.config.layer_types)
        }

    def apply(self, layer, hidden, mask, context):
        return layer(hidden, **context[layer.attention_type])

    def head(self, hidden, mask):
        hidden = self.base.final_norm(hidden)
        if self.config.classifier_pooling == "mean":
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)  # (rows, d)
        else:
            pooled = hidden[:, 0]
        return self.model.classifier(self.model.drop(self.model.head(pooled)))


FAMILIES = {
    "albert": Albert,
    "bert": Bert,
    "deberta-v2": DebertaV2,
    "distilbert": DistilBert,
    "electra": Electra,
    "mobilebert": Bert,
    "modernbert": ModernBert,
    "mpnet": MPNet,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
# fields of a configuration that change nothing F computes: where it came from, how it was trained,
# and its precision, which is the weights' own
SILENT = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

# --------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What travels through the layers, for the rows that are still there."""

    # one entry a row; `keep` selects from these
    hidden: Tensor  # (rows, tokens, d)
    mask: Tensor  # (rows, tokens), 1 at tokens and 0 at padding
    # tokens of a row that is padded on the right or not at all; 0 where a row is padded otherwise
    # and needs all columns
    lengths: list
    seconds: list  # where the second text of a row begins; 0 where that is not known
    # for all rows together
    context: dict  # attention masks, relative positions: whatever the family's layers ask for
    layer: int = 0  # layers applied so far


def lengths_of(mask):
    """`State.lengths` of a mask (rows, tokens); in plain Python, which takes less time than one
    operation on tensors for a lone input.
    """
    rows = mask.tolist()
    return [n if all(row[:n]) else 0 for row, n in zip(rows, map(sum, rows))]


def commit_of(name: str, options: dict[str, Any]) -> str | None:
    """The commit of a Hub model that was just loaded, or None for a folder."""
    if Path(name).is_dir():
        return None
    cached = try_to_load_from_cache(
        name, "config.json", options.get("cache_dir"), options.get("revision")
    )
    return Path(cached).parent.name if isinstance(cached, str) else options.get("revision")


def padded(lengths, width):
    """Whether there is anything to mask."""
    return any(length != width for length in lengths)


class Backbone:
    """A frozen Hugging Face classifier as embeddings, l layers and a classifier.

    The model is put in evaluation mode, and is otherwise untouched. Attributes: `model`, `family`
    (a key of `FAMILIES`), `n_layers` (l), `hidden_size` (d) and `num_labels` (C).

    It drives one plain model in memory: a wrapper (DataParallel, PEFT, torch.compile) has to be
    taken off first.
    """

    def __init__(self, model):
        config = getattr(model, "config", None)
        self.family = getattr(config, "model_type", None)
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), ())
        if (
            self.family not in FAMILIES
            or not isinstance(model, classifier)
            or getattr(config, "is_decoder", False)
        ):
            raise TypeError(
                f"{type(model).__name__} is not a model that can be run layer by layer here: it has"
                " to be an encoder with a sequence classification head, of one of the families"
                f" {', '.join(FAMILIES)}"
            )
        if config.problem_type == "multi_label_classification":
            raise TypeError(
                f"{type(model).__name__} gives several labels to an input (problem_type"
                " multi_label_classification); agreement is about one label here"
            )
        self.revision: str | None = None  # the commit of a model that came from the Hub
        self.model = model.eval()  # F is fixed: no dropout
        self._modules = list(model.modules())
        self.to(None)
        self.glue = FAMILIES[self.family](model)
        self.layers = list(self.glue.layers())
        self.n_layers, self.hidden_size, self.num_labels = (
            len(self.layers),
            config.hidden_size,
            config.num_labels,
        )
        self.token_types = getattr(config, "type_vocab_size", 0) > 1  # else they are ignored

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "Backbone":
        """Load a fine-tuned classifier from a folder or from the Hub, in float32 unless a `dtype`
        is given.

        `kwargs` go to `AutoModelForSequenceClassification.from_pretrained`. Refuses a checkpoint
        without classifier weights: Hugging Face would draw them at random, and the guarantee would
        be agreement with a random model. Code that comes with a model is never run.
        """
        kwargs = {"dtype": torch.float32, "trust_remote_code": False} | kwargs
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name_or_path, output_loading_info=True, **kwargs
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            kind = FileNotFoundError if isinstance(error, OSError) else ValueError
            raise kind(
                f"no model could be loaded from {str(name_or_path)!r}. It is neither a folder with"
                " a whole saved model nor a model that the Hugging Face Hub could give now; without"
                f" a network, name a folder. Their message: {error}"
            ) from error
        backbone = cls(model)
        backbone.revision = commit_of(str(name_or_path), kwargs)
        if info["missing_keys"]:
            raise ValueError(
                f"{str(name_or_path)!r} is not fine-tuned for classification, it has no"
                f" {', '.join(sorted(info['missing_keys']))}. Fine-tune it first; to wrap an"
                " untrained model on purpose, call Backbone(model)"
            )
        return backbone

    @property
    def settings(self) -> dict[str, Any]:
        """What the configuration says about what F computes, as JSON would keep it."""
        fields = json.loads(json.dumps(self.model.config.to_dict(), default=str))
        return {name: value for name, value in fields.items() if name not in SILENT}

    @cached_property
    def weights(self) -> str:
        """A hash of architecture and weights."""
        found = hashlib.sha256(
            f"{self.family} {self.n_layers} {self.hidden_size} {self.num_labels}".encode()
        )
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(name.encode())
            found.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        return found.hexdigest()

    @property
    def fingerprint(self) -> str:
        """A hash of all that F computes with, weights, configuration and precision: what one model
        made is refused by another.
        """
        return digest({"weights": self.weights, "settings": self.settings, "dtype": self.precision})

    def to(self, device: Any) -> "Backbone":
        """Move F to a device; None leaves it where it is."""
        if device is not None:
            self.model.to(device)
        weights = self.model.parameters()
        self._weight = next(weight for weight in weights if weight.is_floating_point())
        return self

    def ready(self) -> "Backbone":
        """F as it is meant, whatever was done to the model since: without dropout."""
        if any(module.training for module in self._modules):
            self.model.eval()
        return self

    @property
    def device(self):
        """Where F is; the model's own `device` looks for a parameter each time."""
        return self._weight.device

    @property
    def dtype(self):
        return self._weight.dtype

    @property
    def precision(self) -> str:
        """The name of its dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def extra_padding(self):
        """Columns of padding that every row must end in, for its answer not to depend on the other
        rows of its batch.
        """
        return 1 if self.family == "mobilebert" else 0

    @property
    def max_tokens(self):
        """The longest input the position embeddings allow, padding that must follow it included."""
        config, longest = (
            self.model.config,
            getattr(self.model.config, "max_position_embeddings", None) or 512,
        )
        if self.family in ("roberta", "xlm-roberta", "mpnet"):
            longest -= config.pad_token_id + 1  # positions count from the padding id
        return longest - self.extra_padding

    def start(self, batch) -> State:
        """Embeddings and masks of a tokenised batch, before the first layer.

        batch: a mapping with `input_ids` (rows, tokens), and perhaps `attention_mask` (default: no
        padding), `token_type_ids` (ignored by models that know only one type) and `second` (rows,),
        where the second text of a pair begins. Tensors are moved to the model's device.
        """
        inputs = {
            name: batch[name]
            for name in ("input_ids", "attention_mask", "token_type_ids")
            if batch.get(name) is not None
        }
        shape = inputs["input_ids"].shape
        if len(shape) != 2 or any(value.shape != shape for value in inputs.values()):
            raise ValueError(
                "start wants tensors of one shape (rows, tokens), got"
                f" { {name: tuple(value.shape) for name, value in inputs.items()} }"
            )
        if "attention_mask" in inputs:
            # DeBERTa subtracts it, so it must not be bool
            inputs["attention_mask"] = inputs["attention_mask"].long()
        lengths = (
            lengths_of(inputs["attention_mask"])
            if "attention_mask" in inputs
            else [shape[1]] * shape[0]
        )
        device = self.device
        inputs = {
            name: value if value.device == device else value.to(device)
            for name, value in inputs.items()
        }
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        hidden = self.glue.embed(
            ids, inputs.get("token_type_ids") if self.token_types else None, mask
        )  # (rows, tokens, d)
        second = batch.get("second")
        seconds = [0] * shape[0] if second is None else second.tolist()
        context = self.glue.context(hidden, mask, padded(lengths, shape[1]))
        return State(hidden, mask, lengths, seconds, context)

    def step(self, state, k) -> State:
        """Apply layer k, in 1..l. Layers come in order: the state knows how many it has seen."""
        if k != state.layer + 1 or k > self.n_layers:
            raise ValueError(f"layer {k} cannot follow layer {state.layer} of {self.n_layers}")
        hidden = state.hidden
        # Hugging Face's layers fail on an empty batch; a loop in which every row has exited need
        # not
        if state.lengths:
            hidden = self.glue.apply(self.layers[k - 1], hidden, state.mask, state.context)
        return State(hidden, state.mask, state.lengths, state.seconds, state.context, k)

    def cls(self, state) -> Tensor:
        """h_[CLS] after the current layer (Section 3.1), (rows, d): what the early heads read.

        As everywhere in transformers this is position 0, also where that is padding: pad on the
        right. For ModernBERT it is the residual stream, before the final norm.
        """
        return state.hidden.select(1, 0)

    def mean(self, state) -> Tensor:
        """The mean of the hidden states over a row's tokens, (rows, d)."""
        if not padded(state.lengths, state.mask.shape[1]):
            return state.hidden.mean(1)
        weights = state.mask.to(state.hidden.dtype)[:, None]  # (rows, 1, tokens)
        return (weights @ state.hidden)[:, 0] / weights.sum(-1)

    def pair(self, state) -> Tensor:
        """How the two texts of a row differ, (rows, 2d): |a - b| and a·b, coordinate by coordinate,
        of the means a and b over the tokens before and from where the second text begins.
        """
        if not all(state.seconds) or not all(state.lengths):
            raise ValueError(
                "these heads read pairs of texts: `second` says where the second begins"
            )
        hidden = state.hidden
        place = torch.arange(hidden.shape[1], device=hidden.device)  # (tokens,)
        ends = torch.tensor([state.seconds, state.lengths], device=hidden.device)[..., None]
        before, within = place < ends  # (rows, tokens) each
        weights = torch.stack([before, within & ~before], 1).to(hidden.dtype)  # (rows, 2, tokens)
        means = (weights @ hidden) / weights.sum(-1, keepdim=True)
        a, b = means.unbind(1)
        return torch.cat([(a - b).abs(), a * b], -1)

    def read(self, state, reads) -> Tensor:
        """What heads read after a layer, (rows, width): see cats.model.exits.READS."""
        return vectors(reads, *(getattr(self, name)(state) for name in reads.split("+")))

    def finish(self, state) -> Tensor:
        """Logits of F itself, (rows, C), after layer l: its own pooler, norm and classifier."""
        if state.layer != self.n_layers:
            raise ValueError(
                f"the classifier of F comes after layer {self.n_layers}, not after layer"
                f" {state.layer}"
            )
        return self.glue.head(state.hidden, state.mask)

    def keep(self, state, rows, trim=True) -> State:
        """Only these rows, in this order: row numbers, as a list or a LongTensor, or a bool tensor
        (rows,). It uses the old state up.

        trim: also cut the columns at the end which are padding in every row that is left. No token
        ever attends to them, so this changes nothing but the time. Only done for right padding,
        where every row begins with a token: a [CLS] that is itself padding may have nothing to
        attend to, and then attends to all columns alike.
        """
        numbers = (
            rows
            if isinstance(rows, list)
            else rows.nonzero().flatten().tolist()
            if rows.dtype == torch.bool
            else rows.tolist()
        )
        lengths, width = [state.lengths[row] for row in numbers], state.mask.shape[1]
        if trim and lengths and all(lengths):
            width = max(lengths)
        hidden, mask, n = state.hidden, state.mask, len(numbers)
        select = lambda tensor: tensor.index_select(
            0, torch.tensor(numbers, dtype=torch.long, device=tensor.device)
        )
        moves = [(to, row) for to, row in enumerate(numbers) if to != row]
        if width == hidden.shape[1] and 2 * len(moves) <= n and all(row >= n for _, row in moves):
            # most rows are where they should be: rows from the end fill the gaps
            for to, row in moves:
                hidden[to] = hidden[row]
            hidden = hidden[:n]
        else:
            hidden = select(hidden[:, :width])
        if padded(lengths, width):
            mask = select(mask[:, :width])
            context = self.glue.fewer(state.context, select, hidden, mask)
        else:  # 1 everywhere
            mask = select(mask[:, :width]) if padded(state.lengths, mask.shape[1]) else mask[:n]
            context = self.glue.context(hidden, mask, False)
        seconds = [state.seconds[row] for row in numbers]
        return State(hidden, mask, lengths, seconds, context, state.layer)

    def rest(self, state) -> State:
        """A state that is going to wait: it lets go of the memory of rows that have left."""
        return state._replace(hidden=state.hidden.clone())

    def join(self, first, second) -> State:
        """The rows of two states of the same layer as one."""
        width = max(first.mask.shape[1], second.mask.shape[1])
        pad = lambda tensor, *rest: (
            tensor
            if tensor.shape[1] == width
            else nn.functional.pad(tensor, (*rest, 0, width - tensor.shape[1]))
        )
        hidden = torch.cat([pad(state.hidden, 0, 0) for state in (first, second)])
        mask = torch.cat([pad(state.mask) for state in (first, second)])
        lengths = first.lengths + second.lengths
        context = self.glue.context(hidden, mask, padded(lengths, width))
        return State(hidden, mask, lengths, first.seconds + second.seconds, context, first.layer)

    @torch.no_grad()  # and not inference_mode: heads are trained on these
    def states(self, batch) -> dict[str, Tensor]:
        """All that training and calibration need of F: `cls` and `mean` after every layer (rows, l,
        d), for pairs of texts `pair` (rows, l, 2d), and `logits` of F (rows, C).
        """
        state = self.start(batch)
        found: dict[str, list] = {"cls": [], "mean": []}
        if state.seconds and all(state.seconds):
            found["pair"] = []
        for k in range(1, self.n_layers + 1):
            state = self.step(state, k)
            for name, values in found.items():
                # a view would keep all tokens of all layers
                values.append(getattr(self, name)(state).clone())
        layers = {name: torch.stack(values, 1) for name, values in found.items()}
        return layers | {"logits": self.finish(state)}
