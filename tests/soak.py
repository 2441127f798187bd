"""Hours of misfortune in some minutes: damaged files, kills, long streams, threads.

    python tests/soak.py              all of it, as `make soak`
    python tests/soak.py fuzz 10000   one part, so often

Each part returns what it counted and raises at the first thing that is silently wrong. The tests
run short versions of the same functions.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import numpy as np
import psutil
import tiny
import torch
from transformers.utils import logging

from cats import CAT, CalibrationWarning, Monitor, ScoreTable
from cats._io import load_module, module_digest
from cats.model.exits import Heads, Meta
from cats.train import demo
from cats.train.states import States, tokenizer_hash

# --- damage ---


def damage(data: bytes, rng: random.Random) -> bytes:
    """The bytes after one accident."""
    data, n = bytearray(data), len(data)
    at = rng.randrange(max(1, n))
    if rng.random() < 0.5:  # headers are short and hold most of what can go wrong
        at = rng.randrange(max(1, min(n, 1500)))
    size = rng.choice([1, 1, 2, 8, 64, 1000])
    kind = rng.choice(["bit", "byte", "digit", "cut", "insert", "delete", "zero", "swap", "empty"])
    if kind == "bit" and n:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "byte" and n:
        data[at] = rng.randrange(256)
    elif kind == "digit":  # a number becomes another one: the JSON stays whole
        places = [i for i, one in enumerate(data[:20_000]) if 48 <= one < 58]
        if places:
            data[rng.choice(places)] = rng.randrange(48, 58)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = rng.randbytes(size)
    elif kind == "delete":
        del data[at : at + size]
    elif kind == "zero":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == "swap":
        other = rng.randrange(max(1, n))
        data[at : at + size], data[other : other + size] = (
            data[other : other + size],
            data[at : at + size],
        )
    else:
        data = b""
    return bytes(data)


def outcome(load: Callable, path: Path, expected: object) -> str:
    """What came of reading damaged files: the same as before, or a refusal that says why. Anything
    else is an error.
    """
    try:
        found = load(path)
    except (ValueError, FileNotFoundError) as error:
        if len(str(error).split()) < 4:
            raise AssertionError(f"{type(error).__name__} without a sentence: {error}") from error
        plain = type(error) in (ValueError, FileNotFoundError)
        return "refused" if plain else type(error).__name__  # in a parser's words, not in ours
    if found != expected:
        raise AssertionError(f"{path} was read as something else: {found} and not {expected}")
    return "the same"


def read_table(path: Path) -> tuple:
    """What a table computes with; its metadata say where it comes from and have no hash."""
    table = ScoreTable.load(path)
    return table.sha256, table.tau


def read_module(kind: type, path: Path) -> tuple:
    module, about = load_module(kind, path)
    return module_digest(module), str(module.shape), str(about)


def read_chunk(path: Path) -> tuple:
    """A chunk as `extract` looks at it before it is used: damaged ones are made again."""
    states = States(path.parent)
    if not states.whole(0):
        raise ValueError("this chunk is not whole and is made again")
    return tuple(value.numpy().tobytes() for value in states.read(0, "cls", "mean", "logits"))


def read_cat(path: Path) -> tuple:
    cat = CAT.from_pretrained(path if path.is_dir() else path.parents[path.parent.name != "cat"])
    parts = (cat.heads, cat.meta)
    return (
        *(module_digest(part) for part in parts),
        str([part.shape for part in parts]),
        cat.table.sha256,
        cat.backbone.fingerprint,
        tokenizer_hash(cat.tokenizer),
        (cat.max_length, cat.measure, cat.autocast, cat.texts, str(cat.about)),
    )


def fuzz(n: int = 10_000, seed: int = 0) -> Counter:
    """Damaged tables, CAT folders and steps of a run."""
    rng, counts = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        cat = tiny.fit(folder=work / "fit")
        cat.save_pretrained(work / "cat")
        readers: list[tuple[int, Path, Callable]] = [
            (3, work / "cat/calibration.safetensors", read_table),
            (1, work / "cat/heads.safetensors", partial(read_module, Heads)),
            (1, work / "cat/meta.safetensors", partial(read_module, Meta)),
            (1, work / "fit/calibration/00000.safetensors", read_chunk),
            (1, work / "fit/calibration/plan.json", read_plan),
        ]
        files = [path for path in (work / "cat").rglob("*") if path.is_file()]
        readers += [(1 + (path.name == "cat.json"), path, read_cat) for path in files]
        expected = {(path, read): read(path) for _, path, read in readers}
        shares = [share for share, _, _ in readers]
        for _ in range(n):
            _, path, read = rng.choices(readers, shares)[0]
            whole = path.read_bytes()
            damaged = damage(whole, rng)
            path.write_bytes(damaged)
            kind = getattr(read, "__name__", "read_module").removeprefix("read_")
            try:
                counts[kind, outcome(read, path, expected[path, read])] += 1
            except Exception as error:
                keep = Path(tempfile.gettempdir()) / f"damaged-{path.name}"
                keep.write_bytes(damaged)
                raise AssertionError(f"{path.name}, kept as {keep}: {error!r}") from error
            finally:
                path.write_bytes(whole)
    return counts


def read_plan(path: Path) -> tuple:
    """A plan as extract takes it up; another one means that all is made again."""
    plan = States(path.parent).plan
    if read_plan.first is None:
        read_plan.first = plan
    if plan != read_plan.first:
        raise ValueError("this plan is another one, and all is made again")
    return (str(plan),)


read_plan.first = None

# --- kills ---


def killed(job: Callable, after: float) -> bool:
    """Whether a process that does a job was killed before it was done."""
    child = os.fork()
    if not child:
        try:
            job()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def whole(job: Callable) -> float:
    """Do a job in a process of its own, to the end; the seconds it took."""
    start = time.monotonic()
    child = os.fork()
    if not child:
        try:
            job()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, "a job that should be done after a kill failed"
    return time.monotonic() - start


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but for what transformers writes with times in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    skip = ("training_args.bin",)
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.name not in skip}


def a_run(folder: Path) -> None:
    training = {"epochs": 2, "batch_size": 20, "save_steps": 2}
    run = tiny.run(folder / "base", folder / "run", training=training)
    run.table("validation")
    run.table("test")


def a_fit(folder: Path) -> None:
    cat = tiny.fit(folder=folder / "states")
    cat.save_pretrained(folder / "cat")


def kills(n: int = 60, seed: int = 0) -> Counter:
    """Kill fine-tuning, extraction, fitting and saving anywhere, and go on: the same bytes."""
    rng, counts = random.Random(seed), Counter()
    shares = {"save": 0.5, "fit": 0.25, "run": 0.25}
    for name, share in shares.items():
        todo = {"save": saves, "fit": partial(resumed, a_fit), "run": partial(resumed, a_run)}
        todo[name](round(n * share), rng, counts, name)
    return counts


def resumed(job: Callable, n: int, rng: random.Random, counts: Counter, name: str) -> None:
    """A job killed several times in one folder, then done: as if it had never been killed."""
    if not n:
        return
    with tempfile.TemporaryDirectory() as temporary:
        first = Path(temporary) / "first"
        tiny.save(first / "base")
        seconds = whole(partial(job, first))
        expected = contents(first)
        while n > 0:
            folder = Path(temporary) / f"again-{n}"
            folder.mkdir()
            shutil.copytree(first / "base", folder / "base")
            for _ in range(min(n, 3)):
                stopped = killed(partial(job, folder), rng.uniform(0, seconds))
                counts[name, "killed" if stopped else "done before"] += 1
                n -= 1
            whole(partial(job, folder))
            found = contents(folder)
            differ = [one for one in expected if found.get(one) != expected[one]]
            differ = [one for one in differ if not one.endswith(".settings.json")]  # hold paths
            assert not differ, f"{name}: {differ} differ after kills"
            shutil.rmtree(folder)


def saves(n: int, rng: random.Random, counts: Counter, name: str) -> None:
    """One CAT saved over another, killed: the folder holds the one or the other, whole."""
    if not n:
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "cat"
        two = []
        for i in range(2):
            whole(lambda i=i: tiny.fit(seed=i).save_pretrained(folder.with_name(f"cat-{i}")))
            two.append(CAT.from_pretrained(folder.with_name(f"cat-{i}")))
        hashes = [module_digest(cat.heads) for cat in two]
        shutil.copytree(folder.with_name("cat-0"), folder)
        (folder / "notes.txt").write_text("mine")
        seconds = whole(lambda: two[0].save_pretrained(folder))
        for i in range(n):
            stopped = killed(
                lambda i=i: two[i % 2].save_pretrained(folder), rng.uniform(0, seconds)
            )
            counts[name, "killed" if stopped else "done before"] += 1
            found = module_digest(CAT.from_pretrained(folder).heads)
            assert found in hashes, "a third CAT"
            counts[name, "new" if found == hashes[i % 2] else "old"] += 1
            assert (folder / "notes.txt").read_text() == "mine"


# --- long use ---


def growth(n: int = 20_000) -> dict[str, float]:
    """Memory after many texts, against memory after some."""
    cat, process = tiny.fit(), psutil.Process()
    texts = demo.corpus("sentiment", "test", 1_000, noise=0)["text"][:]
    start = None
    for i in range(0, n, 500):
        cat.predict(texts[i % 1_000 : i % 1_000 + 500], 0.3)
        sum(1 for _ in cat(iter(texts[:100]), epsilon=0.3))
        if i >= n // 4:
            start = start or process.memory_info().rss
    grown = (process.memory_info().rss - start) / 2**20
    assert grown < 16, f"memory grew by {grown:.1f} MiB over {n} texts"
    return {"texts": n, "grown_mib": round(grown, 2)}


def stream(n: int = 50_000) -> dict[str, float]:
    """Memory over one stream of texts, audited, against memory after a fifth of it. What comes in
    is made on the way and what goes out is dropped; a monitor keeps its last rows alone.
    """
    cat, process = tiny.fit(), psutil.Process()
    texts = demo.corpus("sentiment", "test", 1_000, noise=0)["text"][:]
    monitor, start, most = Monitor(0.9, audit=0.05, keep=200), 0, 0
    coming = (f"{texts[i % 1_000]} {i}" for i in range(n))
    for i, _ in enumerate(cat(coming, epsilon=0.3, monitor=monitor)):
        if i % 1_000 == 999:
            most = process.memory_info().rss
            start = start if i > n // 5 else most
            assert most - start < 16 * 2**20, f"{(most - start) / 2**20:.1f} MiB more after {i}"
    assert monitor.thrown == n and len(monitor.rows) == min(200, monitor.audited)
    return {"texts": n, "audited": monitor.audited, "grown_mib": round((most - start) / 2**20, 2)}


def same(left: tuple, right: tuple) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left[:2], right[:2])) and np.allclose(
        left[3], right[3], atol=1e-5
    )


def threads(n: int = 8, rounds: int = 20) -> dict[str, int]:
    """Many threads on one CAT answer as one does."""
    cat, texts = tiny.fit(), tiny.texts()["test"]
    expected = {epsilon: cat.predict(texts, epsilon) for epsilon in (0.1, 0.3, 0.6)}
    fresh = tiny.fit()  # nothing is kept in it yet

    def work(i: int) -> bool:
        epsilon = (0.1, 0.3, 0.6)[i % 3]
        return same(fresh.predict(texts, epsilon, 1 + i % 9), expected[epsilon])

    with ThreadPoolExecutor(n) as pool:
        assert all(pool.map(work, range(n * rounds)))
    return {"threads": n, "calls": n * rounds}


def alone(n: int = 2_000) -> dict[str, int]:
    """An input is answered alike alone and in any batch."""
    cat = tiny.fit()
    texts = demo.corpus("sentiment", "test", n, noise=0)["text"][:]
    expected = cat.predict(texts, 0.3)
    for batch_size in (1, 7, 64, "auto"):
        assert same(cat.predict(texts, 0.3, batch_size), expected), batch_size
    for i, text in enumerate(texts):
        answer = cat.predict([text], 0.3)
        assert answer[0][0] == expected[0][i] and answer[1][0] == expected[1][i], i
    return {"inputs": n}


PARTS = {
    "fuzz": fuzz,
    "kills": kills,
    "growth": growth,
    "stream": stream,
    "threads": threads,
    "alone": alone,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", CalibrationWarning)
    for name in sys.argv[1:2] or PARTS:
        begin = time.monotonic()
        found = PARTS[name](*map(int, sys.argv[2:3]))
        print(f"{name}: {dict(found)} in {time.monotonic() - begin:.0f} s", flush=True)
