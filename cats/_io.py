"""How files are written (whole or not at all), the one digest, arrays with a JSON header, and the
provenance every result carries.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

MASK = os.umask(0)  # it can only be read by setting it
os.umask(MASK)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the line outside of this package from which it was called."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "cats":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; renamed to `path` at the end, gone if anything went wrong
    before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # keeps the suffix, which writers read the format from
    aside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield aside
        aside.chmod(0o666 & ~MASK)  # some writers make files that nobody else may read
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


NEW, READY = ".new", ".ready"  # inside a folder: what is being written, and what is whole
MOVES = "moves.json"  # in READY until all is in its place


@contextmanager
def replacing(folder: str | Path, ours: Iterable[str]) -> Iterator[Path]:
    """A folder inside `folder` to write to. At the end what is in it takes the places of `ours`,
    the names that belong to the writer: all of them or none, whenever the process is killed. Files
    of other names are left alone.
    """
    folder = Path(folder)
    finish_replacing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / NEW
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        for path in new.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~MASK)
        found = sorted(path.name for path in new.iterdir())
        write_json(new / MOVES, {"ours": sorted({*ours, *found}), "found": found})
        new.rename(folder / READY)  # from here on the new files count
    finally:
        shutil.rmtree(new, ignore_errors=True)
    finish_replacing(folder)


def finish_replacing(folder: str | Path) -> None:
    """Go on where a killed `replacing` was, if it had everything written."""
    folder = Path(folder)
    ready = folder / READY
    if not ready.is_dir():
        return
    moves = read_json(ready / MOVES) or {"ours": [], "found": []}  # it goes last
    for name in moves["ours"]:
        if name != Path(name).name:
            raise ValueError(f"{ready / MOVES} names {name!r}, which is not in this folder")
        if name not in moves["found"]:
            remove(folder / name)
        elif (ready / name).exists():  # else it is in its place already
            remove(folder / name)
            (ready / name).rename(folder / name)
    (ready / MOVES).unlink(missing_ok=True)
    shutil.rmtree(ready)


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def versions(*packages: str) -> dict[str, str]:
    """The versions a result was made with."""
    found = {name: version(name) for name in ("numpy", "scipy", "pandas", *packages)}
    return {"python": platform.python_version(), "cats": version("cats"), **found}


def write_json(path: str | Path, content: Any) -> None:
    """JSON with sorted keys, so that equal contents are equal files."""
    with writing(path) as aside:
        text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        aside.write_text(text, encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """What `write_json` wrote, or None where there is no file, or no whole one."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def digest(content: Any, before: bytes = b"") -> str:
    """The hash of bytes, of a mapping of arrays (names, types, shapes and numbers), or of anything
    that can be written as JSON; what is `before` it counts, too.
    """
    found = hashlib.sha256(before)
    if isinstance(content, bytes):
        found.update(content)
    elif isinstance(content, Mapping) and any(
        isinstance(value, np.ndarray) for value in content.values()
    ):
        for name, array in sorted(content.items()):
            found.update(f"{name} {array.dtype.str} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
    else:
        found.update(json.dumps(content, sort_keys=True).encode())
    return found.hexdigest()


def sha256(path: str | Path) -> str:
    """The hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], header: dict) -> None:
    """Arrays and what is known about them in one safetensors file, with a hash of both."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = json.loads(json.dumps(header | {"sha256": digest(arrays)}))
    write_arrays(path, arrays, header | {"digest": digest(header)})


def write_arrays(path: str | Path, arrays: Mapping[str, np.ndarray], header: dict) -> None:
    """Arrays and a header as they are."""
    # one key: safetensors does not keep the order of several
    with writing(path) as aside:
        save_file(dict(arrays), aside, {"cats": json.dumps(header, sort_keys=True)})


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict]:
    """What `write_arrays` wrote; refuses a file that is cut short or not of this kind."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("cats", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    # what safetensors and NumPy say of damaged files comes as all of these
    except (SafetensorError, ValueError, RecursionError, TypeError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): make it again"
        ) from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has {header!r:.40} as its header: make it again")
    return arrays, header


def load_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict]:
    """What `save_arrays` wrote; refuses a file that is cut short, changed, or not of this kind."""
    arrays, header = read_arrays(path)
    sealed = header.pop("digest", None)
    # files of the old kind have no hash
    if sealed not in (None, digest(header)) or header.get("sha256", digest(arrays)) != digest(
        arrays
    ):
        raise ValueError(f"{path} was changed after it was written: make it again")
    return arrays, header


def module_arrays(module: Any) -> dict[str, np.ndarray]:
    """The numbers of a torch module, by name."""
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}


def module_digest(module: Any) -> str:
    """The hash of a torch module's numbers."""
    return digest(module_arrays(module))


def save_module(module: Any, path: str | Path, about: dict) -> None:
    """A module of cats.model.exits and what is known about it, in one file."""
    header = {"kind": type(module).__name__, "shape": module.shape, "about": about}
    save_arrays(path, module_arrays(module), header)


def load_module(kind: Any, path: str | Path) -> tuple[Any, dict]:
    """A module that `save_module` wrote, and what is known about it."""
    arrays, header = load_arrays(path)
    if header.get("kind") != kind.__name__:
        raise ValueError(f"{path} holds {header.get('kind')!r}, expected {kind.__name__}")
    try:
        module = kind.of(header["shape"], arrays)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: its parts do not fit together: {error}") from None
    return module.requires_grad_(False), header.get("about", {})
