"""Runs a model over a paged cache without a scheduler, under the control of a test."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.config.parallel import ExpertPlacement, ExpertPlacementStrategy
from quire.core.config.quantization import Quantization
from quire.core.config.resolved import ModelSpec
from quire.core.wire.prefix_spans import PrefixSpan
from quire.executor.layers.experts.parallel import ExpertParallel
from quire.executor.memory.kv_layout import KVLayout
from quire.executor.memory.state_layout import StateLayout, StatePages
from quire.executor.models.base import InputEmbeds, Model, ModelContext, StepContext, Wanted
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.input_batch import state_rows
from quire.executor.step.span_rows import SpanRows
from quire.executor.transfers import to_device_together
from quire.executor.weights.formats import open_weights
from quire.executor.weights.packing import PackAtLoad
from quire.executor.weights.quantization.cache_scheme import CacheScales
from quire.executor.weights.quantization.schemes import choose_scheme
from quire.frontend.checkpoint.model_spec import make_model_spec
from quire.ops.backend import AttentionBatch, Backend, DeviceRows
from quire.ops.cache_rows import LARGEST_CODE
from quire.ops.cpu.native import NativeBackend
from tests.executor.pretend_device import DEVICE, IS_ACCELERATED, enter_pretended_device

enter_pretended_device()


def read_spec(folder: Path, *, dtype: Any = "float32", **overrides: Any) -> ModelSpec:
    """The facts of a checkpoint, with values of config.json replaced by `overrides`."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) | overrides
    return make_model_spec(config, folder, ModelConfig(model=folder.name, dtype=dtype), path, folder)


def transformers_spec(folder: Path, **options: Any) -> ModelSpec:
    """The facts of a checkpoint whose class of Transformers is to run, whether or not there is a file here."""
    return msgspec.structs.replace(read_spec(folder, **options), implementation="transformers")


def model_context(
    spec: ModelSpec,
    *,
    device: str = DEVICE,
    group: ParallelGroup | None = None,
    load: LoadConfig | None = None,
    layers: range | None = None,
    quantization: Quantization | None = None,
    experts: ExpertPlacementStrategy | ExpertPlacement | ExpertParallel | None = None,
    cache_scales: CacheScales | None = None,
    reads_media: bool = False,
    divides_towers: bool = False,
) -> ModelContext:
    """What builds the model of `spec` on one rank: all layers or those that are named. Its weights are open."""
    dtype, backend, group = getattr(torch, spec.dtype), ops.bind(device), group or ParallelGroup()
    experts = ExpertPlacement(strategy=experts) if isinstance(experts, str) else experts
    experts = ExpertParallel(group, experts) if isinstance(experts, ExpertPlacement) else experts
    return ModelContext(
        ops=backend,
        group=group,
        dtype=dtype,
        device=torch.device(device),
        weights=open_weights(spec, load or LoadConfig(), dtype),
        scheme=choose_scheme(spec, quantization),
        packing=PackAtLoad(backend),
        layers=range(spec.num_layers) if layers is None else layers,
        max_model_len=spec.max_position_embeddings,
        experts=experts,
        cache_scales=cache_scales,
        generates=not spec.is_encoder,
        is_encoder=spec.is_encoder,
        reads_media=reads_media,
        divides_towers=divides_towers,
    )


def load_model(spec: ModelSpec, **options: Any) -> Model:
    """The model of `spec`; `options` as for `model_context`."""
    context = model_context(spec, **options)
    with contextlib.closing(context.weights), torch.inference_mode():
        return build_model(spec, context)


def batch_tolerance(backend: Backend) -> float:
    """How far apart the logits of a row may be in two batches.

    None at all with our kernels. Plain torch, where there is no compiler or an accelerator computes, sums the shapes of
    other batches in another order.
    """
    if isinstance(backend, NativeBackend):
        return 0
    return 1e-4 if IS_ACCELERATED else 1e-5


