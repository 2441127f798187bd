"""Early predictors F_1 … F_{l-1} and their temperatures (Section 3.1, Appendix B), all layers at
once as stacked matrices.

A head is softmax(W_o tanh(W_p h)), with h the [CLS] vector after its layer and d_e = 32. The l-1
heads do not share anything, so training them together from extracted states gives what training
them one by one would give, in seconds. [CLS] scales differ wildly between layers and models: h is
standardised per layer, and that is folded into W_p at the end.
"""

import math

import torch
from torch import nn
from torch.nn import functional as f
from tqdm.auto import tqdm

D_E = 32
UPDATES = 1000  # on a few thousand inputs five or twenty epochs would be too few


def stacked(layers, inputs, outputs):
    """A weight (layers, inputs, outputs) drawn as nn.Linear would draw each layer's."""
    return nn.Parameter((torch.rand(layers, inputs, outputs) * 2 - 1) / math.sqrt(inputs))


class Heads(nn.Module):
    """The l-1 early heads of one model.

    history  append the logits of earlier layers to a head's input. The text does not say so, but
             the paper's count of 66,304 multiply-accumulates a head is reached only with it
             (averaged over Albert-xlarge's 23 early layers).
    """

    def __init__(self, early, d, n_outputs, d_e=D_E, history=False):
        super().__init__()
        self.early, self.d, self.n_outputs, self.d_e, self.history = (
            early,
            d,
            n_outputs,
            d_e,
            history,
        )
        self.w_p, self.b_p = stacked(early, d, d_e), nn.Parameter(torch.zeros(early, d_e))
        self.w_o, self.b_o = (
            stacked(early, d_e, n_outputs),
            nn.Parameter(torch.zeros(early, n_outputs)),
        )
        if history:
            self.w_h = nn.Parameter(
                torch.zeros(early, early * n_outputs, d_e)
            )  # row block j: the logits of layer j+1
        self.register_buffer("temperature", torch.ones(early))

    @property
    def shape(self):
        """The arguments that make an empty copy."""
        return {name: getattr(self, name) for name in ("early", "d", "n_outputs", "d_e", "history")}

    def forward(self, cls):
        """[CLS] (l-1, rows, d) to unscaled logits (l-1, rows, C) and the hidden states φ(W_p h)
        (l-1, rows, d_e).
        """
        projected = torch.baddbmm(self.b_p[:, None], cls, self.w_p)
        if not self.history:
            hidden = torch.tanh(projected)
            return torch.baddbmm(self.b_o[:, None], hidden, self.w_o), hidden
        logits, hidden = [], []
        for k in range(self.early):  # each head reads the logits of those before it
            layer_logits, layer_hidden = self._one(k, projected[k], logits)
            logits.append(layer_logits)
            hidden.append(layer_hidden)
        return torch.stack(logits), torch.stack(hidden)

    def _one(self, k, projected, past):
        if past:
            projected = projected + torch.cat(past, -1) @ self.w_h[k, : k * self.n_outputs]
        hidden = torch.tanh(projected)
        return hidden @ self.w_o[k] + self.b_o[k], hidden

    def layer(self, k):
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
            weights["w_h"] = (
                self.w_h[i, : i * self.n_outputs] * t[:i].repeat_interleave(self.n_outputs)[:, None]
            )
        return {name: weight.detach() for name, weight in weights.items()}

    def fold(self, mean, std):
        """Turn heads trained on (h - mean)/std into heads on h: inference pays nothing for the
        standardising.
        """
        with torch.no_grad():
            self.b_p -= torch.einsum("ld,lde->le", mean / std, self.w_p)
            self.w_p /= std[..., None]
        return self


def moments(states):
    """Mean and standard deviation (l-1, d) of the early [CLS] states, chunk by chunk."""
    total = squares = 0
    for i in range(states.n_chunks):
        cls = states.read(i, "cls")[0][:, :-1].double()
        total, squares = total + cls.sum(0), squares + (cls**2).sum(0)
    mean = total / len(states)
    std = (squares / len(states) - mean**2).clamp_min(0).sqrt()
    return mean.float(), std.clamp_min(1e-4 * std.mean() + 1e-12).float()


