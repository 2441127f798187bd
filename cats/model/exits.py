"""What sits on F's layers: early predictors F_1 … F_{l-1} and meta classifiers M_1 … M_{l-1}.

A head F_k is softmax(W_o tanh(W_p h)) with d_e = 32 hidden units (Section 3.1, Appendix B). What it
reads of its layer, h, is the [CLS] vector, as in the paper, or [CLS] and the mean over tokens, and
for two texts also how their means differ. M_k says how likely F_k(x) = F(x) is: an MLP with 32
hidden units on the early hidden state tanh(W_p h) and the features of Table 1 (Section 3.2). The
l-1 heads do not share anything, nor do the l-1 meta classifiers: here they are stacked matrices,
all layers at once. The runtime takes them apart again (`Heads.layer`, `Meta.layer`).

With two labels and 24 layers M_k has 58 inputs: 58·32 + 32·2 = 1,920 multiply-accumulates.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

READS = ("cls", "cls+mean", "cls+mean+pair", "mean", "mean+pair")
WIDTHS = {"cls": 1, "mean": 1, "pair": 2}  # in hidden sizes
# in the order of M_k's inputs; the last one is ours
FEATURES = ("history", "hidden", "prediction", "pmax", "pdiff", "odds")
D_E = 32
UNITS = 32


def stacked(layers: int, inputs: int, outputs: int) -> nn.Parameter:
    """A weight (layers, inputs, outputs) drawn as nn.Linear would draw each layer's."""
    return nn.Parameter((torch.rand(layers, inputs, outputs) * 2 - 1) / math.sqrt(inputs))


def restored(module: type, shape: dict, arrays: dict) -> Any:
    """A module of this shape with these numbers. What the shape asks for is compared with what is
    there before anything is made: a small file must not ask for gigabytes.
    """
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in module(**shape).state_dict().items()}
    found = {name: array.shape for name, array in arrays.items()}
    if wanted != found:
        raise ValueError(f"it should hold {wanted} and holds {found}")
    made = module(**shape)
    made.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return made


def widths(reads: str) -> int:
    """How many hidden sizes wide what heads read is."""
    return sum(WIDTHS[name] for name in reads.split("+"))


def vectors(reads: str, *parts: Tensor) -> Tensor:
    """What heads read, (..., width), from the parts that `reads` names, in that order."""
    return parts[0] if reads == "cls" else torch.cat(parts, -1)


