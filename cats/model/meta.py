"""Meta classifiers M_1 … M_{l-1}: how likely is it that F_k(x) = F(x)? (Section 3.2, Table 1)

M_k is an MLP with 32 hidden units on the early hidden state φ(W_p h) and the features of Table 1.
All layers are trained together, as stacked matrices. With two labels and 24 layers it has 58
inputs: 58·32 + 32·2 = 1,920 multiply-accumulates.
"""

import math

import torch
from torch import nn
from torch.nn import functional as f

from cats.model.heads import early_outputs, stacked, train

FEATURES = ("hidden", "prediction", "history", "pmax", "pdiff")
UNITS = 32


def predicted(logits):
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
    return (
        (which[..., :1] == others).to(logits.dtype),
        confidence,
        torch.cat([confidence, confidence - top[..., 1:]], -1),
    )


def predicted_alone(logits):
    """`predicted` of one input, from a list of floats to three lists."""
    if len(logits) == 1:
        return logits, logits, []
    if len(logits) == 2:  # what follows, in a third of the time
        odds = math.exp(-abs(logits[1] - logits[0]))
        total = 1 + odds
        return [float(logits[1] > logits[0])], [1 / total], [1 / total, (1 - odds) / total]
    top = max(logits)
    odds = [math.exp(value - top) for value in logits]
    total, which = sum(odds), logits.index(top)
    odds.sort()
    return (
        [float(which == i) for i in range(1, len(logits))],
        [1 / total],
        [1 / total, (1 - odds[-2]) / total],
    )


def believed_alone(units, w_2, b_2):
    """The end of `Meta` for one input, from what its hidden units get, a list of floats, to P(F_k =
    F).
    """
    odds = b_2 + sum(
        weight * unit for weight, unit in zip(w_2, units) if not unit <= 0
    )  # NaN stays NaN, which exceeds no threshold
    return 1 / (1 + math.exp(min(-odds, 700.0)))


def inputs(said, hidden, past, drop=()):
    """Inputs of a meta classifier (..., D), from `predicted`, the early hidden state φ(W_p h) (...,
    d_e), and the past k-1 predictions (..., l-1): p_j(ŷ_j | x) for j < k, or the outputs; 0 from
    layer k on. Features in `drop` are left out.
    """
    prediction, _, margins = said
    parts = {
        "hidden": hidden,
        "prediction": prediction,
        "history": past,
        "pmax": margins[..., :1],
        "pdiff": margins[..., 1:],
    }
    return torch.cat([parts[name] for name in FEATURES if name not in drop], -1)


def features(logits, hidden, drop=()):
    """`inputs` for all layers at once: logits (rows, l-1, C), hidden (rows, l-1, d_e) to (rows,
    l-1, D).
    """
    said = predicted(logits)
    past = (
        said[1].transpose(1, 2).expand(-1, logits.shape[1], -1).tril(-1)
    )  # (rows, l-1, l-1): row k holds the layers before it
    return inputs(said, hidden, past, drop)


class Meta(nn.Module):
    """The l-1 meta classifiers of one model; `drop` names the features they do without."""

    def __init__(self, early, inputs, drop=(), units=UNITS):
        super().__init__()
        unknown = set(drop) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown features {sorted(unknown)}; there are {', '.join(FEATURES)}")
        self.early, self.inputs, self.drop, self.units = early, inputs, tuple(drop), units
        self.w_1, self.b_1 = stacked(early, inputs, units), nn.Parameter(torch.zeros(early, units))
        self.w_2, self.b_2 = stacked(early, units, 2), nn.Parameter(torch.zeros(early, 2))

    @property
    def shape(self):
        """The arguments that make an empty copy."""
        return {
            "early": self.early,
            "inputs": self.inputs,
            "drop": list(self.drop),
            "units": self.units,
        }

    def forward(self, x):
        """Features (l-1, rows, D) to log-odds of consistency (l-1, rows)."""
        out = torch.baddbmm(
            self.b_2[:, None], torch.relu(torch.baddbmm(self.b_1[:, None], x, self.w_1)), self.w_2
        )
        return out[..., 1] - out[..., 0]

    def layer(self, k):
        """The weights of M_k, counted from 1; the two outputs as one, their difference."""
        w_1, b_1, w_2, b_2 = (
            getattr(self, name)[k - 1].detach() for name in ("w_1", "b_1", "w_2", "b_2")
        )
        return {"w_1": w_1, "b_1": b_1, "w_2": w_2[:, 1] - w_2[:, 0], "b_2": b_2[1] - b_2[0]}

    def fold(self, mean, std):
        """Turn classifiers of (x - mean)/std into classifiers of x."""
        with torch.no_grad():
            self.b_1 -= torch.einsum("ld,lde->le", mean / std, self.w_1)
            self.w_1 /= std[..., None]
        return self


