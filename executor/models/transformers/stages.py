"""A range of a class's layers as a pipeline stage: the class's code runs without the other stages' layers and weights.

A layer of another stage returns its input. The previous stage's message enters the code as embeddings of tokens, and
replaces the input of the range's first layer. The input of the layer after the range becomes the output. Whatever the
code computes before the first and after the last layer of the model is not used where another stage has the weights for
it; programs leave it out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.errors import ModelLoadError
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.absent_modules import AbsentModule
from quire.executor.models.transformers.probe import Findings, Trace, run_backbone, runnable, traced
from quire.executor.models.transformers.row_by_row import LayerPlan, RowPlan, dry_cache, run_row

_NUM_TOKENS = 2  # of a dry run


@dataclass(frozen=True)
class StagePart:
    """The part of a model that a stage computes.

    Attributes:
        token_size: values of each token that a stage sends to the next.
    """

    is_first: bool
    is_last: bool
    token_size: int


def received_rows(step: StepContext) -> Tensor | None:
    """Returns the previous stage's rows, [num_tokens, token_size]; None in the first stage."""
    return None if step.received is None else step.received.view(len(step.positions), -1)


def keep_stage(
    model: PreTrainedModel, findings: Findings, plan: RowPlan | None, layers: range, num_layers: int
) -> tuple[Findings, RowPlan | None, StagePart]:
    """Removes the layers of other stages from `model`, and returns the findings of `layers` only.

    Args:
        findings: of the whole model, whose parameters are on the meta device.
        plan: of the whole model, if it runs row by row.

    Raises:
        ModelLoadError: its code does not work without some layers.
    """
    assert findings.backbone is not None
    stack = _find_stack(findings, num_layers)
    whole, runs = _run_whole(model, findings, plan, stack)
    entering = runs.given[layers.start]
    leaving = runs.given.get(layers.stop)
    part = StagePart(layers.start == 0, leaving is None, entering.shape[-1])
    _leave_out(model, findings, stack, layers, runs, part)
    kept = set(model.modules())
    own = replace(
        findings,
        calls=[call for call in findings.calls if call.module in kept],
        inputs=[(module, x) for module, x in findings.inputs if module in kept],
        top_k={module: top_k for module, top_k in findings.top_k.items() if module in kept},
    )
    _check_stage(model, own, plan, whole if leaving is None else replace(whole, output=leaving), entering, part)
    return own, None if plan is None else _plan_of(plan, layers), part


def _plan_of(plan: RowPlan, layers: range) -> RowPlan:
    """Returns the plan of a stage with only the caches of `layers`."""
    own = [plan.layers[index] for index in layers if index < len(plan.layers)]
    kv = sorted(place for layer in own for place in (layer.kv, layer.index_keys) if place is not None)
    states = sorted(layer.state for layer in own if layer.state is not None)

    def moved(place: int | None, places: list[int]) -> int | None:
        return places.index(place) if place in places else None

    def of_stage(layer: LayerPlan) -> LayerPlan:
        return replace(
            layer, kv=moved(layer.kv, kv), state=moved(layer.state, states), index_keys=moved(layer.index_keys, kv)
        )  # fmt: skip

    own_kv, own_states = [plan.kv[at] for at in kv], [plan.states[at] for at in states]
    return replace(plan, layers=list(map(of_stage, plan.layers)), kv=own_kv, states=own_states)


def _refusal(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot be divided into pipeline stages, because {reason}: use --tensor-parallel-size instead of "
        "--pipeline-parallel-size"
    )


def _find_stack(findings: Findings, num_layers: int) -> nn.ModuleList:
    """Finds the list of the model's layers."""
    assert findings.backbone is not None
    for module in findings.backbone.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == len(set(module)) == num_layers
            and all(layer in findings.called for layer in module)
        ):
            return module
    raise _refusal(f"it has no list of {num_layers} layers that run one after another")


# ------------------------------------------------------------------------------------------------------- dry runs


@dataclass
class _LayerRuns:
    """The inputs and outputs of layers in a dry run.

    Attributes:
        given: the hidden states that enter each layer, [1, num_tokens, size].
        num_returned: the number of values that each layer returns, hidden states first; None: a single tensor.
    """

    given: dict[int, Tensor] = field(default_factory=dict)
    num_returned: dict[int, int | None] = field(default_factory=dict)


