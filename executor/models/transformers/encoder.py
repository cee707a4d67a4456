"""An encoder of Transformers as `quire.executor.models.base.Model`: its code and our layers, without a cache."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from quire.core.config.pooling import SequencePooling
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.adapters import Adapters
from quire.executor.layers.attention.layer_kv import AttentionKV
from quire.executor.layers.context import ModelContext
from quire.executor.layers.recurrent.state import LayerState
from quire.executor.layers.step_context import StepContext
from quire.executor.models.transformers.absent_modules import leave_out_towers
from quire.executor.models.transformers.adapted_rows import adapters_of, check_rows
from quire.executor.models.transformers.checkpoint import ModuleWeights, fill
from quire.executor.models.transformers.encoder_head import EncoderHead, keep_precision
from quire.executor.models.transformers.encoder_probe import EncoderPlan, explore
from quire.executor.models.transformers.probe import run_backbone, set_attention, sizes_of
from quire.executor.models.transformers.replacement import LayerReplacement, transposed_weights
from quire.executor.models.transformers.sequence_attention import AttentionOfSequences
from quire.executor.models.transformers.skeleton import first_tensor, takes

logger = get_logger(__name__)

_NUM_TOKENS = (9, 8)
"""The tokens of the sequences that are computed when a model is loaded, to see what its code does."""
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 0.1  # for 16-bit dtypes


def build_encoder(spec: ModelSpec, model: PreTrainedModel, context: ModelContext) -> "TransformersEncoder":
    """Builds the encoder of `spec` with its weights loaded; `model` is its class without memory.

    Raises:
        ModelLoadError: its code does not run without a cache, or its labels follow from more than one vector of a text.
    """
    plan = explore(spec, model, context)
    weights = ModuleWeights(context.weights, model, transposed_weights(model, plan.splits))
    leave_out_towers(model, plan.findings.called)
    own = replace(context, weights=weights)
    names = {module: name for name, module in model.named_modules()}
    source = names[plan.source]
    LayerReplacement(model, own, plan.findings, plan.splits, kept=plan.head).run()
    for module in plan.head:
        keep_precision(model, own, module, names[module])
    fill(model, weights, context.device)
    built = TransformersEncoder(spec, model, plan, model.get_submodule(source), own)
    if context.device.type != "meta":
        built.check()
    return built


class TransformersEncoder:
    """An encoder of Transformers on one rank. Implements `quire.executor.models.base.Model`.

    Sequences run together, one after the other in one row of the class's code, if its attention is ours and nothing
    else mixes tokens; otherwise each alone.

    Attributes:
        classify: maps pooled vectors, or hidden states of tokens, [n, hidden] float32 to logits [n, num_labels]. Only
            classes with labels have it.
        label_poolings: the poolings whose vector the labels of a text follow from; empty: they are those of tokens, or
            unknown before weights are read.
    """

    kv_layers: Sequence[AttentionKV] = ()
    state_layers: Sequence[LayerState] = ()
    num_layer_outputs = 0

    def __init__(
        self, spec: ModelSpec, model: PreTrainedModel, plan: EncoderPlan, source: nn.Module, context: ModelContext
    ) -> None:
        self._name, self._architecture = spec.name, spec.architecture
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size
        self._model = model
        self._base = model.base_model
        self._context = context
        self._plan = plan
        self._special = _special_tokens(model.config, spec.vocab_size).to(context.device)
        self._head = EncoderHead(
            model, source, plan.output, context.adapters, keeps_states=plan.needs_whole_class
        )  # fmt: skip
        self._attention: AttentionOfSequences | None = None
        self._tokens_at_once = 0  # each sequence alone
        self.label_poolings: Sequence[SequencePooling] = ()
        if plan.has_labels:
            self.classify = self._head
        outputs = sum(sizes_of(linear)[1] for linear, _ in plan.findings.inputs)
        self.activation_size = 2 * outputs // max(1, spec.num_layers)
        if not plan.is_flat:
            self.activation_size += spec.num_attention_heads * context.max_model_len  # scores of the class's attention
            return
        self._attention = AttentionOfSequences(context, plan.findings.calls)
        self._tokens_at_once = max(spec.max_position_embeddings, context.max_model_len)
        name = f"quire-{id(self._attention)}"
        AttentionInterface.register(name, self._attention)
        weakref.finalize(self, AttentionInterface._global_mapping.pop, name)
        set_attention(model, name)

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Computes the hidden states of all tokens, [num_tokens, hidden]."""
        lengths = np.asarray(step.sequences.query_lens)
        parts, start, place = [], 0, self._context.adapters
        for group in self._groups(lengths):
            stop = start + int(group.sum())
            part = step if len(group) == len(lengths) else self._part(step, slice(start, stop), group)
            if place is not None:
                place.enter_part(start, stop - start)
            parts.append(self._run(token_ids[start:stop], part))
            start = stop
        if place is not None:
            place.leave_part()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores the vocabulary at each token, for classes with such a head."""
        assert self._plan.scores_vocabulary, "the class has no scores of the vocabulary"
        return self._head(hidden)[:, : self._vocab_size]

    def check(self) -> None:
        """Compares sequences together and alone, and labels with those of the class's own code.

        Raises:
            ModelLoadError: no vector of a text gives the class's labels.
        """
        with torch.inference_mode():
            first, second = (self._tokens(count) for count in _NUM_TOKENS)
            if self._context.adapters is not None:
                self._check_adapters(self._context.adapters, torch.cat((first, second)))
            second[: len(self._special)] = self._special[: len(second)]
            states = self._alone(first)
            if len(states) != len(first):
                raise ModelLoadError(
                    f"{self._name}: {self._architecture} has hidden states for {len(states)} of {len(first)} tokens, "
                    "and not one for each, which is not supported."
                )
            if self._tokens_at_once:
                expected = torch.cat((states, self._alone(second)))
                got = self.forward(torch.cat((first, second)), self._step([*_NUM_TOKENS]))
                if not self._is_close(got, expected):
                    self._tokens_at_once = 0
                    logger.info("%s: its tokens depend on other sequences beside them", self._architecture)
            if not self._tokens_at_once:
                logger.info("%s runs sequence by sequence, slowly in large batches", self._architecture)
            if self._plan.labels_sequences:
                self._check_labels(states.float(), self._own_logits(first).float())
            elif self._plan.has_labels or self._plan.scores_vocabulary:
                self._check_scores(states, self._own_logits(first)[0])

    def _check_labels(self, states: Tensor, expected: Tensor) -> None:
        vectors: dict[SequencePooling, Tensor] = {
            "CLS": states[:1], "LAST": states[-1:], "MEAN": states.mean(0, keepdim=True)
        }  # fmt: skip
        self.label_poolings = [name for name, vector in vectors.items() if self._is_close(self._head(vector), expected)]
        if not self.label_poolings:
            raise ModelLoadError(
                f"{self._name}: the labels of {self._architecture} follow from other states than the first token's, "
                "the last one's or the mean, which is not supported. Serve it with --convert embed."
            )

    def _check_scores(self, states: Tensor, expected: Tensor) -> None:
        states = states.float() if self._plan.has_labels else states
        if not self._is_close(self._head(states), expected):
            raise ModelLoadError(
                f"{self._name}: what {self._architecture} says of a token follows from other states than the "
                "token's, which is not supported."
            )

    def _own_logits(self, token_ids: Tensor) -> Tensor:
        """Computes the logits of a sequence by the class's code alone."""
        step = self._step([len(token_ids)])
        with contextlib.nullcontext() if self._attention is None else self._attention.in_step(step):
            return self._model(input_ids=token_ids.unsqueeze(0)).logits

    def _run(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Computes `_states`; NaN, which fails a request, where the class's code cannot run a sequence alone."""
        if self._tokens_at_once:
            return self._states(token_ids, step)
        try:
            return self._states(token_ids, step)
        except Exception as error:  # the code of a model may raise anything, for too short a text for example
            logger.error("%s cannot compute a sequence of %d tokens: %s", self._architecture, len(token_ids), error)
            nothing = torch.full((len(token_ids), self._hidden_size), torch.nan, dtype=self._context.dtype)
            return nothing.to(self._context.device)

    def _check_adapters(self, place: Adapters, token_ids: Tensor) -> None:
        """Lets layers of the head take no adapters, nor those that see other rows than tokens; see `check_rows`."""
        step, behind = self._step([*_NUM_TOKENS]), set(self._model.modules()) - set(self._base.modules())
        place.leave_out(adapters_of(behind | self._plan.head))

        def run() -> None:
            self.forward(token_ids, step)

        check_rows(place, self._base.modules(), len(token_ids), run)

    def _states(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Runs the class's code on tokens of one sequence, or of several if they run together."""
        arguments = {}
        entry = self._model if self._plan.needs_whole_class else self._base
        if step.token_types is not None and takes(entry, "token_type_ids"):
            arguments["token_type_ids"] = step.token_types.unsqueeze(0)
        ids = token_ids.unsqueeze(0)
        if self._attention is not None:
            with self._attention.in_step(step):
                return first_tensor(run_backbone(self._base, ids, step.positions.unsqueeze(0), **arguments))[0]
        output = run_backbone(entry, ids, None, **arguments)
        if entry is self._base:
            return first_tensor(output)[0]
        return self._head.take_states()[0]

    def _groups(self, lengths: np.ndarray) -> Iterator[np.ndarray]:
        """Divides a step's sequences into those that run together: tokens of a table of positions, or one sequence."""
        start, total = 0, 0
        for index, length in enumerate(lengths.tolist()):
            if index > start and total + length > self._tokens_at_once:
                yield lengths[start:index]
                start, total = index, 0
            total += length
        yield lengths[start:]

    def _part(self, step: StepContext, tokens: slice, lengths: np.ndarray) -> StepContext:
        types = None if step.token_types is None else step.token_types[tokens]
        return self._context_of(step.positions[tokens], lengths, types)

    def _context_of(self, positions: Tensor, lengths: np.ndarray, token_types: Tensor | None = None) -> StepContext:
        sequences = self._context.ops.sequence_batch(lengths, self._context.device)
        return StepContext(positions, [], [], sequences=sequences, token_types=token_types)

    def _step(self, lengths: list[int]) -> StepContext:
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self._context.device)
        return self._context_of(positions, np.array(lengths))

    def _alone(self, token_ids: Tensor) -> Tensor:
        return self._states(token_ids, self._step([len(token_ids)]))

    def _tokens(self, count: int) -> Tensor:
        """Returns ids far from those of special tokens, which some classes treat differently."""
        return torch.arange(1, count + 1, device=self._context.device) * self._vocab_size // (count + 2)

    def _is_close(self, got: Tensor, expected: Tensor) -> bool:
        """Compares by the norm. States that are not finite prove nothing."""
        if not bool(expected.isfinite().all()):
            return True
        difference = float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6))
        return difference <= _TOLERANCES.get(self._context.dtype, _TOLERANCE)


def _special_tokens(config: PretrainedConfig, vocab_size: int) -> Tensor:
    """Returns the ids of tokens that a class's code may count or leave out, [num_tokens] int64."""
    names = ("mask_token_id", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id")
    found = [getattr(config, name, None) for name in names]
    return torch.tensor([each for each in found if type(each) is int and 0 <= each < vocab_size], dtype=torch.int64)
