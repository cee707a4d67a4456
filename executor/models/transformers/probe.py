"""A dry run of a model that has no weights: what its attention is given, and which linear layers share an input.

Two tokens run through the model's own code on the CPU. Parameters are single numbers that are seen as whole tensors,
linear layers have weights of rank one, and attention returns each token's own value. So the run takes no memory to
speak of, and the second token's outputs depend on the first only if the model mixes tokens elsewhere.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.core.errors import ModelLoadError
from quire.executor.models.transformers.masks import Mask, Visible
from quire.executor.models.transformers.skeleton import first_tensor, takes

_NAME = "quire-probe"
_POSITIONS = (3, 4)  # of the two tokens
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: its module, sizes on this rank, and what the module passed."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: Visible | None  # None: the model showed no mask
    arguments: Mapping[str, Any]


@dataclass
class Findings:
    """What one dry run found.

    Attributes:
        backbone: the module between token ids and hidden states; `None` if attention is not in one place.
        calls: of the attention function, in order.
        inputs: linear layers in the order of their calls, each with the tensor that it got.
        raw: linear layers whose weight the model reads itself.
        called: modules that ran.
        output: what the backbone returned.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    inputs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    raw: set[nn.Module] = field(default_factory=set)
    called: set[nn.Module] = field(default_factory=set)
    backbone: nn.Module | None = None
    output: Any = None
    mixes_tokens: bool = False


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a plain linear layer, which may be exchanged."""
    return type(module) in (nn.Linear, Conv1D)


def sizes_of(linear: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a plain linear layer."""
    rows, columns = linear.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def probe(model: PreTrainedModel, outputs: Mapping[nn.Module, int]) -> Findings:
    """Runs `model`, whose parameters are on the meta device, and leaves it as it was.

    Args:
        outputs: how many outputs this rank has of linear layers that are split over ranks.

    Raises:
        Exception: whatever the model's code raises when it cannot run this way.
    """
    findings = Findings()
    with _runnable(model, findings, outputs):
        model(input_ids=torch.tensor([[5, 9]]), **_positions(model))
        findings.backbone = _backbone(model, findings)
        backbone = findings.backbone
        if backbone is not None:
            ran = dataclasses.replace(findings, calls=findings.calls[:], inputs=findings.inputs[:])
            both, alone = (
                run_backbone(backbone, torch.tensor([[5, 9][first:]]), torch.tensor([_POSITIONS[first:]]))
                for first in (0, 1)
            )
            ran.output, ran.mixes_tokens = both, _differ(first_tensor(both)[0, -1], first_tensor(alone)[0, -1])
            return ran
    return findings


def _differ(x: Tensor, y: Tensor) -> bool:
    """NaN differs from everything."""
    return not bool((x - y).abs().max() <= _TOLERANCE * y.abs().max())


def run_backbone(backbone: nn.Module, token_ids: Tensor | None, positions: Tensor, **arguments: Any) -> Any:
    """The outputs of a backbone without a cache; `token_ids` and `positions` are [1, num_tokens]."""
    given = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "return_dict": True, **arguments}
    return backbone(**{name: value for name, value in given.items() if takes(backbone, name) or name in arguments})


def _positions(model: nn.Module) -> dict[str, Any]:
    given = {"position_ids": torch.tensor([_POSITIONS]), "use_cache": False}
    return {name: value for name, value in given.items() if takes(model, name)}


def _backbone(model: nn.Module, findings: Findings) -> nn.Module | None:
    """The outermost module below `model` that ran with all of the attention inside."""
    modules = {call.module for call in findings.calls}
    part = model
    while True:
        inner = [child for child in part.children() if modules <= set(child.modules())]
        if not modules or len(inner) != 1:
            return None
        part = inner[0]
        if part in findings.called:
            return part


@contextlib.contextmanager
def _runnable(model: PreTrainedModel, findings: Findings, outputs: Mapping[nn.Module, int]) -> Iterator[None]:
    """Lets `model` run and write down what it does."""
    with contextlib.ExitStack() as undo, torch.inference_mode():
        for module in list(model.modules()):
            undo.callback(module.register_forward_hook(lambda part, *_: findings.called.add(part)).remove)
            if is_linear(module):
                _watch(module, findings, outputs.get(module, sizes_of(module)[1]), undo)
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    undo.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = _without_memory(module, name, parameter)
        _use_attention(model, lambda *args, **kwargs: _attend(findings, *args, **kwargs), undo)
        yield


def _use_attention(model: PreTrainedModel, attend: Callable[..., Any], undo: contextlib.ExitStack) -> None:
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, Mask.build)
    undo.callback(AttentionInterface._global_mapping.pop, _NAME)
    undo.callback(AttentionMaskInterface._global_mapping.pop, _NAME)
    set_attention(model, _NAME)
    undo.callback(set_attention, model, "eager")


def set_attention(model: nn.Module, name: str) -> None:
    """Has `model` call the attention function that is registered under `name`."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def _attend(
    findings: Findings, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    if key.shape[2] != query.shape[2]:
        raise ModelLoadError(f"{type(module).__name__} attends to other tokens than its own sequence's.")
    visible = mask.visible if isinstance(mask, Mask) else None
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    findings.calls.append(AttentionCall(module, *sizes, visible, arguments))
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


def _watch(linear: nn.Module, findings: Findings, num_outputs: int, undo: contextlib.ExitStack) -> None:
    plain = type(linear)

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "bias"):
                findings.raw.add(self)
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            findings.inputs.append((self, x))
            weight = _wave(x.shape[-1], x.dtype).mul(x.shape[-1] ** -0.5)
            return (x * weight).sum(-1, keepdim=True) * _wave(num_outputs, x.dtype)

    linear.__class__ = Watched
    undo.callback(setattr, linear, "__class__", plain)


def _without_memory(module: nn.Module, name: str, parameter: Tensor) -> nn.Parameter:
    """Ones; for an embedding, rows that all differ: each begins one number later than the one before."""
    if isinstance(module, nn.Embedding) and name == "weight":
        rows, size = parameter.shape
        numbers = _wave(rows + size, parameter.dtype)
        return nn.Parameter(numbers.as_strided((rows, size), (1, 1)), requires_grad=False)
    return nn.Parameter(torch.ones((), dtype=parameter.dtype).expand(parameter.shape), requires_grad=False)


def _wave(size: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(size).mul(0.7).sin().to(dtype)
