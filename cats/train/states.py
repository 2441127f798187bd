"""Running F over a data set once: tokens, length buckets, and chunk files that a killed run goes on
from.

Every layer's [CLS] and mean over tokens go to disk in chunks of a few hundred inputs. Heads and
meta classifiers are then trained from the chunks, so their memory is bounded by one chunk and not
by the data set, and F never runs again. A chunk is a random part of the data: inside it inputs are
sorted by length for speed, between chunks nothing is.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors import safe_open
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cats._io import digest, load_arrays, read_json, save_arrays, write_json
from cats.model.backbone import Backbone
from cats.train import tasks

Row = dict[str, Any]  # token ids, mask and the like of one input, and where its second text is
CHUNK = 512  # inputs a file
TOKENS = 4096  # tokens a batch


def processes() -> PartialState:
    """The processes that share the work, of which this is one: as many as were launched, on CPUs as
    well as on GPUs.
    """
    # without cpu=True every CPU process would think it is alone; the others wait while the first
    # one trains heads
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))


def load_tokenizer(where: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model id or folder. Refuses a folder without one: transformers would make
    up an empty one, to which every word is unknown.
    """
    lost = f"no tokenizer at {str(where)!r}: give a folder with a model and its tokenizer, or a Hub"
    lost += " id when online; tokenizer.save_pretrained(folder) puts it beside a model"
    try:
        found = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except OSError as error:
        raise FileNotFoundError(f"{lost}. Their message: {error}") from error
    except Exception as error:  # a damaged file comes as whatever its parser raises
        raise ValueError(f"{lost}. Their message: {error}") from error
    if set(found.get_vocab()) <= set(found.all_special_tokens):
        raise FileNotFoundError(lost)
    return found


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Save a tokenizer with the side at which it cuts, of which transformers writes down only what
    it was loaded with: texts would be cut at the other end later.
    """
    side = tokenizer.truncation_side
    if side != tokenizer.init_kwargs.get("truncation_side", "right"):
        tokenizer.init_kwargs["truncation_side"] = side
    tokenizer.save_pretrained(folder)


def tokenise(tokenizer: Any, data: Any, columns: Sequence[str], max_length: int) -> list[Row]:
    """`encode` of a data set."""
    return encode(tokenizer, [list(data[column][:]) for column in columns], max_length)


def encode(tokenizer: Any, texts: Sequence[list[str]], max_length: int) -> list[Row]:
    """Token ids of every row, cut at max_length, from one or two columns of texts: a list of dicts,
    not yet padded.
    """
    if not any(texts):
        return []
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    rows = [dict(zip(encoded, row)) for row in zip(*encoded.values())]
    if len(texts) == 2 and encoded.is_fast:
        for i, row in enumerate(rows):
            row["second"] = second_text(encoded.sequence_ids(i))
    return rows


def second_text(sequence_ids: list[int | None]) -> int:
    """Where the second text of a pair begins; at the last token where nothing is left of it.

    >>> second_text([None, 0, 0, None, 1, 1, None])
    4
    """
    return sequence_ids.index(1) if 1 in sequence_ids else len(sequence_ids) - 1


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of how text becomes tokens, whatever length the tokenizer was last told to cut or pad
    at, and of which inputs F gets.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = (
        json.loads(fast.to_str()) | {"truncation": None, "padding": None}
        if fast
        else tokenizer.get_vocab()
    )
    sides = (tokenizer.model_input_names, tokenizer.truncation_side, tokenizer.pad_token_id)
    return digest([rules, *sides])


def collate(
    tokenizer: Any, rows: Sequence[Row], extra_padding: int = 0, pairs: bool = False
) -> Any:
    """Rows padded on the right to the longest of them (and `extra_padding` columns more), as
    tensors; with `pairs` also where second texts begin, for `Backbone.start`.
    """
    longest = max(len(row["input_ids"]) for row in rows) + extra_padding
    plain = [{name: ids for name, ids in row.items() if name != "second"} for row in rows]
    batch = tokenizer.pad(
        plain, padding="max_length", max_length=longest, padding_side="right", return_tensors="pt"
    )
    if pairs and "second" in rows[0]:
        batch["second"] = torch.tensor([row["second"] for row in rows])
    return batch


def by_length(rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """Row numbers in batches of similar length and at most so many tokens, longest first: if memory
    is short it shows at once.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    batches = []
    while order:
        size = max(1, tokens // len(rows[order[0]]["input_ids"]))
        batches.append(order[:size])
        order = order[size:]
    return batches


def mixed(autocast: str | None, backbone: Backbone) -> AbstractContextManager[Any]:
    """F in lower precision where asked for ("bfloat16", "float16"); heads and scores always stay in
    float32.
    """
    check_autocast(autocast)
    return (
        torch.autocast(backbone.device.type, getattr(torch, autocast))
        if autocast
        else nullcontext()
    )


def check_autocast(autocast: str | None) -> str | None:
    """Refuse the name of a precision that is none."""
    if autocast not in (None, "bfloat16", "float16"):
        raise ValueError(f"autocast is 'bfloat16', 'float16' or None, not {autocast!r}")
    return autocast


def check_max_length(max_length: int) -> int:
    """Refuse a length that leaves no text: the special tokens of a pair take three or four."""
    whole = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
    if not whole or max_length < 5:
        raise ValueError(
            f"max_length is the most tokens of an input, a whole number of at least 5, not"
            f" {max_length!r}"
        )
    return int(max_length)


def extract(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    columns: Sequence[str],
    folder: str | Path,
    *,
    max_length: int,
    tokens: int = TOKENS,
    chunk: int = CHUNK,
    seed: int = 0,
    autocast: str | None = None,
) -> "States":
    """Run F over the data and write what `Backbone.states` gives to `folder`, chunk by chunk.

    Goes on where an interrupted run was; the result is the same, and a chunk that was damaged is
    made again. Under `accelerate launch` the processes share the chunks. A folder made from another
    model, tokenizer or data is made again from the start.

    Numbers are kept in float32. Half precision would halve the disk, and ruin the heads: the first
    layers of a BERT have coordinates that hardly differ from input to input, so what is left of
    them after rounding is not what a head meets later.
    """
    backbone.ready()
    folder, max_length = Path(folder), min(check_max_length(max_length), backbone.max_tokens)
    plan = {
        "model": backbone.fingerprint,
        "tokenizer": tokenizer_hash(tokenizer),
        "data": tasks.fingerprint(data),
        "holds": "cls, mean and pair in float32",
        "texts": len(columns),
        "n": len(data),
        "chunk": chunk,
        "seed": seed,
        "max_length": max_length,
        "autocast": autocast,
    }
    group = processes()
    if group.is_main_process and read_json(folder / "plan.json") != plan:
        remove_states(folder)
    if group.is_main_process:
        write_json(folder / "plan.json", plan)
    group.wait_for_everyone()
    states = States(folder)
    mine = range(group.process_index, states.n_chunks, group.num_processes)
    todo = [i for i in mine if not states.whole(i)]
    done = sum(len(states.rows(i)) for i in mine) - sum(len(states.rows(i)) for i in todo)
    bar = tqdm(
        total=sum(len(states.rows(i)) for i in mine),
        initial=done,
        unit="inputs",
        desc=f"layers of F, {folder.name}",
        **{} if todo else {"disable": True},  # said only if so: it would outrank TQDM_DISABLE
    )
    for i in todo:
        rows = tokenise(tokenizer, data.select(states.rows(i)), columns, max_length)
        parts = {}
        for batch in by_length(rows, tokens):
            with torch.inference_mode():
                with mixed(autocast, backbone):
                    some = [rows[j] for j in batch]
                    given = collate(tokenizer, some, backbone.extra_padding, pairs=True)
                    values = backbone.states(given)
            for name, value in values.items():
                if name not in parts:
                    parts[name] = np.empty((len(rows), *value.shape[1:]), np.float32)
                parts[name][batch] = value.float().cpu().numpy()
            check_finite(parts, batch, states.rows(i), data, columns)
            bar.update(len(batch))
        save_arrays(states.path(i), parts, {})
    bar.close()
    group.wait_for_everyone()
    return states


def check_finite(parts: Any, batch: Any, numbers: Any, data: Any, columns: Sequence[str]) -> None:
    """Refuse inputs of which F makes no numbers: they would spoil everything fitted on them."""
    bad = [j for j in batch if not all(np.isfinite(part[j]).all() for part in parts.values())]
    if bad:
        row = int(numbers[bad[0]])
        text = " | ".join(data[row][column] for column in columns)
        raise ValueError(
            f"F gives NaN or infinite numbers for {len(bad)} inputs, the first is number {row},"
            f" {text[:60]!r}: check F's weights and precision, or leave such inputs out"
        )


def remove_states(folder: Path) -> None:
    """Remove what `extract` left in a folder, and nothing else."""
    for path in [*folder.glob("[0-9]*.safetensors"), folder / "plan.json"]:
        path.unlink(missing_ok=True)


class States:
    """A folder of chunks as `extract` leaves it. Rows are numbered as in its data."""

    def __init__(self, folder: str | Path, backbone: Backbone | None = None) -> None:
        self.folder = Path(folder)
        if not (self.folder / "plan.json").exists():
            raise FileNotFoundError(f"no extracted states in {folder}: run extract first")
        self.plan = read_json(self.folder / "plan.json")
        if not isinstance(self.plan, dict) or not {"model", "n", "chunk", "seed"} <= {*self.plan}:
            raise ValueError(f"{self.folder / 'plan.json'} is damaged: run extract again")
        if backbone is not None and self.plan["model"] != backbone.fingerprint:
            raise ValueError(
                f"the states in {folder} come from another model than this one: extract them again"
            )
        self.n, self.chunk = self.plan["n"], self.plan["chunk"]
        self.n_chunks = -(-self.n // self.chunk)
        self._order = np.random.default_rng(self.plan["seed"]).permutation(self.n)
        self.texts = self.plan.get("texts", 1)  # of an input
        self._checked: set[int] = set()  # chunks whose numbers were compared with their hash

    def __len__(self) -> int:
        return self.n

    def path(self, i: int) -> Path:
        return self.folder / f"{i:05d}.safetensors"

    def rows(self, i: int) -> np.ndarray:
        """The row numbers of chunk i."""
        return self._order[i * self.chunk : (i + 1) * self.chunk]

    def read(self, i: int, *names: str) -> list[torch.Tensor]:
        """Tensors of chunk i."""
        if not self.path(i).exists():
            raise ValueError(
                f"{self.folder} is not complete, chunk {i} of {self.n_chunks} is missing: run"
                " extract again"
            )
        if i not in self._checked:
            arrays, _ = load_arrays(self.path(i))
            self._checked.add(i)
            return [torch.from_numpy(arrays[name]) for name in names]
        with safe_open(self.path(i), framework="pt") as file:
            return [file.get_tensor(name) for name in names]

    def whole(self, i: int) -> bool:
        """Whether chunk i is there, whole and unchanged."""
        try:
            self.read(i, "cls", "mean", "logits")
        except (ValueError, KeyError):
            return False
        return True

    def gather(self, name: str) -> torch.Tensor:
        """One tensor of all chunks, in the order of the data: for what is small."""
        parts = [self.read(i, name)[0] for i in range(self.n_chunks)]
        whole = torch.empty((self.n, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for i, part in enumerate(parts):
            whole[self.rows(i)] = part
        return whole


class Joined:
    """The states of several parts as those of one, in their order: what training reads."""

    def __init__(self, *parts: States) -> None:
        self.parts, self.texts = parts, parts[0].texts
        starts = np.cumsum([0, *map(len, parts)])
        self._chunks = [
            (part, i, start) for part, start in zip(parts, starts) for i in range(part.n_chunks)
        ]
        self.n_chunks = len(self._chunks)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def rows(self, i: int) -> np.ndarray:
        """The row numbers of chunk i."""
        part, j, start = self._chunks[i]
        return part.rows(j) + start

    def read(self, i: int, *names: str) -> list[torch.Tensor]:
        """Tensors of chunk i."""
        part, j, _ = self._chunks[i]
        return part.read(j, *names)

    def gather(self, name: str) -> torch.Tensor:
        """One tensor of all parts, in the order of the data."""
        return torch.cat([part.gather(name) for part in self.parts])
