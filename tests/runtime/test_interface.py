"""At home in the Hugging Face world: a CAT where a text-classification pipeline was."""

import http.server
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64decode

import datasets
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import yaml
from batches import ROOT
from huggingface_hub import constants
from transformers import pipeline

import cats
from cats import CAT
from cats.model.backbone import Backbone
from cats.runtime import inputs
from cats.train import demo

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
TEXTS = tiny.texts()["test"]
ALL = {"thresholds": [np.inf, np.inf]}  # all layers: what F itself says


@pytest.fixture(scope="module")
def cat():
    return tiny.fit(about={"datasets": ["user/data"], "license": "mit"})


@pytest.fixture(scope="module")
def saved(cat, tmp_path_factory):
    return cat.save_pretrained(tmp_path_factory.mktemp("interface") / "cat")


def without_layer(answer):
    """An answer as a pipeline gives it, numbers rounded."""
    if isinstance(answer, list):
        return [without_layer(one) for one in answer]
    assert answer["exit_layer"] in (1, 2, 3)
    return {"label": answer["label"], "score": pytest.approx(answer["score"], abs=1e-5)}


@pytest.mark.parametrize("task, labels", [("sentiment", ("bad", "good")), ("claims", "abc")])
def test_answers_are_those_of_a_pipeline(task, labels):
    """Strings, lists and dicts, with and without top_k: the same form and, at the last layer, the
    same numbers.
    """
    model = tiny.model(labels)
    cat = tiny.fit(model, task)
    pipe = pipeline("text-classification", model=model, tokenizer=demo.tokenizer(), device="cpu")
    texts = tiny.texts(task)["test"]
    if task == "claims":
        texts = [{"text": a, "text_pair": b} for a, b in texts]
    for given in (texts[0], texts[:1], texts):
        for options in ({}, {"top_k": 1}, {"top_k": 2}, {"top_k": None}, {"top_k": 9}):
            for function in (None, "sigmoid", "none"):
                options = options | {"function_to_apply": function}
                assert without_layer(cat(given, **options, **ALL)) == pipe(given, **options)
    assert {one["exit_layer"] for one in cat(texts, epsilon=0.5)} > {3}


def test_a_regression_answers_as_a_pipeline_does():
    for options in ({"problem_type": "regression"}, {}):
        model = tiny.model(["score"], **options)
        cat = tiny.fit(model, "similarity")
        pipe = pipeline("text-classification", model=model, tokenizer=demo.tokenizer())
        given = [{"text": a, "text_pair": b} for a, b in tiny.texts("similarity")["test"][:3]]
        assert without_layer(cat(given, **ALL)) == pipe(given)
        out = cat.predict(given)
        assert out.labels is None and list(out.to_pandas().columns)[0] == "prediction"


