"""A Transformers model as `quire.executor.models.base.Model`: its code, our attention, linear layers and cache."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.executor.layers.attention import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.attention import PagedAttention
from quire.executor.models.transformers.checkpoint import ModuleWeights, fill
from quire.executor.models.transformers.exchange import Exchange, transposed_weights
from quire.executor.models.transformers.probe import Findings, probe, run_backbone, set_attention, sizes_of
from quire.executor.models.transformers.skeleton import UnknownModelError, build_skeleton, first_tensor
from quire.executor.models.transformers.splits import Split, choose_splits, local_outputs

__all__ = ["TransformersModel", "UnknownModelError", "build_transformers_model"]


def build_transformers_model(spec: ModelSpec, context: ModelContext) -> "TransformersModel":
    """The model of `spec` in Transformers' implementation, with its weights loaded.

    Raises:
        ModelLoadError: Transformers lacks the model, or its code does what a step over pages cannot.
    """
    if len(context.layers) != spec.num_layers:
        raise ModelLoadError(f"{spec.name}: --model-impl transformers builds all layers of a model on each rank.")
    model = build_skeleton(spec, context.dtype, context.max_model_len)
    if model.get_output_embeddings() is None:
        raise ModelLoadError(f"{spec.architecture} of {spec.name} has no head over a vocabulary: it generates no text.")
    findings, splits = _explore(spec, model, context)
    weights = ModuleWeights(context.weights, model, transposed_weights(model, splits))
    own = replace(context, weights=weights)
    attention = PagedAttention(context, findings.calls)
    Exchange(model, own, findings, splits).run()
    fill(model, weights, context.device)
    return TransformersModel(model, findings, attention)


def _explore(spec: ModelSpec, model: PreTrainedModel, context: ModelContext) -> tuple[Findings, dict[nn.Module, Split]]:
    """What the model does on this rank, and how its linear layers are split."""
    findings = _probe(spec, model, {})
    splits = choose_splits(model, findings, context)
    if context.group.size > 1:
        try:
            return probe(model, local_outputs(splits)), splits
        except Exception:  # the model's code counts on whole projections
            splits = choose_splits(model, findings, context, with_plan=False)
    return findings, splits


def _probe(spec: ModelSpec, model: PreTrainedModel, outputs: dict[nn.Module, int]) -> Findings:
    try:
        findings = probe(model, outputs)
    except ModelLoadError:
        raise
    except Exception as error:  # the code of a model may raise anything
        raise ModelLoadError(
            f"{spec.architecture} of {spec.name} does not run on the tokens of several requests: "
            f"{type(error).__name__}: {error}"
        ) from error
    if findings.backbone is None:
        raise ModelLoadError(
            f"{spec.architecture} of {spec.name} computes attention in its own code, not by the function that "
            "Transformers lets others replace. It has no native file here either."
        )
    if findings.mixes_tokens:
        raise ModelLoadError(
            f"{spec.architecture} of {spec.name} keeps state of a sequence beside keys and values, or counts positions "
            "itself, so requests cannot share a step. It has no native file here either."
        )
    return findings


class TransformersModel:
    """See `Model`."""

    def __init__(self, model: PreTrainedModel, findings: Findings, attention: PagedAttention) -> None:
        assert findings.backbone is not None
        self._model = model
        self._backbone = findings.backbone
        self._attention = attention
        self._embed = model.get_input_embeddings()
        self._replay = _Replay(findings.output)
        self.kv_layers: Sequence[AttentionKV] = attention.kv
        self.state_layers: Sequence[LayerState] = ()
        self.activation_size = _activation_size(findings)
        for parent in model.modules():
            for name, child in list(parent._modules.items()):
                if child is self._backbone:
                    parent._modules[name] = self._replay
        name = f"quire-{id(attention)}"
        AttentionInterface.register(name, attention)
        weakref.finalize(self, AttentionInterface._global_mapping.pop, name)
        for part in (self._model, self._backbone):
            set_attention(part, name)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """See `Model.forward`."""
        self._attention.begin(step)
        arguments: dict[str, Any] = {}
        given_ids: Tensor | None = token_ids.unsqueeze(0)
        if step.given is not None:
            rows = self._embed(token_ids)
            rows[step.given.places] = step.given.rows
            arguments, given_ids = {"inputs_embeds": rows.unsqueeze(0)}, None
        out = run_backbone(self._backbone, given_ids, step.positions.unsqueeze(0), **arguments)
        hidden = first_tensor(out)[0]
        return hidden if step.wanted is None else hidden.index_select(0, step.wanted.tokens)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Model.compute_logits`."""
        self._replay.hidden = hidden.unsqueeze(0)
        try:
            token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=token_ids).logits[0]
        finally:
            self._replay.hidden = None


class _Replay(nn.Module):
    """Stands in for the backbone when logits are computed: returns hidden states that it was given before."""

    def __init__(self, output: Any) -> None:
        """`output` is what the backbone returned in a dry run."""
        super().__init__()
        self._output = output
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        if isinstance(self._output, tuple):
            return (self.hidden, *[None] * (len(self._output) - 1))
        output = copy.copy(self._output)
        output[next(iter(output))] = self.hidden
        return output


def _activation_size(findings: Findings) -> int:
    """An upper estimate: all outputs of a layer's linear layers, and as much for what is made of them."""
    outputs = sum(sizes_of(linear)[1] for linear, _ in findings.inputs)
    return 2 * outputs // max(1, len(findings.calls))
