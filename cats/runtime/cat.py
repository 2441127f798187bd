"""CAT: a classifier that really stops early, and keeps its promise (Algorithm 1, PREDICT; Eq. 2).

    cat = CAT.fit("path/to/fine-tuned-model", tuning_texts, calibration_texts)       # unlabelled
    text is enough out = cat.predict(texts, epsilon=0.05)
    # ε is chosen here out.predictions, out.exit_layers, out.confidences
    cat.save_pretrained("my-cat");  CAT.from_pretrained("my-cat")

After every layer the rows that have exited leave the batch, so nobody waits for the slowest input.
The calibration inputs' outputs are kept as a ScoreTable: thresholds for any ε, calibrator, measure
and subset of layers come from it.
"""

import json
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from cats._io import (
    load_module,
    module_digest,
    save_module,
    sha256,
    versions,
    write_json,
    writing,
)
from cats.model.backbone import Backbone
from cats.model.exits import Heads, Meta, check_pair
from cats.runtime.card import card
from cats.runtime.loop import Flight, Loop, starting
from cats.runtime.scorer import Exit, Scorer
from cats.stats import calibrators
from cats.stats.measures import MEASURES
from cats.stats.table import TAU, ScoreTable
from cats.stats.trials import evaluate, summary
from cats.train import tasks
from cats.train.fit import find_recipe, fit_heads, fit_meta
from cats.train.run import Run, table_of
from cats.train.states import collate, encode, extract, mixed

FORMAT = "cats.CAT/3"
KNOWN_FORMATS = ("cats.CAT/2", FORMAT)  # files of the older kind still load


class Predictions(NamedTuple):
    """What a CAT says, in the order of the inputs."""

    predictions: np.ndarray  # (n,), a class number, or a number for regression
    exit_layers: np.ndarray  # (n,), 1 … l
    # (n,), the score with which an input left; 1 at the last layer, which is F itself
    confidences: np.ndarray
    # (n, C), softmax of the layer it left at; the outputs themselves for regression
    probabilities: np.ndarray


