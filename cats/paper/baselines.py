"""What else makes a classifier faster on a CPU: bfloat16, 8-bit weights, and ONNX Runtime.
Baselines for the early exits, no guarantee.

    fast = int8(model)  # or onnx(model, batch), the same numbers from another engine, or
    onnx(model, batch, bits=8), both logits = fast(tokenizer(texts, padding=True,
    return_tensors="pt"))  # (rows, C)

All take any Hugging Face sequence classifier and only put it in evaluation mode. `onnx` takes
torch's number of threads.
"""

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnx import load
from onnxruntime.quantization import quantize_dynamic as quantize_onnx
from torch import nn

from cats.model.bodies import Linear16, replace_linear


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence while a model is converted: torch deprecates what has no equal yet, the exporters
    think aloud. Errors come.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if model.dtype != torch.float32:
            raise TypeError(
                f"the model has to be in torch.float32, not {model.dtype}: load it with"
                " dtype=torch.float32"
            )
        self.model = model.eval()

    @torch.inference_mode()
    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).logits  # (rows, C)


def bfloat16(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model in bfloat16, as batch -> logits; its matrices are laid out for the processor, as
    those of a CAT's body are.
    """
    half = copy.deepcopy(_Logits(model).eval()).to(torch.bfloat16)
    if Linear16.runs() and half.model.device.type == "cpu":
        replace_linear([half], Linear16)
    return lambda batch: half(batch).float()


def int8(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model with its linear layers in 8 bits (one scale a row of weights, one a batch of
    inputs), as batch -> logits.
    """
    net = _Logits(model).eval()
    with (
        _quiet()
    ):  # deprecated, but its successor torchao, uncompiled, was slower than 32 bits on our CPU
        from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

        return quantize_dynamic(net, {nn.Linear: per_channel_dynamic_qconfig})  # a copy


def onnx(
    model: nn.Module, batch: Mapping[str, torch.Tensor], threads: int | None = None, bits: int = 32
) -> Callable[..., torch.Tensor]:
    """The model in ONNX Runtime, as batch -> logits, for all batches that have the tensors of this
    one, in any shape.

    batch: an example with at least two tokens. threads: those of torch, if not given. bits: 32, or
    8 for the linear layers.
    """
    return onnx_in(model, batch, (bits,), threads)[bits]


def onnx_in(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    bits: Sequence[int] = (32, 8),
    threads: int | None = None,
) -> dict[int, Callable[..., torch.Tensor]]:
    """`onnx` in several numbers of bits, by their number: the model is exported once, which takes
    longest.
    """
    if not {*bits} <= {8, 32} or batch["input_ids"].shape[1] < 2:
        raise ValueError(
            f"onnx wants 8 or 32 bits and two tokens or more, got {', '.join(map(str, bits))} and"
            f" {tuple(batch['input_ids'].shape)}"
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _quiet():
        plain, small = Path(folder, "model.onnx"), Path(folder, "model-8.onnx")
        _export(model, batch, plain)
        if 8 in bits:
            _quantise(plain, small)
        return {one: _session(small if one == 8 else plain, threads) for one in bits}


def _export(model: nn.Module, batch: Mapping[str, torch.Tensor], file: Path) -> None:
    example = {
        name: value[:1].long().cpu().repeat(2, 1) for name, value in batch.items()
    }  # one row becomes a constant
    torch.onnx.export(
        _Logits(model).eval(),
        (example, dict[str, Any]()),  # {}: a dict that comes last means keyword arguments
        file,
        input_names=list(example),
        dynamic_shapes=({name: {0: "rows", 1: "tokens"} for name in example},),
        dynamo=True,
        verbose=False,
    )


def _quantise(source: Path, file: Path) -> None:
    graph = load(source)
    # torch's shapes of transposed weights; the quantiser takes them for contradictions
    del graph.graph.value_info[:]
    linear = ["MatMul", "Gemm"]  # with 7 bits of weights, as 8 overflow without VNNI
    quantize_onnx(graph, file, op_types_to_quantize=linear, per_channel=True, reduce_range=True)


def _session(file: Path, threads: int | None) -> Callable[..., torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda batch: torch.from_numpy(
        session.run(None, {name: batch[name].long().cpu().numpy() for name in names})[0]
    )
