"""What both READMEs say was found, said again from the committed CSVs and the paper's printed
numbers. Nothing here goes through cats.paper.facts, so that a wrong fact cannot agree with itself.
"""

import json
import re
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
TASKS = {"imdb": "IMDB", "vitaminc": "VitaminC", "ag_news": "AG News", "stsb": "STS-B"}
LAYERS = 24  # of MobileBERT, and of Albert-xlarge
MAIN, SMALL = "mobilebert-uncased", "bge-small-en-v1.5"


def figure(name):
    return pd.read_csv(ROOT / f"figures/{name}.csv")


def printed(name):
    return pd.read_csv(ROOT / f"data/paper/{name}.csv")


def row(frame, **where):
    """The one row of a frame where these columns have these values."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1, where
    return frame.iloc[0]


def count(flags):
    return f"{sum(flags)} of {len(flags)}"


def between(values, form):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def performance():
    """Table 2."""
    ours, theirs = figure("21_tasks_and_features_table_2"), printed("table2_datasets")
    said = []
    for task, sign in {"ag_news": " %", "stsb": "", "imdb": " %", "vitaminc": " %"}.items():
        main, small = (row(ours, task=task, backbone=name).F for name in (MAIN, SMALL))
        name = "bge-small " if task == "ag_news" else ""
        said.append(f"{TASKS[task]} {main:.1f}{sign} ({name}{small:.1f}{sign})")
    order = ("ag_news", "stsb", "imdb", "vitaminc")
    theirs = [row(theirs, task=task).full_model_test_performance for task in order]
    yield "figures", f"F: {', '.join(said)} | {', '.join(f'{one:.1f}' for one in theirs)} |"


def consistency():
    """Figures 3 and 4, and meta against p max in Figure 3."""
    sweep, said, paper = figure("22_consistency"), {}, {}
    for task in TASKS:
        ours = row(sweep, task=task, method="shared", measure="meta", epsilon=0.05)
        if task == "stsb":
            theirs = row(
                printed("table4_regression_test"), task=task, method="shared/meta", target=0.95
            )
        else:  # Figure 3 is of development sets, as Table C.2 is
            theirs = row(printed("tableC2_measures_dev"), task=task, measure="meta", target=0.95)
        said[task] = 100 * ours.consistency_mean, 100 * ours.layers_mean / LAYERS
        paper[task] = theirs.consistency, 100 * theirs.layers / LAYERS
    form = "{:.1f} % with {:.0f} %"
    news, theirs = said["ag_news"], paper["ag_news"]
    yield "README", f"agrees on {form.format(*news)} of the layers (paper: {theirs[0]:.1f} %,"
    yield "README", f"{theirs[0]:.1f} %, {theirs[1]:.0f} %, Albert-xlarge)"
    imdb, vitaminc = (form.format(*said[task]) for task in ("imdb", "vitaminc"))
    yield (
        "figures",
        f"AG News at 0.95: `shared/meta` {news[0]:.1f} % consistent with {news[1]:.0f} % of the"
        f" layers; IMDB {imdb}, VitaminC {vitaminc}; ",
    )
    yield "figures", f"| {theirs[0]:.1f} %, {theirs[1]:.0f} % (AG News) |"
    yield "figures", f"STS-B at 0.95: {form.format(*said['stsb'])} of the layers |"
    yield "figures", f"| {paper['stsb'][0]:.1f} %, {paper['stsb'][1]:.0f} % (Table 4, test) |"
    shared = sweep[sweep["method"] == "shared"]
    pairs = shared.merge(shared, on=["task", "epsilon"])
    pairs = pairs[(pairs["measure_x"] == "meta") & (pairs["measure_y"] == "sm")]
    wins = count((pairs["layers_mean_x"] < pairs["layers_mean_y"]).tolist())
    yield "README", f"fewer layers than p max in {wins} cases of Figure 3"
    yield "figures", f"meta needs fewer layers than p max in {wins} cases |"


def results():
    """Tables 3 and 4."""
    tables, ours, theirs, seen = figure("23_tables"), {}, {}, {}
    for task in TASKS:
        name = "table4_regression_test" if task == "stsb" else "table3_classification_test"
        theirs[task] = row(printed(name), task=task, method="shared/meta", target=0.95).layers
        for method in ("shared", "first_exit"):
            found = row(tables, task=task, method=f"{method}/meta", target=0.95)
            ours[task, method], seen[task, method] = found.layers, found.consistency
    both = {task: (ours[task, "shared"], ours[task, "first_exit"]) for task in TASKS}
    shared, first = both["ag_news"]
    yield "README", f"`first_exit` needs {first:.1f} layers instead of {shared:.1f}"
    yield (
        "figures",
        f"AG News {shared:.1f}, **{first:.1f}** ({seen['ag_news', 'first_exit']:.1f} % consistent),"
        f" IMDB {both['imdb'][0]:.1f}, {both['imdb'][1]:.1f},"
        f" VitaminC {both['vitaminc'][0]:.1f}, {both['vitaminc'][1]:.1f} |",
    )
    listed = ", ".join(f"{theirs[task]:.1f}" for task in ("ag_news", "imdb", "vitaminc"))
    yield "figures", f"| {listed} (`shared/meta`) |"
    shared, first = both["stsb"]
    yield (
        "figures",
        f"STS-B at 0.95: `shared/meta` {shared:.1f} layers, `first_exit` {first:.1f} |"
        f" {theirs['stsb']:.1f} |",
    )
    saved = []
    for (_, _), part in tables.groupby(["task", "target"]):
        used = part.set_index("method")["layers"]
        saved.append(1 - used["first_exit/meta"] / used["shared/meta"])
    middle, low, high = pd.Series(saved).median(), min(saved), max(saved)
    head = f"saves {middle:.0%} of the layers of `shared` (median"
    yield "README", f"{head} of Tables 3 and 4; {low:.0%} to {high:.0%})"
    yield "figures", f"{head}; {low:.0%} to {high:.0%} in Tables 3 and 4)"


def exits():
    """Figures 5 and C.1."""
    means = figure("24_exit_layers_means")
    said = []
    for task, name in TASKS.items():
        low, high = (row(means, task=task, method="shared", epsilon=e).layers for e in (0.05, 0.2))
        said.append(f"{name} {low:.1f} → {high:.1f}")
    yield "figures", f"from ε = 0.05 to 0.2: {', '.join(said)} |"


def seconds():
    """Tables 5 and C.3 and the comparison, from the record of a named run."""
    frame = figure("25_efficiency")
    many = [name for name in frame if name.startswith("batch 32")][0]
    shared, first = (
        row(frame, task="ag_news", method=f"{method}/meta", target=0.9)[many]
        for method in ("shared", "first_exit")
    )
    ratio = frame[many] / frame["share_32"]
    theirs = row(printed("table5_efficiency"), task="ag_news", method="shared/meta", target=0.9)
    run = json.loads((ROOT / "figures/25_efficiency.json").read_text())["measured"]
    yield (
        "figures",
        f"AG News at 0.90: `shared/meta` {shared:.0f} % of the time at batch 32, `first_exit`"
        f" {first:.0f} % (exits replayed on {many.split()[-1]}); T_G/T_F is"
        f" {ratio.median():.2f} times layers_G/l (median; {ratio.min():.2f} to {ratio.max():.2f}),"
        f" measured on {run['machine']}, {run['date']}, {run['repeats']} repeats |"
        f" {theirs.amortized_time_percent:.0f} % (A100) |",
    )
    yield "README", f"T_G/T_F at batch 32 is {ratio.median():.2f} times layers_G/l."
    frame = figure("26_comparison-ag_news-bge-small-en-v1.5-0")
    frame["setting"] = pd.to_numeric(frame["setting"], errors="coerce")
    ours, fast, waiting = (
        100 * row(frame, what=what, setting=0.05).relative_time
        for what in ("CAT", "CAT, bfloat16", "waiting for the slowest")
    )
    whole = 100 * row(frame, what="bfloat16").relative_time
    for name in ("README", "figures"):
        yield (
            name,
            f"the CAT takes {ours:.0f} % of the full model's time, {fast:.0f} % with layers in"
            f" bfloat16 (all layers in bfloat16: {whole:.0f} %)",
        )
        yield name, f"waiting for the slowest of each batch, take {waiting:.0f} %"


def appendices():
    """Tables C.1 and C.2, Figures C.2 and C.3, Table 1."""
    frame, theirs = figure("30_naive"), printed("tableC1_naive_dev")
    naive, ltt = (
        row(frame, task="ag_news", method=f"{method}/meta", target=0.95)
        for method in ("naive", "ltt")
    )
    theirs = row(theirs, task="ag_news", measure="meta", target=0.95)
    yield (
        "figures",
        f"`naive/meta` bound {naive.bound:.1f} %, {naive.layers:.1f} layers; `ltt` promises 95 %"
        f" with {ltt.layers:.1f} | {theirs.bound:.1f} %, {theirs.layers:.1f} |",
    )
    frame, theirs = figure("31_measures"), printed("tableC2_measures_dev")
    layers = {
        (task, measure): row(frame, task=task, method=f"shared/{measure}", target=0.95).layers
        for task in ("ag_news", "vitaminc")
        for measure in ("meta", "sm")
    }
    paper = [
        row(theirs, task="ag_news", measure=measure, target=0.95).layers
        for measure in ("meta", "sm")
    ]
    pairs, wins = figure("21_tasks_and_features"), []
    for _, part in pairs.groupby(["task", "backbone"]):
        by = part.set_index("measure")
        if "pmax" in by.index:
            wins += [
                by[name]["meta"] < by[name]["pmax"] for name in by if name.startswith("shared ")
            ]
    yield (
        "figures",
        f"AG News {layers['ag_news', 'meta']:.1f}, {layers['ag_news', 'sm']:.1f};"
        f" VitaminC {layers['vitaminc', 'meta']:.1f}, {layers['vitaminc', 'sm']:.1f}; over all"
        f" pairs meta needs fewer in {count(wins)} cases | {paper[0]:.1f}, {paper[1]:.1f}"
        " (AG News) |",
    )
    there = [
        row(part, measure="meta").layers < row(part, measure="sm").layers
        for _, part in theirs.groupby(["task", "target"])
    ]
    yield "README", f"and in {count(wins)} over all encoders (paper: {count(there)}, Table C.2)"
    at = dict(backbone=SMALL, task="ag_news", method="shared", measure="meta", epsilon=0.05)
    small = row(figure("32_other_backbones"), **at).layers_mean
    yield "figures", f"bge-small (12 layers): AG News {small:.1f} of 12 layers at 0.95;"
    worth, hidden = [], []
    for run in ("sentiment-demo-0", "similarity-demo-0"):
        layers = figure(f"04_meta_classifiers_features-{run}").set_index("features")["layers"]
        without = layers.filter(like="without") - layers["all"]
        hidden.append(without.pop("without hidden"))
        worth.append(without.max())
    yield "README", f"no feature of Table 1 is worth more than {max(worth):.3f} layers"
    yield "figures", f"no feature of Table 1 is worth more than {max(worth):.3f} layers"
    yield "figures", f"M_k also reads, is worth {min(hidden):.1f} to {max(hidden):.1f}"


def beyond():
    """Theorems, and what the paper has not."""
    claims, controls = figure("11_theorems_claims"), figure("11_theorems_controls")
    own = ("Lemma", "Proposition", "Theorem", "Remark")
    held = {True: [], False: []}
    for claim, verdict in zip(claims["claim"], claims["verdict"]):
        held[claim.startswith(own)].append(verdict == "holds")
    caught = count([verdict != "holds" for verdict in controls["verdict"]])
    law = figure("41_exact_law_checks")
    law = count([verdict == "holds" for verdict in law[law["kind"] == "law"]["verdict"]])
    yield (
        "README",
        f"{count(held[True])} checks of the paper's claims and {count(held[False])} of ours hold"
        f" against exact laws, {caught} controls fail as they must; on real scores the exact law"
        f" holds for {law} tables",
    )
    yield (
        "figures",
        f"{count(held[True])} checks of the paper's claims hold against exact laws,"
        f" {count(held[False])} of promises beyond it; {caught} controls fail, as they must; on"
        f" real scores the law holds for {law} tables",
    )
    size = figure("40_beyond_size")
    size = size[(size["epsilon"] == size["epsilon"].min()) & (size["method"] == "first_exit")]
    by = size.groupby("n")["layers"].mean()
    few, many = min(by.index, key=lambda n: abs(n - 100)), by.index.max()
    yield (
        "figures",
        f"{few} calibration inputs use {by[few]:.0f} % of the layers, {many:,} use"
        f" {by[many]:.0f} %",
    )
    saved = figure("42_heads_saved")["0.05"].mean()
    yield "README", f"heads that learn from F save {saved:.0%} on top"
    yield "figures", f"on the same F: {saved:.0%} fewer layers at ε = 0.05"
    risk = figure("43_choosing")
    way = "chosen on the calibration inputs"
    risk = row(risk, n=risk["n"].min(), way=way).risk_mean
    cost = row(figure("43_choosing_cost"), task="ag_news")
    yield "README", f"gave a risk of {risk:.3f} where 0.05 was promised"
    yield (
        "figures",
        f"a risk of {risk:.3f} where 0.05 was promised; `band` allows it: AG News {cost.band:.1f}"
        f" layers instead of {cost.first_exit:.1f}",
    )
    groups = figure("44_risk_groups")
    one, largest = (
        between(groups[f"worst class, {way}"], "{:.1%}")
        for way in ("one threshold", "the largest for all")
    )
    loss = row(figure("44_risk"), task="stsb", alpha=0.2)
    yield "README", f"left the worst class at {one} for 95 %"
    yield (
        "figures",
        f"promised 0.2, seen {loss.loss:.2f}, {loss.layers:.1f} of 24 layers; worst class"
        f" {largest} for 95 %",
    )
    needs = figure("60_scale")
    runs = (needs["stage"] == "fine-tuning").sum()
    yield (
        "figures",
        f"the paper's {runs} runs: about {needs['hours'].sum():.0f} GPU hours,"
        f" {needs['disk'].sum():.0f} GB of states",
    )


def use():
    """What is watched, and models of any kind."""
    quiet = figure("45_monitor_quiet")
    rate = 100 * quiet["alarms"] / quiet["streams"]
    n, naive = quiet["streams"][0], rate[quiet["way"] == "p-values"]
    kept = rate[(quiet["way"] == "monitor") & (quiet["threshold"] != "first_exit")]
    yield (
        "figures",
        f"a false alarm in {between(kept, '{:.1f}')} % of {n:,} streams (δ = 1 %; p-values looked"
        f" at again and again: {between(naive, '{:.1f}')} %)",
    )
    again = figure("45_monitor_again")
    hard = 100 * again[again["part"] == "hardest quarter"][["shifted", "recalibrated"]]
    yield (
        "figures",
        f"a shift to the hardest quarter: {between(hard['shifted'], '{:.0f}')} % consistent,"
        f" recalibrated {hard['recalibrated'].min():.0f} %",
    )
    found = row(figure("51_cascade"), method="first_exit", epsilon=0.1)
    yield (
        "figures",
        f"TF-IDF before the demo's encoder at 0.90: {found.cost:.0%} of its multiply-adds,"
        f" {found.consistency:.1%} consistent",
    )


def every():
    """(README or figures, a sentence that it must have), all of them."""
    parts = (performance, consistency, results, exits, seconds, appendices, beyond, use)
    said = [headline for part in parts for headline in part()]
    return [(name, re.sub(r"(?<=\d)%", " %", sentence)) for name, sentence in said]
