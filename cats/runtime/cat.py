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
import math
import tempfile
import warnings
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from cats._io import sha256, versions, write_json, writing
from cats.model.backbone import Backbone, State
from cats.model.heads import Heads, fit_temperatures, train_heads
from cats.model.meta import Meta, arranged, believed_alone, predicted, predicted_alone, train_meta
from cats.stats import calibrators, measures
from cats.stats.table import TAU, ScoreTable
from cats.stats.trials import evaluate, summary
from cats.train import tasks
from cats.train.run import load_module, save_module, scoring, table_of
from cats.train.states import collate, encode, extract, mixed

FORMAT = "cats.CAT/2"
FEW = (
    32  # classes up to which plain Python is quicker than tensors to find the largest probabilities
)
RUNTIME_MEASURES = [measure for measure in measures.MEASURES if measure != "random"]


class Predictions(NamedTuple):
    """What a CAT says, in the order of the inputs."""

    predictions: np.ndarray  # (n,), a class number, or a number for regression
    exit_layers: np.ndarray  # (n,), 1 … l
    confidences: (
        np.ndarray
    )  # (n,), the score with which an input left; 1 at the last layer, which is F itself
    probabilities: (
        np.ndarray
    )  # (n, C), softmax of the layer it left at; the outputs themselves for regression


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
        if (backbone.hidden_size, backbone.num_labels) != (
            heads.d,
            heads.n_outputs,
        ) or backbone.num_labels != table.n_classes:
            raise ValueError(
                "backbone, heads and calibration table differ in hidden size or number of labels"
            )
        self.backbone, self.tokenizer, self.table = backbone, tokenizer, table
        self.heads, self.meta = heads.cpu(), meta.cpu()
        self.max_length, self.measure, self.autocast = (
            min(max_length, backbone.max_tokens),
            check_measure(measure),
            autocast,
        )
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

        tuning       trains heads, temperatures and meta classifiers; without `labels` they learn
                     what F says
        calibration  never trained on, not even by F; unlabelled. Its size limits ε: see
                     cats.calibration_size
        autocast     run F in "bfloat16" or "float16", here and in predict; the promise is about F
                     as it runs here
        folder       where extracted states go (a temporary folder by default); give one to resume
                     an interrupted fit
        """
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
            targets = {
                name: None if labels is None else part["label"][:] for name, part in parts.items()
            }
            heads, _ = train_heads(
                states["tune"], backbone.num_labels, targets["tune"], seed=seed, **(early or {})
            )
            fit_temperatures(heads, states["scale"], targets["scale"])
            metas, _ = train_meta(heads, states["meta"], tau=tau, seed=seed, **(meta or {}))
            scored = extract(
                backbone,
                tokenizer,
                calibration,
                columns,
                work / "calibration",
                **scoring(heads, metas),
                **options,
            )
            table = table_of(scored, None, {"split": "calibration"}, tau)
        sizes = {
            "tuning": len(tuning),
            "calibration": len(calibration),
            "labelled": labels is not None,
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
        parts = [order[i : i + fresh(batch_size)] for i in range(0, len(order), fresh(batch_size))]
        batches = (
            collate(self.tokenizer, [tokens[i] for i in part], self.backbone.extra_padding)
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
        card = json.loads((folder / "cat.json").read_text())
        if card.get("format") != FORMAT:
            raise ValueError(f"{folder} holds {card.get('format')!r}, expected {FORMAT!r}")
        for name, digest in card["files"].items():
            if not (folder / name).exists() or sha256(folder / name) != digest:
                raise ValueError(
                    f"{folder / name} is missing or was changed: this CAT's promise cannot be"
                    " trusted, save it again"
                )
        where = backbone or (
            folder / "backbone"
            if card["backbone"]["where"] == "backbone"
            else card["backbone"]["where"]
        )
        model = (
            where
            if isinstance(where, Backbone)
            else Backbone.from_pretrained(
                str(where), dtype=getattr(torch, card["backbone"]["dtype"])
            )
        )
        if model.fingerprint != card["backbone"]["fingerprint"]:
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
            AutoTokenizer.from_pretrained(folder / card["tokenizer"]),
        )
        options = {
            name: card[name] for name in ("max_length", "measure", "autocast", "texts", "about")
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

    def card(self):
        """The model card: what was fitted on what, and what it can promise."""
        n, l, means = (
            len(self.table),
            self.backbone.n_layers,
            self.savings().xs("mean", axis=1, level=1).reset_index(),
        )
        rows = "\n".join(
            f"| {r.epsilon:g} | {r.consistency:.3f} | {r.layers:.2f} of {l} |"
            for r in means.itertuples()
        )
        about = "\n".join(f"* {name}: {value}" for name, value in sorted(self.about.items()))
        return CARD.format(
            family=self.backbone.family,
            l=l,
            n=n,
            measure=self.measure,
            smallest=calibrators.smallest_epsilon(n),
            pac=calibrators.smallest_epsilon(n, 0.01),
            rows=rows,
            about=about,
            max_length=self.max_length,
            some=int((~self.table.consistent.all(axis=1)).sum()),
            autocast=self.autocast or "none",
        )


@dataclass
class Flight:
    """Rows on their way through the layers together."""

    state: State
    rows: list  # their numbers
    scorer: "Scorer"  # what scoring remembers of them


class Loop:
    """One call of `run`: which rows leave after which layer, and what they leave with.

    Rows, scores and thresholds are plain lists: after a layer of F caches are cold, and few things
    are as quick then.
    """

    def __init__(self, cat, thresholds, decide):
        self.backbone, self.autocast, self.decide, bars = (
            cat.backbone,
            cat.autocast,
            decide,
            np.asarray(thresholds, dtype=float),
        )
        l, self.bars = self.backbone.n_layers, bars.tolist()
        if bars.shape != (l - 1,) or [bar for bar in self.bars if bar != bar]:
            raise ValueError(
                f"a CAT of {l} layers needs {l - 1} thresholds, none of them NaN, got"
                f" {thresholds!r}"
            )
        self.last = (
            l - 1
            if decide
            else max((k for k in range(1, l) if self.bars[k - 1] < math.inf), default=0)
        )  # nothing leaves early after it
        self.flights, self.room = [], 0  # rows on their way, and the most that may run together
        self.left = []  # (row, logits, layer, confidence) of those that have left

    def begin(self, flight):
        """Take in new rows, and go on until there is room for more."""
        self.room = max(self.room, len(flight.rows))
        self.flights.append(flight)
        self.go(few=self.room // 2, many=2 * self.room)

    def end(self):
        """Go on until all have left."""
        self.go(few=self.room, many=0)

    def go(self, few, many):
        """Flights of more than a few rows go on. If there is none but many rows wait, the flight
        furthest behind goes on to the next, and so on.
        """
        layer = lambda flight: flight.state.layer
        while self.flights:
            full = [flight for flight in self.flights if len(flight.rows) > few]
            if full:
                flight, rows = max(full, key=layer), few
            elif sum(len(flight.rows) for flight in self.flights) > many:
                flight, rows = min(self.flights, key=layer), 0
            else:
                return
            self.advance(
                flight,
                rows,
                min(
                    (layer(other) for other in self.flights if layer(other) > layer(flight)),
                    default=None,
                ),
            )
            if flight.rows:
                flight.state = self.backbone.rest(flight.state)
                for other in self.flights:
                    if (
                        other is not flight
                        and layer(other) == layer(flight)
                        and len(other.rows) + len(flight.rows) <= self.room
                    ):
                        self.join(flight, other)
            self.flights = [flight for flight in self.flights if flight.rows]

    def advance(self, flight, rows=0, layer=None):
        """On through the layers until at most so many rows are left, or after `layer`."""
        backbone, l = self.backbone, self.backbone.n_layers
        while len(flight.rows) > rows and flight.state.layer < (layer or l):
            k = flight.state.layer + 1
            flight.state = backbone.step(flight.state, k)
            if k <= self.last and (
                self.decide or flight.scorer.needs_all or self.bars[k - 1] < math.inf
            ):
                self.leave(flight, k)
        if flight.rows and flight.state.layer == l:
            self.left += [
                (row, logits, l, 1.0)
                for row, logits in zip(flight.rows, backbone.finish(flight.state).float().tolist())
            ]
            flight.rows = []

    def leave(self, flight, k):
        """The rows that exit at layer k leave the flight."""
        cls = self.backbone.cls(flight.state)
        if cls.is_cpu and cls.dtype is torch.float32 and not self.autocast:
            early, scores = flight.scorer(k, cls)
        else:  # F may run elsewhere and in lower precision, heads and scores do not
            with torch.autocast("cpu", enabled=False):
                early, scores = flight.scorer(k, cls.float().cpu())
        bar = self.bars[k - 1]
        leaves = (
            self.decide(k, scores, flight.rows)
            if self.decide
            else [score > bar for score in scores]
        )
        if any(leaves):
            self.left += [
                (row, logits, k, score)
                for row, logits, score, left in zip(flight.rows, early, scores, leaves)
                if left
            ]
            stays = remaining(leaves)
            flight.rows = [flight.rows[i] for i in stays]
            if stays:
                flight.scorer.keep(stays)
                flight.state = self.backbone.keep(flight.state, stays)

    def join(self, flight, other):
        """Take in the rows of another flight that has come as far."""
        flight.scorer.join(other.scorer)
        flight.state, flight.rows, other.rows = (
            self.backbone.join(flight.state, other.state),
            flight.rows + other.rows,
            [],
        )

    def results(self):
        """Logits (n, C), exit layers and confidences, by row number."""
        _, logits, exits, confidences = (
            zip(*sorted(self.left, key=lambda one: one[0])) if self.left else [()] * 4
        )
        return (
            np.array(logits, np.float32).reshape(len(exits), self.backbone.num_labels),
            np.array(exits, int),
            np.array(confidences, float),
        )


def remaining(leaves):
    """The numbers of the rows that stay, the last ones in the places of those that leave: so that
    most need not be moved.

    >>> remaining([False, True, False, False, True, False])
    [0, 5, 2, 3]
    """
    stays = [i for i, left in enumerate(leaves) if not left]
    last = iter(reversed(stays))
    return [next(last) if left else i for i, left in enumerate(leaves[: len(stays)])]


class Exit(NamedTuple):
    """What the runtime needs of one layer's head and meta classifier, weights as tensors and, for
    few rows, some as plain numbers.
    """

    w_p: torch.Tensor  # (d, d_e)
    b_p: torch.Tensor
    w_o: torch.Tensor  # (d_e, C), temperature folded in
    b_o: torch.Tensor
    w_h: torch.Tensor | None  # (k-1 times C, d_e), of heads with history
    w_1: torch.Tensor  # (inputs, units), inputs in the order of `arranged`
    b_1: torch.Tensor
    w_2: torch.Tensor  # (units,)
    b_2: torch.Tensor
    outputs: list  # w_o and b_o, class by class
    believes: tuple  # w_2 and b_2

    @classmethod
    def of(cls, heads, meta, k):
        weights = {"w_h": None} | heads.layer(k) | meta.layer(k)
        weights["w_1"] = arranged(weights["w_1"], meta.drop, heads)
        outputs = list(zip(weights["w_o"].T.tolist(), weights["b_o"].tolist()))
        return cls(
            **weights, outputs=outputs, believes=(weights["w_2"].tolist(), weights["b_2"].item())
        )


class Scorer:
    """Early predictions and their confidence, layer after layer, for the rows still there: what a
    layer needs of the past.

    It runs on the host, whatever device F runs on: heads are tiny, and the decision to leave is
    taken there anyway. Products by torch and not by NumPy, whose BLAS has threads of its own, which
    go on spinning and take the cores from F's layers.
    """

    def __init__(self, cat, measure, n):
        self.cat, self.measure, self.history, self.early, self.d_e = (
            cat,
            measure,
            cat.heads.history,
            cat.heads.early,
            cat.heads.d_e,
        )
        self.plain = (
            measure == "meta" and not self.history and cat.backbone.num_labels <= FEW
        )  # `_alone` will do for a row
        # whether a layer's score depends on the layers before it: then heads run at every layer
        self.needs_all = (
            self.history
            or measure in ("kl", "patience")
            or (measure == "meta" and "history" not in cat.meta.drop)
        )
        self.x = np.zeros(
            (n, len(cat.exits[0].w_1)), np.float32
        )  # the meta classifiers' inputs; their history fills up as layers pass
        self.inputs = torch.from_numpy(self.x)  # the same memory
        self.past = (
            np.zeros((n, 0), np.float32) if self.history else None
        )  # logits of the layers before, for heads with history
        self.streak, self.before = 0, None  # for patience; logits of the layer before

    def keep(self, rows):
        """Forget the rows that have left."""
        for name, value in self._remembered():
            setattr(self, name, value[rows])
        self.inputs = torch.from_numpy(self.x)

    def join(self, other):
        """Take in the rows of another, which has come as far."""
        for name, value in self._remembered():
            setattr(self, name, np.concatenate([value, getattr(other, name)]))
        self.inputs = torch.from_numpy(self.x)

    def _remembered(self):
        return [
            (name, value)
            for name in ("x", "past", "streak", "before")
            if isinstance(value := getattr(self, name), np.ndarray)
        ]

    def __call__(self, k, cls):
        """Logits with temperature, row by row, and a list of scores, of layer k, counted from 1,
        from [CLS] (rows, d) in float32.
        """
        exit = self.cat.exits[k - 1]
        if self.plain and len(self.x) == 1:
            return self._alone(k, cls, exit)
        hidden = torch.addmm(exit.b_p, cls, exit.w_p)
        if self.history:
            hidden += torch.from_numpy(self.past) @ exit.w_h
        hidden = torch.tanh(
            hidden, out=self.inputs.narrow(1, self.early, self.d_e)
        )  # in the place where a meta classifier reads it
        logits = torch.addmm(exit.b_o, hidden, exit.w_o).tolist()
        if self.history:
            self.past = np.concatenate([self.past, np.array(logits, np.float32)], axis=1)
        if self.measure == "meta":
            return logits, self._meta(k, logits, exit)
        now = np.array(logits, np.float32)
        scores = self._from_logits(now)
        self.before = now
        return logits, scores.tolist()

    def _meta(self, k, logits, exit):
        """M_k: cats.model.meta.features and Meta for one layer."""
        if len(logits[0]) <= FEW:
            said = [predicted_alone(row) for row in logits]
        else:
            said = [*zip(*(part.tolist() for part in predicted(torch.tensor(logits))))]
        self.x[:, self.early + self.d_e :] = [
            prediction + margins for prediction, _, margins in said
        ]
        units = torch.addmm(exit.b_1, self.inputs, exit.w_1)
        self.x[:, k - 1 : k] = [confidence for _, confidence, _ in said]
        return torch.addmv(exit.b_2, units.relu_(), exit.w_2).sigmoid_().tolist()

    def _alone(self, k, cls, exit):
        """Head and M_k for one row: plain Python but for the two large products, as an operation on
        tensors takes longer than 32 numbers do.
        """
        hidden = [*map(math.tanh, torch.addmm(exit.b_p, cls, exit.w_p).tolist()[0])]
        logits = [bias + sum(map(mul, weights, hidden)) for weights, bias in exit.outputs]
        prediction, confidence, margins = predicted_alone(logits)
        x = self.x[0]
        x[self.early :] = hidden + prediction + margins
        units = torch.addmm(exit.b_1, self.inputs, exit.w_1).tolist()[0]
        x[k - 1] = confidence[0]
        return [logits], [believed_alone(units, *exit.believes)]

    def _from_logits(self, logits):
        if self.measure == "patience":
            if self.before is not None:
                regression, tau = self.cat.table.regression, self.cat.table.tau
                same = (
                    abs(logits - self.before)[:, 0] <= tau
                    if regression
                    else logits.argmax(1) == self.before.argmax(1)
                )
                self.streak = (self.streak + 1) * same
            return self.streak / self.cat.heads.early + np.zeros(len(logits))
        if self.measure == "kl" and self.before is None:
            return np.zeros(len(logits))
        # the table's own function on this layer alone; its last layer, F, is not read
        stack = np.stack(
            [logits if self.before is None else self.before, logits, logits], axis=1
        ).astype(float)
        return getattr(measures, self.measure)(stack)[:, 1]


def fresh(batch_size):
    """Rows that start together where F would take `batch_size`: the rest of F's memory is for rows
    that wait, and for the gaps that batches of all sizes leave.
    """
    return max(1, 3 * batch_size // 4)


def check_measure(measure):
    if measure not in RUNTIME_MEASURES:
        raise ValueError(f"a CAT can exit by {', '.join(RUNTIME_MEASURES)}, not by {measure!r}")
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


CARD = """---
library_name: cats
tags: [early-exit, conformal-prediction]
---

# A Confident Adaptive Transformer

A {family} classifier with {l} layers that stops early and agrees with the full model at least
1-ε of the time, for the ε you choose at prediction time (Schuster et al., EMNLP 2021).

```python
from cats import CAT
CAT.from_pretrained("this folder").predict(["a text"], epsilon=0.05)
```

## What is promised

P(G(x) = F(x)) ≥ 1-ε over calibration set and input, by the calibrator `first_exit` with the
measure `{measure}`, for inputs exchangeable with
the {n} calibration inputs ({some} of them have an inconsistent layer). The smallest ε it can promise is **{smallest:.2g}**; with `method="pac"` and
confidence 99 % it is {pac:.2g}. Below that every input runs all layers. Nothing is promised for
inputs of another kind.

## What to expect

Means over random splits of the calibration inputs:

| ε | consistency | layers |
|---|---|---|
{rows}

## How it was made

{about}
* inputs cut at {max_length} tokens; mixed precision: {autocast}
"""