class PagedDriver:
    """Requests that hold `max_tokens` tokens each, in shuffled pages of one pool, and a slot each for their states.

    Pages that no later token sees are given back after each step: they are filled with NaN, and the block tables name
    page 0 in their place, which is full of NaN from the start.
    """

    def __init__(
        self,
        model: Model,
        num_requests: int,
        max_tokens: int,
        *,
        block_size: int = 16,
        device: str = DEVICE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the cache; layers that take no codes have float32 instead of them."""
        self.model = model
        self.ops = ops.bind(device)
        self.device = device
        self.block_size = block_size
        states = StateLayout(model.state_layers, torch.device(device))
        layout: KVLayout | StatePages = StatePages(states.state_bytes, torch.device(device))
        if model.kv_layers:
            layout = KVLayout(
                model.kv_layers,
                self.ops,
                block_size=block_size,
                dtypes=[
                    dtype if layer.can_be_quantized or dtype not in LARGEST_CODE else torch.float32
                    for layer in model.kv_layers
                ],
                device=torch.device(device),
            )
        self.groups = layout.groups
        self.states = states.allocate(num_requests)
        for tensor in (tensor for layer in self.states for tensor in layer):
            # A new request ignores what its slot holds.
            tensor.fill_(_nothing(tensor))
        pages_each = -(-max_tokens // block_size)
        order = np.random.default_rng(0).permutation(len(self.groups) * num_requests * pages_each) + 1
        self.block_tables = order.reshape(len(self.groups), num_requests, pages_each)
        _, self.caches = layout.allocate(order.size + 1)
        for cache in self.caches:
            cache.pages[0] = _nothing(cache.pages)
        self.tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self.prompt_lens: dict[int, int] = {}  # by request
        self.sends_rows = False  # decode steps have their rows on the device, as those of `DecodeInputs`
        self.spans_in_windows = False  # `prefix_spans` are for layers with a window alone
        self.prefix_spans: dict[int, list[PrefixSpan]] = {}  # by request; of models that see prompts, `step` sets them
        self.rotary_positions: Tensor | None = None  # of the next step's tokens

    @torch.inference_mode()
    def step(
        self, new_tokens: dict[int, list[int]], *, only_last: bool = False, input_embeds: InputEmbeds | None = None
    ) -> dict[int, Tensor]:
        """Feeds each request its next tokens; returns logits [new tokens, vocab] of each, or [1, vocab] of the last.

        The first tokens of a request are its prompt, unless `prompt_lens` already has its length.
        """
        lengths = [1 if only_last else len(tokens) for tokens in new_tokens.values()]
        logits = self.launch(new_tokens, only_last=only_last, input_embeds=input_embeds)
        return dict(zip(new_tokens, logits.cpu().split(lengths), strict=True))

    @torch.inference_mode()
    def launch(
        self, new_tokens: dict[int, list[int]], *, only_last: bool = False, input_embeds: InputEmbeds | None = None
    ) -> Tensor:
        """Like `step`; all logits together, on the device, which the host does not wait for."""
        if input_embeds is not None:
            input_embeds = InputEmbeds(*(each if each is None else each.to(self.device) for each in input_embeds))
        rows = list(new_tokens)
        for row in rows:
            self.prompt_lens.setdefault(row, len(new_tokens[row]))
        if any(layer.sees_prompt for layer in self.model.kv_layers):
            self.prefix_spans |= {row: [(0, self.prompt_lens[row])] for row in rows}
        spans = [self.prefix_spans.get(row, []) for row in rows]
        query_lens = np.array([len(new_tokens[row]) for row in rows])
        num_computed = np.array([len(self.tokens[row]) for row in rows])
        positions = np.concatenate([np.arange(n, n + q) for n, q in zip(num_computed, query_lens, strict=True)])
        ends, seq_lens = np.cumsum(query_lens) - 1, num_computed + query_lens
        tables = self.block_tables[:, rows]
        token_rows = np.repeat(np.arange(len(rows)), query_lens)
        slots = tables[:, token_rows, positions // self.block_size] * self.block_size + positions % self.block_size
        attention = self._attention(query_lens, seq_lens, spans, tables, slots)
        wanted = None
        is_new = num_computed == 0
        starts = np.concatenate(([0], ends + 1))
        rows_there, is_new_there, starts_there = to_device_together(
            [np.array(rows), is_new, starts], torch.device(self.device)
        )
        if only_last:
            query_lens = np.ones_like(query_lens)
            last = self._attention(query_lens, seq_lens, spans, tables, slots[:, ends])
            wanted = Wanted(self._tensor(ends), last)
        token_ids = self._tensor(np.concatenate([new_tokens[row] for row in rows]))
        step = StepContext(
            self._tensor(positions), self.caches, attention, input_embeds=input_embeds, wanted=wanted,
            states=self.states,
            rows=state_rows(np.array(rows), rows_there, starts, starts_there, is_new, is_new_there),
            rotary_positions=None if self.rotary_positions is None else self.rotary_positions.to(self.device),
        )  # fmt: skip
        logits = self.model.compute_logits(self.model.forward(token_ids, step))
        for row in rows:
            self.tokens[row] += new_tokens[row]
            self._give_back(row)
        return logits

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts together; the whole prompts in the first step."""
        outputs: list[list[int]] = [[] for _ in prompts]
        feed = dict(enumerate(prompts))
        for _ in range(num_tokens):
            feed = {row: [int(logits[-1].argmax())] for row, logits in self.step(feed).items()}
            for row, token in feed.items():
                outputs[row] += token
        return outputs

    def _attention(
        self,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        prefix_spans: list[list[PrefixSpan]],
        tables: np.ndarray,
        slots: np.ndarray,
    ) -> list[AttentionBatch]:
        rows = SpanRows.of(query_lens, seq_lens, prefix_spans)
        sends_rows = self.sends_rows and query_lens.max() == 1
        spans = rows.spans if rows.spans.any() else None
        return [
            self.ops.attention_batch(
                rows.query_lens, rows.seq_lens, table[rows.sequences], self._tensor(mapping),
                block_size=self.block_size, prefix_spans=spans if group.window or not self.spans_in_windows else None,
                there=self._rows_there(seq_lens, table) if sends_rows else None,
            )
            for table, mapping, group in zip(tables, slots, self.groups, strict=True)
        ]  # fmt: skip

    def _rows_there(self, seq_lens: np.ndarray, table: np.ndarray) -> DeviceRows:
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=self.device)
        there = (torch.from_numpy(array.astype(np.int32)).to(self.device) for array in (seq_lens, table))
        return DeviceRows(starts, *there, 1, table.shape[1] * self.block_size)

    def _give_back(self, row: int) -> None:
        """Takes back a request's pages that neither its next token nor any later one sees."""
        for group, tables in zip(self.groups, self.block_tables, strict=True):
            if group.window is not None:
                num_unseen = max(0, len(self.tokens[row]) - group.window + 1) // self.block_size
                for layer in group.layers:
                    pages = self.caches[layer].pages
                    pages[self._tensor(tables[row, :num_unseen])] = _nothing(pages)
                tables[row, :num_unseen] = 0

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


def _nothing(tensor: Tensor) -> float:
    """What nobody may read: NaN; or bytes of ones, which are a NaN where they are a row's scale."""
    return torch.nan if tensor.is_floating_point() else -1


Checkpoints = Callable[..., Path]