class CAT:
    """A fine-tuned model F with early heads, meta classifiers and calibration data."""

    def __init__(
        self,
        backbone,
        tokenizer,
        heads,
        meta,
        table,
        *,
        max_length=256,
        measure="meta",
        autocast=None,
        texts=None,
        about=None,
    ):
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
        self.max_length = min(max_length, backbone.max_tokens)
        self.measure, self.autocast = check_measure(measure), autocast
        self.texts = texts  # of an input: 1 or 2, or None where that is not known
        self.about, self._sets = dict(about or {}), {}
        self.exits = [Exit.of(self.heads, self.meta, k) for k in range(1, backbone.n_layers)]

    def __repr__(self):
        return (
            f"CAT({self.backbone.family}, {self.backbone.n_layers} layers, {len(self.table)}"
            f" calibration inputs, {self.measure})"
        )

    # --- making one ---

    @classmethod
    def fit(
        cls,
        model,
        tuning,
        calibration,
        *,
        recipe="distilled",
        labels=None,
        tokenizer=None,
        max_length=256,
        measure="meta",
        autocast=None,
        folder=None,
        seed=0,
        tau=TAU,
        early=None,
        meta=None,
        about=None,
    ):
        """A CAT from a fine-tuned model and two lists of texts (pairs for two-text tasks) of the
        kind it will see.

        tuning       trains heads, temperatures and meta classifiers; unlabelled
        calibration  never trained on, not even by F; unlabelled. Its size limits ε: see
                     cats.calibration_size
        autocast     run F in "bfloat16" or "float16", here and in predict; the promise is about F
                     as it runs here
        recipe       "distilled": heads learn what F says; "paper": they learn `labels`, or where
                     there are none F's predictions. Or a cats.train.fit.Recipe
        folder       where extracted states go (a temporary folder by default); give one to resume
                     an interrupted fit
        """
        recipe = find_recipe(recipe)
        if labels is not None and recipe.targets != "labels":
            raise TypeError(
                f"the recipe {recipe.name!r} learns from F and reads no labels: leave them out, or"
                " say recipe='paper'"
            )
        backbone = (
            model
            if isinstance(model, Backbone)
            else (
                Backbone(model)
                if isinstance(model, torch.nn.Module)
                else Backbone.from_pretrained(model)
            )
        )
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(
            model if isinstance(model, (str, Path)) else backbone.model.name_or_path
        )
        tuning, calibration = rows_of(tuning), rows_of(calibration)
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
        check_measure(measure)
        both = len(set(tuning) & set(calibration))
        if both:
            warnings.warn(
                f"{both} calibration texts are also tuning texts: what was trained on cannot"
                " calibrate",
                stacklevel=2,
            )
        columns = tuple(f"text{i + 1}" for i in range(len(tuning[0])))
        data = tasks.from_texts(columns, tuning)
        if labels is not None:
            data = data.add_column("label", list(labels))
        parts, calibration = tasks.cut(data, seed), tasks.from_texts(columns, calibration)

        with tempfile.TemporaryDirectory() as temporary:
            work = Path(folder or temporary)
            options = {"max_length": max_length, "autocast": autocast}
            states = {
                name: extract(
                    backbone,
                    tokenizer,
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
                **(early or {}),
            )
            options_of_meta = {"units": recipe.units} | (meta or {})
            metas, _ = fit_meta(heads, states["meta"], tau=tau, seed=seed, **options_of_meta)
            given = extract(
                backbone, tokenizer, calibration, columns, work / "calibration", **options
            )
            table = table_of(given, heads, metas, None, {"split": "calibration"}, tau)
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
            **(about or {}),
        }
        return cls(
            backbone,
            tokenizer,
            heads,
            metas,
            table,
            max_length=max_length,
            measure=measure,
            autocast=autocast,
            texts=len(columns),
            about=made,
        )

    @classmethod
    def from_run(cls, run: Run, measure="meta") -> "CAT":
        """The CAT of a run, calibrated on its validation split."""
        about = {
            "task": run.task.name,
            "tuning": len(run.data["train"]),
            "calibration": len(run.data["validation"]),
            "recipe": asdict(run.recipe),
        }
        return cls(
            run.backbone,
            run.tokenizer,
            run.heads,
            run.metas,
            run.table("validation"),
            max_length=run.max_length,
            measure=measure,
            texts=len(run.task.columns),
            about=about,
        )

    # --- using it ---

    def thresholds(
        self, epsilon=0.05, method="first_exit", measure=None, exit_layers=None, **options
    ):
        """Thresholds (l-1,) from the calibration inputs; `inf` at layers not in `exit_layers`
        (counted from 1).

        The guarantee holds for whatever subset of layers is chosen: they are calibrated as if there
        were no others.
        """
        early = self.backbone.n_layers - 1
        layers = list(range(1, early + 1)) if exit_layers is None else sorted(set(exit_layers))
        if not layers or not 1 <= layers[0] <= layers[-1] <= early:
            raise ValueError(f"exit_layers must be among 1 … {early}, got {exit_layers}")
        columns = np.array(layers) - 1
        thresholds = np.full(early, np.inf)
        thresholds[columns] = calibrators.thresholds_from(
            self._sorted(measure or self.measure, tuple(columns)), epsilon, method, **options
        )
        return thresholds

    def _sorted(self, measure, columns):
        """The calibration statistics of these columns, sorted once."""
        if (check_measure(measure), columns) not in self._sets:
            scores, consistent = (
                self.table.scores(measure)[:, columns],
                self.table.consistent[:, columns],
            )
            self._sets[measure, columns] = calibrators.CalibrationSet(scores, consistent)
        return self._sets[measure, columns]

    def predict(
        self,
        texts,
        epsilon=0.05,
        batch_size=32,
        *,
        method="first_exit",
        measure=None,
        exit_layers=None,
        thresholds=None,
        **options,
    ):
        """Predictions that agree with F as often as the method promises; see cats.calibrate for
        methods and options.

        texts       a list of strings, or of pairs where F reads two texts. They are batched by
                    length; the results come back in their order
        thresholds  (l-1,) to use these instead of calibrated ones; all `inf` runs F itself
        batch_size  a CAT needs no more memory than F with batches of this size
        """
        measure = check_measure(measure or self.measure)
        if thresholds is None:
            thresholds = self.thresholds(epsilon, method, measure, exit_layers, **options)
        elif options or exit_layers is not None:
            raise TypeError(
                "thresholds are given, so nothing is calibrated:"
                f" {', '.join([*options] or ['exit_layers'])} would have no effect"
            )
        rows = rows_of(texts)
        if rows and self.texts not in (None, len(rows[0])):
            raise TypeError(
                f"this CAT was calibrated on inputs of {self.texts} text{'s' * (self.texts > 1)},"
                f" got {len(rows[0])}"
            )
        tokens = encode(self.tokenizer, [list(column) for column in zip(*rows)], self.max_length)
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]["input_ids"]))
        parts = [
            order[i : i + starting(batch_size)] for i in range(0, len(order), starting(batch_size))
        ]
        batches = (
            collate(
                self.tokenizer, [tokens[i] for i in part], self.backbone.extra_padding, pairs=True
            )
            for part in parts
        )
        back = np.argsort(order)
        logits, exits, confidences = (
            found[back] for found in self.run(batches, thresholds, measure)
        )
        table = self.table
        said = logits[:, 0] if table.regression else logits.argmax(axis=1)
        p = logits if table.regression else torch.softmax(torch.from_numpy(logits), -1).numpy()
        return Predictions(said, exits, confidences, p)

    @torch.inference_mode()
    def run(self, batches, thresholds, measure="meta", decide=None):
        """Tokenised batches through the layers, rows leaving as they exit: logits (rows, C), exit
        layers, confidences.

        A batch of which half is left waits there for what is left of the next ones: late layers,
        which few rows reach, do not run on nearly empty batches. Never more rows than the largest
        batch has run through a layer together; and as a row that waits takes a small part of the
        memory of one that runs, twice as many may wait.

        decide  overrides the rule, as decide(k, scores of the rows left, their numbers), two lists,
                to a list of who leaves: to replay known exits
        """
        loop = Loop(self, thresholds, decide)
        n = 0
        with mixed(self.autocast, self.backbone):
            for batch in batches:
                size = len(batch["input_ids"])
                loop.begin(
                    Flight(
                        self.backbone.start(batch),
                        [*range(n, n + size)],
                        Scorer(self, measure, size),
                    )
                )
                n += size
            loop.end()
        return loop.results()

    # --- keeping it ---

    def save_pretrained(self, folder, backbone=True):
        """Write the CAT to a folder: safetensors, JSON and a model card; the backbone inside, or by
        reference.

        backbone  True to put F and its tokenizer inside; False to keep the name or path F was
                  loaded from
        """
        where, card = str(self.backbone.model.name_or_path), self.card()
        if not (backbone or where):
            raise ValueError(
                "this backbone was not loaded from anywhere: save it inside, with backbone=True"
            )
        folder, files = Path(folder), {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cat.json").unlink(
            missing_ok=True
        )  # a folder without it is refused: no half-written CAT is ever loaded
        save_module(self.heads, folder / "heads.safetensors", {})
        save_module(self.meta, folder / "meta.safetensors", {})
        self.table.save(folder / "calibration.safetensors")
        if backbone:
            where = "backbone"
            self.backbone.model.save_pretrained(folder / where)
        # inside in any case: other tokens would meet the same thresholds. Beside F it makes that
        # folder an ordinary model
        tokens = Path("backbone" if backbone else "tokenizer")
        names = [
            tokens / Path(path).name
            for path in self.tokenizer.save_pretrained(folder / tokens)
            if Path(path).is_file()
        ]
        for name in (*names, "heads.safetensors", "meta.safetensors", "calibration.safetensors"):
            files[Path(name).as_posix()] = sha256(folder / name)
        with writing(folder / "README.md") as aside:
            aside.write_text(card)
        weights = {
            "fingerprint": self.backbone.fingerprint,
            "dtype": str(self.backbone.dtype).removeprefix("torch."),
        }
        write_json(
            folder / "cat.json",
            {
                "format": FORMAT,
                "files": files,
                "backbone": {
                    "where": where,
                    "family": self.backbone.family,
                    "layers": self.backbone.n_layers,
                    **weights,
                },
                "tokenizer": str(tokens),
                "texts": self.texts,
                "max_length": self.max_length,
                "measure": self.measure,
                "autocast": self.autocast,
                "about": self.about,
            },
        )
        return folder

    @classmethod
    def from_pretrained(cls, folder, backbone=None):
        """Load a CAT; `backbone` gives another place for F, or F itself, which must be the very
        model the CAT was made for.
        """
        folder = Path(folder)
        if not (folder / "cat.json").exists():
            raise FileNotFoundError(f"no CAT in {folder}: it has no cat.json")
        saved = json.loads((folder / "cat.json").read_text())
        if saved.get("format") not in KNOWN_FORMATS:
            raise ValueError(f"{folder} holds {saved.get('format')!r}, expected {FORMAT!r}")
        for name, digest in saved["files"].items():
            if not (folder / name).exists() or sha256(folder / name) != digest:
                raise ValueError(
                    f"{folder / name} is missing or was changed: this CAT's promise cannot be"
                    " trusted, save it again"
                )
        where = backbone or (
            folder / "backbone"
            if saved["backbone"]["where"] == "backbone"
            else saved["backbone"]["where"]
        )
        model = (
            where
            if isinstance(where, Backbone)
            else Backbone.from_pretrained(
                str(where), dtype=getattr(torch, saved["backbone"]["dtype"])
            )
        )
        if model.fingerprint != saved["backbone"]["fingerprint"]:
            raise ValueError(
                f"the model at {where} is not the one this CAT was made for: heads and calibration"
                " belong to other weights"
            )
        heads, meta = (
            load_module(Heads, folder / "heads.safetensors")[0],
            load_module(Meta, folder / "meta.safetensors")[0],
        )
        table, tokenizer = (
            ScoreTable.load(folder / "calibration.safetensors"),
            AutoTokenizer.from_pretrained(folder / saved["tokenizer"]),
        )
        options = {
            name: saved[name] for name in ("max_length", "measure", "autocast", "texts", "about")
        }
        return cls(model, tokenizer, heads, meta, table, **options)

    def savings(
        self, epsilons=(0.2, 0.1, 0.05, 0.02, 0.01), method="first_exit", trials=25, seed=0
    ):
        """Expected consistency and layers at each ε, over splits of the calibration inputs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calibrators.CalibrationWarning)
            frame = evaluate(self.table, method, self.measure, epsilons, trials, seed)
        return summary(frame)

    def card(self) -> str:
        """The model card: what was fitted on what, and what it can promise."""
        return card(self)


def runtime_measures() -> list[str]:
    """The measures a CAT can exit by."""
    return [name for name, found in MEASURES.items() if found.at_runtime]


def check_measure(measure: str) -> str:
    """The measure, if a CAT can exit by it."""
    if measure not in runtime_measures():
        raise ValueError(f"a CAT can exit by {', '.join(runtime_measures())}, not by {measure!r}")
    return measure


def rows_of(texts):
    """A list of tuples, one or two texts each."""
    if isinstance(texts, str):
        raise TypeError(
            "texts must be a list of strings (or of pairs), not one string: put it in a list"
        )
    rows = [tuple(text) if isinstance(text, (tuple, list)) else (text,) for text in texts]
    for i, row in enumerate(rows):
        if (
            len(row) != len(rows[0])
            or not 1 <= len(row) <= 2
            or not all(isinstance(text, str) for text in row)
        ):
            raise TypeError(
                f"texts must all be strings, or all be pairs of strings; number {i} is {texts[i]!r}"
            )
    return rows
