"""One look for all figures, and one way to save them: PNG, the numbers beside it as CSV, and how both were made."""

import matplotlib.pyplot as plt
import seaborn as sns

from cats.files import FIGURES, versions, write_json, writing

# Okabe and Ito's colours, safe for colour-blind readers; methods that do not promise epsilon are dashed
COLOURS = {
    "static": "#999999",
    "threshold": "#666666",
    "naive": "#8C6D31",
    "independent": "#56B4E9",
    "shared": "#0072B2",
    "shared_all": "#009E73",
    "first_exit": "#D55E00",
    "pac": "#CC79A7",
    "ltt": "#E69F00",
    "oracle": "#000000",
}
DASHES = {"static": (4, 2), "threshold": (1, 1), "naive": (6, 2, 1, 2), "oracle": (1, 2)}


def use_style():
    """The shared look: call it once at the top of a notebook."""
    sns.set_theme(
        context="paper",
        style="whitegrid",
        rc={"figure.dpi": 110, "savefig.dpi": 200, "axes.titlesize": "medium", "legend.frameon": False, "lines.linewidth": 1.6},
    )


def save(name, figure=None, data=None, parameters=None, inputs=None):
    """Write figures/NAME.png, .pdf, .csv and .json (parameters, versions, hashes of the inputs); returns the PNG's path."""
    undated = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}}  # the same bytes every time
    for kind, metadata in undated.items() if figure is not None else ():
        with writing(FIGURES / f"{name}.{kind}") as path:
            figure.savefig(path, bbox_inches="tight", metadata=metadata)
    if data is not None:
        with writing(FIGURES / f"{name}.csv") as path:
            data.to_csv(path, index=False, float_format="%.6g")
    made = {"parameters": parameters or {}, "inputs": inputs or {}, "versions": versions("matplotlib", "seaborn")}
    write_json(FIGURES / f"{name}.json", made)
    return FIGURES / f"{name}.png"


def save_table(name, data, shown=None, grey=(), parameters=None, inputs=None):
    """Write figures/NAME.csv (the numbers), .md and .tex (booktabs; as shown) and .json; returns the table to look at.

    data   a tidy frame of numbers
    shown  the frame a reader sees, its cells formatted already; by default `data` itself
    grey   positions of the rows that promise nothing
    """
    shown = (data if shown is None else shown).reset_index(drop=True)
    style = shown.style.hide(axis="index").apply(lambda row: ["color: gray" if row.name in set(grey) else ""] * len(row), axis=1)
    with writing(FIGURES / f"{name}.md") as path:
        path.write_text(shown.to_markdown(index=False) + "\n")
    with writing(FIGURES / f"{name}.tex") as path:
        latex = style.format(escape="latex").format_index(escape="latex", axis=1)
        path.write_text(latex.to_latex(hrules=True, convert_css=True, column_format="l" * len(shown.columns)))
    save(name, data=data, parameters=parameters, inputs=inputs)
    return style


def consistency_and_layers(frame, n_layers, title="", measure=None):
    """Figure 3's layout for one table: consistency above, layers below, against 1-epsilon; 16th to 84th percentile shaded."""
    frame = frame.assign(target=1 - frame["epsilon"])
    if measure:
        frame = frame[frame["measure"] == measure]
    methods = list(dict.fromkeys(frame["method"]))
    figure, axes = plt.subplots(2, 1, figsize=(4.6, 6.4), sharex=True, layout="constrained")
    for axis, column in zip(axes, ("consistency", "layers")):
        sns.lineplot(
            frame,
            x="target",
            y=column,
            hue="method",
            style="method",
            hue_order=methods,
            style_order=methods,
            palette=COLOURS,
            dashes={method: DASHES.get(method, "") for method in methods},
            errorbar=("pi", 68),
            ax=axis,
            legend=axis is axes[0],
        )
    axes[0].axline((0.5, 0.5), slope=1, color="black", linewidth=0.8)
    axes[0].set(ylabel="consistency  P(G = F)", title=title, ylim=(frame["target"].min() - 0.02, 1.005))
    axes[1].set(ylabel=f"layers used (of {n_layers})", xlabel="target  1 − ε", ylim=(0, n_layers * 1.02))
    axes[0].set_xlim(frame["target"].min(), frame["target"].max())
    sns.move_legend(axes[0], "upper left", bbox_to_anchor=(1.01, 1), title=None)
    return figure
