"""Replaces attention that a class computes in its own code, found in a trace of one sequence.

Keys and values are the tensors that the class stores in the library's cache. The attention's result is the first
product of a value derived from the keys with one derived from the values. The formula between them is fitted: the scale
and the biases by distance (ALiBi, arXiv:2108.12409) are read off its scores, and our formula has to compute the same
with them.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.masks import MaskBuilder, MaskFunction, Visible, read_mask
from quire.executor.models.transformers.probe import set_attention
from quire.executor.models.transformers.programs.evaluation import agree, constants_of, evaluated, examples
from quire.executor.models.transformers.programs.heads import Attention, HeadsFirst
from quire.executor.models.transformers.programs.program import Call, Meta, Program, Ref
from quire.executor.models.transformers.programs.tracing import RunPart, Untraceable
from quire.executor.models.transformers.row_by_row import LayerPlan, NoLayer, RowPlan, run_row
from quire.executor.models.transformers.skeleton import first_tensor
from quire.executor.models.transformers.stages import received_rows
from quire.executor.parallel.context.strategy import WHOLE
from quire.ops.backend import AttentionForm, Backend

_NUM_TOKENS = 96
"""The tokens with which formulas are compared."""
_NOT_SEEN = -1e30  # an upper bound of masked scores
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class RowCode:
    """Code of a class that computes attention itself, for `FastPath`."""

    def __init__(self, plan: RowPlan, backbone: nn.Module) -> None:
        self._backbone = backbone
        self._plan = plan

    def trace(self, token_ids: Tensor, step: StepContext, run_part: RunPart) -> Tensor:
        """Traces one sequence. A `StoreKV` call stores keys and values, and a `MaskBuilder` call builds the masks."""
        layers: list[Any] = [
            _NewSequence(StoreKV(each), run_part) if each.key_dim else NoLayer() for each in self._plan.layers
        ]  # fmt: skip
        positions = step.positions.unsqueeze(0) if self._plan.gives_positions else None
        rows = received_rows(step)
        embeds = None if rows is None else rows.unsqueeze(0)
        try:
            with _noting_masks(self._backbone, run_part, token_ids.device):
                out = run_row(self._backbone, token_ids.unsqueeze(0), Cache(layers=layers), positions, embeds)
        except Untraceable:
            raise
        except Exception as error:  # the code of a model may raise anything
            raise Untraceable(f"in a trace it raises {type(error).__name__}: {error}") from error
        return first_tensor(out)[0]

    def replace_attention(self, program: Program, ops: Backend, device: torch.device) -> None:
        for store in [call for call in program.calls if isinstance(call.function, StoreKV)]:
            is_latent = store.function.layer.is_latent  # type: ignore[attr-defined]
            if is_latent or not any(_replace(program, store, query, ops, device) for query in _queries(program, store)):
                raise Untraceable("it computes attention of an unknown form itself")
        program.drop_unused()


@dataclass(frozen=True)
class StoreKV:
    """Stores a layer's keys and values [1, heads, num_tokens, size], and returns those of the sequence."""

    layer: LayerPlan

    def __call__(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.view_as(keys), values.view_as(values)


class _NewSequence(CacheLayerMixin):
    """A layer's cache of a new sequence, which holds only what the step stores."""

    is_sliding = False

    def __init__(self, store: StoreKV, run_part: RunPart) -> None:
        super().__init__()
        self._store = partial(run_part, store, store)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: there is no memory to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._store((key_states, value_states))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@contextlib.contextmanager
def _noting_masks(backbone: nn.Module, run_part: RunPart, device: torch.device) -> Iterator[None]:
    """Makes the masks that the library builds for `backbone` calls of `MaskBuilder`, while the context lasts."""
    name = f"quire-trace-{id(backbone)}"

    def build(
        batch_size: int, q_length: int, kv_length: int, *_: Any, mask_function: MaskFunction, **__: Any
    ) -> Tensor:
        with torch._C.DisableTorchFunction():
            visible = read_mask(mask_function)
        if visible is None or visible.is_bidirectional:
            raise Untraceable("tokens see later ones")
        mask = MaskBuilder(visible, device)
        return run_part(mask, mask, (q_length,))

    AttentionMaskInterface.register(name, build)
    set_attention(backbone, name)
    try:
        yield
    finally:
        set_attention(backbone, "eager")
        AttentionMaskInterface._global_mapping.pop(name)


def _queries(program: Program, store: Call) -> Iterator[Ref]:
    """Yields candidates for the queries: values that meet something derived from the keys, and have a multiple of their
    heads.
    """
    keys, values = store.outs
    (_, num_kv_heads, _, size), of_keys = program.metas[keys].shape, _made_of(program, keys)  # type: ignore[index]
    for call in program.calls:
        for index in call.reads() if of_keys.intersection(call.reads()) else ():
            shape, axis = program.metas[index].shape, program.metas[index].axis
            is_fit = len(shape) in (3, 4) and axis == len(shape) - 2 and shape[-1] == size
            if is_fit and math.prod(shape[:-2]) % num_kv_heads == 0 and index not in of_keys and index != values:
                yield Ref(index)


def _made_of(program: Program, source: int | None) -> set[int | None]:
    """Returns all values derived from `source`, including itself."""
    made = {source}
    for call in program.calls:
        if made.intersection(call.reads()):
            made.update(call.outs)
    return made


def _replace(program: Program, store: Call, query: Ref, ops: Backend, device: torch.device) -> bool:
    """Replaces a layer's own attention by ours, if ours has its form."""
    kinds = [_made_of(program, out) for out in store.outs]
    product = next((call for call in program.calls if all(kind.intersection(call.reads()) for kind in kinds)), None)
    formula = None if product is None else _Formula.read(program, store, product, query)
    form = None if formula is None else formula.fit()
    if product is None or form is None:
        return False
    layer: LayerPlan = store.function.layer  # type: ignore[attr-defined]
    assert layer.kv is not None
    if form.slopes is not None:
        form = form._replace(slopes=form.slopes.to(device))
    # Ranks that divide sequences refuse such classes.
    num_kv_heads = program.metas[store.outs[0]].shape[1]  # type: ignore[index]
    attention = Attention(ops, layer.kv, form, max(layer.key_dim, layer.value_dim), num_kv_heads, WHOLE)
    product.function = HeadsFirst(attention, len(program.metas[product.outs[0]].shape) == 4)  # type: ignore[index]
    product.args, product.kwargs = (query, *store.args), {}
    return True


@dataclass
class _Formula:
    """The calls that compute a layer's attention from its queries, keys and values.

    Attributes:
        inputs: queries, keys and values, with their shapes for `_NUM_TOKENS` tokens.
        scores: the input of the softmax.
        result: the attention's result.
    """

    calls: list[Call]
    inputs: list[tuple[int, tuple[int, ...]]]
    positions: int
    scores: int
    result: int
    visible: Visible

    @classmethod
    def read(cls, program: Program, store: Call, product: Call, query: Ref) -> "_Formula | None":
        """Reads the formula that ends with `product`; None if it reads anything else."""
        result, inputs, positions = product.outs[0], (query.index, *store.outs), program.inputs[1]
        calls, starts = program.slice_to([result], lambda call: call is store or query.index in call.outs)  # type: ignore[list-item]
        scores = [index for call in calls if call.function in _SOFTMAX for index in call.reads()]
        masks = {call.function.visible for call in calls if isinstance(call.function, MaskBuilder)}
        has_tables = any(_is_table(each) for call in calls for each in constants_of((call.args, call.kwargs)))
        dtypes = {program.metas[each].dtype for each in (result, *store.outs)}  # type: ignore[index]
        is_closed = starts <= {*inputs, positions} and not has_tables
        if not is_closed or len(scores) != 1 or len(masks) != 1 or len(dtypes) != 1:
            return None
        shapes = [(index, _shape(program.metas[index])) for index in inputs]  # type: ignore[index]
        return cls(calls, shapes, positions, scores[0], result, masks.pop())  # type: ignore[arg-type]

    def fit(self) -> AttentionForm | None:
        """Returns the form with which our attention computes the same; None if there is none."""
        q, k, v = (examples(*shape).roll(number, -1) for number, (_, shape) in enumerate(self.inputs))
        try:
            biases, _ = self._computed(torch.zeros_like(q), k, v)
            scores, result = self._computed(q, k, v)
        except Exception:  # the class's code may need the inputs of its trace
            return None
        q, k, v = (x.flatten(0, -3) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        seen = self.visible.mask(_NUM_TOKENS)
        scale = float(((scores - biases) / (q @ k.mT))[:, seen].median())
        first = int(seen[-1].int().argmax())
        slopes = (biases[:, -1, -1] - biases[:, -1, first]) / (_NUM_TOKENS - 1 - first)
        distances = torch.arange(_NUM_TOKENS) - torch.arange(_NUM_TOKENS).unsqueeze(1)
        expected = scale * (q @ k.mT) + slopes.view(-1, 1, 1) * distances
        if not agree(result, expected.masked_fill(~seen, -torch.inf).softmax(-1) @ v):
            return None
        has_slopes = bool(slopes.abs().max() > 1e-6)
        return AttentionForm(
            scale, window=self.visible.window, chunk=self.visible.chunk, slopes=slopes if has_slopes else None
        )  # fmt: skip

    def _computed(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes scores [heads, num_tokens, num_tokens] and results [heads, num_tokens, size]."""
        given = {index: x for (index, _), x in zip(self.inputs, inputs, strict=True)}
        values = evaluated(self.calls, {**given, self.positions: torch.arange(_NUM_TOKENS)}, _NUM_TOKENS)
        return values[self.scores].flatten(0, -3), values[self.result].flatten(0, -3)


def _shape(meta: Meta) -> tuple[int, ...]:
    return tuple(_NUM_TOKENS if axis == meta.axis else size for axis, size in enumerate(meta.shape))


def _is_table(constant: Tensor) -> bool:
    """Returns True if a constant may depend on pairs of positions beyond those that the comparison covers."""
    return sum(size > _NUM_TOKENS for size in constant.shape) > 1
