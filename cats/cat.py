"""CAT: a classifier that really stops early, and keeps its promise (Algorithm 1, PREDICT; Eq. 2).

    cat = CAT.fit("path/to/fine-tuned-model", tuning_texts, calibration_texts)       # unlabelled text is enough
    out = cat.predict(texts, epsilon=0.05)                                           # ε is chosen here
    out.predictions, out.exit_layers, out.confidences
    cat.save_pretrained("my-cat");  CAT.from_pretrained("my-cat")

After every layer the rows that have exited leave the batch, so nobody waits for the slowest input. The calibration
inputs' outputs are kept as a ScoreTable: thresholds for any ε, calibrator, measure and subset of layers come from it.
"""

import json
import math
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from cats import calibration, evaluation, measures, tasks
from cats.backbone import Backbone, State
from cats.extraction import collate, extract, mixed, tokenise
from cats.files import sha256, versions, write_json, writing
from cats.heads import Heads, fit_temperatures, train_heads
from cats.meta import Meta, believed_alone, layout, predicted, predicted_alone, train_meta
from cats.pipeline import load_module, save_module, scoring, table_of
from cats.tables import TAU, ScoreTable

FORMAT = "cats.CAT/2"
RUNTIME_MEASURES = [measure for measure in measures.MEASURES if measure != "random"]


class Predictions(NamedTuple):
    """What a CAT says, in the order of the inputs."""

    predictions: np.ndarray  # (n,), a class number, or a number for regression
    exit_layers: np.ndarray  # (n,), 1 … l
    confidences: np.ndarray  # (n,), the score with which an input left; 1 at the last layer, which is F itself
    probabilities: np.ndarray  # (n, C), softmax of the layer it left at; the outputs themselves for regression


