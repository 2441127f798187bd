"""Bodies: F in a faster arithmetic, for the layers that a CAT runs.

| body       | what it is                                                                        |
|------------|-----------------------------------------------------------------------------------|
| `float32`  | F itself                                                                          |
| `bfloat16` | weights and states in bfloat16: halves the time on processors that multiply them  |
| `int8`     | the layers' matrices in 8 bits, one scale a row of weights and one a token; CPU   |

F stays the float32 model, and what is promised is agreement with it: calibration compares every
layer of the body, the last included, with F. After the last layer F's own classifier answers, in
float32, whatever the body; and where that is so undecided that rounding could change the answer, F
itself runs (`CAT.in_doubt`).

An input's answer must not depend on the other rows of its batch. Torch's dynamic quantisation has
one scale for all activations of a batch, so there it does; here every token has its own, which also
halves the error. Sums of 8-bit products are whole numbers, so a matrix gives the same bits alone
and in any batch; so did matrices in bfloat16 wherever we looked (1 to 2,048 rows). What does not is
attention: its kernel takes exponentials sixteen at a time, and those left over by another formula.
Float32 hardly notices. In few digits a flipped one travels: it moved an early [CLS] by a fiftieth
of its spread over inputs, and the room for that took bfloat16 most of its early exits. So bodies
attend to a multiple of sixteen tokens, those at the end masked, after which tiny models gave an
input the same bits in every batch, and bge-small gave them to all but a few in a hundred. `CAT.fit`
measures how much is left of it on the machine at hand, and leaves a least room
(cats.runtime.calibrated.LEAST).
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cats._io import digest
from cats.model.backbone import Backbone, State

FULL = "float32"
LANES = 16  # numbers that a vector of a CPU holds, at the most
QUICK = 5  # times that `fastest` runs each body


def in_lanes(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention by `scaled_dot_product_attention`, to keys and values (rows, heads,
    tokens, size) padded to whole vectors of a CPU; all else in a layer runs on the tokens alone.
    """
    tokens = key.shape[2]
    missing = -tokens % LANES if key.is_cpu else 0
    if missing:
        key, value = (nn.functional.pad(one, (0, 0, 0, missing)) for one in (key, value))
        if attention_mask is None:
            attention_mask = (torch.arange(tokens + missing) < tokens)[None, None, None]
        else:  # bool
            attention_mask = nn.functional.pad(attention_mask, (0, missing))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


IN_LANES = "sdpa_in_lanes"
AttentionInterface.register(IN_LANES, in_lanes)
AttentionMaskInterface.register(IN_LANES, sdpa_mask)


class Linear8(nn.Module):
    """A linear layer with weights in 8 bits, one scale an output, and inputs in 8 bits, one scale a
    token: a row's output depends on nothing but the row.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach()
        scale = weight.abs().amax(1).clamp_min(1e-30).double() / 127
        zero = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings(action="ignore"):  # deprecated, and nothing as quick instead
            packed = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(packed, None)

    def forward(self, x: Tensor) -> Tensor:
        # a norm of order ∞ is the same number, in twenty times the time: half of the body's
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(1e-30)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y = product(x / largest, 1 / 127, 128, self.packed)
        if self.bias is None:
            return y.mul_(largest)
        return torch.addcmul(self.bias, y, largest, out=y)

    def __deepcopy__(self, memo: Any) -> "Linear8":
        return self  # nothing in it ever changes, and packed weights cannot be copied


class Linear16(nn.Module):
    """A linear layer in bfloat16, its weights laid out once as the CPU's kernel wants them and not
    at every call, which took a third of the time of a text of 64 tokens; the bits are the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def __deepcopy__(self, memo: Any) -> "Linear16":
        return self  # nothing in it ever changes, and packed weights cannot be copied

    @staticmethod
    def runs() -> bool:
        """Whether torch was built with this kernel, and the processor has it."""
        ops = torch.ops.mkldnn
        return (
            torch.backends.mkldnn.is_available()
            and all(
                hasattr(ops, f"_{name}") for name in ("reorder_linear_weight", "linear_pointwise")
            )
            and ops._is_mkldnn_bf16_supported()
        )


