"""Jina's embeddings v3 (arXiv:2409.10173): XLM-RoBERTa with rotary positions, and an adapter for each task."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.context import ModelContext
from quire.executor.models.encoders.heads import DenseForm, HeadForms
from quire.executor.models.encoders.rotary import RotaryBertModel, RotaryForm
from quire.executor.weights.readers import Shard, Stored, StoredRows, WeightReader
from quire.executor.weights.rearranged import Piece, fused

_DEFAULT_TASK = "text-matching"
_NO_TASK = "none"


class JinaV3Model(RotaryBertModel):
    """The adapter of `jina_task` in config.json is added to the weights; "none": no adapter is."""

    FORM = RotaryForm(
        ("roberta",), "encoder.layers.{}", bias=True, is_gated=False, down_bias=True, eps=1e-5, theta=20_000.0,
        heads=HeadForms(
            DenseForm("classifier.dense", "tanh"), "classifier.out_proj",
            vocabulary_dense=DenseForm("lm_head.dense", "gelu", "lm_head.layer_norm"),
            vocabulary="lm_head.decoder", vocabulary_bias="lm_head.bias",
        ),
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, context: ModelContext) -> None:
        super().__init__(spec, _with_adapter(spec, context))

    def pieces(self, spec: ModelSpec, inner: int) -> dict[str, Piece]:
        q, k, v = fused("mixer.Wqkv", *(spec.hidden_size,) * 3)
        return {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": Piece("mixer.out_proj"),
            "attention_norm": Piece("norm1"),
            "mlp.up_proj": Piece("mlp.fc1"), "mlp.down_proj": Piece("mlp.fc2"),
            "mlp_norm": Piece("norm2"),
        }  # fmt: skip


def _with_adapter(spec: ModelSpec, context: ModelContext) -> ModelContext:
    """Returns a context that reads weights with the adapter of the task.

    Raises:
        ModelLoadError: the checkpoint has no adapter for the task.
    """
    config = spec.hf_config
    tasks, asked = config.get("lora_adaptations") or [], config.get("jina_task")
    if asked is not None and asked not in (*tasks, _NO_TASK):
        raise ModelLoadError(
            f"{spec.name}: jina_task {asked!r} is none of the checkpoint's tasks, which are "
            f"{', '.join(tasks) or 'none'}; choose with --hf-overrides '{{\"jina_task\": ...}}'."
        )
    task = asked or (_DEFAULT_TASK if _DEFAULT_TASK in tasks else _NO_TASK)
    number = None if task == _NO_TASK else tasks.index(task)
    scale = config.get("lora_alpha", 1) / config.get("lora_rank", 1)
    return replace(context, weights=_AdaptedWeights(context.weights, number, scale, context.dtype))


class _AdaptedWeights:
    """A reader of weights that are parametrized: `weight` is the original, plus the product of two low-rank tensors.

    These have all tasks' rows: `lora_A` [tasks, rank, in] and `lora_B` [tasks, out, rank]; of an embedding, `lora_A`
    is [tasks, vocab, rank] and `lora_B` [tasks, rank, size].
    """

    def __init__(self, reader: WeightReader, task: int | None, scale: float, dtype: torch.dtype) -> None:
        """Takes the number of the `task`; None: the original alone."""
        self._reader = reader
        self._task = task
        self._scale = scale
        self._dtype = dtype

    def read(
        self, name: str, shape: tuple[int, ...], shard: Shard | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        stored = _parametrized(name)
        if not self._is_adapted(name):
            return self._reader.read(name, shape, shard, dtype)
        weight = self._reader.read(f"{stored}.original", shape, shard, torch.float32)
        if self._task is not None:
            left, right = self._factors(stored, shape)
            if shard is not None and shard.dim == 0:
                left = left[shard.start : shard.stop]
            elif shard is not None:
                right = right[:, shard.start : shard.stop]
            weight.add_(left @ right, alpha=self._scale)
        return weight.to(dtype or self._dtype)

    def _factors(self, stored: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Returns the tensors [rows, rank] and [rank, columns] of the task."""
        found = []
        for factor in ("lora_A", "lora_B"):
            place = self._reader.find(f"{stored}.0.{factor}")
            if place is None:
                raise ModelLoadError(f"The checkpoint has {stored}.original, and no {stored}.0.{factor}.")
            own = Shard(0, self._task or 0, (self._task or 0) + 1)
            found.append(self._reader.read(f"{stored}.0.{factor}", place.shape, own, torch.float32)[0])
        a, b = found
        return (b, a) if len(b) == shape[0] else (a, b)

    def find(self, name: str, otherwise: Stored | None = None) -> Stored | None:
        return self._reader.find(f"{_parametrized(name)}.original" if self._is_adapted(name) else name, otherwise)

    def locate(self, layer: str, out_features: int) -> StoredRows:
        return self._reader.locate(layer, out_features)._replace(reader=self)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return self._reader.shapes

    def are_same(self, name: str, other: str) -> bool:
        return not (self._is_adapted(name) or self._is_adapted(other)) and self._reader.are_same(name, other)

    def close(self) -> None:
        self._reader.close()

    def _is_adapted(self, name: str) -> bool:
        shapes = self._reader.shapes
        return shapes is not None and f"{_parametrized(name)}.original" in shapes


def _parametrized(name: str) -> str:
    """Returns the name that torch gives a parametrized tensor."""
    module, _, kind = name.rpartition(".")
    return f"{module}.parametrizations.{kind}"
