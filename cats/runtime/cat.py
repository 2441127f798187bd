"""CAT: a classifier that really stops early, and keeps its promise (Algorithm 1, PREDICT; Eq. 2).

    cat = CAT.fit("path/to/fine-tuned-model", tuning_texts, calibration_texts)  # unlabelled text
    out = cat.predict(texts, epsilon=0.05)  # ε is chosen here
    out.labels, out.exit_layers, out.confidences
    cat.predict(texts, monitor=Monitor(0.05, path="monitor.json"))  # is the promise kept?
    cat("one text")  # as transformers' text-classification pipelines answer
    cat.save_pretrained("my-cat")
    CAT.from_pretrained("my-cat", device="cuda")

After every layer the rows that have exited leave the batch, so nobody waits for the slowest input.
The calibration inputs' outputs are kept as a ScoreTable: thresholds for any ε, calibrator, measure
and subset of layers come from it.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cats._io import module_digest, versions, warn
from cats.model.backbone import Backbone
from cats.model.bodies import FULL, body_of, check_body, fastest, reads_on
from cats.model.exits import Heads, Meta, check_pair, score, vectors
from cats.runtime import folder as kept
from cats.runtime.audit import Audit
from cats.runtime.calibrated import EPSILON, LEAST, MEASURED, SPARE, Calibrated
from cats.runtime.card import card
from cats.runtime.inputs import (
    Arrays,
    Predictions,
    Row,
    check_batch_size,
    row_of,
    rows_of,
    rows_together,
    windows,
)
from cats.runtime.loop import Cohort, Decide, Loop, starting
from cats.runtime.scorer import Exit, Scorer
from cats.stats import calibrators
from cats.stats.measures import MEASURES, nines
from cats.stats.monitor import Monitor
from cats.stats.quantiles import SMALLEST
from cats.stats.table import TAU, ScoreTable
from cats.train import tasks
from cats.train.fit import Recipe, find_recipe, fit_heads, fit_meta
from cats.train.run import Run, table_of
from cats.train.states import (
    check_autocast,
    check_max_length,
    collate,
    encode,
    extract,
    load_tokenizer,
    mixed,
)


class CAT(Calibrated):
    """A fine-tuned model F with early heads, meta classifiers and calibration data."""

    def __init__(
        self,
        backbone: Backbone,
        tokenizer: PreTrainedTokenizerBase | None,
        heads: Heads,
        meta: Meta,
        table: ScoreTable,
        *,
        max_length: int = 256,
        measure: str = "meta",
        autocast: str | None = None,
        texts: int | None = None,
        margins: Mapping[str, Any] | None = None,
        unit: str = "nines",
        choosing: ScoreTable | None = None,
        body: str | None = None,
        slack: Sequence[float] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if not backbone.n_layers == heads.early + 1 == meta.early + 1 == table.n_layers:
            layers = (
                f"{backbone.n_layers}, {heads.early + 1}, {meta.early + 1} and {table.n_layers}"
            )
            raise ValueError(
                f"backbone, heads, meta classifiers and calibration table have {layers} layers:"
                " they do not belong together"
            )
        fits = (backbone.hidden_size, backbone.num_labels) == (heads.d, heads.n_outputs)
        if not fits or backbone.num_labels != table.n_classes:
            raise ValueError(
                "backbone, heads and calibration table differ in hidden size or number of labels"
            )
        check_pair(heads, meta, module_digest(heads))
        self.backbone, self.tokenizer, self.table = backbone, tokenizer, table
        self.heads, self.meta = heads.cpu(), meta.cpu()
        self.max_length = min(check_max_length(max_length), backbone.max_tokens)
        self.measure, self.autocast = self.check_measure(measure), check_autocast(autocast)
        self.engine = body_of(backbone, body)  # what runs: F, or a faster body of it
        self.body = self.engine.precision
        if self.nearly != (table.full is not None):
            raise ValueError(
                f"the body {self.body!r} needs a calibration table that compares it with F, and F"
                " itself one that does not: they do not belong together"
            )
        # (l,), by how much a body's logits may be off at each layer: see `fit`
        self.slack = list(slack or []) or [0.0] * backbone.n_layers
        self.texts = texts  # of an input: 1 or 2, or None where that is not known
        self.margins = dict(margins or {})  # by how much a measure's scores may be off: see `fit`
        self.unit = unit  # what that is counted in
        self.choosing = choosing  # inputs to choose by, which do not calibrate
        self.about, self._sets = dict(about or {}), {}
        self.exits = [Exit.of(self.heads, self.meta, k) for k in range(1, backbone.n_layers)]

    def __repr__(self) -> str:
        return (
            f"CAT({self.backbone.family}, {self.backbone.n_layers} layers"
            f"{f' in {self.body}' if self.nearly else ''}, {len(self.table)} calibration inputs,"
            f" {self.measure})"
        )

    @property
    def nearly(self) -> bool:
        """Whether layers run on a body that is only nearly F."""
        return self.engine is not self.backbone

    @property
    def calibration(self) -> ScoreTable:
        """The table of the calibration inputs."""
        return self.table

    @property
    def consistent(self) -> np.ndarray:
        """What calibration counts as F_k = F, (n, l-1). For a body that is only nearly F (n, l),
        and only where rounding cannot change the answer: see `fit`.
        """
        if not self.nearly:
            return self.table.consistent
        sure = self.table.surely_consistent(self.slack)
        if not self.table.regression:  # where rounding could change the last answer F gives it
            sure[:, -1] = self.table.consistent[:, -1]
        return sure

    def in_doubt(self, logits: np.ndarray) -> np.ndarray:
        """Of the last layer's logits (n, C), where they are so near to each other that rounding
        could change a body's answer, (n,): there F itself is asked. Never for numbers, whose
        agreement leaves room for rounding.
        """
        if not self.nearly or self.table.regression:
            return np.zeros(len(logits), bool)
        top = np.sort(logits, axis=-1)[:, -2:]
        return ~(top[:, 1] - top[:, 0] > 2 * self.slack[-1])

    # --- making one ---

    @classmethod
    def fit(
        cls,
        model: str | Path | PreTrainedModel | Backbone,
        tuning: Iterable[Any],
        calibration: Iterable[Any],
        *,
        recipe: str | Recipe = "distilled",
        labels: Sequence[Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        max_length: int | None = None,
        measure: str = "meta",
        autocast: str | None = None,
        body: str | None = None,
        device: str | int | torch.device | None = None,
        folder: str | Path | None = None,
        seed: int = 0,
        tau: float = TAU,
        head_options: Mapping[str, Any] | None = None,
        meta_options: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> "CAT":
        """A CAT from a fine-tuned model and two lists of texts (pairs for two-text tasks) of the
        kind it will see.

        model        a folder, a Hub id, or a model in memory
        tuning       trains heads, temperatures and meta classifiers; unlabelled. A tenth of them is
                     kept to choose by: `savings` and the card read those, never the calibration
                     inputs, so choosing ε, measure or layers by them voids no promise
        calibration  never trained on, not even by F; unlabelled. Its size limits ε: see
                     cats.calibration_size
        recipe       "distilled": heads learn what F says; "paper": they learn `labels`, or where
                     there are none F's predictions. Or a cats.train.fit.Recipe
        labels       class numbers or names, or numbers for regression, one a tuning text
        tokenizer    or its place; by default the model's
        max_length   tokens at which inputs are cut; by default what tokenizer and model allow
        autocast     run F in "bfloat16" or "float16", here and in predict; the promise is about F
                     as it runs here
        body         the arithmetic of the layers that run: None for F itself; "bfloat16" or "int8"
                     (cats.model.bodies), which must agree with F in float32 all the same: the
                     promise is about F, and covers what a body's last layer gets wrong; "auto" for
                     the fastest on this machine whose last layer hardly ever differs from F. Of
                     a body heads read means over tokens, not [CLS] (cats.model.bodies.reads_on)
        device       where F runs; by default an accelerator if there is one, as in transformers'
                     pipelines, and for a model in memory where it is
        folder       where extracted states go (a temporary folder by default); give one to resume
                     an interrupted fit
        head_options, meta_options   of training heads and meta classifiers: epochs, batch_size,
                     learning_rate

        A threshold is some calibration input's score, and predictions are computed in other
        arithmetic than the table (other batches, other padding). How far scores are off is measured
        here, on some calibration inputs alone and together (in nines, since rounding moves a score
        of 0.6 by far more than one of 0.996); calibration counts layers that lie so near to being
        the exit, and predictions leave that much above the threshold. With a body that is only
        nearly F the same is done for answers: how far logits are off is measured layer by layer,
        and a layer counts as agreeing with F only where that could not change its answer; inputs
        whose last layer is that undecided, a few in a hundred, are answered by F itself.
        So {G ≠ F} lies in {V > threshold} for all inputs whose scores and logits are off by no more
        than that, in whatever batch they come.
        """
        recipe = find_recipe(recipe)
        if labels is not None and recipe.targets != "labels":
            raise TypeError(
                f"the recipe {recipe.name!r} learns from F and reads no labels: leave them out, or"
                " say recipe='paper'"
            )
        cls.check_measure(measure)
        check_autocast(autocast)
        if body not in (None, "auto"):
            check_body(body)
        if autocast and body not in (None, FULL):
            raise ValueError(f"autocast={autocast!r} is for F itself, not for body={body!r}")
        tuning, calibration = rows_of(tuning), rows_of(calibration)
        check_texts(tuning, calibration)
        backbone = backbone_of(model).ready()
        place(backbone, device, loaded=isinstance(model, str | Path) and body != "int8")
        reader = tokenizer_of(tokenizer, model, backbone)
        if max_length is None:
            max_length = min(reader.model_max_length, backbone.max_tokens)
        check_max_length(max_length)
        if labels is not None:
            labels = class_numbers(labels, len(tuning), backbone)
        columns = tuple(f"text{i + 1}" for i in range(len(tuning[0])))
        data = tasks.from_texts(columns, tuning)
        if labels is not None:
            data = data.add_column("label", labels)
        parts, calibration = kept_apart(data, seed), tasks.from_texts(columns, calibration)
        timed = {}
        if body == "auto":
            rows = encode(reader, [list(c) for c in zip(*tuning[:TIMED])], max_length)
            body, timed = fastest(backbone, in_batches(reader, rows, backbone), tau)
        engine = body_of(backbone, body)
        recipe = find_recipe(recipe, reads=reads_on(body, recipe.reads))

        with tempfile.TemporaryDirectory() as temporary:
            work = Path(folder or temporary)
            options: dict[str, Any] = {"max_length": max_length, "autocast": autocast}
            states = {
                name: extract(
                    engine,
                    reader,
                    part.select_columns(columns),
                    columns,
                    work / name,
                    **options,
                )
                for name, part in parts.items()
            }
            targets = [
                None if labels is None else parts[name]["label"][:] for name in ("tune", "scale")
            ]
            heads, _ = fit_heads(
                states["tune"],
                states["scale"],
                backbone.num_labels,
                tuple(targets),
                recipe=recipe,
                seed=seed,
                **(head_options or {}),
            )
            meta, _ = fit_meta(
                heads, states["meta"], recipe=recipe, tau=tau, seed=seed, **(meta_options or {})
            )
            states["calibration"] = extract(
                engine, reader, calibration, columns, work / "calibration", **options
            )
            tables = {
                name: table_of(states[name], heads, meta, None, {"split": name}, tau)
                for name in ("calibration", "choosing")
                if name in states
            }
            if engine is not backbone:  # what F itself says
                for name, table in tables.items():
                    part = parts[name].select_columns(columns) if name in parts else calibration
                    aside = work / f"{name}-{FULL}"
                    full = extract(backbone, reader, part, columns, aside, **options)
                    tables[name] = compared(table, full.gather("logits").numpy())
        sizes = {
            "tuning": len(tuning),
            "calibration": len(calibration),
            "labelled": labels is not None,
            "recipe": asdict(recipe),
        }
        made = {
            **sizes,
            "seed": seed,
            "versions": versions("torch", "transformers"),
            **({"bodies": timed} if timed else {}),
            **(about or {}),
        }
        cat = cls(
            backbone,
            reader,
            heads,
            meta,
            tables["calibration"],
            max_length=max_length,
            measure=measure,
            autocast=autocast,
            texts=len(columns),
            choosing=tables.get("choosing"),
            body=body,
            about=made,
        )
        cat._measure_rounding(calibration, columns, seed)
        return cat

    @classmethod
    def from_run(cls, run: Run, measure: str = "meta", body: str | None = None) -> "CAT":
        """The CAT of a run, calibrated on its validation split. With a `body`, see `fit`, heads and
        meta classifiers that read what a body keeps of F are fitted on the run's own states of F,
        if the run has none yet, and calibrated as they read the body.
        """
        engine = body_of(run.backbone, body)
        if engine is not run.backbone:
            run = run.by(find_recipe(run.recipe, reads=reads_on(body, run.recipe.reads)))
        table, data, columns = run.table("validation"), run.data["validation"], run.task.columns
        if engine is not run.backbone:
            with tempfile.TemporaryDirectory() as folder:
                how: dict[str, Any] = {"max_length": run.max_length}
                states = extract(engine, run.tokenizer, data, columns, folder, **how)
                made = table_of(states, run.heads, run.meta, table.labels, table.metadata)
            table = compared(made, table.logits[:, -1])
        about = {
            "task": run.task.name,
            "tuning": len(run.data["train"]),
            "calibration": len(data),
            "recipe": asdict(run.recipe),
        }
        if run.task.hub not in ("", "demo") and not run.source:
            about["datasets"] = [run.task.hub]
        cat = cls(
            run.backbone,
            run.tokenizer,
            run.heads,
            run.meta,
            table,
            max_length=run.max_length,
            measure=measure,
            texts=len(columns),
            body=body,
            about=about,
        )
        if cat.nearly:
            cat._measure_rounding(data, columns)
        return cat

    # --- using it ---

    def _check_method(self, method: str, options: Mapping[str, Any]) -> None:
        """Refuse a method that takes the body's last layer for F."""
        if not self.nearly:
            return
        found = calibrators.METHODS.get(method)
        if found is not None and found.guarantee != "none" and not found.bodies:
            raise ValueError(
                f"{method} takes the last layer for F, and the body {self.body!r} is only nearly F:"
                " use first_exit, pac or band"
            )
        losses = options.get("losses")
        if losses is not None and np.shape(losses)[1:] != (self.backbone.n_layers,):
            raise ValueError(
                f"the body {self.body!r} is only nearly F: losses need {self.backbone.n_layers}"
                f" columns, the last for its own last layer, got shape {np.shape(losses)}"
            )

    def _measure_rounding(self, data: Any, columns: Sequence[str], seed: int = 0) -> None:
        """Margins, and for a body slack, on some of the calibration inputs."""
        some = np.random.default_rng(seed).permutation(len(data))[:MEASURED].tolist()
        rows = list(zip(*(data.select(some)[column][:] for column in columns)))
        self.margins, self.unit = self.measured_margins(rows, self.table.take(some)), "nines"
        if self.nearly:
            self.slack = self.measured_slack(rows, self.table.take(some))

    def measured_margins(self, rows: list[Row], table: ScoreTable) -> dict[str, list[float]]:
        """By how much the scores of these inputs, alone and together, differ at most from those of
        their table, measure by measure and layer by layer, in nines where scores are shares; with a
        factor to spare.
        """
        known = [
            measure
            for measure in self.measures()  # patience counts layers, exactly
            if measure != "patience" and not (MEASURES[measure].needs_classes and table.regression)
        ]
        least = LEAST if self.nearly else 0.0
        noise = np.full(table.n_layers - 1, np.finfo(np.float32).eps)
        tokens, largest = self._tokens(rows), dict.fromkeys(known, noise)
        for size in TOGETHER:
            batches = in_batches(self.tokenizer, tokens, self.backbone, size)
            parts = [self._scores(batch, known) for batch in batches]
            for measure in known:
                seen = np.concatenate([part[measure] for part in parts])
                scale = nines if MEASURES[measure].share else np.asarray
                off = np.abs(scale(seen) - scale(table.scores(measure)))
                largest[measure] = np.maximum(largest[measure], off.max(axis=0))
        return {
            measure: np.maximum(SPARE * off, least).tolist() for measure, off in largest.items()
        }

    @torch.inference_mode()
    def _scores(
        self, batch: Mapping[str, torch.Tensor], measures: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Scores (rows, l-1) by every measure, as `run` computes them, of a batch that nobody
        leaves: one pass for all.
        """
        n, early = len(batch["input_ids"]), len(self.exits)
        loop = Loop(self, np.full(early, np.inf), decide=lambda k, *_: [])
        scorers = {measure: Scorer(self, measure, n) for measure in measures}
        found = {measure: np.empty((n, early)) for measure in measures}
        engine = loop.backbone.ready()
        with mixed(self.autocast, engine):
            state = engine.start(batch)
            for k in range(1, early + 1):
                state = engine.step(state, k)
                for measure, scorer in scorers.items():
                    found[measure][:, k - 1] = loop.score(scorer, k, state)[1]
        return found

    @torch.inference_mode()
    def measured_slack(self, rows: list[Row], table: ScoreTable) -> list[float]:
        """By how much the logits of these inputs, alone and together, differ at most from those of
        their table, layer by layer; with a factor to spare.
        """
        tokens, largest = self._tokens(rows), np.zeros(table.n_layers)
        for size in TOGETHER:
            parts = []
            for batch in in_batches(self.tokenizer, tokens, self.backbone, size):
                states = self.engine.states(batch)
                names = self.heads.reads.split("+")
                read = vectors(self.heads.reads, *(states[name].float().cpu() for name in names))
                logits, _ = score(self.heads, self.meta, read)
                parts.append(torch.cat([logits, states["logits"].float().cpu()[:, None]], 1))
            off = np.abs(torch.cat(parts).numpy() - table.logits)
            largest = np.maximum(largest, off.max(axis=(0, 2)))
        return np.maximum(SPARE * largest, LEAST * math.log(10)).tolist()

    def _tokens(self, rows: list[Row]) -> list[dict[str, Any]]:
        return encode(self.tokenizer, [list(column) for column in zip(*rows)], self.max_length)

    @property
    def names(self) -> dict[int, str] | None:
        """The names of the classes; None for regression."""
        if self.table.regression:
            return None
        return {int(i): name for i, name in self.backbone.model.config.id2label.items()}

    def to(self, device: str | int | torch.device) -> "CAT":
        """Move F to a device; heads and scores stay on the host, where the exits are decided."""
        if self.nearly:
            place(self.engine, device)  # first: it may refuse
        place(self.backbone, device)
        return self

    @property
    def device(self) -> torch.device:
        """Where F runs."""
        return self.backbone.device

    def predict(
        self,
        texts: Iterable[Any],
        epsilon: float | None = None,
        batch_size: int | str = 32,
        *,
        method: str = "first_exit",
        measure: str | None = None,
        exit_layers: Iterable[int] | None = None,
        thresholds: Sequence[float] | np.ndarray | None = None,
        monitor: Monitor | None = None,
        body: str | None = None,
        **options: Any,
    ) -> Predictions:
        """Predictions that agree with F as often as the method promises; see cats.calibrate for
        methods and options.

        texts       strings, or pairs where F reads two texts, as tuples or as dicts with "text" and
                    "text_pair": a list, an array, a column of a data set or frame, or a generator,
                    which is read a little at a time. They are batched by length; the results come
                    back in their order
        epsilon     the tolerated rate of G != F: 0.05 unless given, or what the monitor watches
        method      `first_exit`, the fewest layers for a promise on average over calibration sets;
                    it leaves no input later than `shared`, the paper's, which is the default of
                    cats.calibrate and also promises given an inconsistent layer
        thresholds  (l-1,) to use these instead of calibrated ones; all `inf` runs F itself
        body        the one this CAT was fitted on, which is the default; or "float32" for F itself,
                    all layers of it, where that was another. Where its own last layer differs from
                    F too often for ε, F itself runs, with a warning
        batch_size  a CAT needs no more memory than F with batches of this size (of short texts a
                    tenth more, which is little there); "auto" takes what suits length and device
        monitor     a cats.Monitor, which audits some of the inputs: they go on to F after their
                    exit, when all answers are there, and it warns if the promise is broken. In
                    adaptive mode it also says ε, anew every so many inputs
        """
        asked = epsilon, method, measure, exit_layers, thresholds, options, body
        rule = self._rule(monitor, *asked)
        check_batch_size(batch_size)
        parts, n = [], 0
        for rows in windows(texts, cut=steers(monitor)):
            rule = self._rule(monitor, *asked) if steers(monitor) else rule
            found, audit = self._answer(rows, *rule, batch_size, n, monitor)
            parts.append(found)
            n += len(rows)
            if audit and monitor:
                audit.finish(monitor)
        parts = parts or [self._answer([], *rule, batch_size)[0]]
        logits, exits, confidences = (np.concatenate(column) for column in zip(*parts))
        table = self.table
        predictions = logits[:, 0] if table.regression else logits.argmax(axis=1)
        p = logits if table.regression else torch.softmax(torch.from_numpy(logits), -1).numpy()
        return Predictions.of(Arrays(predictions, exits, confidences, p), self.names)

    def __call__(
        self,
        inputs: Any,
        *,
        top_k: int | None | str = "",
        function_to_apply: str | None = None,
        batch_size: int | str = "auto",
        truncation: bool = True,
        padding: bool | str = True,
        body: str | None = None,
        epsilon: float | None = None,
        method: str = "first_exit",
        measure: str | None = None,
        exit_layers: Iterable[int] | None = None,
        thresholds: Sequence[float] | np.ndarray | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> Any:
        """Answers in the form of transformers' text-classification pipelines, with `exit_layer`.

        >>> cat("a text")  # doctest: +SKIP
        [{'label': 'positive', 'score': 0.98, 'exit_layer': 3}]

        inputs             a string, a dict with "text" and "text_pair", a list of either, a column,
                           an array, or a generator, which is answered by one, as answers are ready
        top_k              so many labels of an input, best first, as a list; None for all of them
        function_to_apply  "softmax", "sigmoid" or "none"; by default what pipelines take
        truncation         True: a CAT cuts inputs at its `max_length`, as it was calibrated
        Others are those of `predict`.
        """
        if truncation is False:
            raise ValueError(
                f"a CAT cuts its inputs at {self.max_length} tokens, as it was calibrated:"
                " truncation=False is not possible"
            )
        asked = epsilon, method, measure, exit_layers, thresholds, options, body
        first = self._rule(monitor, *asked)
        check_batch_size(batch_size)
        apply, classic = self._applied(function_to_apply), top_k == ""
        names = self.names or {int(i): n for i, n in self.backbone.model.config.id2label.items()}

        def form(logits: np.ndarray, layer: int) -> Any:
            scores = apply(logits).tolist()
            found = [
                {"label": names[i], "score": score, "exit_layer": int(layer)}
                for i, score in enumerate(scores)
            ]
            found.sort(key=lambda one: one["score"], reverse=True)  # equal ones in their order
            return found[0] if isinstance(top_k, str) else found[:top_k]

        def answers(texts: Any) -> Iterator[Any]:
            n = 0
            for rows in windows(texts, cut=steers(monitor)):
                rule = self._rule(monitor, *asked) if steers(monitor) else first
                (logits, exits, _), audit = self._answer(rows, *rule, batch_size, n, monitor)
                n += len(rows)
                yield from map(form, logits, exits)
                if (
                    audit and monitor
                ):  # answers first: whoever stops reading here leaves these audits out
                    audit.finish(monitor)

        if isinstance(inputs, str | Mapping):
            (answer,) = answers([row_of(inputs, 0)])
            return [answer] if classic and isinstance(inputs, str) else answer
        return answers(inputs) if isinstance(inputs, Iterator) else list(answers(inputs))

    def _applied(self, function: str | None) -> Any:
        """Logits (C,) to scores, chosen as transformers' pipelines choose it."""
        config = self.backbone.model.config
        if function is None:
            single = "none" if config.problem_type == "regression" else "sigmoid"
            function = single if config.num_labels == 1 else "softmax"
        known = {
            "softmax": lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(),
            "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
            "none": lambda x: x,
        }
        if function not in known:
            raise ValueError(f"function_to_apply is {', '.join(known)} or None, not {function!r}")
        return known[function]

    def _rule(
        self,
        monitor: Monitor | None,
        epsilon: Any,
        method: Any,
        measure: Any,
        exit_layers: Any,
        thresholds: Any,
        options: Any,
        body: str | None = None,
    ) -> tuple[Any, str]:
        """The thresholds and the measure that a call asks for."""
        measure = self.check_measure(measure or self.measure)
        if body not in (None, self.body, FULL):
            raise ValueError(
                f"this CAT was fitted on the body {self.body!r}, and its heads and calibration"
                f" belong to it: fit another with body={body!r}, or predict with body={FULL!r}"
            )
        if self.nearly and monitor is not None:
            raise TypeError(
                f"a monitor compares with the last layer that runs, and the body {self.body!r} is"
                " only nearly F: watch a CAT that was fitted without body="
            )
        if self.nearly and body == FULL:
            return np.full(self.backbone.n_layers - 1, np.inf), measure
        if thresholds is None:
            if steers(monitor) and epsilon is not None:
                raise TypeError("this monitor says which ε to run with: leave epsilon out")
            if epsilon is None:
                epsilon = monitor.level if monitor else EPSILON
            if steers(monitor) and not SMALLEST <= epsilon < 1:  # all layers, or the first alone
                return np.full(self.backbone.n_layers - 1, -np.inf if epsilon else np.inf), measure
            found = self.thresholds(epsilon, method, measure, exit_layers, **options)
            return self.limits(found, measure, method), measure
        if options or exit_layers is not None:
            raise TypeError(
                "thresholds are given, so nothing is calibrated:"
                f" {', '.join([*options] or ['exit_layers'])} would have no effect"
            )
        return thresholds, measure

    def _answer(
        self,
        rows: list[Row],
        thresholds: Any,
        measure: str,
        batch_size: int | str,
        first: int = 0,
        monitor: Monitor | None = None,
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], Audit | None]:
        """Logits (n, C), exit layers and confidences of some inputs, in their order; `first` is the
        number of the first of them. And the audit of those that the monitor's coin chose.
        """
        if rows and self.texts not in (None, len(rows[0])):
            raise TypeError(
                f"this CAT was calibrated on inputs of {self.texts} text{'s' * (self.texts > 1)},"
                f" got {len(rows[0])}"
            )
        tokens = self._tokens(rows)
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]["input_ids"]))
        longest = len(tokens[order[-1]]["input_ids"]) if order else 0
        size = starting(rows_together(batch_size, longest, self.device.type), longest)
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        batches = (
            collate(
                self.tokenizer, [tokens[i] for i in part], self.backbone.extra_padding, pairs=True
            )
            for part in parts
        )
        back = np.argsort(order)
        chosen = back[monitor.coin(len(rows))] if monitor else back[:0]  # before anything runs
        audit = Audit(self, chosen.tolist(), measure) if len(chosen) else None
        ran = self.run(batches, thresholds, measure, audit=audit)
        found = tuple(column[back] for column in ran)
        lost = np.flatnonzero(~np.isfinite(found[0]).all(axis=1))
        if len(lost):
            raise ValueError(
                f"F gives NaN or infinite numbers for {len(lost)} inputs, the first is number"
                f" {first + lost[0]}, {' | '.join(rows[lost[0]])[:60]!r}: check F's weights and"
                " precision, or leave such inputs out"
            )
        return found, audit

    @torch.inference_mode()
    def run(
        self,
        batches: Iterable[Mapping[str, torch.Tensor]],
        thresholds: Any,
        measure: str = "meta",
        decide: Decide | None = None,
        audit: Audit | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokenised batches through the layers, rows leaving as they exit: logits (rows, C), exit
        layers, confidences.

        A batch of which half is left waits there for what is left of the next ones: late layers,
        which few rows reach, do not run on nearly empty batches. Never more rows than the largest
        batch has run through a layer together; and as a row that waits takes a small part of the
        memory of one that runs, twice as many may wait.

        decide  overrides the rule, as decide(k, scores of the rows left, their numbers), two lists,
                to a list of who leaves: to replay known exits
        audit   takes note of some rows, which may then go on: see cats.runtime.audit
        """
        loop = Loop(self, thresholds, decide, audit)
        engine, n = loop.backbone.ready(), 0
        given: list[tuple[Mapping[str, torch.Tensor], int]] = []  # where each row came from
        with mixed(self.autocast, engine):
            for batch in batches:
                size = len(batch["input_ids"])
                loop.begin(
                    Cohort(
                        engine.start(batch, sums=loop.sums),
                        [*range(n, n + size)],
                        Scorer(self, measure, size),
                    )
                )
                n += size
                if loop.asks_f:
                    given += [(batch, i) for i in range(size)]
            loop.end()
        logits, exits, confidences = loop.results()
        room = max(1, loop.room)  # 0 where there was no input
        for i in range(0, len(loop.doubtful), room):
            some = loop.doubtful[i : i + room]
            batch = gathered([given[row] for row in some], self.backbone.model.config.pad_token_id)
            logits[some] = self.backbone.ready().logits(batch).float().cpu().numpy()
        return logits, exits, confidences

    @torch.inference_mode()
    def proceed(self, loop: Loop) -> None:
        """Run what waits in a loop to its end."""
        with mixed(self.autocast, self.backbone):
            loop.end()

    def recalibrated(self, monitor: Monitor, last: int | None = None) -> "CAT":
        """A CAT with the same F, heads and meta classifiers, calibrated on the (last) inputs that a
        monitor has audited, for the measure it watched.

        Its promise is for inputs like these; watch it with a new monitor.
        """
        table = monitor.table(last)
        if table.logits.shape[1:] != self.table.logits.shape[1:]:
            raise ValueError("these audits are of another model: their layers or classes differ")
        return CAT(
            self.backbone,
            self.tokenizer,
            self.heads,
            self.meta,
            table,
            max_length=self.max_length,
            measure=monitor.measure or self.measure,
            autocast=self.autocast,
            texts=self.texts,
            margins=self.margins,
            unit=self.unit,
            choosing=self.choosing,
            about=self.about | {"calibration": len(table), "recalibrated": True},
        )

    # --- keeping it ---

    def save_pretrained(self, folder: str | Path, backbone: bool = True) -> Path:
        """Write the CAT to a folder: safetensors, JSON and a model card; the backbone inside, or by
        reference. A CAT that is there is replaced once the new one is whole, and nothing else is.

        backbone  True to put F and its tokenizer inside; False to keep the path F was loaded from,
                  or its Hub id and revision
        """
        return kept.write(self, folder, backbone)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        backbone: str | Path | PreTrainedModel | Backbone | None = None,
        *,
        device: str | int | torch.device | None = None,
        revision: str | None = None,
        **hub: Any,
    ) -> "CAT":
        """Load a CAT from a folder or from the Hub.

        backbone  another place for F, or F itself, which must be the very model the CAT was made
                  for
        device    as in `fit`
        revision  of a CAT on the Hub: a branch, a tag or a commit
        hub       further options of huggingface_hub.snapshot_download, as token or cache_dir
        """
        where = kept.find(folder, revision=revision, **hub)
        model, *parts, options = kept.read(where, backbone)
        loaded = backbone is None or isinstance(backbone, str | Path)
        place(model, device, loaded and options.get("body") != "int8")
        return cls(model, *parts, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        backbone: bool = True,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "A Confident Adaptive Transformer",
        token: str | bool | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Put the CAT, with its card, in a repository of the Hub, which is made if need be. Returns
        the commit's address.

        backbone  False where F is on the Hub itself: only its id and revision are kept
        """
        if not backbone and Path(kept.origin(self.backbone)[0]).is_absolute():
            raise ValueError("F lies in a folder here, where nobody else finds it: backbone=True")
        api = HfApi(endpoint=endpoint, token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as temporary:
            done = api.upload_folder(
                repo_id=repo,
                folder_path=self.save_pretrained(Path(temporary) / "cat", backbone),
                commit_message=commit_message,
                revision=revision,
            )
        return done.commit_url

    def card(self) -> str:
        """The model card: what was fitted on what, and what it can promise."""
        return card(self)


TIMED = 128  # tuning inputs on which bodies are compared
TOGETHER = (1, 32)  # rows of a batch, where it is measured by how much rounding moves scores


def steers(monitor: Monitor | None) -> bool:
    """Whether a monitor says which ε to run with, as inputs come."""
    return monitor is not None and monitor.step > 0


def compared(table: ScoreTable, full: np.ndarray) -> ScoreTable:
    """The table of a body, all its layers compared with what F says."""
    return ScoreTable(table.logits, table.meta, table.labels, table.metadata, table.tau, full)


def gathered(
    rows: Sequence[tuple[Mapping[str, torch.Tensor], int]], pad: int | None
) -> dict[str, torch.Tensor]:
    """Rows of several tokenised batches, (batch, its number there) each, as one batch."""
    parts = [{name: value[i] for name, value in batch.items()} for batch, i in rows]
    masks = [part.get("attention_mask", torch.ones_like(part["input_ids"])) for part in parts]
    found = {
        "input_ids": pad_sequence([part["input_ids"] for part in parts], True, pad or 0),
        "attention_mask": pad_sequence(masks, True),
    }
    if "token_type_ids" in parts[0]:
        found["token_type_ids"] = pad_sequence([part["token_type_ids"] for part in parts], True)
    return found


def in_batches(tokenizer: Any, rows: list[Any], backbone: Backbone, size: int = 32) -> list[Any]:
    """Tokenised rows as padded batches, in their order."""
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [collate(tokenizer, part, backbone.extra_padding, pairs=True) for part in parts]


def kept_apart(data: Any, seed: int) -> dict[str, Any]:
    """Tuning inputs cut into tune, scale and meta; from 100 on, a tenth of them is `choosing`."""
    if len(data) < 100:
        return tasks.cut(data, seed)
    halves = data.train_test_split(len(data) // 10, seed=seed)
    return {**tasks.cut(halves["train"], seed), "choosing": halves["test"]}


def check_texts(tuning: list[Row], calibration: list[Row]) -> None:
    """Refuse texts that cannot tune and calibrate, and say what weakens the promise."""
    if len(tuning) < 10 or len(calibration) < 2:
        raise ValueError(
            f"needs at least 10 tuning texts and 2 calibration texts, got {len(tuning)} and"
            f" {len(calibration)}"
        )
    if len(tuning[0]) != len(calibration[0]):
        raise TypeError(
            f"tuning inputs have {len(tuning[0])} and calibration inputs {len(calibration[0])}"
            " texts: they must be of one kind"
        )
    distinct = set(calibration)
    both = len(set(tuning) & distinct)
    if both:
        raise ValueError(
            f"{both} calibration texts are also tuning texts: what was trained on cannot calibrate,"
            " take them out of one of the lists"
        )
    repeats = len(calibration) - len(distinct)
    if len(distinct) == 1:
        raise ValueError(f"all {len(calibration)} calibration texts are the same text")
    if repeats:
        # inputs that do repeat are exchangeable as they come, and their ties only raise τ; a file
        # read twice is not a larger sample. From here the two look the same, so it is no error
        warn(
            f"{repeats} of {len(calibration)} calibration texts are repeats: leave them in only if"
            " inputs repeat as often in use. If a file was read twice the promise is not kept; the"
            f" {len(distinct)} distinct ones calibrate down to ε ="
            f" {calibrators.smallest_epsilon(len(distinct)):.2g}"
        )


def class_numbers(labels: Any, n: int, backbone: Backbone) -> list[Any]:
    """Labels as class numbers (or numbers, for regression), one an input; names are looked up."""
    found = list(labels)
    if len(found) != n:
        raise ValueError(f"there are {n} tuning texts and {len(found)} labels: one each")
    config, regression = backbone.model.config, backbone.num_labels == 1
    known = {name: int(i) for i, name in config.id2label.items()}
    for i, label in enumerate(found):
        if isinstance(label, str) and not regression:
            if label not in known:
                raise ValueError(f"label {i} is {label!r}; F knows {', '.join(known)}")
            found[i] = known[label]
        elif label is None or isinstance(label, str) or not np.isfinite(label):
            raise ValueError(
                f"label {i} is {label!r}: give a number for every tuning text, or leave out labels"
            )
        elif not regression and (label != int(label) or not 0 <= label < backbone.num_labels):
            raise ValueError(
                f"label {i} is {label!r}: labels must be class numbers from 0 to"
                f" {backbone.num_labels - 1}, or their names"
            )
    return [one.item() if isinstance(one, np.generic | torch.Tensor) else one for one in found]


def backbone_of(model: str | Path | PreTrainedModel | Backbone) -> Backbone:
    """F from a place, from memory, or as it is."""
    if isinstance(model, Backbone):
        return model
    if isinstance(model, torch.nn.Module):
        return Backbone(model)
    return Backbone.from_pretrained(model)


def tokenizer_of(tokenizer: Any, model: Any, backbone: Backbone) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, itself or its place, or the model's."""
    if tokenizer is None:
        tokenizer = model if isinstance(model, str | Path) else backbone.model.name_or_path
        if not str(tokenizer):
            raise ValueError("this model was not loaded from anywhere: give its tokenizer=")
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def place(backbone: Backbone, device: Any, loaded: bool = False) -> None:
    """Put F on a device. Where none is given, one that was just loaded goes to an accelerator, as
    transformers' pipelines do it; a number is that accelerator's, -1 the CPU.
    """
    if device is None:
        if not loaded or not torch.accelerator.is_available():
            return
        device = 0
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if device < 0 or accelerator is None else f"{accelerator.type}:{device}"
    backbone.to(device)
