"""Fine-tuning F (Section 5, Appendix B) with the Hugging Face Trainer: checkpointed, resumable,
then frozen for good.
"""

import json
import shutil
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from cats._io import MASK, read_json, write_json
from cats.model.backbone import Backbone
from cats.train import demo, tasks
from cats.train.states import (
    Row,
    collate,
    load_tokenizer,
    processes,
    save_tokenizer,
    tokenise,
)


def tokenizer_of(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model id or folder; `demo` has its own."""
    if str(model).startswith("demo"):
        return demo.tokenizer()
    return load_tokenizer(model)


def new_model(model: str | Path, task: tasks.Task) -> PreTrainedModel:
    """A model to fine-tune: pretrained encoder with a new classifier, or for `demo` and
    `demo-shared` an untrained one.
    """
    if str(model).startswith("demo"):
        config = demo.config(task.name, shared=model == "demo-shared", labels=task.labels)
        return AutoModelForSequenceClassification.from_config(config)
    labels = dict(enumerate(task.labels or ("score",)))
    config = AutoConfig.from_pretrained(model, num_labels=task.n_outputs, trust_remote_code=False)
    config.id2label, config.label2id = labels, {name: i for i, name in labels.items()}
    config.problem_type = "regression" if task.regression else "single_label_classification"
    attention = (
        None if torch.cuda.is_available() else "eager"
    )  # a tenth quicker to train on a CPU at these lengths; the same sums
    return AutoModelForSequenceClassification.from_pretrained(
        model,
        config=config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=False,
    )


class Standardise(nn.Module):
    """(x - mean)/std with fixed numbers: an affine map, so it can be folded into the linear layer
    after it.
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def standardise_classifier(
    model: Any, tokenizer: Any, rows: Sequence[Row], extra_padding: int = 0
) -> None:
    """Put a Standardise before a linear classifier, fitted on what it reads for some rows."""
    seen, linear = [], model.classifier
    if not isinstance(linear, nn.Linear):
        return
    hook = linear.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for i in range(0, len(rows), 32):
            model.eval()(**collate(tokenizer, rows[i : i + 32], extra_padding))
    hook.remove()
    x = torch.cat(seen)
    model.classifier = nn.Sequential(Standardise(x.mean(0), x.std(0).clamp_min(1e-3)), linear)


def zero_classifier(model: Any) -> None:
    """Let a linear classifier start at zero: F then says the same of every input until it has
    learned something.
    """
    if not isinstance(model.classifier, nn.Linear):
        raise TypeError(
            "only a linear classifier can start at zero, this one is"
            f" {type(model.classifier).__name__}"
        )
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)