def test_texts_of_every_kind_are_answered_alike(cat):
    expected = cat.predict(TEXTS, 0.4)
    for given in (
        tuple(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pd.Series(TEXTS, index=range(7, 31)),
        datasets.Dataset.from_dict({"text": TEXTS})["text"],
        [{"text": text} for text in TEXTS],
        iter(TEXTS),
        (text for text in TEXTS),
    ):
        for a, b in zip(cat.predict(given, 0.4), expected):
            np.testing.assert_array_equal(a, b)
    assert len(cat.predict(iter([]), 0.4).predictions) == 0


def test_names_and_frames(cat):
    out = cat.predict(TEXTS, 0.4)
    assert out.labels.tolist() == [("bad", "good")[i] for i in out.predictions]
    frame = out.to_pandas()
    assert list(frame.columns) == ["label", "probability", "exit_layer", "confidence"]
    np.testing.assert_allclose(frame.probability, out.probabilities.max(1))
    assert "Predictions of 24 inputs" in repr(out) and "… and 16 more" in repr(out)
    assert "good" in repr(out) and repr(cat.predict([])) == "Predictions of 0 inputs"
    predictions, exits, confidences, probabilities = out


def test_a_stream_is_read_as_it_is_answered(cat, monkeypatch):
    """Never more than a window ahead, in order, and the same as a list; also a bad item is met
    only then.
    """
    monkeypatch.setattr(inputs.windows, "__defaults__", (8,))
    taken = []

    def stream():
        for text in TEXTS * 3:
            taken.append(text)
            yield text

    expected = cat(TEXTS * 3, epsilon=0.4)
    for i, answer in enumerate(cat(stream(), epsilon=0.4)):
        assert answer["label"] == expected[i]["label"]
        assert answer["exit_layer"] == expected[i]["exit_layer"]
        assert len(taken) <= i + 8
    answers = cat(iter([*TEXTS[:9], 3]))
    assert [next(answers) for _ in range(8)]
    with pytest.raises(TypeError, match="number 9 is 3"):
        list(answers)


@pytest.mark.parametrize("how", [{}, {"body": "bfloat16"}, {"autocast": "bfloat16"}], ids=str)
def test_scores_for_margins_are_those_of_a_run(how):
    """All measures from one pass, against a run of each in which nobody leaves: bit for bit."""
    cat, texts = tiny.fit(**how), tiny.texts()["calibration"]
    measures = [measure for measure in CAT.measures() if measure != "patience"]
    for some in (texts[:1], texts[:7]):
        batch = cat.tokenizer(some, padding=True, return_tensors="pt")
        found = cat._scores(batch, measures)
        for measure in measures:
            seen = np.full((len(some), 2), np.nan)

            def look(k, scores, rows):
                seen[rows, k - 1] = scores
                return [False] * len(rows)

            cat.run([batch], np.full(2, np.inf), measure, look)
            assert np.array_equal(seen, found[measure])


def test_the_size_of_a_batch_can_be_left_to_us(cat):
    for a, b in zip(cat.predict(TEXTS, 0.4, "auto"), cat.predict(TEXTS, 0.4)):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert inputs.rows_together("auto", 512, "cpu") == 8
    assert inputs.rows_together("auto", 512, "cuda") == 128
    assert inputs.rows_together("auto", 10**6, "cpu") == 1 and inputs.MOST == 256
    assert inputs.rows_together(3, 512, "cuda") == 3


def test_devices(cat, saved):
    assert cat.to("cpu") is cat and cat.device == torch.device("cpu")
    for device in ("cpu", -1, torch.device("cpu"), None):
        assert CAT.from_pretrained(saved, device=device).device.type in ("cpu", "cuda", "mps")
    away = CAT.from_pretrained(saved, device="meta")  # a device that every machine has
    assert away.device.type == "meta" and away.heads.w_p.is_cpu


def test_lengths_come_from_the_tokenizer(cat):
    assert cat.max_length == demo.MAX_LENGTH == demo.tokenizer().model_max_length
    tokens = demo.tokenizer()
    tokens.model_max_length = int(1e30)
    assert tiny.fit(tokenizer=tokens).max_length == 48


def test_a_backbone_in_memory(cat, saved):
    model = tiny.model()
    for given in (model, Backbone(model)):
        back = CAT.from_pretrained(saved, backbone=given)
        assert back.backbone.model is model
        assert (back.predict(TEXTS, 0.4)[1] == cat.predict(TEXTS, 0.4)[1]).all()
    with pytest.raises(ValueError, match="other weights"):
        CAT.from_pretrained(saved, backbone=tiny.model(seed=1))
    with pytest.raises(ValueError, match="id2label is .* and was"):
        CAT.from_pretrained(saved, backbone=tiny.model(("good", "bad")))


def test_progress_bars_and_logs_are_quiet_when_told(tmp_path, capfd, cat):
    tiny.fit()
    assert capfd.readouterr().err == ""  # TQDM_DISABLE is set for all tests


def test_progress_bars_say_what_they_do():
    """In a process of its own: tqdm reads TQDM_DISABLE when it is imported."""
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import tiny; tiny.fit()"],
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": places},
    )
    assert done.returncode == 0 and "early heads" in done.stderr, done.stderr


# --- the Hub ---


def cached(folder, cache, repo, commit="c" * 40, branch="main"):
    """A repository in the layout of the Hub's cache: blobs, and links to them."""
    root = cache / f"models--{repo.replace('/', '--')}"
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        name = path.relative_to(folder)
        blob = root / "blobs" / f"{abs(hash((commit, name))):x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)


def test_a_cat_of_the_hub(cat, saved, tmp_path):
    cached(saved, tmp_path, "user/cat")
    cached(saved, tmp_path, "user/cat", "d" * 40, "v2")
    for revision in (None, "main", "v2", "d" * 40):
        back = CAT.from_pretrained("user/cat", revision=revision, cache_dir=tmp_path)
        assert (back.predict(TEXTS, 0.4)[1] == cat.predict(TEXTS, 0.4)[1]).all()
    for name in ("user/none", "no such: name"):
        with pytest.raises(FileNotFoundError, match="no CAT at"):
            CAT.from_pretrained(name, cache_dir=tmp_path)


