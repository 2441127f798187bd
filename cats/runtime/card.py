"""The model card of a CAT, from the template beside this file."""

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from cats.stats.calibrators import smallest_epsilon

if TYPE_CHECKING:
    from cats.runtime.cat import CAT

TEMPLATE = Path(__file__).with_name("card.md")


def metadata(cat: "CAT") -> ModelCardData:
    """What the Hub reads of a card: base model, task, data, labels and metrics, where known."""
    where = str(cat.backbone.model.name_or_path)
    on_hub = bool(where) and not Path(where).exists() and not Path(where).is_absolute()
    return ModelCardData(
        library_name="cats",
        pipeline_tag="text-classification",
        base_model=where if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        datasets=cat.about.get("datasets"),
        language=cat.about.get("language"),
        license=cat.about.get("license"),
        metrics=["consistency"],
        labels=list(cat.names.values()) if cat.names else None,
        tags=["early-exit", "conformal-prediction", "text-classification"],
    )


def card(cat: "CAT") -> str:
    """What was fitted on what, and what it can promise."""
    n, l = len(cat.table), cat.backbone.n_layers
    means = cat.savings().xs("mean", axis=1, level=1).reset_index()
    rows = "\n".join(
        f"| {row.epsilon:g} | {row.consistency:.3f} | {row.layers:.2f} of {l} |"
        for row in means.itertuples()
    )
    return TEMPLATE.read_text(encoding="utf-8").format(
        metadata=metadata(cat).to_yaml(),
        family=cat.backbone.family,
        l=l,
        n=n,
        measure=cat.measure,
        smallest=smallest_epsilon(n),
        pac=smallest_epsilon(n, 0.01),
        rows=rows,
        about="\n".join(f"* {name}: {value}" for name, value in sorted(cat.about.items())),
        max_length=cat.max_length,
        some=int((~cat.table.consistent.all(axis=1)).sum()),
        autocast=cat.autocast or "none",
    )
