"""A dry run of a model without weights, which finds the inputs of its attention, and linear layers that share an input.

Two tokens run through the model's own code on the CPU. Parameters are single elements expanded to whole tensors, linear
layers have weights of rank one, and attention returns each token's own value. So the run takes almost no memory, and
the second token's outputs depend on the first only if the model mixes tokens outside of attention.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.core.errors import ModelLoadError
from quire.executor.models.transformers.experts import GATE_UP
from quire.executor.models.transformers.latents import Expansion, find_expansion
from quire.executor.models.transformers.masks import Mask, Visible
from quire.executor.models.transformers.row_by_row import RowPlan, dry_cache, find_backbone, read_plan, run_row
from quire.executor.models.transformers.skeleton import first_tensor, hands_on, takes

_NAME = "quire-probe"
_POSITIONS = (3, 4)  # of the two tokens
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function: its module, its sizes on this rank, and the module's arguments.

    Attributes:
        expansion: the layer that computed keys and values from latents, if the module used it for nothing else.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: Visible | None  # None: the model passed no mask
    arguments: Mapping[str, Any]
    expansion: Expansion | None = None


@dataclass
class Findings:
    """The results of one dry run.

    Attributes:
        backbone: the module between token ids and hidden states; `None` if attention is not in one place.
        calls: of the attention function, in order.
        inputs: linear layers in the order of their calls, each with its input.
        raw: linear layers whose weight the model reads itself.
        called: modules that ran, in the order in which they first finished.
        top_k: of modules with experts' weights, how many experts each token had.
        output: the backbone's result.
        recent: linear layers since the last attention, with their outputs.
        queries: of the last token in each call of a decoder's attention.
        expansions: of attention that is being checked; its queries and shared keys count as inputs of linear layers.
        withholds: the layers of these expansions return zeros.
        is_encoder: attention is in both directions, or the run fails.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    inputs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    raw: set[nn.Module] = field(default_factory=set)
    called: dict[nn.Module, None] = field(default_factory=dict)
    top_k: dict[nn.Module, int] = field(default_factory=dict)
    backbone: nn.Module | None = None
    output: Any = None
    mixes_tokens: bool = False
    recent: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    expansions: dict[nn.Module, Expansion] = field(default_factory=dict)
    withholds: bool = False
    is_encoder: bool = False

    def note(self, linear: nn.Module, x: Tensor, out: Tensor) -> None:
        """Adds a call of a linear layer."""
        self.inputs.append((linear, x))
        self.recent.append((linear, out))


def is_linear(module: nn.Module) -> bool:
    """Returns True for a plain linear layer, which may be replaced."""
    return type(module) in (nn.Linear, Conv1D)


def sizes_of(linear: nn.Module) -> tuple[int, int]:
    """Returns (inputs, outputs) of a plain linear layer."""
    rows, columns = linear.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def probe(model: PreTrainedModel, outputs: Mapping[nn.Module, int], *, encoder: nn.Module | None = None) -> Findings:
    """Runs `model`, whose parameters are on the meta device, and restores it.

    Only a backbone that counts positions as RoBERTa does is changed: it then takes positions that count from 0. A
    padding token among others gets the next position, too, so that a token's position does not depend on the rest of
    the step.

    Args:
        outputs: this rank's outputs of linear layers that are split over ranks.
        encoder: the module between token ids and hidden states, if its attention shall be in both directions.

    Raises:
        Exception: any error that the model's code raises when it cannot run this way.
    """
    findings = Findings(is_encoder=encoder is not None)
    with runnable(model, findings, outputs):
        if encoder is None:
            model(input_ids=torch.tensor([[5, 9]]), **_without_cache(model))
        else:
            run_backbone(encoder, torch.tensor([[5, 9]]), None)
        findings.backbone = backbone = encoder or _backbone(model, findings)
        if backbone is None:
            return findings
        ran = dataclasses.replace(findings, calls=findings.calls[:])
        token_ids, positions = torch.tensor([[5, 9]]), torch.tensor([_POSITIONS])
        both = traced(findings, lambda: run_backbone(backbone, token_ids, positions))
        alone = traced(findings, lambda: run_backbone(backbone, token_ids[:, 1:], positions[:, 1:]))
        counted = traced(findings, lambda: run_backbone(backbone, token_ids, torch.tensor([[0, 1]])))
        own_count = traced(findings, lambda: run_backbone(backbone, token_ids, None))
        if counted.differs_from(own_count) and (first := _first_position(model)):
            from_there = traced(findings, lambda: run_backbone(backbone, token_ids, torch.tensor([[first, first + 1]])))
            if not from_there.differs_from(own_count):
                backbone.register_forward_pre_hook(partial(_shift_positions, first), with_kwargs=True)
                counted = own_count
        if not _expands_for_attention_alone(findings, ran.calls, lambda: run_backbone(backbone, token_ids, positions)):
            ran.calls = [dataclasses.replace(call, expansion=None) for call in ran.calls]
    ran.output, ran.inputs = both.output, ran.inputs[:]
    is_placed = not both.turns_from(alone)  # by the positions that it is given, and not by a count of its own
    ran.mixes_tokens = both.differs_from(alone) or counted.differs_from(own_count) or not is_placed
    return ran