def train(
    module,
    states,
    prepare,
    loss,
    *,
    epochs=None,
    at_least=1,
    batch_size,
    learning_rate,
    weight_decay=0.01,
    seed=0,
    desc="training",
):
    """AdamW over the chunks of extracted states, with a linear decay; one chunk in memory at a
    time.

    prepare  chunk number to a list of tensors, each with the rows in its dimension 1 (layers come
             first)
    loss     such a list, cut to a batch, to a loss per layer (l-1,), whose sum is minimised
    epochs   by default as many as make UPDATES updates, and no fewer than `at_least`: small data
             needs more of them
    Returns the mean loss per layer of each epoch, (epochs, l-1).
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=weight_decay)
    an_epoch = sum(-(-len(states.rows(i)) // batch_size) for i in range(states.n_chunks))
    epochs = epochs or max(at_least, -(-UPDATES // an_epoch))
    updates = epochs * an_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, 1 - step / updates)
    )
    history, bar = [], tqdm(total=updates, unit="updates", desc=desc)
    for _ in range(epochs):
        seen = 0
        for i in torch.randperm(states.n_chunks, generator=generator).tolist():
            tensors = prepare(i)
            for batch in torch.randperm(tensors[0].shape[1], generator=generator).split(batch_size):
                losses = loss([tensor[:, batch] for tensor in tensors])
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
                schedule.step()
                seen = seen + losses.detach() * len(batch)
                bar.update()
        history.append(seen / len(states))
    bar.close()
    return torch.stack(history)


def layer_losses(logits, targets):
    """Cross-entropy, or squared error where the targets are floating point, per layer: (l-1, rows,
    C) to (l-1,).
    """
    if targets.is_floating_point():
        return ((logits[..., 0] - targets) ** 2).mean(1)
    losses = f.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def targets_of(states, n_outputs, labels=None):
    """Labels as tensors, numbers where there is one output and else classes, or F's own predictions
    where the data is unlabelled (Section 3.1).
    """
    if labels is None:
        logits = states.gather("logits")
        return logits[:, 0] if n_outputs == 1 else logits.argmax(1)
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


def train_heads(
    states,
    n_outputs,
    labels=None,
    *,
    history=False,
    epochs=None,
    batch_size=64,
    learning_rate=1e-3,
    seed=0,
    **options,
):
    """Early heads from extracted states (D_tune); without labels they learn F's predictions.
    Returns heads and losses.
    """
    torch.manual_seed(seed)
    mean, std = moments(states)
    heads = Heads(*mean.shape, n_outputs, history=history)
    targets = targets_of(states, n_outputs, labels)

    def prepare(i):
        cls = states.read(i, "cls")[0][:, :-1].float()  # (rows, l-1, d)
        cls = ((cls - mean) / std).transpose(0, 1).contiguous()  # (l-1, rows, d)
        return cls, targets[states.rows(i)].expand(len(cls), -1)

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


@torch.no_grad()
def early_outputs(heads, cls):
    """[CLS] (rows, l or l-1, d) to logits with temperature (rows, l-1, C) and hidden states (rows,
    l-1, d_e).
    """
    logits, hidden = heads(cls[:, : heads.early].float().transpose(0, 1))
    return (logits / heads.temperature[:, None, None]).transpose(0, 1), hidden.transpose(0, 1)


def fit_temperatures(heads, states, labels=None, *, steps=100, learning_rate=1e-3):
    """One temperature a layer, by Adam on D_scale's likelihood (Appendix B; Guo et al. 2017)."""
    targets = targets_of(states, heads.n_outputs, labels)
    if targets.is_floating_point():
        return heads  # regression has no softmax
    logits = torch.empty(len(states), heads.early, heads.n_outputs)
    heads.temperature.fill_(1)
    for i in range(states.n_chunks):
        logits[states.rows(i)] = early_outputs(heads, states.read(i, "cls")[0])[0]
    logits, temperature = logits.transpose(0, 1), nn.Parameter(torch.ones(heads.early))
    optimizer = torch.optim.Adam([temperature], lr=learning_rate)
    for _ in tqdm(range(steps), desc="temperatures", unit="steps"):
        optimizer.zero_grad()
        layer_losses(
            logits / temperature[:, None, None], targets.expand(heads.early, -1)
        ).sum().backward()
        optimizer.step()
    heads.temperature.copy_(temperature.detach())
    return heads
