"""From text to states, heads, meta classifiers and tables, on tiny real models: fast paths against
slow and obvious ones.
"""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats import CAT, exit_layers
from cats._io import load_module, module_arrays, module_digest, save_arrays, save_module
from cats.model.backbone import Backbone
from cats.model.exits import (
    FEATURES,
    Heads,
    Meta,
    check_pair,
    features,
    log_odds,
    score,
    sizes,
    vectors,
)
from cats.paper.store import open_run
from cats.train import demo, tasks
from cats.train.finetune import (
    fine_tune,
    fold_classifier,
    last_checkpoint,
    load_fine_tuned,
    new_model,
    standardise_classifier,
    tokenizer_of,
    warn_if_diverged,
    zero_classifier,
)
from cats.train.fit import (
    UPDATES,
    Recipe,
    consistent,
    find_recipe,
    fit_heads,
    fit_meta,
    fit_temperatures,
    moments,
    train_heads,
)
from cats.train.run import Run
from cats.train.states import States, by_length, collate, extract, tokenise, tokenizer_hash

SIZES = {"train": 120, "validation": 40, "test": 40}
QUICK = dict(
    model="demo",
    limit=SIZES,
    training={"epochs": 1},
    head_options={"epochs": 2},
    meta_options={"epochs": 2},
)


@pytest.fixture(scope="module")
def setting():
    """An untrained demo model, its tokenizer, and a few demo inputs."""
    torch.manual_seed(0)
    task = tasks.find("sentiment")
    data = tasks.load(task, limit=SIZES)
    return Backbone(new_model("demo", task)), tokenizer_of("demo"), data["validation"], task


def write_states(folder, n=50, layers=4, d=6, classes=3, chunk=16, seed=0):
    """A folder of random states as `extract` would leave it, layers on very different scales."""
    torch.manual_seed(seed)
    cls = torch.randn(n, layers, d) * torch.tensor([0.01, 1, 100, 1][:layers])[:, None] + 3
    mean, logits = cls.flip(-1) * 2 - 1, torch.randn(n, classes)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"model": "x", "n": n, "chunk": chunk, "seed": 0}))
    states = States(folder)
    for i in range(states.n_chunks):
        rows = states.rows(i)
        arrays = {"cls": cls[rows], "mean": mean[rows], "logits": logits[rows]}
        save_arrays(states.path(i), {name: value.numpy() for name, value in arrays.items()}, {})
    return states, cls, logits


# --- heads ---


@pytest.mark.parametrize("history", [False, True])
def test_stacked_heads_equal_one_linear_head_a_layer(history):
    torch.manual_seed(0)
    heads, cls = Heads(5, 7, 3, history=history), torch.randn(5, 4, 7)
    if history:
        nn.init.normal_(heads.w_h)
    logits, hidden = heads(cls)
    past = []
    for k in range(1, 6):
        w_p, w_o = nn.Linear(7 + 3 * len(past), 32), nn.Linear(32, 3)
        inputs = [heads.w_p[k - 1]] + ([heads.w_h[k - 1, : 3 * len(past)]] if history else [])
        w_p.weight.data = torch.cat(inputs).T if history else inputs[0].T
        w_p.bias.data, w_o.weight.data, w_o.bias.data = (
            heads.b_p[k - 1],
            heads.w_o[k - 1].T,
            heads.b_o[k - 1],
        )
        phi = torch.tanh(w_p(torch.cat([cls[k - 1], *(past if history else [])], -1)))
        torch.testing.assert_close(hidden[k - 1], phi)
        torch.testing.assert_close(logits[k - 1], w_o(phi))
        if history:
            past.append(w_o(phi))


def test_multiply_accumulates_of_the_paper():
    """66,304 for an early head of Albert-xlarge with two labels (with history, on average), 1,920
    for a meta classifier.
    """
    d, early, classes = 2048, 23, 2
    with_history = [(d + classes * (k - 1)) * 32 + 32 * classes for k in range(1, early + 1)]
    assert np.mean(with_history) == 66_304
    shape = features(torch.zeros(1, early, classes), torch.zeros(1, early, 32)).shape[-1]
    assert shape == 58 and shape * 32 + 32 * 2 == 1920


