"""The full model F, one layer at a time (Section 3 of the paper).

A fine-tuned Hugging Face classifier is driven from outside, with Hugging Face's own modules:
embeddings, then l layers, then its own classifier. Between two layers the caller may read the [CLS]
vectors, and let the rows that have exited leave the batch.

    backbone = Backbone.from_pretrained("path/to/a-fine-tuned-albert")
    state = backbone.start(tokenizer(texts, padding=True, return_tensors="pt"))
    for k in range(1, backbone.n_layers):            # layers are 1-based
        state = backbone.step(state, k)
        logits = heads[k](backbone.cls(state))        # F_k(x), (rows, C)
        state = backbone.keep(state, ~exits(logits))  # the rows that have not exited go on, in a
        smaller batch
    state = backbone.step(state, backbone.n_layers)
    logits = backbone.finish(state)                  # F_l = F

What differs between one family of encoders and the next is in `cats.model.families`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from operator import attrgetter
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

from cats._io import digest
from cats.model.families import FAMILIES

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
    # (rows, 2 or 4, tokens), of a row's tokens in what heads read, see `reading`; None where nobody
    # reads more than [CLS]
    weights: Tensor | None
    # for all rows together
    context: dict  # attention masks, relative positions: whatever the family's layers ask for
    layer: int = 0  # layers applied so far


def lengths_of(mask: Tensor) -> list[int]:
    """`State.lengths` of a mask (rows, tokens); in plain Python, which takes less time than one
    operation on tensors for a lone input.
    """
    rows = mask.tolist()
    return [n if all(row[:n]) else 0 for row, n in zip(rows, map(sum, rows))]


def differing(sums: Tensor) -> Tensor:
    """How the two texts of a row differ, (..., 2d): |a - b| and a·b, coordinate by coordinate, of
    the means a and b over the two texts, of `sums` (..., 4, d).
    """
    if sums.shape[-2] != 4:
        raise ValueError("these heads read pairs of texts: `second` says where the second begins")
    a, b = sums[..., 2, :], sums[..., 3, :]
    return torch.cat([(a - b).abs(), a * b], -1)


def reading(mask: Tensor, second: Tensor | None = None) -> Tensor:
    """The weights of a row's tokens in what heads read, (rows, 2, tokens): [CLS] alone, and the
    mean over all tokens. Where `second` (rows,) says where the second text begins, (rows, 4,
    tokens): also the means over the first text and over the second.
    """
    rows, tokens = mask.shape
    weights = torch.zeros(rows, 2 if second is None else 4, tokens, device=mask.device)
    weights[:, 0, 0] = 1
    weights[:, 1] = mask
    if second is not None:
        if not all(second.tolist()):
            raise ValueError("`second` must say of every row where its second text begins, not 0")
        after = torch.arange(tokens, device=mask.device) >= second.to(mask.device)[:, None]
        weights[:, 2], weights[:, 3] = mask * ~after, mask * after
    weights /= weights.sum(-1, keepdim=True)
    return weights


@cache
def reading_all(tokens: int, device: torch.device) -> Tensor:
    """`reading` of a text without padding, (1, 2, tokens): made once, as it takes as long as half
    the scoring after a layer.
    """
    return reading(torch.ones(1, tokens, device=device))


def commit_of(name: str, options: dict[str, Any]) -> str | None:
    """The commit of a Hub model that was just loaded, or None for a folder."""
    if Path(name).is_dir():
        return None
    cached = try_to_load_from_cache(
        name, "config.json", options.get("cache_dir"), options.get("revision")
    )
    return Path(cached).parent.name if isinstance(cached, str) else options.get("revision")


def padded(lengths: Sequence[int], width: int) -> bool:
    """Whether there is anything to mask."""
    return any(length != width for length in lengths)


class Backbone:
    """A frozen Hugging Face classifier as embeddings, l layers and a classifier.

    The model is put in evaluation mode, and is otherwise untouched. Attributes: `model`, `family`
    (a key of `FAMILIES`), `encoder` (the model as its family drives it), `n_layers` (l),
    `hidden_size` (d) and `num_labels` (C).

    It drives one plain model in memory: a wrapper (DataParallel, PEFT, torch.compile) has to be
    taken off first.
    """

    # batches are padded to a multiple of so many tokens, as far as positions reach: see
    # cats.model.bodies
    tokens_together = 1

    def __init__(self, model: Any) -> None:
        config: Any = getattr(model, "config", None)
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
        self.encoder = FAMILIES[self.family](model)
        self.layers = list(self.encoder.layers())
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
        if any(map(attrgetter("training"), self._modules)):
            self.model.eval()
        return self

    @property
    def device(self) -> torch.device:
        """Where F is; the model's own `device` looks for a parameter each time."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def precision(self) -> str:
        """The name of its dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def extra_padding(self) -> int:
        """Columns of padding that every row must end in: see cats.model.families."""
        return self.encoder.extra_padding

    @property
    def max_tokens(self) -> int:
        """The longest input the position embeddings allow."""
        return self.encoder.max_tokens

    def start(self, batch: Mapping[str, Tensor], sums: bool = True) -> State:
        """Embeddings and masks of a tokenised batch, before the first layer.

        batch: a mapping with `input_ids` (rows, tokens), and perhaps `attention_mask` (default: no
        padding), `token_type_ids` (ignored by models that know only one type) and `second` (rows,),
        where the second text of a pair begins. Tensors are moved to the model's device.
        sums: whether `sums` of tokens will be asked for; [CLS] and F itself need none.
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
        width = self._width(shape[1])
        if width > shape[1]:
            inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
            padding = {"input_ids": self.model.config.pad_token_id or 0}
            inputs = {
                name: nn.functional.pad(value, (0, width - shape[1]), value=padding.get(name, 0))
                for name, value in inputs.items()
            }
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
        hidden = self.encoder.embed(
            ids, inputs.get("token_type_ids") if self.token_types else None, mask
        )  # (rows, tokens, d)
        context = self.encoder.context(hidden, mask, padded(lengths, width))
        weights = None
        if sums:
            plain = batch.get("second") is None and not padded(lengths, width)
            weights = (
                reading_all(width, device).expand(shape[0], -1, -1)
                if plain
                else reading(mask, batch.get("second"))
            )
        return State(hidden, mask, lengths, weights, context)

    def _width(self, tokens: int) -> int:
        """Columns of a batch whose longest row has so many tokens."""
        whole = -(-tokens // self.tokens_together) * self.tokens_together
        return max(tokens, min(whole, self.max_tokens + self.extra_padding))

    def step(self, state: State, k: int) -> State:
        """Apply layer k, in 1..l. Layers come in order: the state knows how many it has seen."""
        if k != state.layer + 1 or k > self.n_layers:
            raise ValueError(f"layer {k} cannot follow layer {state.layer} of {self.n_layers}")
        hidden = state.hidden
        # Hugging Face's layers fail on an empty batch; a loop in which every row has exited need
        # not
        if state.lengths:
            hidden = self.encoder.apply(self.layers[k - 1], hidden, state.mask, state.context)
        return state._replace(hidden=hidden, layer=k)

    def cls(self, state: State) -> Tensor:
        """h_[CLS] after the current layer (Section 3.1), (rows, d): what the early heads read.

        As everywhere in transformers this is position 0, also where that is padding: pad on the
        right. For ModernBERT it is the residual stream, before the final norm.
        """
        return state.hidden.select(1, 0)

    def sums(self, state: State, which: slice = slice(None)) -> Tensor:
        """Weighted sums of a row's tokens, (rows, 2 or 4, d), in float32: see `reading`; or `which`
        of them. One product, which takes a quarter of the time of [CLS], a mean and joining them.
        """
        if state.weights is None:
            raise ValueError("this state was started without sums: start(batch, sums=True)")
        hidden, device = state.hidden.float(), state.hidden.device.type
        # the context takes time, so only where something rounds
        rounds = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if rounds else nullcontext():
            return torch.bmm(state.weights[:, which], hidden)

    def read(self, state: State, reads: str) -> Tensor:
        """What heads read after a layer, (rows, width): see cats.model.exits.READS."""
        if reads == "cls":
            return self.cls(state)
        if reads == "mean":
            return self.sums(state, slice(1, 2))[:, 0]
        sums = self.sums(state)
        if reads == "cls+mean" and sums.shape[1] == 2:
            return sums.flatten(1)
        found = sums[:, :2].flatten(1) if reads.startswith("cls") else sums[:, 1]
        return torch.cat([found, differing(sums)], -1) if "pair" in reads else found

    def finish(self, state: State) -> Tensor:
        """Logits of F itself, (rows, C), after layer l: its own pooler, norm and classifier."""
        if state.layer != self.n_layers:
            raise ValueError(
                f"the classifier of F comes after layer {self.n_layers}, not after layer"
                f" {state.layer}"
            )
        return self.encoder.classify(state.hidden, state.mask)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits of F, (rows, C), of a tokenised batch: all layers, nobody leaves."""
        state = self.start(batch, sums=False)
        for k in range(1, self.n_layers + 1):
            state = self.step(state, k)
        return self.finish(state)

    def keep(self, state: State, rows: list[int] | Tensor, trim: bool = True) -> State:
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
            width = min(width, self._width(max(lengths)))
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
            context = self.encoder.context_of(state.context, select, hidden, mask)
        else:  # 1 everywhere
            mask = select(mask[:, :width]) if padded(state.lengths, mask.shape[1]) else mask[:n]
            context = self.encoder.context(hidden, mask, False)
        weights = None if state.weights is None else select(state.weights[..., :width])
        return State(hidden, mask, lengths, weights, context, state.layer)

    def compact(self, state: State) -> State:
        """A state that is going to wait: it lets go of the memory of rows that have left."""
        return state._replace(hidden=state.hidden.clone())

    def join(self, first: State, second: State) -> State:
        """The rows of two states of the same layer as one."""
        width = max(first.mask.shape[1], second.mask.shape[1])
        pad = lambda tensor, *inner: (
            tensor
            if tensor.shape[1] == width
            else nn.functional.pad(tensor, (*inner, 0, width - tensor.shape[1]))
        )
        hidden = torch.cat([pad(state.hidden, 0, 0) for state in (first, second)])
        mask = torch.cat([pad(state.mask) for state in (first, second)])
        lengths = first.lengths + second.lengths
        context = self.encoder.context(hidden, mask, padded(lengths, width))
        weights = None
        if first.weights is not None and second.weights is not None:
            parts = [one.transpose(1, 2) for one in (first.weights, second.weights)]
            weights = torch.cat([pad(part, 0, 0) for part in parts]).transpose(1, 2)
        return State(hidden, mask, lengths, weights, context, first.layer)

    @torch.no_grad()  # and not inference_mode: heads are trained on these
    def states(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that training and calibration need of F: `cls` and `mean` after every layer (rows, l,
        d), for pairs of texts `pair` (rows, l, 2d), and `logits` of F (rows, C).
        """
        state = self.start(batch)
        layers = []
        for k in range(1, self.n_layers + 1):
            state = self.step(state, k)
            layers.append(self.sums(state))
        sums = torch.stack(layers, 1)  # (rows, l, 2 or 4, d)
        found = {"cls": sums[:, :, 0], "mean": sums[:, :, 1], "logits": self.finish(state)}
        return found if sums.shape[2] == 2 else found | {"pair": differing(sums)}
