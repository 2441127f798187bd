"""The folder a CAT is kept in: what is written there, and what is refused when it is read.

    cat.json                  settings, hashes of the other files, and a hash of itself
    heads, meta, calibration  .safetensors
    backbone/ or tokenizer/   F and its tokenizer, or the tokenizer alone where F is elsewhere
    README.md                 the model card

Hashes find damage and mix-ups. They are no signature: whoever can write the folder can write its
hashes, see SECURITY.md.
"""

import copy
import logging
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download

from cats._io import (
    digest,
    finish_replacing,
    load_module,
    read_json,
    replacing,
    save_module,
    sha256,
    write_json,
)
from cats.model.backbone import Backbone
from cats.model.exits import Heads, Meta
from cats.stats.table import ScoreTable
from cats.train.states import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from cats.runtime.cat import CAT

log = logging.getLogger(__name__)

FORMAT = "cats.CAT/6"
# files of the older kinds still load: 4 and 5, of which 5 alone knows bodies, count margins in
# scores, not in nines; 2 and 3 hash neither the configuration nor cat.json itself
SCORE_FORMATS = ("cats.CAT/4", "cats.CAT/5")
OLD_FORMATS = ("cats.CAT/2", "cats.CAT/3")
PARTS = ("heads.safetensors", "meta.safetensors", "calibration.safetensors")
CHOOSING = "choosing.safetensors"  # where there is one
PLACES = ("backbone", "tokenizer")  # folders inside
OURS = (*PARTS, CHOOSING, *PLACES, "cat.json")
OPTIONS = ("max_length", "measure", "autocast", "texts", "margins", "unit", "about")
BODY_OPTIONS = ("body", "slack")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def write(cat: "CAT", folder: str | Path, inside: bool) -> Path:
    """Write a CAT; what was there before stays until the new one is whole."""
    folder = Path(folder)
    where, revision = origin(cat.backbone)
    if not (inside or where):
        raise ValueError(
            "this backbone was not loaded from anywhere: save it inside, with backbone=True"
        )
    if not inside and Path(where).is_relative_to(folder.resolve()):
        raise ValueError(
            f"F itself lies in {folder}, and would be removed with the CAT that is there: save to"
            " another folder, or with backbone=True"
        )
    finish_replacing(folder)
    old = read_json(folder / "cat.json")
    taken = [name for name in PLACES if (folder / name).exists()]
    if taken and not isinstance(old, dict):
        raise FileExistsError(
            f"{folder} holds {' and '.join(taken)} and no CAT: what is not a CAT's is not replaced,"
            " give another folder"
        )
    names = [*OURS]
    card, shown = cat.card(), folder / "README.md"
    if not shown.exists() or (isinstance(old, dict) and old.get("card") == sha256(shown)):
        names.append("README.md")
    else:
        log.warning("%s is not as this CAT wrote it and is left alone", shown)
    with replacing(folder, names) as new:
        save_module(cat.heads, new / PARTS[0], {})
        save_module(cat.meta, new / PARTS[1], {})
        cat.table.save(new / PARTS[2])
        parts = [*PARTS]
        if cat.choosing is not None:
            cat.choosing.save(new / CHOOSING)
            parts.append(CHOOSING)
        # the tokenizer is inside in any case: other tokens would meet the same thresholds. Beside F
        # it makes that folder an ordinary model
        place = PLACES[0 if inside else 1]
        if inside:
            cat.backbone.model.save_pretrained(new / place)
        save_tokenizer(plain(cat.tokenizer), new / place)
        content = {
            "format": FORMAT,
            "files": {name: sha256(new / name) for name in (*parts, *listed(new / place))},
            "backbone": {
                "where": place if inside else where,
                "revision": None if inside else revision,
                "family": cat.backbone.family,
                "layers": cat.backbone.n_layers,
                "dtype": cat.backbone.precision,
                "weights": cat.backbone.weights,
                "settings": cat.backbone.settings,
            },
            "tokenizer": place,
            **{name: getattr(cat, name) for name in OPTIONS + BODY_OPTIONS * cat.nearly},
        }
        if "README.md" in names:
            (new / "README.md").write_text(card, encoding="utf-8")
            content["card"] = sha256(new / "README.md")
        write_json(new / "cat.json", content | {"digest": digest(content)})
    return folder


def plain(tokenizer: Any) -> Any:
    """A copy without the length it was last told to cut or pad at: equal CATs are equal files."""
    tokenizer = copy.deepcopy(tokenizer)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast:
        fast.no_truncation()
        fast.no_padding()
    return tokenizer


def origin(backbone: Backbone) -> tuple[str, str | None]:
    """Where F was loaded from: a whole path, or a Hub id and its revision; "" if from nowhere."""
    where = str(backbone.model.name_or_path)
    if where and Path(where).is_dir():
        return str(Path(where).resolve()), None
    return where, backbone.revision


def listed(place: Path) -> list[str]:
    """The files of a folder inside a CAT, but for weights, which have a hash of their own."""
    found = (path for path in place.rglob("*") if path.is_file())
    names = (path.relative_to(place.parent).as_posix() for path in found)
    return sorted(name for name in names if not weights_or_hidden(name))


def weights_or_hidden(name: str) -> bool:
    return name.endswith(".safetensors") or PurePosixPath(name).name.startswith(".")


