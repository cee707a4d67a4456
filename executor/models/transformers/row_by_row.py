"""Runs models whose code must see one sequence at a time: row by row, over views of our pages and states.

This is for classes that compute attention in their own code, count positions themselves, or keep a state of a sequence.
They read and write through the library's cache interface; its objects here own no memory.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import Adapters
from quire.executor.layers.attention.layer_kv import AttentionKV, LatentKV, LayerKV
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.skeleton import first_tensor, takes
from quire.ops.backend import Backend

try:
    from transformers.cache_utils import DummyLayer as NoLayer
except ImportError:  # before Transformers 5.23

    class NoLayer:  # type: ignore[no-redef]
        """In a cache, the place of a layer that keeps nothing."""


@dataclass(frozen=True)
class LayerPlan:
    """The caches of one layer, as indices into `kv_layers` and `state_layers`.

    Attributes:
        kv: None: it caches no keys, or another pipeline stage does.
        state: None: likewise for states.
        key_dim: elements of a head's key; 0: it caches none.
        value_dim: elements of a head's value.
        is_latent: keys and values are shared by all heads, differ in size, and lie in one row; see `LatentKV`.
        states: the kind and index of each state tensor, in the library's words.
        index_keys: like `kv`, for the keys of an indexer that selects the tokens to attend to.
    """

    kv: int | None
    state: int | None
    key_dim: int = 0
    value_dim: int = 0
    states: tuple[tuple[str, int], ...] = ()
    index_keys: int | None = None
    is_latent: bool = False


@dataclass(frozen=True)
class RowPlan:
    """The caches of a model.

    Attributes:
        gives_positions: the model takes positions; otherwise it counts them, perhaps not from zero.
    """

    layers: Sequence[LayerPlan]
    kv: Sequence[AttentionKV]
    states: Sequence[LayerState]
    gives_positions: bool = False


def dry_cache(config: PretrainedConfig) -> Cache:
    """Builds a cache of the library, for a dry run."""
    cache = DynamicCache(config=config)
    special = (LinearAttentionCacheLayerMixin, DynamicIndexedLayer)
    is_special = any(isinstance(layer, special) or type(layer).__module__ != Cache.__module__ for layer in cache.layers)
    return cache if is_special else DynamicCache()  # which grows to the model's number of layers


def check_cache(config: PretrainedConfig) -> None:
    """Refuses models whose caches hold more than our pages can.

    Raises:
        ModelLoadError: a layer's cache, of the model's own class, has functions that the views here lack.
    """
    kinds = {type(layer) for layer in dry_cache(config).layers}
    own = {name for kind in kinds if kind.__module__ != Cache.__module__ for name in vars(kind) if name[0] != "_"}
    missing = sorted(own - set(dir(DynamicLayer)) - set(dir(_StateAndPages)))
    if missing:
        raise ModelLoadError(keeps_more(*missing))


def keeps_more(*names: str) -> str:
    """Explains why a model is refused that calls `names` of a cache, which no cache here has."""
    return f"it keeps more of a sequence than keys, values and states ({', '.join(names)})"


def read_plan(cache: Cache, gives_positions: bool) -> RowPlan:
    """Reads the plan off the contents of `cache` after a dry run."""
    layers: list[LayerPlan] = []
    kv: list[AttentionKV] = []
    states: list[LayerState] = []
    for layer in cache.layers:
        kv_index = state_index = index_keys = None
        key_dim = value_dim = 0
        is_latent = False
        kept: list[tuple[str, int]] = []
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and keys.dim() == 4:
            kv_index, key_dim, value_dim = len(kv), keys.shape[3], values.shape[3]  # type: ignore[union-attr]
            is_latent = keys.shape[1] == 1 and key_dim != value_dim
            kv.append(_latents(key_dim, value_dim) if is_latent else LayerKV(keys.shape[1], max(key_dim, value_dim)))
        chooses_by = getattr(layer, "indexer_keys", None) if isinstance(layer, DynamicIndexedLayer) else None
        if chooses_by is None:
            chooses_by = getattr(layer, "idx_keys", None)
        if chooses_by is not None:
            index_keys = len(kv)
            kv.append(LatentKV((chooses_by.shape[-1],)))
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors = {
                (kind, index): tensor
                for kind in ("conv_states", "recurrent_states")
                for index, tensor in getattr(layer, kind).items()
                if tensor is not None
            }
            kept = list(tensors)
            if kept:
                state_index = len(states)
                shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors.values())
                states.append(LayerState(shapes, tuple(tensor.dtype for tensor in tensors.values())))
        layers.append(LayerPlan(kv_index, state_index, key_dim, value_dim, tuple(kept), index_keys, is_latent))
    return RowPlan(layers, kv, states, gives_positions)


class RowByRow:
    """Runs a backbone on the rows of a step, one after another.

    Attributes:
        plan: the caches of the model.
        kv: the keys and values that each layer caches.
        states: the states that each recurrent layer keeps.
    """

    def __init__(self, plan: RowPlan, ops: Backend, adapters: Adapters | None = None) -> None:
        self.plan = plan
        self._adapters = adapters
        self._ops = ops
        self.kv = plan.kv
        self.states = plan.states

    def forward(self, backbone: nn.Module, step: StepContext, token_ids: Tensor, embeds: Tensor | None) -> Tensor:
        """Returns hidden states of all tokens, [num_tokens, hidden]; `embeds` replaces the rows of `token_ids`."""
        outputs = []
        for row, tokens, past in self._pieces(step):
            if self._adapters is not None:
                self._adapters.enter_part(tokens.start, tokens.stop - tokens.start)
            cache = Cache(layers=[self._view(step, row, tokens, past, layer) for layer in self.plan.layers])
            rows = None if embeds is None else embeds[tokens].unsqueeze(0)
            is_shifted = bool(step.attention) and int(step.positions[tokens.start]) != past  # images take fewer places
            gives_positions = self.plan.gives_positions or is_shifted
            positions = step.positions[tokens].unsqueeze(0) if gives_positions else None
            if step.rotary_positions is not None:
                positions = step.rotary_positions[:, tokens].unsqueeze(1)
            out = run_row(backbone, token_ids[tokens].unsqueeze(0), cache, positions, rows)
            outputs.append(first_tensor(out)[0])
        if self._adapters is not None:
            self._adapters.leave_part()
        return torch.cat(outputs)

    def _pieces(self, step: StepContext) -> Iterator[tuple[int, slice, int]]:
        """Yields rows with their tokens, and the number of those before. A row that continues from a state comes token
        by token, as the library's code needs.
        """
        if step.attention:
            lengths = step.attention[0].query_lens
            pasts = step.attention[0].seq_lens - lengths
        else:
            lengths = step.rows.starts.diff().numpy()
            pasts = (~step.rows.is_new).int().cpu().numpy()  # how many does not matter to states
        start = 0
        for row, (length, past) in enumerate(zip(lengths.tolist(), pasts.tolist(), strict=True)):
            goes_on = bool(self.plan.states) and not bool(step.rows.is_new[row])
            for first in range(start, start + length, 1 if goes_on else length):
                yield row, slice(first, first + (1 if goes_on else length)), past + first - start
            start += length

    def _view(self, step: StepContext, row: int, tokens: slice, past: int, layer: LayerPlan) -> Any:
        if not layer.key_dim and not layer.states:
            return NoLayer()
        view: Any = _Pages() if not layer.states else _StateAndPages() if layer.key_dim else _State()
        seq_len = past + tokens.stop - tokens.start
        if layer.key_dim:
            view.past = past
        if layer.kv is not None:
            view.ops, view.layer = self._ops, layer
            view.pages, view.slots = _places(step, row, seq_len, layer.kv)
            if layer.index_keys is not None:
                view.index_pages, view.index_slots = _places(step, row, seq_len, layer.index_keys)
        if layer.states and layer.state is None:  # another stage keeps them
            view.has_previous_state |= {index: past > 0 for _, index in layer.states}
        if layer.state is not None:
            slot, is_new = step.rows.slots[row], bool(step.rows.is_new[row])
            for (kind, index), tensor in zip(layer.states, step.states[layer.state], strict=True):
                own = tensor[slot : slot + 1] if slot >= 0 else torch.zeros_like(tensor[:1])  # padding has none
                view.take_state(kind, index, own, is_new)
        return view


def _places(step: StepContext, row: int, seq_len: int, layer: int) -> tuple[Tensor, Tensor]:
    """Returns the pages of one of `kv_layers`, and the slots of the first `seq_len` tokens of a row."""
    pages, group = step.caches[layer]
    batch, size = step.attention[group], step.attention[group].block_size
    table = torch.from_numpy(batch.block_tables[row].astype("int64"))
    slots = (table * size).repeat_interleave(size) + torch.arange(size).repeat(len(table))
    return pages, slots[:seq_len].to(pages.device)


_NAMES_OF_CACHES = ("cache", "past_key_values", "cache_params")  # a class takes one; `cache` since Transformers 5.24


def run_row(
    backbone: nn.Module, token_ids: Tensor, cache: Cache, positions: Tensor | None, embeds: Tensor | None = None
) -> Any:
    """Runs one sequence's next tokens [1, num_tokens], which continue the contents of `cache`.

    `positions` [1, num_tokens] are those of the tokens; None: the model counts.
    """
    given: dict[str, Any] = {"input_ids": token_ids, "use_cache": True, "return_dict": True}
    if positions is not None:
        given["position_ids"] = positions
    given |= dict.fromkeys(_NAMES_OF_CACHES, cache)
    if embeds is not None:
        given |= {"input_ids": None, "inputs_embeds": embeds}
    return backbone(**{name: value for name, value in given.items() if takes(backbone, name)})


def find_backbone(model: PreTrainedModel, called: Collection[nn.Module]) -> nn.Module | None:
    """Finds the outermost module below `model` that contains the token embedding."""
    part: nn.Module = model
    embedding = model.get_input_embeddings()
    while True:
        inner = [child for child in part.children() if any(each is embedding for each in child.modules())]
        if not inner or inner[0] is embedding:
            return None
        part = inner[0]
        if part in called:
            return part


class _Pages(CacheLayerMixin):
    """A sequence's keys and values in one layer, in our pages."""

    is_sliding = False
    ops: Backend
    pages: Tensor
    layer: LayerPlan
    slots: Tensor  # of all tokens, the new ones included
    past: int  # tokens before the new ones
    has_new = False  # the new ones are stored
    index_pages: Tensor  # [num_pages, block_size, size], if the layer has index keys
    index_slots: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the memory exists."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values [1, heads, num_tokens, size]; returns those of all tokens."""
        keys, values = self._updated(key_states, value_states)
        self.keys = torch.empty(keys.shape, device="meta")  # whose shape some classes read; the pages have the numbers
        self.has_new = True
        return keys, values

    def _updated(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.layer.is_latent:
            rows = torch.cat((key_states[0, 0], value_states[0, 0]), dim=-1)
            parts = self.layer.key_dim, self.layer.value_dim
            kept = _stored(self.ops, rows, parts, self.pages, self.slots, self.past).view(1, 1, len(self.slots), -1)
            keys, values = kept.split(parts, dim=3)
            return keys, values
        size = max(self.layer.key_dim, self.layer.value_dim)
        k, v = (F.pad(x[0].transpose(0, 1), (0, size - x.shape[3])) for x in (key_states, value_states))
        self.ops.write_kv(k, v, self.pages, self.slots[self.past :])
        keys, values = (x.transpose(0, 1).unsqueeze(0).to(k.dtype) for x in self.ops.read_kv(self.pages, self.slots))
        return keys[..., : self.layer.key_dim], values[..., : self.layer.value_dim]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Stores new index keys [1, num_tokens, size]; returns those of all tokens."""
        new = indexer_key_states[0]
        keys = _stored(self.ops, new, new.shape[-1:], self.index_pages, self.index_slots, self.past)
        return keys.unsqueeze(0)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Adapts `update_indexer` for classes whose index keys are [1, 1, num_tokens, size]."""
        return self.update_indexer(idx_k[:, 0]).unsqueeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.past + query_length, 0

    def get_seq_length(self) -> int:
        return len(self.slots) if self.has_new else self.past

    def get_max_length(self) -> int:
        return -1


def _latents(*sizes: int) -> LatentKV:
    """Builds rows of several values' sizes; a value of size 0 takes neither space nor a scale."""
    return LatentKV(tuple(size for size in sizes if size))


def _stored(ops: Backend, new: Tensor, parts: tuple[int, ...], pages: Tensor, slots: Tensor, past: int) -> Tensor:
    """Stores `new` after the first `past` of `slots` [num_tokens], and returns the rows of all slots in its dtype."""
    kv = _latents(*parts)
    kv.store(ops, new, pages, slots[past:])
    return kv.read(pages, slots, new.dtype)


class _State(LinearAttentionLayer):
    """A sequence's states in one layer, in our tensors: the library's code copies new states into them."""

    def __init__(self) -> None:
        super().__init__(number_of_states=0)

    def take_state(self, kind: str, index: int, tensor: Tensor, is_new: bool) -> None:
        """Uses `tensor` [1, ...] as the state `index` of this kind; a new sequence's state counts as zeros."""
        if is_new:
            tensor.zero_()
        getattr(self, kind)[index] = tensor
        getattr(self, f"is_{kind}_initialized")[index] = True
        self.has_previous_state[index] = not is_new
        vars(self).update(device=tensor.device, dtype=tensor.dtype)
        if kind == "conv_states":
            self.conv_kernel_size[index] = tensor.shape[-1]
        for other in ("conv_states", "recurrent_states"):
            getattr(self, other).setdefault(index, None)
            getattr(self, f"is_{other}_initialized").setdefault(index, False)


class _StateAndPages(_State, _Pages):  # type: ignore[override]
    """A sequence's states, and its keys and values."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return -1