def arranged(w_1, drop, heads):
    """The weights w_1 of an M_k, trained without the features in `drop`, for the inputs of the
    runtime, (inputs, units).

    There what is remembered comes first, then what is new after a layer: history, hidden,
    prediction, pmax, pdiff. All of them are there; those that M_k does without have weights 0.
    """
    classes = heads.n_outputs
    sizes = {
        "hidden": heads.d_e,
        "prediction": max(1, classes - 1),
        "history": heads.early,
        "pmax": int(classes > 1),
        "pdiff": int(classes > 1),
    }
    trained = {name: sizes[name] for name in FEATURES if name not in drop}
    if len(w_1) != sum(trained.values()):
        raise ValueError(
            f"meta classifiers with {len(w_1)} inputs do not fit these heads, which give"
            f" {sum(trained.values())}"
        )
    parts = dict(zip(trained, w_1.split([*trained.values()])))
    order = sorted(FEATURES, key=lambda name: name != "history")
    return torch.cat([parts.get(name, w_1.new_zeros(sizes[name], w_1.shape[1])) for name in order])


def consistent(early, full, tau):
    """F_k(x) = F(x), for logits (rows, l-1, C) against (rows, C); for regression within tau."""
    if full.shape[1] == 1:
        return (early[..., 0] - full).abs() <= tau
    return early.argmax(-1) == full.argmax(-1, keepdim=True)


def train_meta(
    heads,
    states,
    *,
    tau,
    drop=(),
    epochs=None,
    batch_size=128,
    learning_rate=1e-3,
    seed=0,
    **options,
):
    """Meta classifiers by binary cross-entropy on F_k = F over D_meta, which needs no labels.
    Returns them and the losses.
    """
    torch.manual_seed(seed)

    def prepare(i):
        cls, full = states.read(i, "cls", "logits")
        logits, hidden = early_outputs(heads, cls)
        x = features(logits, hidden, drop=drop).transpose(0, 1)  # (l-1, rows, D)
        return x, consistent(logits, full, tau).T.float()

    chunks = [prepare(i)[0] for i in range(min(states.n_chunks, 20))]  # enough to standardise by
    mean = torch.cat(chunks, 1).mean(1)
    std = torch.cat(chunks, 1).std(1)
    std[std < 1e-3] = 1.0  # constant features, such as the history that layer 1 does not have
    meta = Meta(heads.early, mean.shape[1], drop)

    def loss(batch):
        x, target = batch
        x = (x - mean[:, None]) / std[:, None]
        return f.binary_cross_entropy_with_logits(meta(x), target, reduction="none").mean(1)

    losses = train(
        meta,
        states,
        prepare,
        loss,
        epochs=epochs,
        at_least=20,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        desc="meta classifiers",
        **options,
    )
    return meta.fold(mean, std).requires_grad_(False), losses


@torch.no_grad()
def score(heads, meta, cls):
    """Early logits with temperature (rows, l-1, C) and meta scores (rows, l-1) of [CLS] states
    (rows, l, d).
    """
    logits, hidden = early_outputs(heads, cls)
    x = features(logits, hidden, drop=meta.drop).transpose(0, 1)
    return logits, torch.sigmoid(meta(x)).T
