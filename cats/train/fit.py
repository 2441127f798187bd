"""Fitting what sits on F's layers, from extracted states: heads, temperatures, meta classifiers.

    heads, _ = fit_heads(tune, scale, n_outputs, recipe="distilled")    # no labels needed
    meta, _ = fit_meta(heads, states, recipe="distilled")               # nor here

A recipe says what heads learn and what they read. `paper` is the paper's (Sections 3.1 and 3.2,
Appendix B): labels, from [CLS]. `distilled` is ours: the promise is agreement with F, so heads
learn what F says, from [CLS] and the mean over tokens, and where an input is two texts also from
how their means differ. (F's softmax as the target does a little better where F is sure of itself
and much worse where it is not.) In a Run they learn from altered copies of the inputs too: what an
F of many epochs says of its own training inputs is the label.

The l-1 heads do not share anything, so training them together gives what training them one by one
would give, in seconds. Scales differ wildly between layers and models: what a head reads is
standardised per layer, and that is folded into W_p at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from tqdm.auto import tqdm

from cats._io import module_digest
from cats.model.exits import (
    D_E,
    READS,
    UNITS,
    Heads,
    Meta,
    early_outputs,
    features,
    vectors,
    widths,
)
from cats.stats.table import TAU, ScoreTable
from cats.train.states import Joined, States

TARGETS = ("labels", "prediction", "softmax")
UPDATES = 1000  # on a few thousand inputs five or twenty epochs would be too few
FEW_UPDATES = 300  # of meta classifiers that begin as p max's equal: with more they forget it


@dataclass(frozen=True)
class Recipe:
    """What early heads and meta classifiers are made of.

    targets  what heads learn: "labels" (F's prediction where there are none), F's "prediction" or
             F's "softmax"; for regression F's output in both cases
    reads    what heads read of a layer: "cls", "mean" or "cls+mean"
    pairs    where an input is two texts, heads also read how the means of the two differ
    history  heads also read the logits of earlier layers
    d_e      hidden units of a head
    units    hidden units of a meta classifier
    odds     meta classifiers begin as p max's equal: see cats.model.exits.Meta
    altered  in a Run, whose F was trained on the same inputs, heads and meta classifiers also learn
             from copies with this share of the words left out: F knows its own inputs too well
    """

    name: str
    targets: str = "labels"
    reads: str = "cls"
    pairs: bool = False
    history: bool = False
    d_e: int = D_E
    units: int = UNITS
    odds: bool = False
    altered: float = 0.0

    def __post_init__(self) -> None:
        for value, known in ((self.targets, TARGETS), (self.reads, READS)):
            if value not in known:
                raise ValueError(f"unknown {value!r} in a recipe; there are {', '.join(known)}")
        if self.altered and self.targets == "labels":
            raise ValueError("altered copies have no labels: heads that learn from F read them")
        if not 0 <= self.altered < 1:
            raise ValueError(f"altered is a share of words from 0 to below 1, got {self.altered}")


RECIPES = {
    "paper": Recipe("paper"),
    "distilled": Recipe(
        "distilled", targets="prediction", reads="cls+mean", pairs=True, odds=True, altered=0.15
    ),
}


def find_recipe(recipe: str | Recipe, **changes: Any) -> Recipe:
    """A recipe by name, or the recipe itself; with `changes` it gets a name that says them."""
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}; there are {', '.join(RECIPES)}")
        recipe = RECIPES[recipe]
    unknown = sorted(set(changes) - set(asdict(recipe)))
    if unknown:
        known = ", ".join(name for name in asdict(recipe) if name != "name")
        raise TypeError(f"a recipe has {known}, not {', '.join(unknown)}")
    changes = {name: value for name, value in changes.items() if value != getattr(recipe, name)}
    if changes and "name" not in changes:
        listed = " ".join(f"{name}={value}" for name, value in sorted(changes.items()))
        changes["name"] = f"{recipe.name} {listed}"
    return replace(recipe, **changes)


def reads_of(recipe: Recipe, states: States | Joined) -> str:
    """What heads of a recipe read of these inputs."""
    return f"{recipe.reads}+pair" if recipe.pairs and states.texts == 2 else recipe.reads


def read_chunk(states: States | Joined, i: int, reads: str) -> Tensor:
    """What heads read of chunk i, (rows, l, width)."""
    return vectors(reads, *states.read(i, *reads.split("+")))


def moments(states: States | Joined, reads: str = "cls") -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (l-1, width) of what early heads read, chunk by chunk."""
    total = squares = torch.zeros(())
    for i in range(states.n_chunks):
        x = read_chunk(states, i, reads)[:, :-1].double()
        total, squares = total + x.sum(0), squares + (x**2).sum(0)
    mean = total / len(states)
    std = (squares / len(states) - mean**2).clamp_min(0).sqrt()
    return mean.float(), std.clamp_min(1e-4 * std.mean() + 1e-12).float()


def train(
    module: nn.Module,
    states: States | Joined,
    prepare: Callable[[int], Sequence[Tensor]],
    loss: Callable[[Sequence[Tensor]], Tensor],
    *,
    epochs: int | None = None,
    at_least: int = 1,
    at_least_updates: int = UPDATES,
    batch_size: int,
    learning_rate: float,
    weight_decay: float = 0.01,
    seed: int = 0,
    desc: str = "training",
) -> Tensor:
    """AdamW over the chunks of extracted states, with a linear decay; one chunk in memory at a
    time.

    prepare  chunk number to a list of tensors, each with the rows in its dimension 1 (layers come
             first)
    loss     such a list, cut to a batch, to a loss per layer (l-1,), whose sum is minimised
    epochs   by default as many as make `at_least_updates`, and no fewer than `at_least`: small data
             needs more of them
    Returns the mean loss per layer of each epoch, (epochs, l-1).
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=weight_decay)
    an_epoch = sum(-(-len(states.rows(i)) // batch_size) for i in range(states.n_chunks))
    epochs = epochs or max(at_least, -(-at_least_updates // an_epoch))
    updates = epochs * an_epoch
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
    history, bar = [], tqdm(total=updates, unit="updates", desc=desc)
    for _ in range(epochs):
        seen = torch.zeros(())
        for i in torch.randperm(states.n_chunks, generator=generator).tolist():
            tensors = prepare(i)
            for batch in torch.randperm(tensors[0].shape[1], generator=generator).split(batch_size):
                losses = loss([tensor[:, batch] for tensor in tensors])
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
                decay.step()
                seen = seen + losses.detach() * len(batch)
                bar.update()
        history.append(seen / len(states))
    bar.close()
    return torch.stack(history)


def layer_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy to class numbers (l-1, rows) or to probabilities (l-1, rows, C), squared error
    to numbers where there is one output: (l-1, rows, C) to (l-1,).
    """
    if logits.shape[-1] == 1:
        return ((logits[..., 0] - targets) ** 2).mean(1)
    losses = f.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1), reduction="none")
    return losses.view(logits.shape[:2]).mean(1)