def _expands_for_attention_alone(findings: Findings, calls: Sequence[AttentionCall], run: Callable[[], Any]) -> bool:
    """Returns True if zeros from the layers that expand latents change nothing else in a run."""
    findings.expansions = {call.module: call.expansion for call in calls if call.expansion is not None}
    if not findings.expansions:
        return False
    try:
        before = traced(findings, run)
        findings.withholds = True
        return not traced(findings, run).differs_from(before)
    except Exception:  # a model's code may write into the expanded tensor
        return False
    finally:
        findings.withholds = False
        findings.expansions = {}


@dataclass
class Trace:
    """One run: the last token's inputs of linear layers, by layer, its queries, and the backbone's output."""

    inputs: dict[nn.Module, Tensor]
    queries: list[Tensor]
    output: Any

    def turns_from(self, other: "Trace") -> bool:
        """Returns True if the last token had other queries: they are rotated by its place."""
        return any(_differ(x, y) for x, y in zip(self.queries, other.queries, strict=True))

    def differs_from(self, other: "Trace") -> bool:
        """Returns True if the last token had another input of a layer, or another output."""
        shared = self.inputs.keys() & other.inputs.keys()
        pairs = [(self.inputs[each], other.inputs[each]) for each in shared]
        pairs.append((first_tensor(self.output)[0, -1], first_tensor(other.output)[0, -1]))
        return any(x.shape != y.shape or _differ(x, y) for x, y in pairs)


def traced(findings: Findings, run: Callable[[], Any]) -> Trace:
    """Runs the model and restores `findings`."""
    num_calls, num_inputs = len(findings.calls), len(findings.inputs)
    findings.queries.clear()
    output = run()
    inputs: dict[nn.Module, Tensor] = {}
    for module, x in findings.inputs[num_inputs:]:
        if x.dim() == 3 and len(x) == 1:
            inputs.setdefault(module, x[0, -1])
    del findings.calls[num_calls:], findings.inputs[num_inputs:]
    return Trace(inputs, findings.queries[:], output)


def probe_rows(model: PreTrainedModel) -> tuple[Findings, RowPlan]:
    """Runs `probe` with the model's own attention and the library's cache, whose contents are the plan.

    Raises:
        ModelLoadError: the model does not take the cache, keeps nothing in it or more tokens than its input, or gives
            something else from tokens one by one than from all at once. In 16 bits rounding hides the last fault;
            `check_steps` finds it.
    """
    findings = Findings()
    token_ids, positions = torch.tensor([[5, 9, 6]]), torch.arange(3).unsqueeze(0)
    with runnable(model, findings, {}, is_flat=False):
        model(input_ids=token_ids, **_without_cache(model))
        findings.backbone = backbone = find_backbone(model, findings.called)
        ran = dataclasses.replace(findings, inputs=findings.inputs[:])
        if backbone is None:
            raise ModelLoadError(f"{type(model).__name__} has no part that makes hidden states of token ids")
        cache, parted = dry_cache(model.config), dry_cache(model.config)
        whole = _run(findings, backbone, token_ids, cache, None)
        num_own = max((_num_keys(layer) for layer in cache.layers), default=0) - token_ids.shape[1]
        if num_own > 0:
            raise ModelLoadError(f"it puts tokens of its own before a sequence: {num_own}")
        gives_positions = False
        if takes(backbone, "position_ids"):  # some ignore the cache when they count, others do not count from 0
            told = _run(findings, backbone, token_ids, dry_cache(model.config), positions)
            gives_positions = not told.differs_from(whole)
        before, after = (positions[:, :2], positions[:, 2:]) if gives_positions else (None, None)
        _run(findings, backbone, token_ids[:, :2], parted, before)
        last = _run(findings, backbone, token_ids[:, 2:], parted, after)
        if model.dtype == torch.float32 and last.differs_from(whole):
            raise ModelLoadError("it does not go on from a cache")
    plan = read_plan(cache, gives_positions)
    if not plan.kv and not plan.states:
        raise ModelLoadError("it keeps nothing of a sequence in the library's cache")
    ran.output = whole.output
    return ran, plan


