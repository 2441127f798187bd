"""What each picture and table shows, said once: for the page, the Markdown, LaTeX and the text that
stands for a picture where it cannot be seen.
"""

import re

SHADES = "Lines are means over random splits, shades the 16th to 84th percentile."
BESIDE = "Ours, and in brackets the paper's (Albert-xlarge); grey rows promise nothing."
CAPTIONS = {
    "00_start": "All notebooks, and what they regenerate of the paper.",
    "00_start_figure_1": "Figure 1: one input's way through the layers. Filled boxes were run,"
    " dotted ones not; below, the confidence of each layer, hatched where it disagrees with F, and"
    " the threshold it has to exceed.",
    "00_start_figure_2": "Figure 2: meta confidence and early predictions of an easy and a hard"
    " input. Circles agree with F, crosses do not; dashed is the threshold, dotted the exit.",
    "01_tasks_lengths": "Words (above) and labels (below) of each task's training inputs.",
    "02_fine_tuning": "Training loss of the full model F by epoch.",
    "03_early_heads_layers": "Left: how often each layer agrees with F, and its performance. Right:"
    " calibration error before and after one temperature a layer, or the distance to F.",
    "03_early_heads_difficulty": "How often each layer agrees with F, a curve a known difficulty.",
    "04_meta_classifiers_auroc": "How well meta score and p max tell inputs on which a layer agrees"
    " with F from the others; 0.5 is a coin.",
    "04_meta_classifiers_scores": "Meta scores where a layer agrees with F and where it does not:"
    " first, middle and last layer, logarithmic counts.",
    "04_meta_classifiers_features": "Table 1: meta classifiers trained once more without each"
    " feature; layers are those of first_exit at ε = 0.05.",
    "05_scores_exits": "Where test inputs leave, coloured by known difficulty, and the mean exit"
    " layer of each difficulty.",
    "10_calibration": "Every calibrator on a synthetic table whose truth is known: distance of"
    f" consistency to its target (shaded: below the promise) and layers. {SHADES} Dashed or dotted"
    " methods do not promise ε.",
    "11_theorems": "The true coverage of many calibrations against its exact Beta law, and how far"
    " coverages passed through their own law deviate from uniform; grey is a 99 % band.",
    "11_theorems_checks": "Where each check fell in the interval it had to fall in; below the line"
    " the controls, which must fall outside.",
    "21_tasks_and_features": "One feature alone as the confidence, beside the meta score: mean"
    " AUROC over layers, and layers used by method and ε.",
    "21_tasks_and_features_auroc": "AUROC for agreement with F by layer: the meta score and single"
    " features; 0.5 is a coin.",
    "21_tasks_and_features_table_1": "Table 1: what M_k reads, and how many numbers that is.",
    "21_tasks_and_features_table_2": "Table 2: labels, rows and the full model's test performance,"
    " ours and the paper's.",
    "22_consistency": "Figure 3: distance of consistency to its target (shaded: below the promise)"
    f" and layers used, against 1 − ε. {SHADES} Grey methods promise nothing; solid lines exit by"
    " the meta classifier, dashed ones by p max.",
    "22_consistency_regression": "Figure 4: the same as Figure 3 for STS-B, where G and F agree if"
    " they differ by at most 0.5.",
    "22_consistency_paper": "Points of Figures 3 and 4 that the paper prints, beside ours: per cent"
    " consistent, and share of layers.",
    "23_tables": "Layers as a share of the model's in Tables 3 and 4: dots ours, diamonds the"
    " paper's, colours the target.",
    "23_tables_classification": f"Table 3: classification, test. {BESIDE}",
    "23_tables_regression": f"Table 4: STS-B, test. {BESIDE}",
    "24_exit_layers": "Figure 5: the share of IMDB inputs that leave at each layer, by ε; dashed"
    " (shared) and dotted (first_exit) lines are the means.",
    "24_exit_layers_others": "Figure C.1: the share of inputs that leave at each layer, a row a"
    " task, by ε; dashed (shared) and dotted (first_exit) lines are the means.",
    "24_exit_layers_means": "Mean exit layers by task, method and ε; half is the share that leaves"
    " in the first half of the layers, last the share that runs them all.",
    "25_efficiency_by_exit": "Time of an exit at layer k as a share of the full model's, one input"
    " at a time; dotted is k / l.",
    "25_efficiency_table_5": "Table 5: layers, MACs reduction and time at 1 − ε = 0.90; square"
    " brackets are the paper's, round ones the range of repeats.",
    "25_efficiency_table_c3": "Table C.3: the same as Table 5 at 1 − ε = 0.95.",
    "26_comparison": "Other ways to a faster classifier: seconds against agreement with the full"
    " model; only the CAT's agreement is promised.",
    "26_comparison_promised": "Seconds against the agreement that was promised beforehand: the"
    " others promise nothing and are left out.",
    "30_naive": "Consistency minus target of single calibrations (dots) and the mean bound (ticks):"
    " naive tuning aims at the line, ltt to the right of it.",
    "30_naive_classification": f"Table C.1: naive calibration, validation, and ltt. {BESIDE}",
    "30_naive_regression": "The same as Table C.1 for STS-B, which the paper leaves out.",
    "31_measures": "Layers as a share of the model's by confidence measure: dots shared, crosses"
    " first_exit, diamonds the paper's shared; colours the target.",
    "31_measures_classification": f"Table C.2: confidence measures, validation. {BESIDE}",
    "31_measures_regression": "The same as Table C.2 for STS-B, which the paper leaves out.",
    "32_other_backbones": "Figure C.2: the layout of Figure 3 on a 12-layer encoder. Distance of"
    f" consistency to its target (shaded: below the promise) and layers. {SHADES}",
    "32_other_backbones_c3": "Figure C.3: the layout of Figure 3 on another kind of encoder."
    f" Distance of consistency to its target (shaded: below the promise) and layers. {SHADES}",
    "32_other_backbones_share": "Encoders side by side, layers as a share of the model's."
    " Colours are methods, dashes encoders.",
    "32_other_backbones_trends": "The paper's trends by encoder.",
    "33_examples": "Table D.1: the first generated inputs of each quarter of the layers, by exit.",
    "40_beyond": "Layers in per cent of F's at the same promise: shared (the paper's), shared_all,"
    " first_exit, and the oracle, which sees the answers.",
    "40_beyond_delta": "Left: how often the risk on the rest of a table exceeds ε after one"
    " calibration, against δ (black). Right: layers added to first_exit. Bars are 95 % intervals.",
    "40_beyond_size": "Layers, consistency and calibrations without a promise against the number of"
    " calibration inputs. Shaded: 5th to 95th percentile; dashed: those of the exact law.",
    "41_exact_law": "Covered test inputs over random splits of real tables (bars) and the exact law"
    " (line); nothing is fitted.",
    "41_exact_law_checks": "Distance to the law of every table, and of controls that are broken on"
    " purpose (grey).",
    "42_heads": "Heads of the paper's recipe and heads that learn from F: consistency by layer, and"
    " layers of first_exit against 1 − ε. Dotted lines know the answers.",
    "42_heads_by_seed": "Layers of first_exit where a pair was trained with more than one seed: a"
    " mark a seed, a bar from the lowest to the highest.",
    "42_heads_seeds": "Layers of first_exit seed by seed: how much a seed changes, beside what the"
    " recipe changes.",
    "42_heads_saved": "Share of layers that heads which learn from F save, by ε.",
    "42_heads_ablation": "One half of the recipe at a time: what heads learn, and what they read.",
    "43_choosing": "Left: risk where exit layers were chosen before or after looking, with 99 %"
    " intervals. Right: layers of first_exit, pac and band.",
    "43_choosing_cost": "Layers of first_exit, pac and band at the same ε.",
    "44_risk": "Mean losses promised and seen, and the layers they need; below the diagonal a"
    " promise is kept.",
    "44_risk_groups": "Consistency of the worst class and layers, with one threshold for all, one a"
    " class, and the largest for all.",
    "45_monitor": "A monitor over streams of inputs: quiet while the promise is kept, an alarm"
    " after a shift.",
    "45_monitor_again": "Consistency before a shift, after it, and recalibrated on audited inputs.",
    "45_monitor_quiet": "False alarms of the monitor, and of p-values looked at again and again.",
    "51_cascade": "A cascade of models, cheap to dear: agreement and cost against 1 − ε.",
    "50_your_own_model_exits": "Where held-out texts leave the CAT that was just fitted.",
    "60_scale": "GPU hours, disk and memory of every stage of the paper's runs.",
    "60_scale_stages": "GPU hours, disk and memory by stage, largest task, logarithmic.",
}


def caption(name: str) -> str:
    """The caption of a picture or table by its file's name, that of a run included.

    >>> caption("02_fine_tuning-sentiment-demo-0")
    'Training loss of the full model F by epoch.'
    """
    name = re.sub(r"\.(png|pdf|csv|md|tex|json)$", "", name)
    known = [stem for stem in CAPTIONS if name == stem or name.startswith(f"{stem}-")]
    return CAPTIONS[max(known, key=len)] if known else name