def targets_of(
    states: States | Joined, n_outputs: int, targets: str = "labels", labels: Any = None
) -> Tensor:
    """What heads learn, (rows,) or (rows, C): see Recipe."""
    if targets != "labels" or labels is None:
        logits = states.gather("logits")
        if n_outputs == 1:
            return logits[:, 0]
        return logits.softmax(1) if targets == "softmax" else logits.argmax(1)
    labels = torch.as_tensor(labels)
    if len(labels) != len(states) or not torch.isfinite(labels).all():
        raise ValueError(f"needs {len(states)} finite labels, one an input, got {len(labels)}")
    if n_outputs == 1:
        return labels.float()
    if (labels != labels.long()).any() or not 0 <= labels.min() <= labels.max() < n_outputs:
        raise ValueError(
            f"labels must be class numbers from 0 to {n_outputs - 1}, got {labels.min()} to"
            f" {labels.max()}"
        )
    return labels.long()


def fit_heads(
    tune: States | Joined,
    scale: States,
    n_outputs: int,
    labels: tuple = (None, None),
    *,
    recipe: str | Recipe = "distilled",
    seed: int = 0,
    **options: Any,
) -> tuple[Heads, Tensor]:
    """Early heads from the states of D_tune, their temperatures from D_scale; returns heads and
    losses. `labels` are those of the two parts, where the recipe reads them.
    """
    heads, losses = train_heads(tune, n_outputs, labels[0], recipe=recipe, seed=seed, **options)
    targets = find_recipe(recipe).targets
    return fit_temperatures(heads, scale, labels[1], targets=targets), losses