class Heads(nn.Module):
    """The l-1 early heads of one model.

    d        hidden size of the model
    reads    "cls" (paper), "mean", "cls+mean" or, where inputs are two texts, the last two "+pair"
    history  append the logits of earlier layers to a head's input. The text does not say so, but
             the paper's count of 66,304 multiply-accumulates a head is reached only with it
             (averaged over Albert-xlarge's 23 early layers).
    recipe   the name of the recipe they were trained by
    """

    def __init__(
        self,
        early: int,
        d: int,
        n_outputs: int,
        d_e: int = D_E,
        history: bool = False,
        reads: str = "cls",
        recipe: str = "paper",
    ) -> None:
        super().__init__()
        if reads not in READS:
            raise ValueError(f"a head reads one of {', '.join(READS)}, not {reads!r}")
        self.early, self.d, self.n_outputs, self.d_e = early, d, n_outputs, d_e
        self.history, self.reads, self.recipe = history, reads, recipe
        self.w_p, self.b_p = stacked(early, self.width, d_e), nn.Parameter(torch.zeros(early, d_e))
        self.w_o = stacked(early, d_e, n_outputs)
        self.b_o = nn.Parameter(torch.zeros(early, n_outputs))
        if history:  # row block j: the logits of layer j+1
            self.w_h = nn.Parameter(torch.zeros(early, early * n_outputs, d_e))
        self.register_buffer("temperature", torch.ones(early))

    @classmethod
    def of(cls, shape: dict, arrays: dict) -> "Heads":
        """Heads from a file's shape and numbers."""
        return restored(cls, shape, arrays)

    @property
    def width(self) -> int:
        """The numbers a head reads of an input."""
        return self.d * widths(self.reads)

    @property
    def shape(self) -> dict:
        """The arguments that make an empty copy."""
        names = ("early", "d", "n_outputs", "d_e", "history", "reads", "recipe")
        return {name: getattr(self, name) for name in names}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is read (l-1, rows, width) to unscaled logits (l-1, rows, C) and hidden states
        tanh(W_p h) (l-1, rows, d_e).
        """
        projected = torch.baddbmm(self.b_p[:, None], x, self.w_p)
        if not self.history:
            hidden = torch.tanh(projected)
            return torch.baddbmm(self.b_o[:, None], hidden, self.w_o), hidden
        logits: list[Tensor] = []
        hiddens = []
        for k in range(self.early):  # each head reads the logits of those before it
            before = projected[k]
            if logits:
                before = before + torch.cat(logits, -1) @ self.w_h[k, : k * self.n_outputs]
            hiddens.append(torch.tanh(before))
            logits.append(hiddens[-1] @ self.w_o[k] + self.b_o[k])
        return torch.stack(logits), torch.stack(hiddens)

    def layer(self, k: int) -> dict[str, Tensor]:
        """The weights of head k, counted from 1, with temperatures folded in: what the runtime
        needs of it.
        """
        i, t = k - 1, self.temperature
        weights = {
            "w_p": self.w_p[i],
            "b_p": self.b_p[i],
            "w_o": self.w_o[i] / t[i],
            "b_o": self.b_o[i] / t[i],
        }
        if self.history:  # the logits it meets have been divided by their temperature
            scale = t[:i].repeat_interleave(self.n_outputs)[:, None]
            weights["w_h"] = self.w_h[i, : i * self.n_outputs] * scale
        return {name: weight.detach() for name, weight in weights.items()}

    def fold(self, mean: Tensor, std: Tensor) -> "Heads":
        """Turn heads trained on (h - mean)/std into heads on h: inference pays nothing for it."""
        with torch.no_grad():
            self.b_p -= torch.einsum("ld,lde->le", mean / std, self.w_p)
            self.w_p /= std[..., None]
        return self


def predicted(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer says, from its logits (..., C), each (..., size): prediction, confidence and
    margins.

    prediction  ŷ_k: which class (one indicator fewer than classes), or the output itself for
                regression
    confidence  p_k(ŷ_k | x), or the output itself: what later layers remember of this one
    margins     pmax, which is the confidence, and pdiff, the distance to the second largest
                probability; nothing for regression
    """
    if logits.shape[-1] == 1:
        return logits, logits, logits[..., :0]
    top, which = logits.softmax(-1).topk(2, -1)
    others = torch.arange(1, logits.shape[-1], device=logits.device)
    confidence = top[..., :1]
    margins = torch.cat([confidence, confidence - top[..., 1:]], -1)
    return (which[..., :1] == others).to(logits.dtype), confidence, margins


def log_odds(logits: Tensor) -> Tensor:
    """log p/(1-p) of the largest probability, (..., C) to (..., 1): the order of p max, on a scale
    that does not end at 1.
    """
    top, which = logits.topk(1, -1)
    return top - logits.scatter(-1, which, -torch.inf).logsumexp(-1, keepdim=True)


def features(logits: Tensor, hidden: Tensor, odds: bool = False) -> Tensor:
    """Inputs of all meta classifiers: logits (rows, l-1, C), hidden (rows, l-1, d_e) to (rows, l-1,
    D), in the order of FEATURES.

    The history of layer k is p_j(ŷ_j | x) for j < k, or the outputs; 0 from layer k on.
    """
    prediction, confidence, margins = predicted(logits)
    past = confidence.transpose(1, 2).expand(-1, logits.shape[1], -1).tril(-1)  # (rows, l-1, l-1)
    parts = [past, hidden, prediction, margins]
    if odds and logits.shape[-1] > 1:
        parts.append(log_odds(logits))
    return torch.cat(parts, -1)


