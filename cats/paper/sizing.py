"""What a run needs before it is started: work, memory and disk of every stage, from shapes alone.

Models are built on the meta device, where tensors have a shape and no numbers, so RoBERTa-large
costs nothing to ask about. n is the number of training inputs, l the layers, d the hidden size, T
the tokens of an input:

    fine-tuning   work n·epochs·3·F(T), F's own multiply-accumulates; memory 16 bytes a parameter,
                  and what autograd keeps: l·T·d·rows
    extraction    work n·F(T); disk 2·n·l·d·4 bytes
    heads, meta   reading the states once an epoch; memory one chunk of 512·l·d·4 bytes, whatever n
    tables        disk m·(l·C + l - 1)·4 bytes for m held-out inputs
"""

from collections.abc import Mapping

import pandas as pd
import seaborn as sns
import torch
import yaml
from matplotlib.figure import Figure

from cats.model.backbone import Backbone
from cats.model.cost import ends_macs, layer_macs
from cats.paper.places import DATA, ROOT
from cats.paper.style import MODELS, palette, written
from cats.paper.timing import random_backbone
from cats.train.states import CHUNK, TOKENS
from cats.train.tasks import find

HEAD_EPOCHS, META_EPOCHS = 5, 20  # passes over the extracted states
ADAM = 16  # bytes a parameter: weight, gradient and two moments in float32
HUB = {
    "albert-xlarge-v2": "ALBERT-xlarge 24 x 2048",
    "albert-base-v2": "ALBERT-base 12 x 768",
    "roberta-large": "RoBERTa-large 24 x 1024",
    "mobilebert-uncased": "MobileBERT 24 x 512",
    "bge-small-en-v1.5": "BERT 12 x 384",
}


def shaped(model: str, n_outputs: int = 2) -> Backbone:
    """A classifier without weights, by its name on the Hub (of those in HUB, so that no network is
    needed).
    """
    with torch.device("meta"):
        return random_backbone(HUB[model.split("/")[-1]], n_outputs, attn_implementation="eager")


def parameters(backbone: Backbone) -> int:
    """How many numbers F has; ALBERT's layers share theirs."""
    return sum(tensor.numel() for tensor in backbone.model.parameters())


def full_macs(backbone: Backbone, tokens: int) -> float:
    """Multiply-accumulates of F for one input."""
    return sum(layer_macs(backbone, tokens)) + sum(ends_macs(backbone, tokens))


def kept_bytes(backbone: Backbone, rows: int, tokens: int) -> int:
    """What autograd keeps of a forward pass in float32 until the backward pass, weights not
    counted.
    """
    weights = {tensor.untyped_storage()._cdata for tensor in backbone.model.parameters()}
    # storage to a tensor in it, which must stay alive: a later storage would take its address
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.zeros(rows, tokens, dtype=torch.long, device=backbone.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone.model.train()(input_ids=ids)
    backbone.model.eval()  # as a Backbone always is
    return sum(
        tensor.untyped_storage().nbytes()
        for storage, tensor in kept.items()
        if storage not in weights
    )


def states_bytes(backbone: Backbone, n: float) -> float:
    """Extracted states on disk: [CLS] and mean of every layer, and F's logits, in float32."""
    return n * (2 * backbone.n_layers * backbone.hidden_size + backbone.num_labels) * 4


def table_bytes(backbone: Backbone, n: float) -> float:
    """A ScoreTable's arrays: logits of all layers, meta scores, and a label of 8 bytes."""
    return n * (backbone.n_layers * backbone.num_labels * 4 + (backbone.n_layers - 1) * 4 + 8)


def stages(
    backbone: Backbone,
    n: int,
    held_out: int,
    tokens: int,
    epochs: float,
    batch_size: int = 32,
    speed: float = 1e14,
    disk: float = 5e8,
) -> pd.DataFrame:
    """Hours, gigabytes of disk and gigabytes of memory of every stage of one run.

    n, held_out       training inputs, and those of validation and test together
    speed, disk       operations (two to a multiply-accumulate) and bytes read a second
    """
    forward, hours = 2 * full_macs(backbone, tokens), 1 / 3600
    weights, chunk = 4 * parameters(backbone), CHUNK * backbone.n_layers * backbone.hidden_size
    run_f = (
        4
        * TOKENS
        * max(
            matrix.out_features
            for matrix in backbone.model.modules()
            if isinstance(matrix, torch.nn.Linear)
        )
    )
    read = {
        part: states_bytes(backbone, share * n) / disk
        for part, share in (("tune", 0.7), ("meta", 0.2))
    }
    rows = [
        (
            "fine-tuning",
            3 * epochs * n * forward / speed,
            ADAM / 4 * weights,
            ADAM / 4 * weights + kept_bytes(backbone, 1, tokens) * batch_size,
        ),
        ("extraction", n * forward / speed, states_bytes(backbone, n), weights + 2 * run_f),
        ("early heads", HEAD_EPOCHS * read["tune"], 0, 3 * 4 * chunk),
        ("meta classifiers", META_EPOCHS * read["meta"], 0, 3 * 4 * chunk),
        (
            "tables",
            held_out * forward / speed,
            states_bytes(backbone, held_out) + table_bytes(backbone, held_out),
            weights + 2 * run_f,
        ),
    ]
    return pd.DataFrame(
        [
            (stage, seconds * hours, kept / 1e9, memory / 1e9)
            for stage, seconds, kept, memory in rows
        ],
        columns=["stage", "hours", "disk", "memory"],
    )


NEEDS = {"hours": "GPU hours", "disk": "disk (GB)", "memory": "memory (GB)"}


def needs(
    profile: str, speed: float, disk: float, tokens: int, training_rows: Mapping[str, int]
) -> pd.DataFrame:
    """Every stage of every run of a profile: hours, disk and memory."""
    table2 = pd.read_csv(DATA / "paper" / "table2_datasets.csv", index_col="task")
    path = ROOT / "notebooks" / "profiles" / f"{profile}.yaml"
    parts = []
    for run in yaml.safe_load(path.read_text())["runs"]:
        size, training = table2.loc[run["task"]], run["training"]
        backbone = shaped(run["model"], find(run["task"]).n_outputs)
        found = stages(
            backbone,
            training_rows.get(run["task"], size["train"]),
            size["dev"] + size["test"],
            training.get("max_length", tokens),
            training["epochs"],
            training.get("batch_size", 32),
            speed=speed,
            disk=disk,
        )
        named = dict(model=run["model"].split("/")[-1], task=run["task"])
        parts.append(found.assign(**named, parameters=parameters(backbone)))
    return pd.concat(parts, ignore_index=True)


def largest(needs: pd.DataFrame) -> pd.DataFrame:
    """Each need of each stage on the largest task, a row a model."""
    long = needs.melt(["model", "task", "stage"], list(NEEDS), "what", "value")
    long["what"] = long["what"].map(NEEDS)
    return long.groupby(["model", "stage", "what"], sort=False)["value"].max().reset_index()


def stages_figure(most: pd.DataFrame) -> Figure:
    """Hours, disk and memory by stage, a colour a model."""
    grid = sns.catplot(
        most,
        x="value",
        y="stage",
        hue="model",
        col="what",
        kind="bar",
        sharex=False,
        height=2.6,
        aspect=1.15,
        palette=palette(most["model"], MODELS),
        saturation=1,
    )
    grid.set(xscale="log").set_axis_labels("", "").set_titles("{col_name}, largest task")
    for text in grid.legend.get_texts():
        text.set_text(written(text.get_text()))
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.45, -0.12), ncol=3, title=None)
    return grid.figure