def test_a_reference_keeps_hub_id_and_revision(saved, tmp_path, monkeypatch):
    cached(saved / "backbone", tmp_path / "hub", "user/model")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    backbone = Backbone.from_pretrained("user/model", cache_dir=tmp_path / "hub")
    assert backbone.revision == "c" * 40
    thin = CAT.from_pretrained(saved, backbone=backbone)
    thin.save_pretrained(tmp_path / "thin", backbone=False)
    kept = json.loads((tmp_path / "thin/cat.json").read_text())["backbone"]
    assert (kept["where"], kept["revision"]) == ("user/model", "c" * 40)
    head = (tmp_path / "thin/README.md").read_text("utf-8").split("---")[1]
    assert yaml.safe_load(head)["base_model"] == "user/model"


def test_the_card_tells_the_hub(saved):
    data = yaml.safe_load((saved / "README.md").read_text("utf-8").split("---")[1])
    assert data["library_name"] == "cats" and data["pipeline_tag"] == "text-classification"
    assert data["datasets"] == ["user/data"] and data["labels"] == ["bad", "good"]
    assert data["metrics"] == ["consistency"] and data["license"] == "mit"
    assert "base_model" not in data  # it lies in a folder: nobody else finds it


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as takes a commit: every file comes in the commit itself."""

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if self.path == "/api/repos/create":
            answer = {"url": f"{self.server.address}/user/cat"}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": name} | kind for name in names]}
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    path = self.server.folder / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b64decode(line["value"]["content"]))
            answer = {
                "commitUrl": f"{self.server.address}/user/cat/commit/1",
                "commitOid": "1" * 40,
            }
            answer |= {"success": True}
        self.reply(answer)

    def do_GET(self):
        self.reply({})

    def reply(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_pushing_puts_a_whole_cat_there(cat, saved, tmp_path, monkeypatch):
    """A server on this machine stands in for the Hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.address = tmp_path / "repo", f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        where = cat.push_to_hub("user/cat", endpoint=server.address, token="x")
    finally:
        server.shutdown()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert where.startswith(server.address)
    back = CAT.from_pretrained(tmp_path / "repo")
    assert (back.predict(TEXTS, 0.4)[1] == cat.predict(TEXTS, 0.4)[1]).all()
    local = CAT.from_pretrained(saved)
    with pytest.raises(ValueError, match="nobody else finds it"):
        local.push_to_hub("user/cat", backbone=False)


SCRIPT = """
import json, sys
{}
texts = ["The plot was superb.", "It was dull."]
found = [classify(texts[0]), classify(texts), classify(texts, top_k=None), classify(texts, top_k=1)]
found += [classify({{"text": texts[0]}}), classify(texts, truncation=True, batch_size=2)]
found.append(list(classify(text for text in texts)))
for answer in classify(texts):
    assert answer["label"] in ("bad", "good") and 0 < round(answer["score"], 3) <= 1
print(json.dumps(found))
"""
LINES = {
    "backbone": """from transformers import pipeline
classify = pipeline("text-classification", model=sys.argv[1], device="cpu")""",
    "": """from cats import CAT
classify = CAT.from_pretrained(sys.argv[1], device="cpu")""",
}


def form(answer):
    """The lists and keys of an answer, and what kind of values it has."""
    if isinstance(answer, list):
        return [form(one) for one in answer]
    return {key: type(value).__name__ for key, value in answer.items() if key != "exit_layer"}


def test_a_script_for_a_pipeline_runs_with_a_cat(saved):
    """The readme's promise: one line is replaced, the rest of the script stays, and so does the
    form of what it is answered.
    """
    found = []
    for place, line in LINES.items():
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(line), saved / place],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert form(found[0]) == form(found[1])
    assert found[0] != found[1] and found[1][0][0]["exit_layer"] in (1, 2, 3)


def test_default_methods_are_those_that_are_written_down():
    """cats.calibrate has the paper's `shared`; whatever predicts has `first_exit`, the same promise
    of agreement with no later exits. Each says so where it is described.
    """
    default = lambda call: inspect.signature(call).parameters["method"].default
    assert default(cats.calibrate) == "shared" and "first_exit" in cats.calibrate.__doc__
    users = (CAT.predict, CAT.__call__, CAT.thresholds, CAT.savings, cats.savings)
    users += (cats.Cascade.predict, cats.Cascade.thresholds, cats.Cascade.savings)
    assert {default(call) for call in users} == {"first_exit"}
    assert "`shared`, the paper's, which is the default of" in " ".join(CAT.predict.__doc__.split())
    table = cats.Synthetic().table(500)
    given = table.scores("meta"), table.consistent
    early, late = (
        cats.exit_layers(given[0], cats.calibrate(*given, 0.1, method))
        for method in ("first_exit", "shared")
    )
    assert (early <= late).all() and (early < late).any()