def sizes(early: int, d_e: int, n_outputs: int, odds: bool = False) -> dict[str, int]:
    """How many inputs of M_k each feature takes."""
    margin = int(n_outputs > 1)
    return {
        "history": early,
        "hidden": d_e,
        "prediction": max(1, n_outputs - 1),
        "pmax": margin,
        "pdiff": margin,
        "odds": margin if odds else 0,
    }


class Meta(nn.Module):
    """The l-1 meta classifiers that belong to some heads.

    drop    features they do without: a mask, all inputs stay where they are
    recipe  the name of the recipe they were trained by, the heads' own
    heads   digest of the heads they were trained on; None where that is not known
    odds    they also read the log-odds of p max, and begin as its equal: what the MLP says is added
            to them. (With few inputs to learn from, an MLP by itself may be worse than p max.)
    """

    def __init__(
        self,
        early: int,
        d_e: int,
        n_outputs: int,
        drop: tuple[str, ...] = (),
        units: int = UNITS,
        recipe: str = "paper",
        heads: str | None = None,
        odds: bool = False,
    ) -> None:
        super().__init__()
        unknown = set(drop) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown features {sorted(unknown)}; there are {', '.join(FEATURES)}")
        self.early, self.d_e, self.n_outputs = early, d_e, n_outputs
        self.drop, self.units, self.recipe, self.heads = tuple(drop), units, recipe, heads
        lengths = sizes(early, d_e, n_outputs, odds)
        self.odds = bool(lengths["odds"])
        self.inputs = sum(lengths.values())
        self.w_1 = stacked(early, self.inputs, units)
        self.b_1 = nn.Parameter(torch.zeros(early, units))
        self.w_2, self.b_2 = stacked(early, units, 2), nn.Parameter(torch.zeros(early, 2))
        if self.odds:
            self.w_0 = nn.Parameter(torch.ones(early))
        kept = [torch.full((size,), float(name not in drop)) for name, size in lengths.items()]
        self.register_buffer("mask", torch.cat(kept)[:, None], persistent=False)

    @property
    def shape(self) -> dict:
        """The arguments that make an empty copy."""
        names = ("early", "d_e", "n_outputs", "units", "recipe", "heads", "odds")
        return {name: getattr(self, name) for name in names} | {"drop": list(self.drop)}

    @classmethod
    def of(cls, shape: dict, arrays: dict) -> "Meta":
        """Meta classifiers from a file's shape and numbers."""
        if "inputs" in shape:
            shape, arrays = rearranged(shape, arrays)
        return restored(cls, shape, arrays)

    def forward(self, x: Tensor) -> Tensor:
        """Features (l-1, rows, D) to log-odds of consistency (l-1, rows)."""
        units = torch.relu(torch.baddbmm(self.b_1[:, None], x, self.w_1 * self.mask))
        out = torch.baddbmm(self.b_2[:, None], units, self.w_2)
        odds = out[..., 1] - out[..., 0]
        return odds + self.w_0[:, None] * x[..., -1] if self.odds else odds

    def layer(self, k: int) -> dict[str, Tensor]:
        """The weights of M_k, counted from 1; the two outputs as one, their difference. Log-odds
        pass through two units more, x = relu(x) - relu(-x), and are added with the others.
        """
        i = k - 1
        w_1, b_1 = self.w_1[i] * self.mask, self.b_1[i]
        w_2, b_2 = self.w_2[i, :, 1] - self.w_2[i, :, 0], self.b_2[i, 1] - self.b_2[i, 0]
        if self.odds:
            through = torch.zeros(self.inputs, 2)
            through[-1] = torch.tensor([1.0, -1.0])
            w_1, b_1 = torch.cat([w_1, through], 1), torch.cat([b_1, torch.zeros(2)])
            w_2 = torch.cat([w_2, self.w_0[i] * through[-1]])
        weights = {"w_1": w_1, "b_1": b_1, "w_2": w_2, "b_2": b_2}
        return {name: weight.detach() for name, weight in weights.items()}

    def fold(self, mean: Tensor, std: Tensor) -> "Meta":
        """Turn classifiers of (x - mean)/std into classifiers of x."""
        with torch.no_grad():
            self.w_1 *= self.mask
            self.b_1 -= torch.einsum("ld,lde->le", mean / std, self.w_1)
            self.w_1 /= std[..., None]
            if self.odds:
                self.b_2[:, 1] -= self.w_0 * mean[:, -1] / std[:, -1]
                self.w_0 /= std[:, -1]
        return self


