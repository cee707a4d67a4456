"""A Transformers model as `quire.executor.models.base.Model`: its code, our attention, linear layers and cache."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.core.wire.media import MediaItem
from quire.executor.layers.adapters import Adapters, without_tokens
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.positions.rotary import check_first_chunk
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.architectures import ARCHITECTURES
from quire.executor.models.base import MediaRows, MediaSupport, Model
from quire.executor.models.transformers.absent_modules import leave_out_towers
from quire.executor.models.transformers.adapted_rows import check_rows
from quire.executor.models.transformers.attention import FlatCode, PagedAttention, is_latent
from quire.executor.models.transformers.cache_check import check_cached_attention
from quire.executor.models.transformers.checkpoint import ModuleWeights, fill
from quire.executor.models.transformers.encoder import build_encoder
from quire.executor.models.transformers.fast_path import FastPath, TracedCode
from quire.executor.models.transformers.layer_modules import Experts
from quire.executor.models.transformers.own_attention import RowCode
from quire.executor.models.transformers.probe import Findings, probe, probe_rows, set_attention, sizes_of
from quire.executor.models.transformers.replacement import LayerReplacement, transposed_weights
from quire.executor.models.transformers.row_by_row import RowByRow, RowPlan, check_cache, keeps_more
from quire.executor.models.transformers.skeleton import build_skeleton, text_part
from quire.executor.models.transformers.small_sequences import SmallSequences
from quire.executor.models.transformers.splits import Split, choose_splits, local_outputs
from quire.executor.models.transformers.stages import StagePart, keep_stage, received_rows
from quire.executor.models.transformers.step_check import check_steps
from quire.executor.models.transformers.towers import Towers, build_towers

logger = get_logger(__name__)


def build_transformers_model(spec: ModelSpec, context: ModelContext) -> Model:
    """Builds the model of `spec` in Transformers' implementation, with its weights loaded.

    Raises:
        ModelLoadError: Transformers lacks the model; its code cannot run over pages; or it runs row by row and fails
            `check_steps`.
    """
    check_first_chunk(spec.hf_config, context.max_model_len)
    whole = build_skeleton(spec, context.dtype, context.max_model_len, generates=context.generates)
    if spec.is_encoder:
        return build_encoder(spec, whole, context)
    model = text_part(whole)
    if context.generates and model.get_output_embeddings() is None:
        raise ModelLoadError(f"{spec.architecture} of {spec.name} has no head over a vocabulary: it generates no text.")
    findings, splits, plan = _explore(spec, model, context)
    if plan is not None and context.sequences.is_divided:
        raise _refusal(spec, f"runs row by row, on whole sequences, and {context.sequences.flag} divides them")
    weights = ModuleWeights(context.weights, whole, transposed_weights(whole, splits))
    towers = build_towers(whole, model, findings, context, is_flat=plan is None) if context.reads_media else None
    if towers is None:
        leave_out_towers(whole, findings.called)
    own = replace(context, weights=weights)
    part = StagePart(is_first=True, is_last=True, token_size=spec.hidden_size)
    if len(context.layers) < spec.num_layers:
        try:
            findings, plan, part = keep_stage(model, findings, plan, context.layers, spec.num_layers)
        except ModelLoadError as error:
            raise _refusal(spec, str(error)) from error
    expansions = LayerReplacement(whole, own, findings, splits, () if towers is None else towers.modules).run()
    if towers is not None:
        towers.replace_layers(own)
    if plan is None:
        sequences: PagedAttention | RowByRow = PagedAttention(context, findings.calls, expansions)
    else:
        sequences = RowByRow(plan, context.ops, context.adapters)
    fill(whole, weights, context.device)
    built = TransformersModel(model, findings, sequences, own, spec.vocab_size, part, towers)
    has_peers = context.experts is not None and context.experts.exchange is not None  # which are not ready yet
    if context.adapters is not None and context.device.type != "meta" and not has_peers:
        built.check_adapters(context.adapters)
    if plan is not None and context.device.type != "meta":
        try:
            check_steps(built, part, context, spec.vocab_size)
        except Exception as error:
            raise _refusal(spec, f"does not run row by row: {_text(error)}") from error
        if built.fast_path is None or built.fast_path.programs is None:
            logger.info("%s runs row by row, slowly in large batches: its code sees one sequence", spec.architecture)
    return built


def _explore(
    spec: ModelSpec, model: PreTrainedModel, context: ModelContext
) -> tuple[Findings, dict[nn.Module, Split], RowPlan | None]:
    """Returns the model's findings on this rank, the split of its linear layers, and the plan if it runs row by row."""
    try:
        check_cache(model.config)
    except ModelLoadError as error:
        raise _refusal(spec, f"cannot run over pages: {error}") from error
    try:
        findings = _probe_flat(model, {})
        assert findings.backbone is not None
        check_cached_attention(model, findings.backbone)
    except Exception as obstacle:  # the code of a model may raise anything
        try:
            findings, plan = probe_rows(model)
        except Exception as error:
            raise _refusal(
                spec,
                f"can run neither on the tokens of several requests ({_text(obstacle)}) nor row by row "
                f"({_text(error)})",
            ) from error
        return findings, choose_splits(model, findings, context, with_plan=False), plan
    splits = choose_splits(model, findings, context)
    if context.group.size > 1:
        try:
            return _probe_flat(model, local_outputs(splits)), splits, None
        except Exception:  # the model's code depends on whole projections
            splits = choose_splits(model, findings, context, with_plan=False)
    return findings, splits, None