def _run(findings: Findings, backbone: nn.Module, token_ids: Tensor, cache: Cache, positions: Tensor | None) -> Trace:
    """Runs a backbone that has run without a cache, as `run_row` does.

    Raises:
        ModelLoadError: it does not run with a cache.
    """
    try:
        return traced(findings, lambda: run_row(backbone, token_ids, cache, positions))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError("it does not go on from the library's cache") from error


def _first_position(model: PreTrainedModel) -> int:
    """Returns the position of a sequence's first token in classes with a position for padding, such as RoBERTa."""
    padding = model.config.pad_token_id
    return 0 if padding is None else padding + 1


def _shift_positions(
    first: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adds `first` to the positions in the arguments, before a backbone runs."""
    positions = kwargs.get("position_ids")
    return args, kwargs if positions is None else {**kwargs, "position_ids": positions + first}


def _num_keys(layer: Any) -> int:
    """Counts the tokens whose keys are in a cache's layer; 0 if there are none."""
    keys = getattr(layer, "keys", None)
    return keys.shape[2] if keys is not None and keys.dim() == 4 else 0


def _differ(x: Tensor, y: Tensor) -> bool:
    """Compares two tensors; NaN differs from everything."""
    return not bool((x - y).abs().max() <= _TOLERANCE * y.abs().max())


def run_backbone(backbone: nn.Module, token_ids: Tensor | None, positions: Tensor | None, **arguments: Any) -> Any:
    """Runs a backbone without a cache; `token_ids` and `positions` (None: it counts) are [1, num_tokens]."""
    given = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "return_dict": True, **arguments}
    taken = {name for name in given if takes(backbone, name) or name in arguments}
    if hands_on(backbone):  # to the language model inside, which may take positions where the class names none
        taken.add("position_ids")
    return backbone(**{name: value for name, value in given.items() if name in taken})