class Body(Backbone):
    """A backbone whose layers are those of another, `full`, in a faster arithmetic."""

    def __init__(self, full: Backbone, name: str) -> None:
        check_body(name)
        if name == FULL or full.precision != FULL:
            raise ValueError(
                f"a body {name!r} of a model in {full.precision}: bodies are made of a model in"
                f" {FULL}, which is its own body {FULL!r}"
            )
        if name == "int8" and full.device.type != "cpu":
            raise ValueError(
                f"the body 'int8' runs on CPUs, and F is on {full.device}: take 'bfloat16'"
            )
        self.full, self.name = full, name
        self._make(full.device.type)

    def _make(self, kind: str) -> None:
        """Its layers from F's, for a kind of device."""
        model = BODIES[self.name](self.full, kind)
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(IN_LANES)
        else:  # attention of a family's own: all of a layer runs on whole vectors of tokens
            self.tokens_together = LANES
        super().__init__(model)
        self.revision = self.full.revision

    @cached_property
    def weights(self) -> str:
        """A hash: it is made of F's weights alone."""
        return digest({"weights": self.full.weights, "body": self.name})

    @property
    def precision(self) -> str:
        return self.name

    def to(self, device: Any) -> "Body":
        kind = torch.device("cpu" if device is None else device).type
        if self.name == "int8" and kind != "cpu":
            raise ValueError(
                f"the body 'int8' runs on CPUs and not on {device}: fit with body='bfloat16'"
            )
        if device is not None and kind != self.device.type:
            self._make(kind)  # what is laid out for a CPU stays there
        super().to(device)
        return self

    def finish(self, state: State) -> Tensor:
        """Logits by F's own classifier, in float32."""
        return self.full.finish(state._replace(hidden=state.hidden.float()))


def _bfloat16(full: Backbone, kind: str) -> nn.Module:
    model = copy.deepcopy(full.model)
    for weight in model.parameters():  # buffers, such as angles, keep their digits
        weight.data = weight.data.to(torch.bfloat16)
    if kind == "cpu" and Linear16.runs():
        replace_linear([model], Linear16)
    return model


def _int8(full: Backbone, kind: str) -> nn.Module:
    # what is not a matrix of a layer is shared with F
    shared = [*full.model.parameters(), *full.model.buffers()]
    model = copy.deepcopy(full.model, {id(tensor): tensor for tensor in shared})
    replace_linear(Backbone(model).layers, Linear8)
    return model


def replace_linear(parts: Iterable[nn.Module], by: Callable[[nn.Linear], nn.Module]) -> None:
    """Put matrices in another form, wherever they are in these modules."""
    for part in [inner for outer in parts for inner in outer.modules()]:
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear:
                setattr(part, name, by(child))


BODIES: dict[str, Any] = {FULL: None, "bfloat16": _bfloat16, "int8": _int8}


def reads_on(name: str | None, reads: str) -> str:
    """What heads read of a body: not [CLS], unless they read nothing else.

    The [CLS] of the first layers hardly differs from input to input: on bge-small its distance to
    F's was 2.7 times its spread over inputs at layer 1 in 8 bits, 0.12 in bfloat16, and that of the
    mean over tokens 0.02. Of heads that learned from F's own states those that read both agreed at
    layer 4 with F on 31 % of AG News in bfloat16, those that read means on 96 %, as in float32.
    """
    return reads if name in (None, FULL) else reads.replace("cls+mean", "mean")


def check_body(name: str) -> str:
    """Refuse the name of a body that is none."""
    if name not in BODIES:
        raise ValueError(f"body is one of {', '.join(BODIES)}, or 'auto' to fit, not {name!r}")
    return name


def body_of(full: Backbone, name: str | None) -> Backbone:
    """The body of that name; F itself for None and for its own precision."""
    return full if name is None or name == full.precision else Body(full, name)


@torch.inference_mode()
def fastest(
    full: Backbone,
    batches: Sequence[Any],
    tau: float = 0.5,
    differs: float = 0.005,
    slower: float = 0.95,
) -> tuple[str, dict[str, dict[str, float]]]:
    """The body that takes the least time for these batches on this machine, among those whose
    answers differ from F's on at most a share `differs` of the rows (for regression, by more than
    `tau`); and what was measured.

    F unless another takes less than `slower` of its time. They take turns, so that a machine that
    slows down slows all.
    """
    names = [name for name in BODIES if name != "int8" or full.device.type == "cpu"]
    bodies = {name: body_of(full, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(QUICK + 1):
        answers = {}
        for name, body in bodies.items():
            start = time.perf_counter()
            answers[name] = torch.cat([body.logits(batch).float().cpu() for batch in batches])
            seconds[name].append(time.perf_counter() - start)
    found = {
        name: {
            "seconds": sorted(seconds[name][1:])[QUICK // 2],  # the first turn warms up
            "differs": _differs(answers[name], answers[FULL], tau),
        }
        for name in names
    }
    allowed = [name for name in names if found[name]["differs"] <= differs]
    best = min(allowed, key=lambda name: found[name]["seconds"])
    quick = found[best]["seconds"] < slower * found[FULL]["seconds"]
    return (best if quick else FULL), found


def _differs(ours: Tensor, theirs: Tensor, tau: float) -> float:
    """The share of rows with another answer."""
    regression = theirs.shape[1] == 1
    other = (ours - theirs).abs() > tau if regression else ours.argmax(1) != theirs.argmax(1)
    return float(other.float().mean())