def find(place: str | Path, **hub: Any) -> Path:
    """The folder of a CAT: itself, or what the Hub or its cache gives for an id."""
    folder = Path(place)
    if folder.is_dir():
        finish_replacing(folder)
        return folder
    try:
        return Path(snapshot_download(str(place), **hub))
    except (OSError, ValueError) as error:  # no such id, no network, no access
        raise FileNotFoundError(
            f"no CAT at {str(place)!r}: it is neither a folder here, nor a repository that the"
            f" Hugging Face Hub or its cache could give now. Their message: {error}"
        ) from error


def read(folder: Path, backbone: Any = None) -> tuple[Backbone, Any, Heads, Meta, ScoreTable, dict]:
    """The parts of a CAT and its settings; refuses what is not whole, or does not fit together."""
    saved = settings(folder)
    try:
        model = find_backbone(folder, saved, backbone)
        heads, meta = (
            load_module(kind, folder / name)[0] for kind, name in zip((Heads, Meta), PARTS)
        )
        table = ScoreTable.load(folder / PARTS[2])
        tokenizer = load_tokenizer(folder / saved["tokenizer"])
        options: dict[str, Any] = {} if saved["format"] == FORMAT else {"unit": "score"}
        if saved["format"] in OLD_FORMATS:
            options["margins"] = {}
        options |= {name: saved[name] for name in OPTIONS if name not in options}
        options |= {name: saved[name] for name in BODY_OPTIONS if "body" in saved}
        if CHOOSING in saved["files"]:
            options["choosing"] = ScoreTable.load(folder / CHOOSING)
        return model, tokenizer, heads, meta, table, options
    except (KeyError, TypeError, AttributeError) as error:
        raise broken(folder, f"{type(error).__name__}: {error}") from error


def broken(folder: Path, why: str) -> ValueError:
    return ValueError(f"{folder / 'cat.json'} is damaged ({why}): save this CAT again")


def settings(folder: Path) -> dict[str, Any]:
    """What cat.json says, once it and all files it names are found to be what they were."""
    if not (folder / "cat.json").is_file():
        raise FileNotFoundError(f"no CAT in {folder}: it has no cat.json")
    saved = read_json(folder / "cat.json")
    if not isinstance(saved, dict):
        raise broken(folder, "it is no whole JSON")
    if saved.get("format") not in (FORMAT, *SCORE_FORMATS, *OLD_FORMATS):
        raise ValueError(f"{folder} holds {saved.get('format')!r}, expected {FORMAT!r}")
    hashed = {name: value for name, value in saved.items() if name != "digest"}
    new = saved["format"] not in OLD_FORMATS
    if new and saved.get("digest") != digest(hashed):
        raise broken(folder, "its settings are not those it was saved with")
    place, files = saved.get("tokenizer"), saved.get("files")
    if place not in PLACES or not isinstance(files, dict):
        raise broken(folder, "it does not name its files")
    for name, hashed in files.items():
        check_file(folder, name, hashed)
    tokens = [name for name in files if name.startswith(f"{place}/") and "config" not in name]
    if {*PARTS} - {*files} or not tokens:
        raise broken(folder, "it names no hash for some of its files")
    extra = sorted({*listed(folder / place)} - {*files})
    if new and extra:
        raise ValueError(
            f"{folder / extra[0]} is not part of this CAT, and F or its tokenizer would read it:"
            " move it elsewhere"
        )
    return saved


def check_file(folder: Path, name: str, hashed: str) -> None:
    """Refuse a file that was changed, that lies elsewhere, or that is no file."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or not path.parts:
        raise ValueError(f"{folder / 'cat.json'} names {name!r}, which is outside of its folder")
    if not (folder / path).is_file() or sha256(folder / path) != hashed:
        raise ValueError(
            f"{folder / path} is missing or was changed: this CAT's promise cannot be trusted, save"
            " it again"
        )


def find_backbone(folder: Path, saved: dict[str, Any], given: Any = None) -> Backbone:
    """F, from the place the CAT names or from `given`: the very model the CAT was made for."""
    kept = saved["backbone"]
    if kept["dtype"] not in DTYPES:
        raise broken(folder, f"no precision is called {kept['dtype']!r}")
    options: dict[str, Any] = {"dtype": getattr(torch, kept["dtype"])}
    where = given
    if given is None and kept["where"] == "backbone":
        where, options["use_safetensors"] = folder / "backbone", True
    elif given is None:
        where, options["revision"] = kept["where"], kept.get("revision")
        if Path(where).is_absolute() and not Path(where).is_dir():
            raise FileNotFoundError(
                f"this CAT keeps its F at {where}, which is not there: give its place, or F itself,"
                " as backbone="
            )
    if isinstance(where, Backbone):
        model = where
    elif isinstance(where, torch.nn.Module):
        model = Backbone(where)
    else:
        model = Backbone.from_pretrained(str(where), **options)
    check_backbone(model, kept, where)
    return model


def check_backbone(model: Backbone, kept: dict[str, Any], where: Any) -> None:
    """Refuse another F than the one a CAT was made for, and say what differs."""
    if "settings" not in kept:  # of the older kinds
        differs = "heads and calibration belong to other weights" * (
            model.weights != kept["fingerprint"]
        )
    else:
        now = model.settings
        fields = [name for name, value in kept["settings"].items() if now.get(name) != value]
        differs = ", ".join(
            f"{name} is {now.get(name)!r:.60} and was {kept['settings'][name]!r:.60}"
            for name in fields
        )
        if not differs and model.precision != kept["dtype"]:
            differs = f"it is in {model.precision} and was in {kept['dtype']}"
        if not differs and model.weights != kept["weights"]:
            differs = "heads and calibration belong to other weights"
    if differs:
        name = where if isinstance(where, str | Path) else "given"
        raise ValueError(f"the model at {name} is not the one this CAT was made for: {differs}")