def fold_classifier(model: Any) -> None:
    """Undo `standardise_classifier`: the same function as one linear layer, which any Hugging Face
    code can load.
    """
    if isinstance(model.classifier, nn.Sequential):
        scale, linear = model.classifier
        with torch.no_grad():
            linear.bias -= linear.weight @ (scale.mean / scale.std)
            linear.weight /= scale.std
        model.classifier = linear


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint that was written to its end and is whole, or None."""
    needed = (
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    )
    whole = [
        path
        for path in Path(folder).glob("checkpoint-*")
        if all(readable(path / name) for name in needed)
    ]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


def readable(path: Path) -> bool:
    """Whether a file of a checkpoint is there and whole, as far as its format shows."""
    if not path.is_file() or not path.stat().st_size:
        return False
    if path.suffix == ".json":
        return read_json(path) is not None
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return True
        except (SafetensorError, OSError):
            return False
    return zipfile.is_zipfile(path)


def warn_if_diverged(losses: Sequence[float]) -> None:
    """An F that has learned nothing can be calibrated, too, and nothing later would look wrong."""
    end = losses[-len(losses) // 4 :]
    first, last = losses[0] if losses else 0, sum(end) / max(1, len(end))
    if not last <= 1.2 * first:  # also where it is not a number
        warnings.warn(
            f"the training loss went from {first:.3g} to {last:.3g}: F has diverged. Lower the"
            " learning rate and train it again",
            stacklevel=3,
        )


def fine_tune(
    task: str | tasks.Task,
    data: Mapping[str, Any],
    model: str | Path,
    folder: str | Path,
    *,
    epochs: float = 3,
    learning_rate: float = 2e-5,
    batch_size: int = 32,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    max_length: int | None = None,
    truncation_side: str | None = None,
    seed: int = 0,
    standardise: bool | None = None,
    zero: bool = False,
    **arguments: Any,
) -> Backbone:
    """Fine-tune `model` on data["train"] and leave it, with its tokenizer, in `folder`. Returns the
    Backbone.

    model        a Hub id, a folder, or "demo" / "demo-shared": a small deep encoder trained from
                 scratch
    batch_size   rows in a step, of all processes together: a recipe means the same on any number of
                 them
    truncation_side  where longer inputs are cut, by default as the tokenizer says: "left" keeps
                 their end, which of a review says more than its beginning
    standardise  put the classifier's input on unit scale (folded away at the end); by default
                 where the family needs it
    zero         start a linear classifier at zero
    arguments    further TrainingArguments
    A run that was interrupted goes on from its last checkpoint in folder/checkpoints.
    """
    task, folder = tasks.find(task), Path(folder)
    others = sorted({path.name for path in folder.glob("*")} - {"checkpoints"})
    if others:
        raise FileExistsError(
            f"{folder} holds {', '.join(others[:3])}: it will be replaced by the model, so give a"
            " folder that is empty or not there"
        )
    if batch_size % processes().num_processes:
        raise ValueError(
            f"a batch of {batch_size} cannot be shared by {processes().num_processes} processes:"
            " give a multiple as batch_size"
        )
    if truncation_side not in (None, "left", "right"):
        raise ValueError(f"truncation_side is 'left' or 'right', not {truncation_side!r}")
    set_seed(seed)
    tokenizer, network = tokenizer_of(model), new_model(model, task)
    if truncation_side:
        tokenizer.truncation_side = truncation_side
    backbone = Backbone(network)
    if zero:
        zero_classifier(network)
    max_length = min(max_length or task.max_length, backbone.max_tokens)
    rows = tokenise(tokenizer, data["train"], task.columns, max_length)
    if backbone.encoder.standardise if standardise is None else standardise:
        standardise_classifier(network, tokenizer, rows[:256], backbone.extra_padding)
    targets = [float(y) if task.regression else int(y) for y in data["train"]["label"][:]]
    examples = [row | {"labels": y} for row, y in zip(rows, targets)]

    def batch(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([example["labels"] for example in examples])
        inputs = [
            {name: value for name, value in example.items() if name != "labels"}
            for example in examples
        ]
        return collate(tokenizer, inputs, backbone.extra_padding) | {"labels": labels}

    trainer = Trainer(
        network,
        TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            num_train_epochs=epochs,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size // processes().num_processes,
            warmup_steps=warmup,
            weight_decay=weight_decay,
            seed=seed,
            # made for sums over tokens: it would count a mean over rows once a process
            average_tokens_across_devices=False,
            use_cpu=not torch.accelerator.is_available(),  # as `processes` sees it
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            **{"save_steps": 0.1, "save_total_limit": 1, "logging_steps": 0.05} | arguments,
        ),
        train_dataset=examples,
        data_collator=batch,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder / "checkpoints"))
    fold_classifier(network)
    if trainer.is_world_process_zero():
        aside = folder.with_name(f".{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        network.save_pretrained(aside)
        save_tokenizer(tokenizer, aside)
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        warn_if_diverged([float(entry["loss"]) for entry in log])
        write_json(aside / "training.json", {"log": log, "max_length": max_length})
        for path in aside.iterdir():  # safetensors makes files that nobody else may read
            path.chmod(0o666 & ~MASK)
        shutil.rmtree(folder)
        aside.rename(folder)
    trainer.accelerator.wait_for_everyone()
    return Backbone(network)


def load_fine_tuned(
    folder: str | Path, task: str | tasks.Task
) -> tuple[Backbone, PreTrainedTokenizerBase]:
    """A fine-tuned model, on this process's device, and its tokenizer; refuses one that was tuned
    for another number of labels.
    """
    task, backbone = tasks.find(task), Backbone.from_pretrained(folder)
    if backbone.num_labels != task.n_outputs:
        raise ValueError(
            f"{folder} was fine-tuned for {backbone.num_labels} outputs, {task.name} has"
            f" {task.n_outputs}"
        )
    backbone.model.to(processes().device)
    return backbone, load_tokenizer(folder)


def training_log(folder: str | Path) -> list[dict[str, float]]:
    """The training losses of a model fine-tuned here."""
    return json.loads((Path(folder) / "training.json").read_text("utf-8"))["log"]
