"""How files are written (whole or not at all), the one digest, arrays with a JSON header, and the
provenance every result carries.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

MASK = os.umask(0)  # it can only be read by setting it
os.umask(MASK)


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
    except (FileNotFoundError, ValueError):
        return None


def digest(content: Any) -> str:
    """The hash of bytes, of a mapping of arrays (names, types, shapes and numbers), or of anything
    that can be written as JSON.
    """
    found = hashlib.sha256()
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
    """Arrays and what is known about them in one safetensors file, with a hash of the arrays."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = header | {"sha256": digest(arrays)}
    # one key: safetensors does not keep the order of several
    with writing(path) as aside:
        save_file(arrays, aside, {"cats": json.dumps(header, sort_keys=True)})


def load_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict]:
    """What `save_arrays` wrote; refuses a file that is cut short, changed, or not of this kind."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("cats", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole file ({error}): make it again") from None
    if header.get("sha256", digest(arrays)) != digest(arrays):  # files of the old kind have none
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
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: its parts do not fit together: {error}") from None
    return module.requires_grad_(False), header.get("about", {})
