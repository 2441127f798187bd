"""Seconds, side by side: the full model against a CAT whose exits are replayed (Sections 5.4 and 6.3, Table 5).

Time depends on shapes and exit layers and not on weights. So the exits of any ScoreTable can be replayed on an untrained
model of any architecture of the same depth, Albert-xlarge's included, heads and meta classifiers running as they would.
"""

import time
from typing import NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats.backbone import Backbone
from cats.cat import CAT
from cats.heads import Heads
from cats.meta import Meta
from cats.tables import ScoreTable

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ARCHITECTURES = {
    "BERT 12 x 384": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "MobileBERT 24 x 512": {"model_type": "mobilebert"},
    "ALBERT-xlarge 24 x 2048": {"model_type": "albert", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 8192},
    "RoBERTa-large 24 x 1024": {"model_type": "roberta", "max_position_embeddings": 514, **LARGE},
}


def untrained(architecture, n_outputs=2):
    """A CAT of random weights, for timing and counting alone."""
    config = AutoConfig.for_model(**ARCHITECTURES[architecture], num_labels=n_outputs)
    backbone = Backbone(AutoModelForSequenceClassification.from_config(config))
    early = backbone.n_layers - 1
    sizes = 32 + max(1, n_outputs - 1) + early + (2 if n_outputs > 1 else 0)
    heads, meta = Heads(early, backbone.hidden_size, n_outputs).requires_grad_(False), Meta(early, sizes).requires_grad_(False)
    return CAT(backbone, None, heads, meta, ScoreTable(np.zeros((1, early + 1, n_outputs)), np.zeros((1, early))))


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Replay(NamedTuple):
    """Seconds of each batch, medians over repeats, and the spread of the totals."""

    full: np.ndarray  # (batches,)
    early: np.ndarray  # (batches,)
    share: float  # mean exit layer as a share of l
    spread: tuple  # smallest and largest ratio of the totals over repeats

    @property
    def ratio(self):
        """T_G / T_F."""
        return self.early.sum() / self.full.sum()


def replay(cat, exits, tokens=64, batch_size=1, repeats=5, wait=False, measure="meta", progress=False):
    """Time F and the CAT on batches of random tokens whose rows exit at these layers; repeats are interleaved.

    wait  keep finished rows in the batch until the slowest has exited, as most early-exit code does
    """
    exits, l = np.asarray(exits), cat.backbone.n_layers
    ids = torch.randint(10, 1000, (len(exits), tokens), generator=torch.Generator().manual_seed(0))
    mask, never = torch.ones_like(ids), np.full(l - 1, np.inf)
    starts, times = range(0, len(exits), batch_size), {"full": [], "early": []}
    for _ in tqdm(range(repeats + 1), desc="repeats", disable=not progress):  # the first one warms up
        for i in starts:
            batch = {"input_ids": ids[i : i + batch_size], "attention_mask": mask[i : i + batch_size]}
            last = exits[i : i + batch_size].max() if wait else None
            rule = lambda k, scores, rows: np.full(len(rows), last == k) if wait else exits[i + rows] == k
            with torch.inference_mode():
                times["full"].append(seconds(lambda: cat.backbone.model(**batch)))
            times["early"].append(seconds(lambda: cat.run(batch, never, measure, decide=rule)))
    full, early = (np.reshape(times[name], (repeats + 1, len(starts)))[1:] for name in ("full", "early"))
    ratios = early.sum(axis=1) / full.sum(axis=1)
    return Replay(np.median(full, axis=0), np.median(early, axis=0), exits.mean() / l, (ratios.min(), ratios.max()))


def by_exit(cat, tokens=64, repeats=5, measure="meta"):
    """T_G(k)/T_F (l,) of one input that exits at layer k = 1 … l: with it the time of any exits at batch 1 is a sum."""
    times = replay(cat, np.arange(1, cat.backbone.n_layers + 1), tokens, 1, repeats, measure=measure)
    return times.early / times.full.mean()
