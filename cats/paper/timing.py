"""Seconds, side by side: the full model against a CAT whose exits are replayed (Sections 5.4 and
6.3, Table 5).

Time depends on shapes and exit layers and not on weights. So the exits of any ScoreTable can be
replayed on an untrained model of any architecture of the same depth, Albert-xlarge's included,
heads and meta classifiers running as they would.
"""

import datetime
import itertools
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats.model.backbone import Backbone
from cats.model.bodies import reads_on
from cats.model.exits import Heads, Meta
from cats.runtime.cat import CAT
from cats.runtime.loop import starting
from cats.stats.quantiles import Floats, Ints
from cats.stats.table import ScoreTable
from cats.train.fit import find_recipe

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BERT 12 x 384": {
        "model_type": "bert",
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "MobileBERT 24 x 512": {"model_type": "mobilebert"},
    "ALBERT-xlarge 24 x 2048": {
        "model_type": "albert",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
    },
    "ALBERT-base 12 x 768": {
        "model_type": "albert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "RoBERTa-large 24 x 1024": {"model_type": "roberta", "max_position_embeddings": 514, **LARGE},
}
# inputs alone that one model is timed on before the other takes over: with many, a machine that
# slows down for a second slows one of them
BLOCK = 4


def random_backbone(architecture: str, n_outputs: int = 2, **options: Any) -> Backbone:
    """A model of random weights."""
    config = AutoConfig.for_model(**ARCHITECTURES[architecture], num_labels=n_outputs)
    return Backbone(AutoModelForSequenceClassification.from_config(config, **options))


def untrained(
    architecture: str, n_outputs: int = 2, recipe: Any = "paper", body: str | None = None
) -> CAT:
    """A CAT of random weights, for timing and counting alone; its layers on a faster body."""
    recipe = find_recipe(recipe)
    recipe = find_recipe(recipe, reads=reads_on(body, recipe.reads))
    backbone = random_backbone(architecture, n_outputs)
    early = backbone.n_layers - 1
    heads = Heads(early, backbone.hidden_size, n_outputs, reads=recipe.reads)
    meta = Meta(early, heads.d_e, n_outputs, odds=recipe.odds)
    return CAT(
        backbone,
        None,
        heads.requires_grad_(False),
        meta.requires_grad_(False),
        ScoreTable(
            np.zeros((1, early + 1, n_outputs)),
            np.zeros((1, early)),
            full=np.zeros((1, n_outputs)) if body else None,
        ),
        body=body,
    )


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured_here(repeats: int) -> dict[str, Any]:
    """What a result in seconds has to say of itself: the machine, the date and the repeats."""
    return {"machine": machine(), "date": datetime.date.today().isoformat(), "repeats": repeats}