def _probe_flat(model: PreTrainedModel, outputs: dict[nn.Module, int]) -> Findings:
    """Raises ModelLoadError if the model's code cannot take the tokens of several requests as one sequence."""
    findings = probe(model, outputs)
    if findings.backbone is None:
        raise ModelLoadError("attention is computed in the class's own code")
    if findings.mixes_tokens:
        raise ModelLoadError("tokens mix outside of attention, or positions are counted")
    findings.calls = [call if is_latent(call) else replace(call, expansion=None) for call in findings.calls]
    return findings


def _refusal(spec: ModelSpec, reason: str) -> ModelLoadError:
    has_file = spec.architecture in ARCHITECTURES
    remedy = "Quire's own file may serve it (--model-impl quire)"
    if not has_file:
        remedy = "Quire has no file of its own for it; a class that you register with quire.register_model may serve it"
    return ModelLoadError(f"{spec.architecture} of {spec.name}: its class of Transformers {reason}. {remedy}.")


def _text(error: Exception) -> str:
    if isinstance(error, AttributeError) and isinstance(error.obj, Cache | CacheLayerMixin):
        return keeps_more(str(error.name))
    return str(error) if isinstance(error, ModelLoadError) else f"its code raises {type(error).__name__}: {error}"


class TransformersModel:
    """A model of Transformers on one rank. Implements `quire.executor.models.base.StagedModel`.

    Attributes:
        fast_path: the programs that replace the class's code; None if the code keeps a state of a sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        findings: Findings,
        sequences: PagedAttention | RowByRow,
        context: ModelContext,
        vocab_size: int,
        part: StagePart,
        towers: Towers | None = None,
    ) -> None:
        assert findings.backbone is not None
        self._model = model
        self._towers = towers
        self._backbone = findings.backbone
        self._sequences = sequences
        self._part = part
        self._vocab_size = vocab_size
        self._embed = model.get_input_embeddings()
        self._context = context
        self._replay = _Replay(self._backbone, findings.output)
        self.kv_layers: Sequence[AttentionKV] = sequences.kv
        if towers is not None and towers.sees_prompt:
            self.kv_layers = [layer._replace(sees_prompt=True) for layer in sequences.kv]
        self.state_layers: Sequence[LayerState] = sequences.states
        mixtures = [each.activation_size for each in model.modules() if isinstance(each, Experts)]
        self.num_layer_outputs = 0
        self.activation_size = _activation_size(findings) + max(mixtures, default=0)
        self.activation_size += sequences.exchanged_size if isinstance(sequences, PagedAttention) else 0
        for parent in model.modules():
            for name, child in list(parent._modules.items()):
                if child is self._backbone:
                    parent._modules[name] = self._replay
        if isinstance(sequences, PagedAttention):
            name = f"quire-{id(sequences)}"
            AttentionInterface.register(name, sequences)
            weakref.finalize(self, AttentionInterface._global_mapping.pop, name)
            for module in (self._model, self._backbone):
                set_attention(module, name)
        if towers is not None:
            towers.settle()
        self._modules = list(dict.fromkeys((*model.modules(), *self._backbone.modules())))
        self.fast_path: FastPath | None = None
        code = _traced_code(sequences, self._backbone)
        if code is not None:
            self.fast_path = FastPath(self, code, self._embed, self._modules, context, vocab_size, part)

    @torch.inference_mode()
    def check_adapters(self, place: Adapters) -> None:
        """Runs a few tokens, and lets layers take no adapters that see other rows than these; see `check_rows`."""
        lengths = {0: min(24, self._context.max_model_len), 1: 3}  # no expert is chosen by so many tokens
        token_ids, step = SmallSequences(
            self, self._part, self._context, self._vocab_size, len(lengths), max(lengths.values())
        ).step(lengths)

        def run() -> None:
            hidden = self.run_code(token_ids, step)
            if self._part.is_last:
                self.run_head(hidden)

        check_rows(place, self._modules, len(token_ids), run)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        hidden = None if self.fast_path is None or _needs_code(step) else self.fast_path.forward(token_ids, step)
        if hidden is None:
            hidden = self.run_code(token_ids, step)
            hidden = hidden if step.wanted is None else hidden.index_select(0, step.wanted.tokens)
        return hidden.flatten() if step.hands_over else hidden

    def handover_size(self, hidden_size: int) -> int:
        """Counts the input of a layer."""
        return self._part.token_size

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = None if self.fast_path is None else self.fast_path.compute_logits(hidden)
        logits = self.run_head(hidden) if logits is None else logits
        missing = self._vocab_size - logits.shape[1]  # a head may lack the tokens that pad the embedding
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    def run_code(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Returns hidden states of all tokens, [num_tokens, hidden], as the class's code computes them."""
        embeds = None
        if step.received is not None:
            embeds = received_rows(step)
        elif step.input_embeds is not None:
            embeds = self._embed(token_ids)
            embeds[step.input_embeds.places] = step.input_embeds.rows
        if self._towers is None:
            return self._sequences.forward(self._backbone, step, token_ids, embeds)
        with self._towers.features(step):
            return self._sequences.forward(self._backbone, step, token_ids, embeds)

    @property
    def media(self) -> MediaSupport | None:
        """What the towers read; None: there are none."""
        return None if self._towers is None else self._towers.support

    def encode_media(self, items: Sequence[MediaItem]) -> list[MediaRows]:
        assert self._towers is not None, "a prompt has an image, and the model no tower"
        with without_tokens(self._context.adapters):
            return self._towers.encode(items)

    def media_positions(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Tensor | None:
        return None if self._towers is None else self._towers.positions(token_ids, items)

    def run_head(self, hidden: Tensor) -> Tensor:
        """Returns the logits [num_tokens, vocab] of hidden states, as the class's code computes them."""
        self._replay.hidden = hidden.unsqueeze(0)
        try:
            token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=token_ids).logits[0]
        finally:
            self._replay.hidden = None


