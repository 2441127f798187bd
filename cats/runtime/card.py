"""The model card of a CAT, from the template beside this file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from cats.stats.quantiles import smallest_epsilon
from cats.stats.validity import coverage_law

if TYPE_CHECKING:
    from cats.runtime.cat import CAT

EPSILONS = (0.2, 0.1, 0.05, 0.02, 0.01)
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


def beta_quantiles(n: int, epsilons: Sequence[float]) -> dict[float, str]:
    """Between which shares a calibration on n inputs covers new ones, nine times in ten."""
    found = {}
    for epsilon in epsilons:
        if epsilon < smallest_epsilon(n):
            found[epsilon] = "all layers run"
        else:
            low, high = coverage_law(n, epsilon).ppf([0.05, 0.95])
            found[epsilon] = f"{low:.3f} to {high:.3f}"
    return found


def body(cat: "CAT") -> str:
    """What the layers run on, where that is not F itself."""
    if not cat.nearly:
        return ""
    lost = int((~cat.consistent[:, -1]).sum())
    return (
        f"\n* layers run in {cat.body}; F is the model in {cat.backbone.precision}. The body's own"
        f" last layer differs from F, or might by rounding, on {lost} of {len(cat.table)}"
        " calibration inputs, which calibration takes into account; where that is too much for ε, F"
        " itself runs"
    )


def card(cat: "CAT") -> str:
    """What was fitted on what, and what it can promise."""
    n, l = len(cat.table), cat.backbone.n_layers
    read = "tuning inputs that were kept to choose by" if cat.choosing else "calibration inputs"
    law = beta_quantiles(n, EPSILONS)
    rows = "\n".join(
        f"| {row.epsilon:g} | {law[row.epsilon]} | {row.layers:.2f} of {l} ({row.low:.2f} to"
        f" {row.high:.2f}) |"
        for row in cat.savings(EPSILONS).itertuples()
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
        read=f"{len(cat.choosing or cat.table):,} {read}",
        about="\n".join(f"* {name}: {value}" for name, value in sorted(cat.about.items())),
        max_length=cat.max_length,
        some=int((~cat.consistent.all(axis=1)).sum()),
        autocast=cat.autocast or "none",
        body=body(cat),
    )