def machine(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """This machine in a few words, not its name: threads, processor, what it multiplies with."""
    text = Path(cpuinfo).read_text() if Path(cpuinfo).exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)", text, flags=re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((R|TM)\)|@.*", " ", name, flags=re.I).split())
    units = {"avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    unit = next((shown for flag, shown in units.items() if re.search(rf"\b{flag}\b", text)), None)
    count = torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    return f"{threads} of {name}" + (f" with {unit}" if unit else "")


def live(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that `run()` holds at one time, beyond those that were there: the
    same in every run, unlike a process's memory.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    sizes = [
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]  # negative where freed
    return int(np.cumsum([0, *sizes]).max())


def interval(ratios: Any, confidence: float = 0.95) -> tuple[float, float, float]:
    """Median of paired ratios and an interval for it, by order statistics, which asks nothing of
    their law: exact where there are six or more, else from the smallest to the largest.

    >>> interval([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    (5.5, 2.0, 9.0)
    """
    values = np.sort(np.asarray(ratios, dtype=float))
    beyond = binom.cdf(np.arange(len(values)), len(values), 0.5) <= (1 - confidence) / 2
    low = max(int(beyond.sum()) - 1, 0)
    return float(np.median(values)), float(values[low]), float(values[len(values) - 1 - low])


def in_turns(
    ways: Mapping[Any, Callable[[], Any]], reference: Any, repeats: int, beside: int = 4
) -> tuple[dict[Any, Floats], float]:
    """Seconds of each way, {name: a call}, as a share of the reference's, {name: (repeats,)}; and
    the reference's own. All take turns, the reference before every so many of them, so that a
    machine that slows down slows both. The first time, which warms up, is not counted.
    """
    ratios, whole, last = {name: np.zeros(repeats) for name in ways}, [], 0.0
    for run in (reference, *ways.values()):
        run()
    for r in tqdm(range(repeats), desc="repeats"):
        for j, (name, run) in enumerate(ways.items()):
            if j % beside == 0:
                last = seconds(reference)
                whole.append(last)
            ratios[name][r] = seconds(run) / last
    return ratios, float(np.median(whole))


class Replay(NamedTuple):
    """Seconds of what was timed together, repeat by repeat."""

    full: np.ndarray  # (repeats, 1), or a column for each input at batch 1
    early: np.ndarray
    share: float  # mean exit layer as a share of l

    @property
    def ratios(self) -> Floats:
        """T_G / T_F of every repeat, (repeats,)."""
        return self.early.sum(axis=1) / self.full.sum(axis=1)

    @property
    def interval(self) -> tuple[float, float, float]:
        """T_G / T_F, and an interval of 95 %."""
        return interval(self.ratios)

    @property
    def ratio(self) -> float:
        """T_G / T_F."""
        return float(np.median(self.ratios))


def contradictions(replays: Mapping[str, "Replay"]) -> list[tuple[str, str]]:
    """Pairs of replays of the same inputs of which one runs more layers and is faster, beyond both
    intervals: [(name, name)]. Time follows layers where there is none.
    """
    return [
        (more, fewer)
        for more in replays
        for fewer in replays
        if replays[more].share > replays[fewer].share
        and replays[more].interval[2] < replays[fewer].interval[1]
    ]


def replays(
    cat: CAT,
    patterns: Mapping[str, Ints],
    tokens: int = 64,
    batch_size: int = 1,
    repeats: int = 5,
    measures: Any = None,
    beside: int = 4,
    brief: bool = False,
) -> "dict[str, Replay]":
    """Time F, and the CAT on batches of random tokens whose rows exit at the layers of each pattern
    (a dict of arrays of one length, by name). They take turns, so that a machine that slows down
    slows both. At batch 1 every input is timed alone, BLOCK of them by F and then by the CAT; else
    the CAT runs them all at once, as `predict` does, and F a batch whenever the CAT asks for one.

    measures  by name, what the CAT computes after each layer; "meta" where nothing is said
    beside    F takes its turn before every so many patterns (batch 1) or batches of whatever
              pattern, and not before each
    brief     at batch 1: time F on one input of a block, and warm nothing up, for models whose
              weights are larger than any cache
    """
    l, n, never = (
        cat.backbone.n_layers,
        len(next(iter(patterns.values()))),
        np.full(cat.backbone.n_layers - 1, np.inf),
    )
    ids = torch.randint(10, 1000, (n, tokens), generator=torch.Generator().manual_seed(0))
    batch_of = lambda part: {"input_ids": part, "attention_mask": torch.ones_like(part)}
    exits = {name: np.asarray(pattern).tolist() for name, pattern in patterns.items()}
    full, early = (
        {name: np.zeros((repeats, n if batch_size == 1 else 1)) for name in patterns}
        for _ in range(2)
    )

    def run_full(i: int = 0) -> None:
        with torch.inference_mode():
            cat.engine.model(**batch_of(ids[i : i + batch_size]))  # F on the same body

    def run_early(name: str, batches: Any, exits: Any) -> None:
        cat.run(
            batches,
            never,
            (measures or {}).get(name, "meta"),
            decide=lambda k, scores, rows: [exits[row] == k for row in rows],
        )

    def turn(run: Callable[[int], Any], block: Any) -> list[float]:
        if not brief:
            # untimed: a model of which the caches hold what the other has left is slower than it is
            # by itself, the CAT above all
            run(block[-1])
        return [seconds(lambda: run(i)) for i in block]

    turns, alone = itertools.count(), [seconds(run_full)]  # the first warms up

    def together(name: str) -> tuple[float, float]:
        waits: list[float] = []

        def batches() -> Iterator[Any]:
            for part in ids.split(starting(batch_size, tokens)):
                if next(turns) % beside == 0:
                    alone[:] = [seconds(run_full)]
                    waits.extend(alone)
                yield batch_of(part)

        both = seconds(lambda: run_early(name, batches(), exits[name]))
        return float(np.mean(waits or alone)) * n / batch_size, both - sum(waits)

    for r in tqdm(range(repeats), desc="repeats"):
        if batch_size > 1:
            for name in patterns:
                full[name][r], early[name][r] = together(name)
            continue
        for block in np.split(np.arange(n), range(BLOCK, n, BLOCK)):
            for j, name in enumerate(patterns):
                if j % beside == 0:
                    last = turn(run_full, block[:1] if brief else block)
                one = lambda i: run_early(name, [batch_of(ids[i : i + 1])], [exits[name][i]])
                full[name][r, block], early[name][r, block] = last, turn(one, block)
    return {
        name: Replay(full[name], early[name], float(np.mean(patterns[name])) / l)
        for name in patterns
    }


def by_exit(
    cat: CAT,
    tokens: int = 64,
    repeats: int = 5,
    every: int = 1,
    measures: Sequence[str] = ("meta", "sm"),
    brief: bool = False,
) -> dict[str, Floats]:
    """{measure: T_G(k)/T_F (l,)} of one input that exits at layer k: with it the time of any exits
    at batch 1 is a sum.

    every  measure each so many layers and the last, and interpolate between them, for models that
           take seconds
    brief  as in `replays`
    """
    l = cat.backbone.n_layers
    layers, by = measured(l, every), dict(zip(measures, measures))
    patterns = dict.fromkeys(measures, layers)
    times = replays(cat, patterns, tokens, 1, repeats, by, brief=brief)
    # within a repeat both have met the same machine, which between repeats has two speeds and more:
    # so ratios first, then medians
    return {
        measure: np.interp(np.arange(1, l + 1), layers, np.median(found.early / found.full, axis=0))
        for measure, found in times.items()
    }


def measured(l: int, every: int) -> Ints:
    """The layers that `by_exit` measures."""
    return np.union1d(np.arange(1, l, every), [l])
