"""Runs a Transformers class without its code: by traced programs that compute its hidden states and logits.

The programs are traced at the first step, because tracing runs a few steps of all ranks together. They are used if they
compute the same as the class's code; otherwise the code itself keeps running.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.core.logging import get_logger
from quire.executor.layers.adapters import without_tokens
from quire.executor.layers.context import ModelContext
from quire.executor.layers.step_context import StepContext
from quire.executor.models.base import Model
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.latents import fuse_latents
from quire.executor.models.transformers.programs.heads import fuse_heads
from quire.executor.models.transformers.programs.program import InStep, Program, Runner
from quire.executor.models.transformers.programs.rewriting import Rewriter, merge_projections, weigh_norms
from quire.executor.models.transformers.programs.rotation import Positions
from quire.executor.models.transformers.programs.routing import fuse_routers
from quire.executor.models.transformers.programs.tracing import RunPart, Untraceable, trace
from quire.executor.models.transformers.small_sequences import SmallSequences
from quire.executor.models.transformers.stages import StagePart
from quire.ops.backend import Backend

logger = get_logger(__name__)

_TRACED = (7, 12)
"""The two token counts with which a class's code is traced."""
_CHECKED: tuple[dict[int, int], ...] = ({0: 5, 1: 3}, {1: 5, 0: 3})
"""The tokens of the steps that compare programs and code."""
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 0.1  # for 16-bit dtypes, where the code rounds more often than the program