def test_folding_changes_nothing():
    torch.manual_seed(0)
    heads, meta, x = Heads(3, 6, 2), Meta(3, 1, 1), torch.randn(3, 8, 5) * 40 + 7
    heads = Heads(3, 5, 2)
    mean, std = x.mean(1), x.std(1)
    scaled = (x - mean[:, None]) / std[:, None]
    before, before_meta = heads(scaled)[0].detach(), meta(scaled).detach()
    torch.testing.assert_close(heads.fold(mean, std)(x)[0], before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(meta.fold(mean, std)(x), before_meta, atol=1e-4, rtol=1e-4)


def test_training_together_equals_training_one_layer_at_a_time(tmp_path):
    """AdamW works on each weight alone and layers share none, so the stacked run must reproduce
    every single one.
    """
    states, cls, _ = write_states(tmp_path / "s")
    labels = np.random.default_rng(0).integers(3, size=50)
    heads, losses = train_heads(states, 3, labels, epochs=3, batch_size=8, seed=5)

    mean, std = cls[:, :-1].mean(0), cls[:, :-1].std(0, correction=0)
    torch.testing.assert_close(moments(states), (mean, std), atol=1e-4, rtol=1e-4)
    mean, std = moments(states)
    torch.manual_seed(5)
    fresh, updates = (
        Heads(3, 6, 3),
        3 * sum(-(-len(states.rows(i)) // 8) for i in range(states.n_chunks)),
    )
    for k in range(3):
        weights = [
            nn.Parameter(getattr(fresh, name)[k].clone()) for name in ("w_p", "b_p", "w_o", "b_o")
        ]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)
        generator, step, total = torch.Generator().manual_seed(5), 0, 0
        for _ in range(3):
            total = 0
            for i in torch.randperm(states.n_chunks, generator=generator).tolist():
                rows = states.rows(i)
                for batch in torch.randperm(len(rows), generator=generator).split(8):
                    h = (cls[rows[batch], k] - mean[k]) / std[k]
                    logits = torch.tanh(h @ weights[0] + weights[1]) @ weights[2] + weights[3]
                    loss = nn.functional.cross_entropy(logits, torch.tensor(labels[rows[batch]]))
                    optimizer.param_groups[0]["lr"] = 1e-3 * max(0, 1 - step / updates)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step, total = step + 1, total + loss.item() * len(batch)
        assert losses[-1, k].item() == pytest.approx(total / 50, rel=1e-4)
        h = cls[:, k]
        expected = (
            torch.tanh((h - mean[k]) / std[k] @ weights[0] + weights[1]) @ weights[2] + weights[3]
        )
        together = heads(cls[:, :-1].transpose(0, 1))[0][k]
        torch.testing.assert_close(together, expected.detach(), atol=1e-3, rtol=1e-3)


def test_small_data_gets_as_many_updates_as_large(tmp_path):
    """Epochs are counted only where they are asked for, or where they come to more."""
    states, _, logits = write_states(tmp_path / "s")
    labels = logits.argmax(1).numpy()
    an_epoch = sum(-(-len(states.rows(i)) // 8) for i in range(states.n_chunks))
    heads, losses = train_heads(states, 3, labels, batch_size=8)
    assert len(losses) == -(-UPDATES // an_epoch)
    assert len(train_heads(states, 3, labels, batch_size=8, epochs=2)[1]) == 2
    assert len(fit_meta(heads, states, tau=0.5, batch_size=8)[1]) == -(-UPDATES // an_epoch)


def test_unlabelled_heads_learn_what_f_says(tmp_path):
    states, _, logits = write_states(tmp_path / "s")
    said, _ = train_heads(states, 3, None, epochs=2)
    labelled, _ = train_heads(states, 3, logits.argmax(1).numpy(), epochs=2)
    torch.testing.assert_close(said.w_p, labelled.w_p)
    told = find_recipe("paper", targets="prediction")
    torch.testing.assert_close(train_heads(states, 3, recipe=told, epochs=2)[0].w_p, said.w_p)


def test_soft_targets_are_f_s_probabilities(tmp_path):
    """The loss of one update, by hand: cross-entropy to F's softmax, from [CLS] and mean."""
    states, cls, logits = write_states(tmp_path / "s", n=12, chunk=12)
    recipe = find_recipe("distilled", targets="softmax")
    heads, losses = train_heads(states, 3, recipe=recipe, epochs=1, batch_size=12, seed=3)
    torch.manual_seed(3)
    start = Heads(3, 6, 3, reads="cls+mean")
    mean, std = moments(states, "cls+mean")
    x = vectors("cls+mean", states.gather("cls"), states.gather("mean"))[:, :-1]
    log_p = start(((x - mean) / std).transpose(0, 1))[0].log_softmax(-1)
    expected = -(logits.softmax(1) * log_p).sum(-1).mean(1)
    torch.testing.assert_close(losses[0], expected.detach(), atol=1e-5, rtol=1e-5)
    assert (heads.reads, heads.width) == ("cls+mean", 12)
    assert heads.recipe == "distilled targets=softmax"


def test_a_recipe_that_is_changed_says_so():
    assert find_recipe("distilled", reads="cls").name == "distilled reads=cls"
    assert find_recipe("paper", reads="cls") == find_recipe("paper")
    for wrong in ({"targets": "gold"}, {"reads": "tokens"}):
        with pytest.raises(ValueError, match="there are"):
            find_recipe("paper", **wrong)
    with pytest.raises(ValueError, match="paper, distilled"):
        find_recipe("cheap")
    with pytest.raises(TypeError, match="a recipe has targets"):
        find_recipe("paper", colour=1)
    assert Recipe("mine", reads="cls+mean").units == 32


def test_heads_and_meta_classifiers_of_two_kinds_are_refused(tmp_path):
    states, cls, _ = write_states(tmp_path / "s")
    pairs = {}
    for name in ("paper", "distilled"):
        heads, _ = fit_heads(states, states, 3, recipe=name, epochs=1)
        pairs[name] = heads, fit_meta(heads, states, epochs=1)[0]
    (paper, its), (other, _) = pairs.values()
    check_pair(paper, its, module_digest(paper))
    with pytest.raises(ValueError, match="'distilled' and meta classifiers of 'paper'"):
        check_pair(other, its, module_digest(other))
    again, _ = fit_heads(states, states, 3, recipe="paper", epochs=1, seed=1)
    with pytest.raises(ValueError, match="trained on other heads"):
        check_pair(again, its, module_digest(again))
    with pytest.raises(ValueError, match="do not fit these heads"):
        check_pair(Heads(3, 6, 2), its, "")


def test_regression_heads_reduce_the_squared_error(tmp_path):
    states, cls, _ = write_states(tmp_path / "s", classes=1)
    labels = (cls[:, 1] @ torch.randn(6) + 2).numpy()
    heads, losses = train_heads(states, 1, labels, epochs=40, batch_size=8, learning_rate=1e-2)
    assert losses[-1, 1] < 0.3 * losses[0, 1] and heads.n_outputs == 1
    assert (fit_temperatures(heads, states, labels).temperature == 1).all()


def test_temperatures_undo_a_known_overconfidence(tmp_path):
    """Labels drawn from a head's own softmax; its logits are then tripled, so the best temperature
    is 3.
    """
    states, _, _ = write_states(tmp_path / "s", n=4000, chunk=512)
    torch.manual_seed(1)
    heads = Heads(3, 6, 3).requires_grad_(False)
    cls = states.gather("cls").float()
    for k in (1, 2):
        heads.w_o *= 3  # far from uniform
        labels = torch.multinomial(heads(cls[:, :-1].transpose(0, 1))[0][k - 1].softmax(-1), 1)[
            :, 0
        ].numpy()
        heads.w_o[k - 1] *= 3
        heads.b_o[k - 1] *= 3
        fit_temperatures(heads, states, labels, steps=200, learning_rate=0.1)
        assert heads.temperature[k - 1].item() == pytest.approx(3, rel=0.15)


# --- meta classifiers ---


def slow_features(logits, hidden, k, drop, odds=False):
    """Table 1 for one input and one layer."""
    p = [torch.softmax(row, -1) for row in logits]
    classes, early = logits.shape[1], len(logits)
    said = [int(row.argmax()) for row in p]
    top = sorted(p[k - 1].tolist(), reverse=True) if classes > 1 else None
    parts = {
        "hidden": hidden[k - 1].tolist(),
        "prediction": (
            [float(said[k - 1] == c) for c in range(1, classes)]
            if classes > 1
            else [logits[k - 1, 0].item()]
        ),
        "history": [
            (p[j][said[j]].item() if classes > 1 else logits[j, 0].item()) if j < k - 1 else 0.0
            for j in range(early)
        ],
        "pmax": [top[0]] if top else [],
        "pdiff": [top[0] - top[1]] if top else [],
        "odds": [],
    }
    if top and odds:
        parts["odds"] = [math.log(top[0] / sum(top[1:]))]
    return [0.0 if name in drop else value for name in FEATURES for value in parts[name]]


@pytest.mark.parametrize("classes", [1, 2, 4])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("drop", [(), ("history",), ("hidden", "pmax")])
def test_features_equal_the_slow_ones(classes, drop, extra):
    """A dropped feature is a mask: M_k says what it says where that feature is 0."""
    torch.manual_seed(0)
    logits, hidden = torch.randn(6, 5, classes), torch.randn(6, 5, 3)
    fast, meta = features(logits, hidden, extra), Meta(5, 3, classes, drop, odds=extra)
    odds = meta(fast.transpose(0, 1))
    whole = Meta.of(Meta(5, 3, classes, odds=extra).shape, module_arrays(meta))
    for i in range(6):
        for k in range(1, 6):
            slow = slow_features(logits[i], hidden[i], k, (), extra)
            assert fast[i, k - 1].tolist() == pytest.approx(slow, abs=1e-5)
            x = torch.tensor(slow_features(logits[i], hidden[i], k, drop, extra))
            torch.testing.assert_close(
                odds[k - 1, i], whole(x.expand(5, 1, -1))[k - 1, 0], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("classes", [1, 2, 4])
@pytest.mark.parametrize("drop", [[], ["history"], ["hidden"]])
def test_meta_classifiers_of_the_first_format_say_the_same(classes, drop):
    """There the inputs came in another order, without those that were dropped."""
    torch.manual_seed(0)
    logits, hidden = torch.randn(6, 5, classes), torch.randn(6, 5, 32)
    old = [name for name in ("hidden", "prediction", "history", "pmax", "pdiff")]
    names = [name for name in old if name not in drop]
    lengths = sizes(5, 32, classes)
    parts = dict(zip(FEATURES, features(logits, hidden).split([*lengths.values()], -1)))
    x = torch.cat([parts[name] for name in names], -1).transpose(0, 1)  # (l-1, rows, D)
    arrays = {
        "w_1": torch.randn(5, x.shape[-1], 8),
        "b_1": torch.randn(5, 8),
        "w_2": torch.randn(5, 8, 2),
        "b_2": torch.randn(5, 2),
    }
    out = torch.relu(x @ arrays["w_1"] + arrays["b_1"][:, None]) @ arrays["w_2"]
    out = out + arrays["b_2"][:, None]
    shape = {"early": 5, "inputs": x.shape[-1], "drop": drop, "units": 8}
    meta = Meta.of(shape, {name: value.numpy() for name, value in arrays.items()})
    torch.testing.assert_close(
        meta(features(logits, hidden).transpose(0, 1)),
        out[..., 1] - out[..., 0],
        atol=1e-4,
        rtol=1e-4,
    )


def test_meta_classifiers_begin_as_the_equal_of_p_max(tmp_path):
    """Before the first update their order is that of p max; folding keeps it."""
    states, cls, _ = write_states(tmp_path / "s", n=200)
    heads, _ = train_heads(states, 3, recipe="paper", epochs=2)
    meta, _ = fit_meta(heads, states, recipe="distilled", epochs=1, learning_rate=0.0)
    logits, m = score(heads, meta, cls)
    torch.testing.assert_close(torch.logit(m), log_odds(logits)[..., 0], atol=1e-4, rtol=1e-4)


def test_meta_classifiers_learn(tmp_path):
    states, cls, logits = write_states(tmp_path / "s", n=200)
    heads, _ = train_heads(states, 3, logits.argmax(1).numpy(), epochs=2)
    meta, losses = fit_meta(heads, states, tau=0.5, epochs=20, batch_size=16, learning_rate=1e-2)
    early, m = score(heads, meta, cls)
    target = consistent(early, logits, 0.5).float()
    assert (losses[-1] < losses[0]).all()
    assert (m[target == 1].mean() > m[target == 0].mean()) and 0 <= m.min() and m.max() <= 1
    with pytest.raises(ValueError, match="unknown features"):
        fit_meta(heads, states, tau=0.5, drop=("colour",))


def test_modules_come_back_from_disk(tmp_path):
    for module in (Heads(3, 5, 2, history=True, reads="cls+mean"), Meta(3, 9, 2, ("pmax",))):
        path = tmp_path / f"{type(module).__name__}.safetensors"
        save_module(module, path, {"seed": 3})
        back, about = load_module(type(module), path)
        assert back.shape == module.shape and about == {"seed": 3}
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(back.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="expected Heads"):
        load_module(Heads, tmp_path / "Meta.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "Meta.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match="not a whole"):
        load_module(Meta, tmp_path / "cut.safetensors")
    damaged = bytearray((tmp_path / "Meta.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "bit.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="was changed"):
        load_module(Meta, tmp_path / "bit.safetensors")
    large = Heads(3, 5, 2).shape | {"d": 10**9}
    save_arrays(
        tmp_path / "large.safetensors", {"w_p": np.zeros(3)}, {"kind": "Heads", "shape": large}
    )
    with pytest.raises(ValueError, match="should hold"):
        load_module(Heads, tmp_path / "large.safetensors")


# --- extraction ---


def test_states_equal_the_models_own_hidden_states(setting, tmp_path):
    backbone, tokenizer, data, task = setting
    states = extract(
        backbone, tokenizer, data, task.columns, tmp_path / "s", max_length=48, chunk=16
    )
    for i in (0, 7, 39):
        batch = collate(tokenizer, tokenise(tokenizer, data.select([i]), task.columns, 48))
        with torch.no_grad():
            out = backbone.model(**batch, output_hidden_states=True)
        torch.testing.assert_close(states.gather("logits")[i], out.logits[0], atol=1e-5, rtol=1e-5)
        for k in (1, 6, 11):
            expected = out.hidden_states[k][0, 0]
            torch.testing.assert_close(
                states.gather("cls")[i, k - 1], expected, atol=1e-5, rtol=1e-5
            )  # half precision would be off by 5e-4
            torch.testing.assert_close(
                states.gather("mean")[i, k - 1],
                out.hidden_states[k][0].mean(0),
                atol=1e-5,
                rtol=1e-5,
            )
    assert sorted(np.concatenate([states.rows(i) for i in range(states.n_chunks)])) == list(
        range(40)
    )


def test_killed_extraction_goes_on_and_gives_the_same(setting, tmp_path):
    backbone, tokenizer, data, task = setting
    calls = []

    class Dies(Backbone):
        def states(self, batch):
            calls.append(len(batch))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return super().states(batch)

    options = dict(max_length=48, chunk=16)
    with pytest.raises(KeyboardInterrupt):
        dying = Dies(backbone.model)
        extract(dying, tokenizer, data, task.columns, tmp_path / "killed", **options)
    partial = States(tmp_path / "killed", backbone)
    assert sum(partial.path(i).exists() for i in range(3)) == 2
    with pytest.raises(ValueError, match="not complete"):
        partial.gather("cls")
    before = partial.path(0).stat().st_mtime_ns
    whole = extract(backbone, tokenizer, data, task.columns, tmp_path / "whole", **options)
    resumed = extract(backbone, tokenizer, data, task.columns, tmp_path / "killed", **options)
    assert resumed.path(0).stat().st_mtime_ns == before  # what was done is not done again
    for i in range(3):
        assert resumed.path(i).read_bytes() == whole.path(i).read_bytes()
    damaged = bytearray(whole.path(1).read_bytes())
    damaged[-7] ^= 4
    resumed.path(1).write_bytes(damaged)  # one flipped bit, and a file that was emptied
    resumed.path(2).write_bytes(b"")
    with pytest.raises(ValueError, match="was changed"):
        States(tmp_path / "killed").read(1, "cls")
    again = extract(backbone, tokenizer, data, task.columns, tmp_path / "killed", **options)
    for i in range(3):
        assert again.path(i).read_bytes() == whole.path(i).read_bytes()


def test_states_of_another_model_or_other_data_are_not_taken(setting, tmp_path):
    backbone, tokenizer, data, task = setting
    extract(backbone, tokenizer, data, task.columns, tmp_path / "s", max_length=48)
    torch.manual_seed(9)
    other = Backbone(new_model("demo", task))
    with pytest.raises(ValueError, match="another model"):
        States(tmp_path / "s", other)
    again = extract(other, tokenizer, data, task.columns, tmp_path / "s", max_length=48)
    assert States(tmp_path / "s", other).plan == again.plan
    fewer = extract(
        other, tokenizer, data.select(range(5)), task.columns, tmp_path / "s", max_length=48
    )
    assert len(fewer) == 5
    same, renamed = tokenizer_of("demo"), tokenizer_of("demo")
    renamed.add_tokens(["zebra"])
    for tokens, taken in ((same, True), (renamed, False)):
        made = fewer.path(0).stat().st_mtime_ns
        extract(other, tokens, data.select(range(5)), task.columns, tmp_path / "s", max_length=48)
        assert (fewer.path(0).stat().st_mtime_ns == made) == taken
    with pytest.raises(FileNotFoundError, match="run extract"):
        States(tmp_path / "nowhere")


def test_a_text_of_100_000_words_is_cut(setting, tmp_path):
    backbone, tokenizer, _, task = setting
    data = tasks.from_texts(
        task.columns, ["The plot was superb. " * 25_000, "The plot was superb."]
    )
    states = extract(backbone, tokenizer, data, task.columns, tmp_path / "s", max_length=10**9)
    assert (
        states.plan["max_length"] == backbone.max_tokens
        and torch.isfinite(states.gather("logits")).all()
    )


def test_batches_hold_similar_lengths_and_every_row_once():
    rows = [{"input_ids": [0] * n} for n in np.random.default_rng(0).integers(1, 60, size=100)]
    batches = by_length(rows, tokens=128)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    lengths = [[len(rows[i]["input_ids"]) for i in batch] for batch in batches]
    assert all(max(batch) * len(batch) <= 128 for batch in lengths)
    assert all(min(a) >= max(b) for a, b in zip(lengths, lengths[1:]))


# --- fine-tuning and the whole run ---


def test_fine_tuning_resumes_after_a_kill(tmp_path):
    task, options = (
        tasks.find("sentiment"),
        dict(epochs=2, batch_size=16, learning_rate=1e-3, save_steps=4),
    )
    data = tasks.load(task, limit=SIZES)
    fine_tune(task, data, "demo", tmp_path / "whole", **options)

    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    import cats.train.finetune as training

    plain = training.Trainer
    training.Trainer = lambda *a, **k: plain(*a, **k, callbacks=[Kill()])
    try:
        with pytest.raises(KeyboardInterrupt):
            fine_tune(task, data, "demo", tmp_path / "killed", **options)
    finally:
        training.Trainer = plain
    assert last_checkpoint(tmp_path / "killed" / "checkpoints").name == "checkpoint-4"
    (
        tmp_path / "killed" / "checkpoints" / "checkpoint-5"
    ).mkdir()  # half-written: must not be resumed
    fine_tune(task, data, "demo", tmp_path / "killed", **options)
    whole, killed = (load_fine_tuned(tmp_path / name, task)[0] for name in ("whole", "killed"))
    for a, b in zip(whole.model.parameters(), killed.model.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert not (tmp_path / "killed" / "checkpoints").exists()


def test_inputs_may_lose_their_beginning_and_still_do_after_loading(tmp_path):
    task, options = tasks.find("sentiment"), dict(epochs=1, max_length=8, truncation_side="left")
    data = tasks.load(task, limit=32)
    fine_tune(task, data, "demo", tmp_path / "f", **options)
    _, kept = load_fine_tuned(tmp_path / "f", task)
    rows = [tokenise(demo.tokenizer(), data["test"], task.columns, length) for length in (99, 8)]
    long = [i for i, row in enumerate(rows[0]) if len(row["input_ids"]) > 8]
    assert long
    for i, row in enumerate(tokenise(kept, data["test"], task.columns, 8)):
        whole, cut = rows[0][i]["input_ids"], rows[1][i]["input_ids"]
        assert row["input_ids"] == ([whole[0], *whole[-7:]] if i in long else cut)
    assert tokenizer_hash(kept) != tokenizer_hash(demo.tokenizer())
    with pytest.raises(ValueError, match="'left' or 'right', not 'both'"):
        fine_tune(task, data, "demo", tmp_path / "g", truncation_side="both")


def test_standardised_classifier_folds_to_the_same_function():
    from transformers import MobileBertConfig, MobileBertForSequenceClassification

    torch.manual_seed(0)
    model = MobileBertForSequenceClassification(
        MobileBertConfig(
            vocab_size=300,
            num_hidden_layers=2,
            hidden_size=32,
            intra_bottleneck_size=16,
            embedding_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            max_position_embeddings=64,
            num_labels=3,
        )
    ).eval()
    tokenizer = tokenizer_of("demo")
    rows = tokenise(tokenizer, tasks.load("sentiment", limit=SIZES)["test"], ("text",), 40)
    standardise_classifier(model, tokenizer, rows, extra_padding=1)
    batch = collate(tokenizer, rows[:8], extra_padding=1)
    with torch.no_grad():
        before = model(**batch).logits
        fold_classifier(model)
        torch.testing.assert_close(model(**batch).logits, before, atol=1e-4, rtol=1e-4)
    assert isinstance(model.classifier, nn.Linear)


def test_a_checkpoint_with_another_number_of_labels_is_refused(tmp_path):
    model = new_model("demo", tasks.find("topics"))
    model.save_pretrained(tmp_path)
    tokenizer_of("demo").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fine-tuned for 4 outputs, sentiment has 2"):
        load_fine_tuned(tmp_path, "sentiment")


@pytest.mark.parametrize("recipe", ["paper", "distilled"])
@pytest.mark.parametrize("name", ["sentiment", "similarity"])
def test_the_whole_run(name, recipe, tmp_path):
    run = Run(name, folder=tmp_path / "run", recipe=recipe, **QUICK)
    table = run.table("validation")
    assert len(table) == 40 and table.n_layers == 12 and table.regression == (name == "similarity")
    assert (
        table.metadata["task"] == name
        and table.metadata["rows"]["tune"] == 84
        and table.metadata["versions"]["torch"]
    )
    # the table says what the model and its heads say
    tokens = tokenise(run.tokenizer, run.data["validation"], run.task.columns, 48)
    batch = collate(run.tokenizer, tokens, pairs=True)
    states = run.backbone.states(batch)
    reads = run.heads.reads
    assert ("pair" in reads) == (recipe == "distilled" and name == "similarity")
    read = vectors(reads, *(states[part] for part in reads.split("+")))
    early, meta = score(run.heads, run.meta, read)
    np.testing.assert_allclose(table.logits[:, :-1], early, atol=1e-4)
    np.testing.assert_allclose(table.logits[:, -1], states["logits"], atol=1e-4)
    np.testing.assert_allclose(table.meta, meta, atol=1e-4)
    np.testing.assert_array_equal(table.labels, run.labels("validation"))
    # and the CAT exits where the table says, up to scores that lie on the threshold itself
    cat, rows = CAT.from_run(run), run.data["validation"]
    out = cat.predict(list(zip(*(rows[column][:] for column in run.task.columns))), 0.3)
    thresholds = cat.thresholds(0.3)
    near = (np.abs(table.scores("meta") - thresholds) < 1e-5).any(axis=1)
    assert (
        near.sum() <= 2
        and (out.exit_layers == exit_layers(table.scores("meta"), thresholds))[~near].all()
    )
    # a second run loads, a change of the meta classifier only makes what depends on it
    stamp = lambda: {p.name: p.stat().st_mtime_ns for p in run.home.glob("*.safetensors")}
    before = stamp()
    options = QUICK | {"folder": tmp_path / "run", "recipe": recipe}
    assert Run(name, **options).table("validation").sha256 == table.sha256
    assert stamp() == before
    other = Run(name, **options | {"meta_options": {"epochs": 2, "drop": ["history"]}})
    assert other.table("validation").sha256 != table.sha256
    assert stamp()["heads.safetensors"] == before["heads.safetensors"]


def test_heads_that_learn_from_f_also_see_altered_copies(tmp_path):
    run = Run("sentiment", folder=tmp_path / "run", recipe="distilled", **QUICK)
    both, own, copies = run.learned("tune"), run.states("tune"), run.states("tune-altered")
    assert len(both) == len(own) + len(copies) and len(copies) == len(own)
    rows = np.concatenate([both.rows(i) for i in range(both.n_chunks)])
    assert sorted(rows) == list(range(len(both)))
    logits = torch.empty_like(both.gather("logits"))
    for i in range(both.n_chunks):
        logits[both.rows(i)] = both.read(i, "logits")[0]
    assert torch.equal(logits, torch.cat([own.gather("logits"), copies.gather("logits")]))
    assert not torch.equal(own.gather("logits"), copies.gather("logits"))
    plain = run.by("paper").learned("tune")
    assert len(plain) == len(own)
    with pytest.raises(ValueError, match="altered copies have no labels"):
        find_recipe("paper", altered=0.1)


def test_heads_of_other_data_are_not_taken_up(tmp_path):
    """A model that is fine-tuned already does not change with the data; its heads must."""
    first = Run("sentiment", folder=tmp_path / "run", **QUICK)
    assert first.heads
    options = QUICK | {"model": str(tmp_path / "run" / "model"), "fine_tuned": True}
    tuned = {
        rows: (
            Run(
                "sentiment",
                folder=tmp_path / "tuned",
                **options | {"limit": SIZES | {"train": rows}},
            ).heads.w_p
        )
        for rows in (120, 60)
    }
    assert not torch.equal(tuned[120], tuned[60])


def test_a_kill_between_file_and_record_leaves_nothing_to_trust(tmp_path):
    """The old record must not vouch for a new file whose own record was never written."""
    path, made = tmp_path / "heads.safetensors", []
    run = Run("sentiment", folder=tmp_path)
    run._keep(path, {"a": 1}, lambda: "one", path.write_text, Path.read_text)

    def dies(text):
        path.write_text(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run._keep(path, {"a": 2}, lambda: "two", dies, Path.read_text)
    make = lambda text: made.append(path.write_text(text))
    assert run._keep(path, {"a": 1}, lambda: "one", make, Path.read_text) == "one" and made


def test_nothing_is_calibrated_that_was_trained_on():
    run = Run("claims", folder="unused", **QUICK)
    parts = {
        name: {tuple(row[c] for c in run.task.columns) for row in part}
        for name, part in run.data.items()
    }
    for a in ("tune", "scale", "meta"):
        for b in ("tune", "scale", "meta", "validation", "test"):
            assert a == b or not parts[a] & parts[b], (a, b)
    assert parts["tune"] | parts["scale"] | parts["meta"] == parts["train"]
    assert not parts["validation"] & parts["test"]


def test_two_seeds_give_two_runs():
    assert (
        len(
            {
                open_run(task="topics", seed=1).folder,
                open_run(task="topics").folder,
                open_run(task="topics", model="demo-shared").folder,
            }
        )
        == 3
    )


def test_a_classifier_can_start_at_zero():
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "num_labels": 3,
    }
    model, other = (
        AutoModelForSequenceClassification.from_config(AutoConfig.for_model(name, **config))
        for name in ("bert", "roberta")
    )
    zero_classifier(model)
    assert not model(input_ids=torch.arange(8)[None]).logits.any()
    with pytest.raises(TypeError, match="only a linear classifier"):
        zero_classifier(other)


@pytest.mark.parametrize(
    "losses, warned",
    [
        ([1.0, 0.9, 0.8, 0.5], False),
        ([1.02, 0.98, 24.0, 9.0, 2.0, 1.4, 1.3, 1.25], True),
        ([1.0, float("nan")], True),
        ([0.7], False),
    ],
)
def test_a_model_that_diverged_is_not_passed_over_in_silence(losses, warned):
    with warnings.catch_warnings(record=True, action="always") as caught:
        warn_if_diverged(losses)
    assert bool(caught) == warned
