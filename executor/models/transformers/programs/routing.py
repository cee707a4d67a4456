"""Replaces routers of mixtures in a program by one operation, where it selects and weights the same experts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.programs.evaluation import agree, constants_of, evaluated, examples
from quire.executor.models.transformers.programs.program import Call, InStep, Program, Ref
from quire.ops.backend import Backend
from quire.ops.eager.routing import route
from quire.ops.routing import ExpertRouter, Routing, Score

_NUM_TOKENS = 48
"""The number of tokens with which a router is compared."""


@dataclass(eq=False)
class Route:
    """Maps hidden states [..., hidden] to ids and weights of experts, both [num_tokens, top_k]."""

    ops: Backend
    router: ExpertRouter

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.route(x.reshape(-1, x.shape[-1]), self.router)


def fuse_routers(program: Program, ops: Backend) -> None:
    """Puts `Route` where the class's code selects the same experts."""
    calls: list[Call] = []
    for call in program.calls:
        found = _read_router(program, call) if isinstance(call.function, layer_modules.Experts) else None
        if found is not None:
            x, router = found
            ids, weights = (program.metas[each.index] for each in call.args[1:])
            outs = program.add_value(ids), program.add_value(weights._replace(dtype=torch.float32))
            calls.append(Call(Route(ops, router), (Ref(x),), {}, outs, is_single=False))
            call.args = (call.args[0], *(Ref(out) for out in outs))
        calls.append(call)
    program.calls = calls
    program.drop_unused()


def _read_router(program: Program, call: Call) -> tuple[int, ExpertRouter] | None:
    """Returns the hidden states that determine the ids and weights of a call of experts, and the equivalent router."""
    ids, weights = (each.index for each in call.args[1:])
    calls, starts = program.slice_to(
        [ids, weights], lambda each: isinstance(each.function, layer_modules.LayerModule | InStep)
    )
    if len(starts) != 1 or not calls:
        return None
    start = min(starts)
    meta = program.metas[start]
    if meta.axis is None or len(meta.shape) - meta.axis != 2:
        return None
    hidden_size = meta.shape[-1]
    x = examples(_NUM_TOKENS, hidden_size)
    try:
        values = evaluated(calls, {start: x.view(*meta.shape[: meta.axis], *x.shape)}, _NUM_TOKENS)
    except Exception:  # a class's code that wants what it had in the trace
        return None
    expected = _sorted(values[ids], values[weights])
    num_experts = call.function.num_experts  # type: ignore[attr-defined]
    for router in _candidates(calls, num_experts, hidden_size, expected[0].shape[-1]):
        got_ids, got_weights = _sorted(*route(x, _on_cpu(router)))
        if not torch.equal(got_ids, expected[0]):
            continue
        scale = float((expected[1] / got_weights).median())
        if agree(got_weights * scale, expected[1]):
            return start, router._replace(
                routing=router.routing._replace(scale=scale if abs(scale - 1) > 1e-5 else 1.0)
            )
    return None


def _sorted(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts a token's experts by their ids."""
    ids, order = ids.sort(dim=-1)
    return ids, weights.float().gather(-1, order)


def _on_cpu(router: ExpertRouter) -> ExpertRouter:
    return ExpertRouter._make(each.cpu() if isinstance(each, Tensor) else each for each in router)


def _candidates(calls: Sequence[Call], num_experts: int, hidden_size: int, top_k: int) -> Iterator[ExpertRouter]:
    """Yields routers with the constants of `calls`."""
    constants = [each for call in calls for each in constants_of((call.args, call.kwargs))]
    weights = [each for each in constants if each.shape == (num_experts, hidden_size)]
    biases = [None, *(each.flatten().float() for each in constants if each.numel() == num_experts and each.dim())]
    numbers = sorted({number for call in calls for number in _integers((call.args, call.kwargs))})
    groups = [(1, 1, 1)]
    groups += [
        (num_groups, top_groups, best)
        for num_groups, top_groups in product(numbers, numbers)
        for best in (1, 2)
        if 0 < top_groups < num_groups < num_experts and num_experts % num_groups == 0
    ]
    scores: tuple[Score, ...] = ("softmax", "sigmoid")
    for weight, score, renormalize, bias, correction in product(weights, scores, (False, True), biases, biases):
        for num_groups, top_groups, best in groups if bias is None or correction is not bias else ():
            routing = Routing(
                top_k, score, renormalize, num_groups=num_groups, top_groups=top_groups, group_best=best
            )  # fmt: skip
            yield ExpertRouter(routing, weight.float(), bias, correction)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for each in value:
            yield from _integers(each)
    elif type(value) is int:
        yield value