def _without_cache(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if takes(model, "use_cache") else {}


def _backbone(model: nn.Module, findings: Findings) -> nn.Module | None:
    """Finds the outermost module below `model` that contains all of the attention."""
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
def runnable(
    model: PreTrainedModel, findings: Findings, outputs: Mapping[nn.Module, int], *, is_flat: bool = True
) -> Iterator[None]:
    """Prepares `model` to run and to record its calls; with `is_flat`, attention mixes no tokens."""
    with contextlib.ExitStack() as undo, torch.inference_mode():
        for module in list(model.modules()):
            undo.callback(module.register_forward_hook(lambda part, *_: findings.called.setdefault(part)).remove)
            if GATE_UP in module._parameters:
                undo.callback(module.register_forward_pre_hook(partial(_note_top_k, findings), with_kwargs=True).remove)
            if is_linear(module):
                _watch(module, findings, outputs.get(module, sizes_of(module)[1]), undo)
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_meta:
                    undo.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = _without_memory(module, name, parameter)
        if is_flat:
            use_attention(model, lambda *args, **kwargs: _attend(findings, *args, **kwargs), undo)
        yield
        _note_alike(model, findings.raw)


def _note_alike(model: nn.Module, raw: set[nn.Module]) -> None:
    """Adds the layers in the same places of other modules of a class: a dry run may not reach all of its experts."""
    places = {
        (type(parent), name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and child in raw
    }
    for parent in model.modules():
        raw.update(
            child
            for name, child in parent._modules.items()
            if child is not None and (type(parent), name) in places and isinstance(child, nn.Linear | Conv1D)
        )


def _note_top_k(findings: Findings, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Records the top-k of a module that takes tokens, ids of experts, and their weights."""
    given = [*args, *kwargs.values()]
    if len(given) == 3 and all(isinstance(each, Tensor) for each in given) and given[1].shape == given[2].shape:
        findings.top_k[experts] = given[1].shape[-1]


def use_attention(model: PreTrainedModel, attend: Callable[..., Any], undo: contextlib.ExitStack) -> None:
    name = f"{_NAME}-{id(model)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, Mask.build)
    undo.callback(AttentionInterface._global_mapping.pop, name)
    undo.callback(AttentionMaskInterface._global_mapping.pop, name)
    set_attention(model, name)
    undo.callback(set_attention, model, "eager")


def set_attention(model: nn.Module, name: str) -> None:
    """Makes `model` call the attention function registered under `name`."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def _attend(
    findings: Findings,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    if key.shape[2] != query.shape[2]:
        raise ModelLoadError(f"{type(module).__name__} attends to other tokens than its own sequence's.")
    visible = attention_mask.visible if isinstance(attention_mask, Mask) else None
    if visible is None and attention_mask is not None:
        raise ModelLoadError(f"{type(module).__name__} has a mask of its own")
    if findings.is_encoder:
        _check_both_directions(module, visible, arguments)
    elif visible is not None and visible.is_bidirectional:
        raise ModelLoadError(f"{type(module).__name__} sees later tokens, which only a whole sequence has.")
    if not findings.is_encoder:
        findings.queries.append(query[0, :, -1])
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    own = set(module.modules())
    outputs = [(linear, out) for linear, out in findings.recent if linear in own]
    findings.recent.clear()
    expansion = findings.expansions.get(module)
    if expansion is None and query.shape[1] == key.shape[1] and not findings.is_encoder:
        expansion = find_expansion(outputs, key, value)
    elif expansion is not None:
        shared = key[:, :, :, expansion.nope_head_dim :]
        findings.inputs.append((module, torch.cat((query, shared), dim=-1).transpose(1, 2).flatten(2)))
        _, values = expansion.split(dict(outputs)[expansion.linear], key.shape[1])
        value = values.unsqueeze(0)
    findings.calls.append(AttentionCall(module, *sizes, visible, arguments, expansion))
    attended = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)
    return (
        attended.contiguous(),
        None,
    )  # contiguous, as from Transformers' own functions: some classes call `view` on it


def _check_both_directions(module: nn.Module, visible: Visible | None, arguments: Mapping[str, Any]) -> None:
    """Raises ModelLoadError if a call of attention sees earlier tokens alone."""
    is_causal = arguments.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if is_causal if visible is None else not visible.is_bidirectional:
        raise ModelLoadError(f"{type(module).__name__} sees earlier tokens alone")


def _watch(linear: nn.Module, findings: Findings, num_outputs: int, undo: contextlib.ExitStack) -> None:
    plain = type(linear)

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            if name in ("weight", "bias"):
                findings.raw.add(self)
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            weight = _wave(x.shape[-1], x.dtype).mul(x.shape[-1] ** -0.5)
            out = (x * weight).sum(-1, keepdim=True) * _wave(num_outputs, x.dtype)
            findings.note(self, x, out)
            is_withheld = findings.withholds and any(each.linear is self for each in findings.expansions.values())
            return out.new_zeros(()).expand(out.shape) if is_withheld else out

    linear.__class__ = Watched
    undo.callback(setattr, linear, "__class__", plain)


def _without_memory(module: nn.Module, name: str, parameter: Tensor) -> nn.Parameter:
    """Returns one element expanded to the shape. In an embedding the rows differ: each begins one element later."""
    if isinstance(module, nn.Embedding) and name == "weight":
        rows, size = parameter.shape
        numbers = _wave(rows + size, parameter.dtype)
        return nn.Parameter(numbers.as_strided((rows, size), (1, 1)), requires_grad=False)
    number = torch.tensor(parameter.shape[-1] ** -1.0 if parameter.dim() > 1 else 1.0, dtype=parameter.dtype)
    return nn.Parameter(number.expand(parameter.shape), requires_grad=False)


def _wave(size: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(size).mul(0.7).sin().to(dtype)
