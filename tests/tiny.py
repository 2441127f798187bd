"""A tiny CAT on real text, fitted in a second: for tests of files, inputs and interface."""

from functools import cache

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from cats import CAT
from cats.train import demo, tasks
from cats.train.run import Run

SIZES = {"tuning": 40, "calibration": 40, "test": 24}
QUICK = {"head_options": {"epochs": 1}, "meta_options": {"epochs": 1}}


def model(labels=("bad", "good"), layers=3, seed=0, model_type="bert", **options):
    """A small untrained encoder that reads the demo's words; its outputs differ between texts."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(demo.tokenizer()),
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=48,
        initializer_range=0.3,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={name: i for i, name in enumerate(labels)},
        **options,
    )
    return AutoModelForSequenceClassification.from_config(config).eval()


@cache
def texts(task="sentiment"):
    """Lists of tuning, calibration and test texts (or pairs) that share none."""
    rows = demo.corpus(task, "train", sum(SIZES.values()))
    columns = [rows[column][:] for column in demo.COLUMNS[task]]
    found = columns[0] if len(columns) == 1 else list(zip(*columns))
    ends = iter(found)
    return {name: [next(ends) for _ in range(size)] for name, size in SIZES.items()}


def fit(of=None, task="sentiment", **options):
    """A CAT of a tiny model."""
    given = texts(task)
    options = {"tokenizer": demo.tokenizer()} | QUICK | options
    return CAT.fit(of or model(), given["tuning"], given["calibration"], **options)


@cache
def data(task="sentiment"):
    """A few rows of a demo task, cut as a run cuts them."""
    sizes = {"train": 60, "validation": 20, "test": 20}
    found = {split: demo.corpus(task, split, n) for split, n in sizes.items()}
    return {**found, **tasks.cut(found["train"])}


def run(model, folder, **options):
    """A run on a few rows, from a model in a folder."""
    made = Run("sentiment", str(model), folder=folder, **QUICK, **options)
    made.__dict__["data"] = data()  # the whole corpus takes seconds
    return made


def save(folder, labels=("negative", "positive")):
    """A tiny model and its tokenizer in a folder."""
    model(labels).save_pretrained(folder)
    demo.tokenizer().save_pretrained(folder)
    return folder
