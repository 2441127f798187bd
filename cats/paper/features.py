"""Tables 1 and 2 on the shipped tables (notebook 21)."""

from collections.abc import Sequence

import pandas as pd

from cats.model.cost import meta_macs
from cats.model.exits import Meta, sizes
from cats.paper import report
from cats.paper.places import DATA, results
from cats.paper.store import Tables
from cats.stats.table import ScoreTable
from cats.stats.trials import auroc, evaluate

MEANING = {
    "hidden": "the early hidden state (text of Section 3.2)",
    "prediction": "the current prediction ŷ_k",
    "history": "the past k-1 predictions; for classification their probabilities p_j(ŷ_j)",
    "pmax": "probability of the prediction (classification)",
    "pdiff": "its distance to the second largest (classification)",
}
# one feature as the confidence: a measure by the name Table 1 gives it
SINGLE = {"meta": "meta", "sm": "pmax", "diff": "pdiff", "patience": "patience"}
KEYS = ["task", "backbone", "measure"]


def table_2(tables: Tables) -> pd.DataFrame:
    """The tasks: labels, sizes and F's test performance in per cent, the paper's beside ours."""
    path = DATA / "paper" / "table2_datasets.csv"
    paper = pd.read_csv(path).rename(columns={"full_model_test_performance": "F"})
    paper, rows = paper.set_index("task"), []
    for (task, backbone), table in tables.items():
        size, theirs = table.metadata.get("rows", {}), paper.reindex([task]).iloc[0]
        labels = "regression" if table.regression else table.n_classes
        ours = {"train": size.get("train"), "dev": size.get("validation"), "test": len(table)}
        ours |= {"F": 100 * report.full_performance(table)}
        beside = {f"paper {name}": theirs[name] for name in ours}
        rows.append({"task": task, "backbone": backbone, "labels": labels} | ours | beside)
    return pd.DataFrame(rows)


def counts(C: int, l: int, d_e: int = 32) -> dict[str, int]:
    """How many inputs of M_k each feature is, and what one M_k costs.

    >>> counts(C=2, l=24)["MACs of one M_k"]  # the paper's for IMDB and Albert-xlarge, Section 5.4
    1920
    """
    meta, parts = Meta(l - 1, d_e, C), sizes(l - 1, d_e, C)
    parts = {name: parts[name] for name in MEANING}
    return parts | {"all": meta.inputs, "MACs of one M_k": meta_macs(meta)}


def table_1(tables: Tables) -> pd.DataFrame:
    """The features: what they are, and how many numbers for each table."""
    found = {" ".join(pair): counts(t.n_classes, t.n_layers) for pair, t in tables.items()}
    frame = pd.DataFrame(found).rename_axis("feature").reset_index()
    frame.insert(1, "what it is", frame["feature"].map(MEANING).fillna(""))
    return frame


def worth() -> pd.DataFrame | None:
    """What leaving out each feature costs a trained M_k, as 04_meta_classifiers found it; None
    where it has not been run.
    """
    found = results("04_meta_classifiers_features-*.csv")
    if not found:
        return None
    named = [pd.read_csv(path).assign(run=path.stem.split("features-")[1]) for path in found]
    frame = pd.concat(named)
    whole = frame[frame["features"] == "all"].set_index("run")
    frame["AUROC lost"] = frame["run"].map(whole["mean AUROC"]) - frame["mean AUROC"]
    frame["layers added"] = frame["layers"] - frame["run"].map(whole["layers"])
    without = frame[frame["features"].str.startswith("without")]
    wide = without.pivot(index="features", columns="run", values=["AUROC lost", "layers added"])
    return wide.astype(float).round(3)


def usable(table: ScoreTable) -> list[str]:
    """The measures that stand for one feature, as far as a table has them."""
    return [name for name in SINGLE if not (table.regression and name in ("sm", "diff"))]


def areas(tables: Tables) -> pd.DataFrame:
    """AUROC for F_k = F of the meta score and of each feature alone, by layer."""
    rows = []
    for pair, table in tables.items():
        for measure in usable(table):
            scores, consistent = table.scores(measure), table.consistent
            rows += [
                (*pair, SINGLE[measure], k, auroc(scores[:, k - 1], consistent[:, k - 1]))
                for k in range(1, table.n_layers)
            ]
    return pd.DataFrame(rows, columns=[*KEYS, "layer", "auroc"])


def single(
    tables: Tables,
    areas: pd.DataFrame,
    methods: Sequence[str],
    epsilons: Sequence[float],
    trials: int,
    seed: int,
) -> pd.DataFrame:
    """Mean AUROC of each confidence and the layers it needs, calibrated in the same way."""
    frames = [
        evaluate(table, methods, usable(table), epsilons, trials, seed).assign(
            task=pair[0], backbone=pair[1]
        )
        for pair, table in tables.items()
    ]
    frame = pd.concat(frames).replace({"measure": SINGLE})
    groups = frame.groupby([*KEYS, "method", "epsilon"], sort=False)["layers"]
    layers = groups.mean().unstack(["method", "epsilon"])
    layers.columns = [f"{method} {epsilon:g}" for method, epsilon in layers.columns]
    mean = areas.groupby(KEYS, sort=False)["auroc"].mean().to_frame("mean AUROC")
    return mean.join(layers).reset_index()