class CodeModel(Model, Protocol):
    """A model that runs a class's code."""

    def run_code(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Returns hidden states of all tokens, [num_tokens, hidden]."""
        ...

    def run_head(self, hidden: Tensor) -> Tensor:
        """Returns the logits [num_tokens, vocab] of hidden states."""
        ...


class TracedCode(Protocol):
    """A way to run a class's code for a trace."""

    def trace(self, token_ids: Tensor, step: StepContext, run_part: RunPart) -> Tensor:
        """Returns hidden states [num_tokens, hidden] of one sequence's first tokens; `run_part` runs some calls.

        Raises:
            Untraceable: the code does not run this way.
        """
        ...

    def replace_attention(self, program: Program, ops: Backend, device: torch.device) -> None:
        """Replaces the attention in the code by ours, unless that is done already.

        Raises:
            Untraceable: the attention has an unknown form.
        """
        ...


class EmbedTokens(InStep):
    """Embeds tokens [1, num_tokens], or takes the rows that a step provides."""

    def __init__(self, embed: nn.Module) -> None:
        self.embed = embed

    def __call__(self, step: StepContext, token_ids: Tensor) -> Tensor:
        embedded = self.embed(token_ids)
        if step.input_embeds is not None:
            embedded[0, step.input_embeds.places] = step.input_embeds.rows
        return embedded


class FastPath:
    """The programs of one model, traced from its code, which runs the model until then.

    Attributes:
        programs: for hidden states, and, in the last pipeline stage, for logits; None until the first step, and if
            there are none.
    """

    def __init__(
        self,
        model: CodeModel,
        code: TracedCode,
        embed: nn.Module,
        modules: Iterable[nn.Module],
        context: ModelContext,
        vocab_size: int,
        part: StagePart,
    ) -> None:
        """Takes a `model` that runs `code` in any step; `modules` are all of its modules, including `embed`."""
        self._model = model
        self._code = code
        self._embed = embed
        self._parts = [module for module in modules if isinstance(module, layer_modules.LayerModule)]
        self._context = context
        self._vocab_size = vocab_size
        self._part = part
        self._is_built = False
        self.programs: tuple[Runner, Runner | None] | None = None

    @torch.inference_mode()
    def _build(self) -> None:
        """Traces the programs, and keeps them if they compute the same as the code."""
        try:
            runner, logits = self._make()
            difference = self._difference(runner, logits)
        except Untraceable as error:
            logger.info("steps run the class's own code, and are not recorded: %s", error)
            return
        except Exception as error:  # a class's code may pass anything to our operations
            logger.info("steps run the class's own code: without it, %s is raised: %s", type(error).__name__, error)
            return
        if not difference <= _TOLERANCES.get(self._context.dtype, _TOLERANCE):  # NaN differs
            logger.info("steps run the class's own code: without it, logits differ by %.1e of their norm", difference)
            return
        self.programs = runner, logits

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor | None:
        """Returns hidden states [num_outputs, hidden] of the wanted tokens, or None if there is no program."""
        if not self._is_built:
            self._is_built = True
            with without_tokens(self._context.adapters):
                self._build()
        return None if self.programs is None else _hidden(self.programs[0], token_ids, step)

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Returns logits [num_tokens, vocab], or None if there is no program."""
        runner = None if self.programs is None else self.programs[1]
        return None if runner is None else runner.run([hidden], len(hidden))

    def _make(self) -> tuple[Runner, Runner | None]:
        ops = self._context.ops
        forward = trace(self._forward, _TRACED, self._parts)
        self._code.replace_attention(forward, ops, self._context.device)
        embeddings = [call for call in forward.calls if call.function is self._embed]
        if len(embeddings) != self._part.is_first:
            raise Untraceable("it reads the embeddings of tokens in its own way")
        for call in embeddings:
            call.function = EmbedTokens(self._embed)
        merge_projections(forward)
        weigh_norms(forward, ops, self._context.device)
        fuse_routers(forward, ops)
        positions = Positions.of(forward, self._context.max_model_len)
        fuse_heads(forward, ops, positions, self._context.device)
        fuse_latents(forward, ops, positions, self._context.device)
        hidden_size = forward.metas[forward.output].shape[-1]
        Rewriter(forward, ops).run()
        if not self._part.is_last:
            return Runner(forward, ops), None
        logits = trace(partial(self._head, hidden_size), _TRACED, self._parts)
        Rewriter(logits, ops).run()
        return Runner(forward, ops), Runner(logits, ops)

    def _forward(self, num_tokens: int) -> tuple[list[Tensor], Callable[[RunPart], Tensor]]:
        token_ids, step = self._sequences(1, num_tokens).step({0: num_tokens})

        return _inputs(token_ids, step), partial(self._code.trace, token_ids, step)

    def _head(self, hidden_size: int, num_tokens: int) -> tuple[list[Tensor], Callable[[RunPart], Tensor]]:
        hidden = torch.ones(num_tokens, hidden_size, dtype=self._context.dtype, device=self._context.device)
        return [hidden], lambda _: self._model.run_head(hidden)

    def _difference(self, runner: Runner, logits: Runner | None) -> float:
        """Measures how far a token's logits, or a stage's message, are from the code's, relative to their norm.

        The result is the maximum over steps of the median over tokens. A median, because rounding of router scores may
        give single tokens another expert.
        """
        num_rows, num_tokens = len(_CHECKED[0]), sum(max(step.values()) for step in _CHECKED)
        own, ours = (self._sequences(num_rows, num_tokens) for _ in range(2))
        differences = []
        for lengths in _CHECKED:
            expected = self._model.run_code(*own.step(lengths))
            token_ids, step = ours.step(lengths)
            got = _hidden(runner, token_ids, step)
            if logits is not None:
                expected, got = self._model.run_head(expected), logits.run([got], len(token_ids))
            expected, got = expected.float(), got.float()
            differences.append(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        return float(torch.stack(differences).max())

    def _sequences(self, num_rows: int, num_tokens: int) -> SmallSequences:
        return SmallSequences(self._model, self._part, self._context, self._vocab_size, num_rows, num_tokens)


def _hidden(runner: Runner, token_ids: Tensor, step: StepContext) -> Tensor:
    hidden = runner.run(_inputs(token_ids, step), len(token_ids), step)
    return hidden if step.wanted is None or runner.selects else hidden.index_select(0, step.wanted.tokens)


def _inputs(token_ids: Tensor, step: StepContext) -> list[Tensor]:
    """Returns the inputs of a program for hidden states."""
    received = [] if step.received is None else [step.received]
    return [token_ids, step.positions, *received]
