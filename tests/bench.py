"""Performance as ratios, side by side in one run: `make bench`."""

import itertools
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import oracles
import torch
from builders import even
from safetensors.torch import save_file
from torch import nn

from cats import Synthetic, calibrate, evaluate, exit_layers
from cats._io import write_json
from cats.model.backbone import Backbone
from cats.model.bodies import BODIES, FULL
from cats.paper import timing
from cats.train import tasks
from cats.train.finetune import new_model, tokenizer_of
from cats.train.fit import train_heads
from cats.train.states import States, collate, extract, tokenise

EPSILONS = [round(0.05 * i, 2) for i in range(1, 20)]


RECIPE = "distilled"  # what CAT.fit makes, and the dearer one


def evaluation(n=25_000, layers=24, trials=25, sample=1_000):
    """`evaluate` against the paper's algorithm run input by input: that is timed on `sample` inputs
    and three epsilons, and scaled. Two sets of six methods: without search, and with `naive`, whose
    search the paper's Appendix C.1 does by trial.
    """
    table = Synthetic(layers=layers).table(n)
    small = table.take(np.arange(sample))
    scores, consistent, predictions = small.scores("meta"), small.consistent, small.predictions
    cut = sample * 4 // 5

    def slow(method, epsilon):
        taus = getattr(oracles, method)(scores[:cut], consistent[:cut], epsilon)
        exits = [oracles.predict(scores[i], taus) for i in range(cut, sample)]
        agree = np.mean([oracles.agrees(consistent[i], k) for i, k in enumerate(exits, cut)])
        right = np.mean(
            [predictions[i, k - 1] == small.labels[i] for i, k in enumerate(exits, cut)]
        )
        return agree, right, np.mean(exits)

    print(f"evaluate: {n:,} inputs, {layers} layers, {trials} trials, {len(EPSILONS)} epsilons")
    plain = ["static", "threshold", "independent", "shared", "shared_all", "first_exit"]
    for methods in (plain, ["static", "threshold", "naive", "independent", "shared", "first_exit"]):
        fast = min(
            timing.seconds(lambda: evaluate(table, methods, ["meta"], EPSILONS, trials))
            for _ in range(3)
        )
        pieces = [
            min(timing.seconds(lambda: slow(m, e)) for _ in range(2))
            for m in methods
            for e in (0.05, 0.5, 0.95)
        ]
        whole = sum(pieces) / 3 * len(EPSILONS) * trials * n / sample
        print(f"  {', '.join(methods)}")
        print(
            f"    evaluate {fast:.2f} s, input by input {whole:,.0f} s: {whole / fast:,.0f} times"
            " faster"
        )
    print(f"  peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def heads(rows=2048, batch_size=64, epochs=5):
    """All early heads together from extracted states, against one layer at a time with the backbone
    in the loop.

    The same number of updates, the same batch size and rate; extraction counts as part of the fast
    way.
    """
    task = tasks.find("sentiment")
    torch.manual_seed(0)
    backbone, tokenizer = Backbone(new_model("demo", task)), tokenizer_of("demo")
    data = tasks.load(task, limit=rows)["train"]
    labels = np.array(data["label"][:])
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        states = extract(
            backbone,
            tokenizer,
            data,
            task.columns,
            Path(folder) / "s",
            max_length=task.max_length,
            chunk=batch_size,
        )
        _, losses = train_heads(states, 2, labels, epochs=epochs, batch_size=batch_size)
        fast = time.perf_counter() - start

    tokens, slow, ends = tokenise(tokenizer, data, task.columns, task.max_length), 0.0, []
    for k in range(1, backbone.n_layers):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(
            backbone.hidden_size, affine=False
        )  # what standardising does for the extracted states
        head = nn.Sequential(norm, nn.Linear(backbone.hidden_size, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer, updates = (
            torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01),
            epochs * -(-rows // batch_size),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)
        start = time.perf_counter()
        for _ in range(epochs):
            total = 0.0
            for batch in torch.randperm(rows).split(batch_size):
                with torch.no_grad():  # no further than layer k: the authors' code runs all layers
                    state = backbone.start(collate(tokenizer, [tokens[i] for i in batch]))
                    for j in range(1, k + 1):
                        state = backbone.step(state, j)
                    cls = backbone.cls(state)
                loss = nn.functional.cross_entropy(head(cls), torch.tensor(labels[batch]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(batch) / rows
        slow += time.perf_counter() - start
        ends.append(total)
    print(
        f"early heads: {backbone.n_layers - 1} layers, {rows:,} inputs, {epochs} epochs of batches"
        f" of {batch_size}"
    )
    print(
        f"  together from extracted states {fast:.1f} s (extraction included), one layer at a time"
        f" {slow:.1f} s: {slow / fast:.0f} times faster"
    )
    print(
        f"  mean loss {losses[-1].mean():.4f} and {np.mean(ends):.4f}; largest difference at a"
        f" layer {np.abs(losses[-1].numpy() - ends).max():.4f}"
    )


def memory(n=25_000, layers=24, d=2048, chunk=512):
    """Peak memory of head training on states the size of Albert-xlarge's, beyond what importing
    everything takes.
    """
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder)
        write_json(folder / "plan.json", {"model": "random", "n": n, "chunk": chunk, "seed": 0})
        states = States(folder)
        one = torch.randn(chunk, layers, d)
        for i in range(states.n_chunks):
            size = len(states.rows(i))
            save_file({"cls": one[:size].clone(), "logits": torch.randn(size, 2)}, states.path(i))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30
        peak = in_a_process(_train_from, folder, n)
    print(
        f"memory: {n:,} inputs, {layers} layers, hidden size {d}, {size:.1f} GiB of states, chunks"
        f" of {chunk}"
    )
    print(f"  peak of one epoch of head training {peak:.2f} GiB, all of Python and torch included")


def runtime(tokens=64, short=8, alone=(60, 21), together=(256, 11)):
    """T_G/T_F against layers_G/l, F on the same body, with exits replayed from a synthetic table at
    epsilon = 0.05; in turns, medians over repeats and their range. By both measures, since what is
    computed for an exit differs; of `short` texts, too. `alone` and `together`: inputs and repeats.
    """
    cases = [(tokens, 1, *alone), (tokens, 32, *together), (short, 32, *together)]
    for name in ("BERT 12 x 384", "MobileBERT 24 x 512"):
        for (length, size, n, repeats), body in itertools.product(cases, BODIES):
            found = in_a_process(_replayed, name, body, n, length, size, repeats)
            print(f"runtime: {name}, {body}, {length} tokens, batch {size}:")
            for measure, one in found.items():
                quotient, low, high = (value / one.share for value in one.interval)
                print(
                    f"    {measure}: T_G/T_F {one.ratio:.3f}, layers_G/l {one.share:.3f},", end=" "
                )
                print(f"quotient {quotient:.3f} ({low:.3f} to {high:.3f})")
            dearer = found["sm"].early.sum(axis=1) / found["meta"].early.sum(axis=1)
            print(
                "    exits by sm take {:.3f} ({:.3f} to {:.3f}) of the time of those by"
                " meta".format(*timing.interval(dearer)),
                flush=True,
            )
            if size > 1:
                continue
            for which, times in (("F", found["meta"].full), ("G", found["meta"].early)):
                p50, p95 = np.quantile(np.median(times, axis=0), [0.5, 0.95]) * 1e3  # over inputs
                print(f"    {which} latency: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
        held = [in_a_process(_held, name, "full", None)]
        held += [in_a_process(_held, name, "early", body) for body in (None, "bfloat16", "int8")]
        print(f"    tensors held at batch 32 beyond weights: F {held[0]:.1f} MiB;", end=" ")
        print("G in float32 {:.1f}, bfloat16 {:.1f}, int8 {:.1f}".format(*held[1:]))
        peaks = [
            [in_a_process(_peak, name, which) for which in ("full", "early")] for _ in range(3)
        ]
        print(
            "    peak memory of a process at batch 32 beyond the loaded model, three times:",
            ", ".join(f"F {f:.0f} and G {g:.0f} MiB" for f, g in peaks),
        )


def _replayed(name, body, n, *how):
    """In a process of its own: how fast F is depends on the heap that whatever ran before has left,
    by a tenth at batch size 32. The same exits by both measures, in turns.
    """
    torch.manual_seed(0)
    cat = timing.untrained(name, recipe=RECIPE, body=None if body == FULL else body)
    table = Synthetic(layers=cat.backbone.n_layers).table(2000)
    thresholds = calibrate(table.scores("meta"), table.consistent, 0.05, method="first_exit")
    exits = exit_layers(table.scores("meta"), thresholds)[:n]
    by = {measure: measure for measure in ("meta", "sm")}
    return timing.replays(cat, dict.fromkeys(by, exits), *how, by, beside=1)


def _held(name, which, body):
    """Tensors held at batch size 32, beyond the model itself, in MiB; in a process of its own, as a
    profiler may leave something behind.
    """
    cat = timing.untrained(name, recipe=RECIPE, body=body)
    return timing.live(even(cat, which, 32)) / 2**20


def _peak(name, which):
    """Peak memory at batch size 32, beyond the model itself, in MiB."""
    run = even(timing.untrained(name, recipe=RECIPE), which, 32)
    before = _peak_memory(reset=True)
    for _ in range(5):
        run()
    return _peak_memory() - before


def _peak_memory(reset=False):
    """The process's peak memory in MiB, since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10


def _train_from(folder, n):
    train_heads(States(folder), 2, np.zeros(n, int), epochs=1, batch_size=64)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_a_process(run, *arguments):
    """The result of a call in a process of its own, whose peak memory is its own, too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["evaluation", "heads", "memory", "runtime"]
    for name in chosen:
        globals()[name]()