class _Replay(nn.Module):
    """Replaces the backbone while logits are computed, and returns hidden states that were computed before."""

    def __init__(self, backbone: nn.Module, output: Any) -> None:
        """Takes as `output` the backbone's result in a dry run."""
        super().__init__()
        self._backbone = (backbone,)  # no part of this module
        self._output = output
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._backbone[0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        if isinstance(self._output, tuple):
            return (self.hidden, *[None] * (len(self._output) - 1))
        output = copy.copy(self._output)
        output[next(iter(output))] = self.hidden
        return output


def _traced_code(sequences: PagedAttention | RowByRow, backbone: nn.Module) -> TracedCode | None:
    """Returns the code of a backbone that may have a program, else None."""
    if isinstance(sequences, PagedAttention):
        return FlatCode(sequences, backbone)
    return None if sequences.states else RowCode(sequences.plan, backbone)


def _needs_code(step: StepContext) -> bool:
    """Returns True if a step has inputs that programs lack: places in height and width, and features of images."""
    return step.rotary_positions is not None or (step.input_embeds is not None and step.input_embeds.deep is not None)


def _activation_size(findings: Findings) -> int:
    """Estimates from above: all outputs of a layer's linear layers, twice, for values computed from them."""
    outputs = sum(sizes_of(linear)[1] for linear, _ in findings.inputs)
    return 2 * outputs // max(1, len(findings.calls))