def train_heads(
    states: States | Joined,
    n_outputs: int,
    labels: Any = None,
    *,
    recipe: str | Recipe = "paper",
    epochs: int | None = None,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **options: Any,
) -> tuple[Heads, Tensor]:
    """Early heads from extracted states (D_tune), without temperatures; and the losses."""
    recipe = find_recipe(recipe)
    torch.manual_seed(seed)
    reads = reads_of(recipe, states)
    mean, std = moments(states, reads)
    d = mean.shape[1] // widths(reads)
    heads = Heads(len(mean), d, n_outputs, recipe.d_e, recipe.history, reads, recipe.name)
    targets = targets_of(states, n_outputs, recipe.targets, labels)

    def prepare(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = read_chunk(states, i, reads)[:, :-1].float()  # (rows, l-1, width)
        x = ((x - mean) / std).transpose(0, 1).contiguous()  # (l-1, rows, width)
        some = targets[states.rows(i)]
        return x, some.expand(len(x), *some.shape)

    if n_outputs == 1:  # start at the mean: squared error from zero would take epochs to get there
        heads.b_o.data += targets.mean()
    losses = train(
        heads,
        states,
        prepare,
        lambda batch: layer_losses(heads(batch[0])[0], batch[1]),
        epochs=epochs,
        at_least=5,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        desc="early heads",
        **options,
    )
    return heads.fold(mean, std).requires_grad_(False), losses


def fit_temperatures(
    heads: Heads,
    states: States,
    labels: Any = None,
    *,
    targets: str = "labels",
    steps: int = 100,
    learning_rate: float = 1e-3,
) -> Heads:
    """One temperature a layer, by Adam on D_scale's likelihood (Appendix B; Guo et al. 2017)."""
    if heads.n_outputs == 1:
        return heads  # regression has no softmax
    aims = targets_of(states, heads.n_outputs, targets, labels)
    logits = torch.empty(len(states), heads.early, heads.n_outputs)
    heads.temperature.fill_(1)
    for i in range(states.n_chunks):
        logits[states.rows(i)] = early_outputs(heads, read_chunk(states, i, heads.reads))[0]
    logits, temperature = logits.transpose(0, 1), nn.Parameter(torch.ones(heads.early))
    aims = aims.expand(heads.early, *aims.shape)
    optimizer = torch.optim.Adam([temperature], lr=learning_rate)
    for _ in tqdm(range(steps), desc="temperatures", unit="steps"):
        optimizer.zero_grad()
        layer_losses(logits / temperature[:, None, None], aims).sum().backward()
        optimizer.step()
    heads.temperature.copy_(temperature.detach())
    return heads


def early_table(heads: Heads, states: States, labels: Any = None) -> ScoreTable:
    """A ScoreTable of heads that have no meta classifiers yet: their scores are all 0."""
    logits = torch.empty(len(states), heads.early + 1, heads.n_outputs)
    for i in range(states.n_chunks):
        rows = torch.from_numpy(states.rows(i))
        logits[rows, :-1] = early_outputs(heads, read_chunk(states, i, heads.reads))[0]
        logits[rows, -1] = states.read(i, "logits")[0]
    return ScoreTable(logits.numpy(), np.zeros((len(states), heads.early)), labels)


def consistent(logits: Tensor, full: Tensor, tau: float) -> Tensor:
    """F_k(x) = F(x), for logits (rows, l-1, C) against (rows, C); for regression within tau."""
    if full.shape[1] == 1:
        return (logits[..., 0] - full).abs() <= tau
    return logits.argmax(-1) == full.argmax(-1, keepdim=True)


def fit_meta(
    heads: Heads,
    states: States | Joined,
    *,
    recipe: str | Recipe = "paper",
    tau: float = TAU,
    drop: Sequence[str] = (),
    epochs: int | None = None,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **options: Any,
) -> tuple[Meta, Tensor]:
    """Meta classifiers by binary cross-entropy on F_k = F over D_meta, which needs no labels.
    Returns them and the losses; features in `drop` are left out.
    """
    torch.manual_seed(seed)
    recipe = find_recipe(recipe)

    def prepare(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, full = read_chunk(states, i, heads.reads), states.read(i, "logits")[0]
        logits, hidden = early_outputs(heads, x)
        inputs = features(logits, hidden, recipe.odds).transpose(0, 1)  # (l-1, rows, D)
        return inputs, consistent(logits, full, tau).T.float()

    chunks = [prepare(i)[0] for i in range(min(states.n_chunks, 20))]  # enough to standardise by
    mean = torch.cat(chunks, 1).mean(1)
    std = torch.cat(chunks, 1).std(1)
    std[std < 1e-3] = 1.0  # constant features, such as the history that layer 1 does not have
    meta = Meta(
        heads.early,
        heads.d_e,
        heads.n_outputs,
        tuple(drop),
        recipe.units,
        heads.recipe,
        module_digest(heads),
        recipe.odds,
    )
    if meta.odds:
        with torch.no_grad():
            meta.w_2.zero_()
            meta.w_0.copy_(std[:, -1])  # of standardised log-odds: so it begins as the log-odds
            meta.b_2[:, 1] = mean[:, -1]

    def loss(batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, target = batch
        odds = meta((x - mean[:, None]) / std[:, None])
        return f.binary_cross_entropy_with_logits(odds, target, reduction="none").mean(1)

    losses = train(
        meta,
        states,
        prepare,
        loss,
        epochs=epochs,
        at_least=5 if meta.odds else 20,
        at_least_updates=FEW_UPDATES if meta.odds else UPDATES,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        desc="meta classifiers",
        **options,
    )
    return meta.fold(mean, std).requires_grad_(False), losses