class CAT:
    """A fine-tuned model F with early heads, meta classifiers and calibration data."""

    def __init__(self, backbone, tokenizer, heads, meta, table, *, max_length=256, measure="meta", autocast=None, texts=None, about=None):
        if not backbone.n_layers == heads.early + 1 == meta.early + 1 == table.n_layers:
            layers = f"{backbone.n_layers}, {heads.early + 1}, {meta.early + 1} and {table.n_layers}"
            raise ValueError(f"backbone, heads, meta classifiers and calibration table have {layers} layers: they do not belong together")
        if (backbone.hidden_size, backbone.num_labels) != (heads.d, heads.n_outputs) or backbone.num_labels != table.n_classes:
            raise ValueError("backbone, heads and calibration table differ in hidden size or number of labels")
        self.backbone, self.tokenizer, self.table = backbone, tokenizer, table
        self.heads, self.meta = heads.cpu(), meta.cpu()
        self.max_length, self.measure, self.autocast = min(max_length, backbone.max_tokens), check_measure(measure), autocast
        self.texts = texts  # of an input: 1 or 2, or None where that is not known
        self.about, self._sets = dict(about or {}), {}
        self.exits = [{**self.heads.layer(k), **self.meta.layer(k)} for k in range(1, backbone.n_layers)]
        self.layout = layout(meta, heads)

    def __repr__(self):
        return f"CAT({self.backbone.family}, {self.backbone.n_layers} layers, {len(self.table)} calibration inputs, {self.measure})"

    # --- making one ---

    @classmethod
    def fit(
        cls, model, tuning, calibration, *, labels=None, tokenizer=None, max_length=256, measure="meta",
        autocast=None, folder=None, seed=0, tau=TAU, early=None, meta=None, about=None,
    ):  # fmt: skip
        """A CAT from a fine-tuned model and two lists of texts (pairs for two-text tasks) of the kind it will see.

        tuning       trains heads, temperatures and meta classifiers; without `labels` they learn what F says
        calibration  never trained on, not even by F; unlabelled. Its size limits ε: see cats.calibration_size
        autocast     run F in "bfloat16" or "float16", here and in predict; the promise is about F as it runs here
        folder       where extracted states go (a temporary folder by default); give one to resume an interrupted fit
        """
        backbone = model if isinstance(model, Backbone) else Backbone(model) if isinstance(model, torch.nn.Module) else Backbone.from_pretrained(model)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model if isinstance(model, (str, Path)) else backbone.model.name_or_path)
        tuning, calibration = rows_of(tuning), rows_of(calibration)
        if len(tuning) < 10 or len(calibration) < 2:
            raise ValueError(f"needs at least 10 tuning texts and 2 calibration texts, got {len(tuning)} and {len(calibration)}")
        if len(tuning[0]) != len(calibration[0]):
            raise TypeError(f"tuning inputs have {len(tuning[0])} and calibration inputs {len(calibration[0])} texts: they must be of one kind")
        check_measure(measure)
        both = len(set(tuning) & set(calibration))
        if both:
            warnings.warn(f"{both} calibration texts are also tuning texts: what was trained on cannot calibrate", stacklevel=2)
        columns = tuple(f"text{i + 1}" for i in range(len(tuning[0])))
        data = tasks.from_texts(columns, tuning)
        if labels is not None:
            data = data.add_column("label", list(labels))
        parts, calibration = tasks.cut(data, seed), tasks.from_texts(columns, calibration)

        with tempfile.TemporaryDirectory() as temporary:
            work = Path(folder or temporary)
            options = {"max_length": max_length, "autocast": autocast}
            states = {
                name: extract(backbone, tokenizer, part.select_columns(columns), columns, work / name, **options) for name, part in parts.items()
            }
            targets = {name: None if labels is None else part["label"][:] for name, part in parts.items()}
            heads, _ = train_heads(states["tune"], backbone.num_labels, targets["tune"], seed=seed, **(early or {}))
            fit_temperatures(heads, states["scale"], targets["scale"])
            metas, _ = train_meta(heads, states["meta"], tau=tau, seed=seed, **(meta or {}))
            scored = extract(backbone, tokenizer, calibration, columns, work / "calibration", **scoring(heads, metas), **options)
            table = table_of(scored, None, {"split": "calibration"}, tau)
        sizes = {"tuning": len(tuning), "calibration": len(calibration), "labelled": labels is not None}
        made = {**sizes, "seed": seed, "versions": versions("torch", "transformers"), **(about or {})}
        return cls(backbone, tokenizer, heads, metas, table, max_length=max_length, measure=measure, autocast=autocast, texts=len(columns), about=made)

    # --- using it ---

    def thresholds(self, epsilon=0.05, method="first_exit", measure=None, exit_layers=None, **options):
        """Thresholds (l-1,) from the calibration inputs; `inf` at layers not in `exit_layers` (counted from 1).

        The guarantee holds for whatever subset of layers is chosen: they are calibrated as if there were no others.
        """
        early = self.backbone.n_layers - 1
        layers = list(range(1, early + 1)) if exit_layers is None else sorted(set(exit_layers))
        if not layers or not 1 <= layers[0] <= layers[-1] <= early:
            raise ValueError(f"exit_layers must be among 1 … {early}, got {exit_layers}")
        columns = np.array(layers) - 1
        thresholds = np.full(early, np.inf)
        thresholds[columns] = calibration.thresholds_from(self._sorted(measure or self.measure, tuple(columns)), epsilon, method, **options)
        return thresholds

    def _sorted(self, measure, columns):
        """The calibration statistics of these columns, sorted once."""
        if (check_measure(measure), columns) not in self._sets:
            scores, consistent = self.table.scores(measure)[:, columns], self.table.consistent[:, columns]
            self._sets[measure, columns] = calibration.CalibrationSet(scores, consistent)
        return self._sets[measure, columns]

    def predict(self, texts, epsilon=0.05, batch_size=32, *, method="first_exit", measure=None, exit_layers=None, thresholds=None, **options):
        """Predictions that agree with F as often as the method promises; see cats.calibrate for methods and options.

        texts       a list of strings, or of pairs where F reads two texts. They are batched by length; the results come
                    back in their order
        thresholds  (l-1,) to use these instead of calibrated ones; all `inf` runs F itself
        batch_size  a CAT needs no more memory than F with batches of this size
        """
        measure = check_measure(measure or self.measure)
        if thresholds is None:
            thresholds = self.thresholds(epsilon, method, measure, exit_layers, **options)
        elif options or exit_layers is not None:
            raise TypeError(f"thresholds are given, so nothing is calibrated: {', '.join([*options] or ['exit_layers'])} would have no effect")
        rows = rows_of(texts)
        if rows and self.texts not in (None, len(rows[0])):
            raise TypeError(f"this CAT was calibrated on inputs of {self.texts} text{'s' * (self.texts > 1)}, got {len(rows[0])}")
        columns = [f"text{i + 1}" for i in range(len(rows[0]))] if rows else []
        tokens = tokenise(self.tokenizer, tasks.from_texts(columns, rows), columns, self.max_length)
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]["input_ids"]))
        parts = [order[i : i + fresh(batch_size)] for i in range(0, len(order), fresh(batch_size))]
        batches = (collate(self.tokenizer, [tokens[i] for i in part], self.backbone.extra_padding) for part in parts)
        back = np.argsort(order)
        logits, exits, confidences = (found[back] for found in self.run(batches, thresholds, measure))
        table = self.table
        said = logits[:, 0] if table.regression else logits.argmax(axis=1)
        p = logits if table.regression else torch.softmax(torch.from_numpy(logits), -1).numpy()
        return Predictions(said, exits, confidences, p)

    @torch.inference_mode()
    def run(self, batches, thresholds, measure="meta", decide=None):
        """Tokenised batches through the layers, rows leaving as they exit: logits (rows, C), exit layers, confidences.

        A batch of which a quarter is left waits there for what is left of the next ones. When as many wait as fit in a batch they
        go on together, those behind picking up those ahead: late layers, which few rows reach, do not run on nearly empty batches.
        Never more rows than the largest batch has run through a layer together, and never more wait.

        decide  overrides the rule, as decide(k, scores of the rows left, their numbers) to a mask: to replay known exits
        """
        loop = Loop(self, thresholds, decide)
        waiting, n, room = [], 0, 0
        with mixed(self.autocast, self.backbone.device):
            for batch in batches:
                size = len(batch["input_ids"])
                room = max(room, size)
                flight = Flight(self.backbone.start(batch), np.arange(n, n + size), Scorer(self, measure, size))
                n += size
                loop.advance(flight, rows=room // 4)
                waiting = [flight for flight in (*waiting, flight) if len(flight.rows)]
                if sum(len(flight.rows) for flight in waiting) > room - room // 4:
                    waiting = [loop.gather(waiting, rows=room // 4)]
            if waiting:
                loop.gather(waiting)
        return loop.results(n)

    # --- keeping it ---

    def save_pretrained(self, folder, backbone=True):
        """Write the CAT to a folder: safetensors, JSON and a model card; the backbone inside, or by reference.

        backbone  True to put F and its tokenizer inside; False to keep the name or path F was loaded from
        """
        where, card = str(self.backbone.model.name_or_path), self.card()
        if not (backbone or where):
            raise ValueError("this backbone was not loaded from anywhere: save it inside, with backbone=True")
        folder, files = Path(folder), {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cat.json").unlink(missing_ok=True)  # a folder without it is refused: no half-written CAT is ever loaded
        save_module(self.heads, folder / "heads.safetensors", {})
        save_module(self.meta, folder / "meta.safetensors", {})
        self.table.save(folder / "calibration.safetensors")
        if backbone:
            where = "backbone"
            self.backbone.model.save_pretrained(folder / where)
        # inside in any case: other tokens would meet the same thresholds. Beside F it makes that folder an ordinary model
        tokens = Path("backbone" if backbone else "tokenizer")
        names = [tokens / Path(path).name for path in self.tokenizer.save_pretrained(folder / tokens) if Path(path).is_file()]
        for name in (*names, "heads.safetensors", "meta.safetensors", "calibration.safetensors"):
            files[Path(name).as_posix()] = sha256(folder / name)
        with writing(folder / "README.md") as aside:
            aside.write_text(card)
        weights = {"fingerprint": self.backbone.fingerprint, "dtype": str(self.backbone.dtype).removeprefix("torch.")}
        write_json(
            folder / "cat.json",
            {
                "format": FORMAT,
                "files": files,
                "backbone": {"where": where, "family": self.backbone.family, "layers": self.backbone.n_layers, **weights},
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
        """Load a CAT; `backbone` gives another place for F, or F itself, which must be the very model the CAT was made for."""
        folder = Path(folder)
        if not (folder / "cat.json").exists():
            raise FileNotFoundError(f"no CAT in {folder}: it has no cat.json")
        card = json.loads((folder / "cat.json").read_text())
        if card.get("format") != FORMAT:
            raise ValueError(f"{folder} holds {card.get('format')!r}, expected {FORMAT!r}")
        for name, digest in card["files"].items():
            if not (folder / name).exists() or sha256(folder / name) != digest:
                raise ValueError(f"{folder / name} is missing or was changed: this CAT's promise cannot be trusted, save it again")
        where = backbone or (folder / "backbone" if card["backbone"]["where"] == "backbone" else card["backbone"]["where"])
        model = where if isinstance(where, Backbone) else Backbone.from_pretrained(str(where), dtype=getattr(torch, card["backbone"]["dtype"]))
        if model.fingerprint != card["backbone"]["fingerprint"]:
            raise ValueError(f"the model at {where} is not the one this CAT was made for: heads and calibration belong to other weights")
        heads, meta = load_module(Heads, folder / "heads.safetensors")[0], load_module(Meta, folder / "meta.safetensors")[0]
        table, tokenizer = ScoreTable.load(folder / "calibration.safetensors"), AutoTokenizer.from_pretrained(folder / card["tokenizer"])
        options = {name: card[name] for name in ("max_length", "measure", "autocast", "texts", "about")}
        return cls(model, tokenizer, heads, meta, table, **options)

    def savings(self, epsilons=(0.2, 0.1, 0.05, 0.02, 0.01), method="first_exit", trials=25, seed=0):
        """Expected consistency and layers at each ε, over random splits of the calibration inputs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", calibration.CalibrationWarning)
            frame = evaluation.evaluate(self.table, method, self.measure, epsilons, trials, seed)
        return evaluation.summary(frame)

    def card(self):
        """The model card: what was fitted on what, and what it can promise."""
        n, l, means = len(self.table), self.backbone.n_layers, self.savings().xs("mean", axis=1, level=1).reset_index()
        rows = "\n".join(f"| {r.epsilon:g} | {r.consistency:.3f} | {r.layers:.2f} of {l} |" for r in means.itertuples())
        about = "\n".join(f"* {name}: {value}" for name, value in sorted(self.about.items()))
        return CARD.format(
            family=self.backbone.family, l=l, n=n, measure=self.measure, smallest=calibration.smallest_epsilon(n),
            pac=calibration.smallest_epsilon(n, 0.01), rows=rows, about=about, max_length=self.max_length,
            some=int((~self.table.consistent.all(axis=1)).sum()), autocast=self.autocast or "none",
        )  # fmt: skip


@dataclass
class Flight:
    """Rows on their way through the layers together."""

    state: State
    rows: np.ndarray  # their numbers
    scorer: "Scorer"  # what scoring remembers of them


class Loop:
    """One call of `run`: which rows leave after which layer, and what they leave with."""

    def __init__(self, cat, thresholds, decide):
        self.backbone, self.decide, self.bars = cat.backbone, decide, np.asarray(thresholds, dtype=float)
        l = self.backbone.n_layers
        if self.bars.shape != (l - 1,) or any(map(math.isnan, self.bars)):
            raise ValueError(f"a CAT of {l} layers needs {l - 1} thresholds, none of them NaN, got {thresholds!r}")
        self.last = l - 1 if decide else max((k for k in range(1, l) if self.bars[k - 1] < np.inf), default=0)  # nothing leaves early after it
        self.plain = self.backbone.device.type == "cpu" and not cat.autocast and self.backbone.dtype == torch.float32
        self.left = []  # (rows, logits, layer, confidences) of those that have left

    def advance(self, flight, rows=0, layer=None):
        """On through the layers until at most so many rows are left, or after `layer`."""
        backbone, l = self.backbone, self.backbone.n_layers
        while len(flight.rows) > rows and flight.state.layer < (layer or l):
            k = flight.state.layer + 1
            flight.state = backbone.step(flight.state, k)
            if k <= self.last and (self.decide or flight.scorer.needs_all or self.bars[k - 1] < np.inf):
                self.leave(flight, k)
        if len(flight.rows) and flight.state.layer == l:
            self.left.append((flight.rows, backbone.finish(flight.state).float().cpu().numpy(), l, np.ones(len(flight.rows))))
            flight.rows = flight.rows[:0]

    def leave(self, flight, k):
        """The rows that exit at layer k leave the flight."""
        cls = self.backbone.cls(flight.state)
        if self.plain:
            early, scores = flight.scorer(k, cls)
        else:  # F may run elsewhere and in lower precision, heads and scores do not
            with torch.autocast("cpu", enabled=False):
                early, scores = flight.scorer(k, cls.float().cpu())
        leaves = self.decide(k, scores, flight.rows) if self.decide else scores > self.bars[k - 1]
        if np.count_nonzero(leaves):
            self.left.append((flight.rows[leaves], early.numpy()[leaves], k, scores[leaves]))
            stays = np.flatnonzero(~leaves)
            flight.rows = flight.rows[stays]
            if len(stays):
                flight.scorer.keep(stays)
                flight.state = self.backbone.keep(flight.state, torch.from_numpy(stays))

    def gather(self, flights, rows=0):
        """Flights as one, those behind picking up those ahead, until at most so many rows are left."""
        together, *ahead = sorted(flights, key=lambda flight: flight.state.layer)
        for flight in ahead:
            self.advance(together, layer=flight.state.layer)
            together = self.join(together, flight) if len(together.rows) else flight
        self.advance(together, rows)
        return together

    def join(self, first, second):
        """Two flights that have come as far as one."""
        first.scorer.join(second.scorer)
        return Flight(self.backbone.join(first.state, second.state), np.concatenate([first.rows, second.rows]), first.scorer)

    def results(self, n):
        """Logits (n, C), exit layers and confidences, by row number."""
        logits = np.empty((n, self.backbone.num_labels), np.float32)
        exits, confidences = np.empty(n, int), np.empty(n)
        for rows, said, layer, scores in self.left:
            logits[rows], exits[rows], confidences[rows] = said, layer, scores
        return logits, exits, confidences


class Scorer:
    """Early predictions and their confidence, layer after layer, for the rows still there: what a layer needs of the past.

    It runs on the host, whatever device F runs on: heads are tiny, and the decision to leave is taken there anyway.
    By torch and not by NumPy, whose BLAS has threads of its own, which go on spinning and take the cores from F's layers.
    """

    def __init__(self, cat, measure, n):
        self.cat, self.measure, self.history, self.layout = cat, measure, cat.heads.history, cat.layout
        # whether a layer's score depends on the layers before it: then heads run at every layer
        self.needs_all = self.history or measure in ("kl", "patience") or (measure == "meta" and "history" in self.layout)
        self.x = np.zeros((n, cat.meta.inputs), np.float32)  # the meta classifiers' inputs; their history fills up as layers pass
        self.past = np.zeros((n, 0), np.float32)  # logits of the layers before, for heads with history
        self.streak, self.before = np.zeros(n), None  # for patience; logits of the layer before

    def keep(self, rows):
        """Forget the rows that have left."""
        self.x, self.past, self.streak = self.x[rows], self.past[rows], self.streak[rows]
        self.before = None if self.before is None else self.before[rows]

    def join(self, other):
        """Take in the rows of another, which has come as far."""
        for name in ("x", "past", "streak") + (() if self.before is None else ("before",)):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))

    def __call__(self, k, cls):
        """Logits with temperature (rows, C), a tensor, and scores (rows,) of layer k, counted from 1, from [CLS] (rows, d) in float32."""
        exit = self.cat.exits[k - 1]
        hidden = torch.addmm(exit["b_p"], cls, exit["w_p"])
        if self.history:
            hidden += torch.from_numpy(self.past) @ exit["w_h"]
        logits = torch.addmm(exit["b_o"], hidden.tanh_(), exit["w_o"])
        if self.history:
            self.past = np.concatenate([self.past, logits.numpy()], axis=1)
        if self.measure == "meta":
            return logits, self._meta(k, logits, hidden, exit)
        now = logits.numpy()
        scores = self._from_logits(now)
        self.before = now
        return logits, scores

    def _meta(self, k, logits, hidden, exit):
        """M_k: cats.meta.features and Meta for one layer."""
        x, at, alone = self.x, self.layout, len(self.x) == 1
        prediction, confidence, pdiff = predicted_alone(logits.tolist()[0]) if alone else predicted(logits)
        for name, value in (("hidden", hidden.numpy()), ("prediction", prediction), ("pmax", confidence), ("pdiff", pdiff)):
            if name in at:
                x[:, at[name]] = value
        units = torch.addmm(exit["b_1"], torch.from_numpy(x), exit["w_1"])
        if "history" in at:  # what the layers after this one remember of it
            x[:, at["history"].start + k - 1 : at["history"].start + k] = confidence
        if alone:
            return np.array([believed_alone(units.tolist()[0], *exit["floats"])])
        return torch.addmv(exit["b_2"], units.relu_(), exit["w_2"]).sigmoid_().numpy()

    def _from_logits(self, logits):
        if self.measure == "patience":
            if self.before is not None:
                regression, tau = self.cat.table.regression, self.cat.table.tau
                same = abs(logits - self.before)[:, 0] <= tau if regression else logits.argmax(1) == self.before.argmax(1)
                self.streak = (self.streak + 1) * same
            return self.streak / self.cat.heads.early
        if self.measure == "kl" and self.before is None:
            return np.zeros(len(logits))
        # the table's own function on this layer alone; its last layer, F, is not read
        stack = np.stack([logits if self.before is None else self.before, logits, logits], axis=1).astype(float)
        return getattr(measures, self.measure)(stack)[:, 1]


def fresh(batch_size):
    """Rows that start together where F would take `batch_size`: the rest of F's memory is for rows that wait, and for the gaps that batches of all sizes leave."""
    return max(1, 3 * batch_size // 4)


def check_measure(measure):
    if measure not in RUNTIME_MEASURES:
        raise ValueError(f"a CAT can exit by {', '.join(RUNTIME_MEASURES)}, not by {measure!r}")
    return measure


def rows_of(texts):
    """A list of tuples, one or two texts each."""
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings (or of pairs), not one string: put it in a list")
    rows = [tuple(text) if isinstance(text, (tuple, list)) else (text,) for text in texts]
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]) or not 1 <= len(row) <= 2 or not all(isinstance(text, str) for text in row):
            raise TypeError(f"texts must all be strings, or all be pairs of strings; number {i} is {texts[i]!r}")
    return rows


CARD = """---
library_name: cats
tags: [early-exit, conformal-prediction]
---

# A Confident Adaptive Transformer

A {family} classifier with {l} layers that stops early and agrees with the full model at least 1-ε of the time, for the ε you choose at
prediction time (Schuster et al., EMNLP 2021).

```python
from cats import CAT
CAT.from_pretrained("this folder").predict(["a text"], epsilon=0.05)
```

## What is promised

P(G(x) = F(x)) ≥ 1-ε over calibration set and input, by the calibrator `first_exit` with the measure `{measure}`, for inputs exchangeable with the {n}
calibration inputs ({some} of them have an inconsistent layer). The smallest ε it can promise is **{smallest:.2g}**; with `method="pac"` and
confidence 99 % it is {pac:.2g}. Below that every input runs all layers. Nothing is promised for inputs of another kind.

## What to expect

Means over random splits of the calibration inputs:

| ε | consistency | layers |
|---|---|---|
{rows}

## How it was made

{about}
* inputs cut at {max_length} tokens; mixed precision: {autocast}
"""
