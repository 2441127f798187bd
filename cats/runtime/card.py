"""The model card of a CAT, from the template beside this file."""

from pathlib import Path
from typing import TYPE_CHECKING

from cats.stats.calibrators import smallest_epsilon

if TYPE_CHECKING:
    from cats.runtime.cat import CAT

TEMPLATE = Path(__file__).with_name("card.md")


def card(cat: "CAT") -> str:
    """What was fitted on what, and what it can promise."""
    n, l = len(cat.table), cat.backbone.n_layers
    means = cat.savings().xs("mean", axis=1, level=1).reset_index()
    rows = "\n".join(
        f"| {row.epsilon:g} | {row.consistency:.3f} | {row.layers:.2f} of {l} |"
        for row in means.itertuples()
    )
    return TEMPLATE.read_text(encoding="utf-8").format(
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