def rearranged(shape: dict, arrays: dict) -> tuple[dict, dict]:
    """Meta classifiers of the first file format in the order of today's inputs.

    There the inputs were hidden, prediction, history, pmax, pdiff, without those that were dropped.
    """
    early, drop, w_1 = shape["early"], shape["drop"], arrays["w_1"]
    order = ("hidden", "prediction", "history", "pmax", "pdiff")
    for n_outputs in range(1, 1 + w_1.shape[1]):
        lengths = sizes(early, D_E, n_outputs)
        kept = [name for name in order if name not in drop]
        if sum(lengths[name] for name in kept) == w_1.shape[1]:
            break
    else:
        raise ValueError(f"no number of classes gives {w_1.shape[1]} inputs")
    ends = np.cumsum([lengths[name] for name in kept])[:-1]
    parts = dict(zip(kept, np.split(w_1, ends, axis=1)))
    empty = {
        name: np.zeros((early, size, w_1.shape[2]), w_1.dtype) for name, size in lengths.items()
    }
    w_1 = np.concatenate([parts.get(name, empty[name]) for name in lengths], axis=1)
    new = {"early": early, "d_e": D_E, "n_outputs": n_outputs, "drop": drop}
    return new | {"units": shape["units"]}, arrays | {"w_1": w_1}


def check_pair(heads: Heads, meta: Meta, digest: str) -> None:
    """Refuse meta classifiers that were trained on other heads than these; `digest` is theirs."""
    if (heads.early, heads.d_e, heads.n_outputs) != (meta.early, meta.d_e, meta.n_outputs):
        raise ValueError(
            f"meta classifiers with {meta.inputs} inputs at {meta.early} layers do not fit these"
            f" heads of {heads.early} layers, {heads.d_e} hidden units and {heads.n_outputs}"
            " outputs"
        )
    if heads.recipe != meta.recipe:
        raise ValueError(
            f"heads of the recipe {heads.recipe!r} and meta classifiers of {meta.recipe!r} do not"
            " belong together: a meta classifier knows the mistakes of its own heads only"
        )
    if meta.heads not in (None, digest):
        raise ValueError(
            "these meta classifiers were trained on other heads: train them again on these"
        )


@torch.no_grad()
def early_outputs(heads: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is read (rows, l or l-1, width) to logits with temperature (rows, l-1, C) and hidden
    states (rows, l-1, d_e).
    """
    logits, hidden = heads(x[:, : heads.early].float().transpose(0, 1))
    return (logits / heads.temperature[:, None, None]).transpose(0, 1), hidden.transpose(0, 1)


@torch.no_grad()
def score(heads: Heads, meta: Meta, x: Tensor) -> tuple[Tensor, Tensor]:
    """Early logits with temperature (rows, l-1, C) and meta scores (rows, l-1) of what is read
    (rows, l, width).
    """
    logits, hidden = early_outputs(heads, x)
    return logits, torch.sigmoid(meta(features(logits, hidden, meta.odds).transpose(0, 1))).T