def _run_whole(
    model: PreTrainedModel, findings: Findings, plan: RowPlan | None, stack: nn.ModuleList
) -> tuple[Trace, _LayerRuns]:
    runs = _LayerRuns()
    hooks = []
    for index, layer in enumerate(stack):

        def note_given(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            runs.given.setdefault(index, _hidden_of(args, kwargs).clone())

        def note_returned(_: nn.Module, args: Any, output: Any, index: int = index) -> None:
            runs.num_returned[index] = None if isinstance(output, Tensor) else len(output)

        hooks.append(layer.register_forward_pre_hook(note_given, with_kwargs=True))
        hooks.append(layer.register_forward_hook(note_returned))
    try:
        trace = _dry_run(model, findings.backbone, plan, None)
    finally:
        for hook in hooks:
            hook.remove()
    shapes, types = ({getattr(x, name) for x in runs.given.values()} for name in ("shape", "dtype"))
    if len(shapes) > 1 or types != {model.dtype} or next(iter(shapes))[:-1] != (1, _NUM_TOKENS):
        raise _refusal("its layers do not hand on hidden states of one size and type")
    return trace, runs


def _dry_run(model: PreTrainedModel, backbone: nn.Module | None, plan: RowPlan | None, embeds: Tensor | None) -> Trace:
    """Runs a few tokens through the code, or `embeds` in their place."""
    assert backbone is not None
    positions = torch.arange(_NUM_TOKENS).unsqueeze(0)
    token_ids = positions + 5
    dry = Findings()
    with runnable(model, dry, {}, is_flat=plan is None):
        if plan is not None:
            told = positions if plan.gives_positions else None
            return traced(dry, lambda: run_row(backbone, token_ids, dry_cache(model.config), told, embeds))
        given = {} if embeds is None else {"inputs_embeds": embeds}
        return traced(dry, lambda: run_backbone(backbone, None if given else token_ids, positions, **given))


def _check_stage(
    model: PreTrainedModel, own: Findings, plan: RowPlan | None, expected: Trace, entering: Tensor, part: StagePart
) -> None:
    """Raises ModelLoadError if the layers have other inputs than within the whole model."""
    try:
        trace = _dry_run(model, own.backbone, plan, None if part.is_first else entering)
    except Exception as error:  # the code of a model may raise anything
        raise _refusal(f"without the layers of other stages it raises {type(error).__name__}: {error}") from error
    met = {module for module, _ in own.inputs if module in expected.inputs}
    if not met <= trace.inputs.keys() or trace.differs_from(expected):
        raise _refusal("its layers read more than the output of the layer before")


# -------------------------------------------------------------------------------------------- what stands for others


class _Passage:
    """Carries the hidden states that enter and leave a backbone in place of embeddings and its own output."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        self.leaving: Tensor | None = None

    def enter(self, _: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Runs before the backbone's code, as a hook."""
        self.entering = kwargs["inputs_embeds"]

    def leave(self, *_: Any) -> Tensor | None:
        """Runs after the backbone's code, as a hook."""
        leaving, self.leaving, self.entering = self.leaving, None, None
        return leaving


class _AbsentLayer(nn.Module):
    """Replaces a layer of another stage, with the attributes that the class's code may look at."""

    def __init__(self, layer: nn.Module, num_returned: int | None, passage: _Passage, *, enters: bool, leaves: bool):
        """Takes `enters` if the next layer gets the received rows, `leaves` if this layer's input is the message."""
        super().__init__()
        vars(self).update({name: value for name, value in vars(layer).items() if name not in vars(self)})
        self._num_returned = num_returned
        self._passage = passage
        self._enters = enters
        self._leaves = leaves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_of(args, kwargs)
        if self._leaves:
            self._passage.leaving = hidden
        if self._enters:
            assert self._passage.entering is not None
            hidden = self._passage.entering
        return hidden if self._num_returned is None else (hidden, *[None] * (self._num_returned - 1))


def _leave_out(
    model: PreTrainedModel,
    findings: Findings,
    stack: nn.ModuleList,
    layers: range,
    runs: _LayerRuns,
    part: StagePart,
) -> None:
    passage, backbone = _Passage(), findings.backbone
    assert backbone is not None
    if not part.is_first:
        backbone.register_forward_pre_hook(passage.enter, with_kwargs=True)
    if not part.is_last:
        backbone.register_forward_hook(passage.leave)
    before, behind = _ends(model, findings, stack)
    ends = [*([] if part.is_first else before), *([] if part.is_last else behind)]
    others: dict[nn.Module, nn.Module] = {module: AbsentModule(module) for module in ends}
    for index, layer in enumerate(stack):
        if index not in layers:
            enters, leaves = index == layers.start - 1, index == layers.stop
            others[layer] = _AbsentLayer(layer, runs.num_returned[index], passage, enters=enters, leaves=leaves)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in others:
                parent._modules[name] = others[child]


def _ends(model: PreTrainedModel, findings: Findings, stack: nn.ModuleList) -> tuple[list[nn.Module], list[nn.Module]]:
    """Lists the modules with weights that run before the first layer, and those that run after the last one."""
    if model.get_output_embeddings() not in findings.called:
        raise _refusal("its head is no module of its own")
    order = list(findings.called)
    first, last = order.index(stack[0]), order.index(stack[-1])
    inner = set(stack.modules())

    def weighty(modules: list[nn.Module]) -> Iterator[nn.Module]:
        for module in modules:
            if module._parameters and module not in inner and stack not in module.modules():
                yield module

    return list(weighty(order[:first])), list(weighty(order[last:]))


def _hidden_of(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the hidden states among a layer's arguments: its first tensor."""
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
