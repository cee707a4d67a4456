"""A dry run of an encoder's class: whether sequences may run together, and where its head begins."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.context import ModelContext
from quire.executor.models.transformers.attention import form_of
from quire.executor.models.transformers.probe import Findings, probe, run_backbone, runnable
from quire.executor.models.transformers.skeleton import first_tensor
from quire.executor.models.transformers.splits import Split, choose_splits, local_outputs

logger = get_logger(__name__)

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
_OVER_VOCABULARY = ("ForMaskedLM", "WithLMHeadModel")
_DRY_TOKENS = torch.tensor([[5, 9, 6, 8, 4, 7, 3, 10]])


@dataclass(frozen=True)
class EncoderPlan:
    """What the dry run found.

    Attributes:
        is_flat: the class calls our attention, and tokens meet nowhere else, so that sequences run together.
        source: the module whose output are the hidden states, and which the head follows.
        output: of that module.
        head: the modules behind it, of a class with labels.
        labels_sequences: the class has labels of a sequence.
        has_labels: or of each token.
        scores_vocabulary: or scores of the vocabulary at each token.
    """

    findings: Findings
    splits: Mapping[nn.Module, Split]
    is_flat: bool
    source: nn.Module
    output: Any
    head: frozenset[nn.Module]
    labels_sequences: bool
    has_labels: bool
    scores_vocabulary: bool

    @property
    def needs_whole_class(self) -> bool:
        """Returns True if the whole class has to run: it may pass its base arguments that its head depends on."""
        return self.has_labels and not self.is_flat


@dataclass(frozen=True)
class _Run:
    """One run of a class's code on one sequence: the results of the base and of its modules, in order."""

    findings: Findings
    output: Any
    results: list[tuple[nn.Module, Any]]


def explore(spec: ModelSpec, model: PreTrainedModel, context: ModelContext) -> EncoderPlan:
    """Runs the class of `spec`, whose parameters are on the meta device, and restores it.

    Raises:
        ModelLoadError: it does not run without a cache, or its head reads other states than the last ones.
    """
    labels_sequences = spec.architecture.endswith(_OF_SEQUENCES)
    has_labels = labels_sequences or spec.architecture.endswith(_OF_TOKENS)
    scores_vocabulary = spec.architecture.endswith(_OVER_VOCABULARY)
    try:
        run = _run_alone(model)
        read_whole = _read_by_head(model) if scores_vocabulary else set()
        source, output, later = _source(model, run)
    except Exception as error:  # the code of a model may raise anything
        text = str(error) if isinstance(error, ModelLoadError) else f"its code raises {type(error).__name__}: {error}"
        raise ModelLoadError(
            f"{spec.architecture} of {spec.name}: its class of Transformers does not run as an encoder: {text}. A "
            "class that you register with quire.register_model may serve it."
        ) from error
    head: frozenset[nn.Module] = frozenset()
    if has_labels:
        head = frozenset(set(model.modules()) - set(model.base_model.modules()) - {model}) | later
    findings = _probe_together(model, {})
    for found in filter(None, (findings, run.findings)):
        found.raw |= read_whole
    splits = choose_splits(model, findings or run.findings, context, with_plan=findings is not None)
    if findings is not None and context.group.size > 1:
        findings = _probe_together(model, local_outputs(splits))
        if findings is None:  # the class's code depends on whole projections
            findings = _probe_together(model, {})
            splits = choose_splits(model, findings or run.findings, context, with_plan=False)
    return EncoderPlan(
        findings=findings or run.findings,
        splits={module: split for module, split in splits.items() if module not in head},
        is_flat=findings is not None,
        source=source,
        output=output,
        head=head,
        labels_sequences=labels_sequences,
        has_labels=has_labels,
        scores_vocabulary=scores_vocabulary,
    )


def _probe_together(model: PreTrainedModel, outputs: Mapping[nn.Module, int]) -> Findings | None:
    """Returns the findings of a run with our attention; None if sequences cannot run together."""
    try:
        findings = probe(model, outputs, encoder=model.base_model)
        for call in findings.calls:
            form_of(call, is_encoder=True)
    except Exception as obstacle:  # the code of a model may raise anything
        logger.debug("%s runs sequence by sequence: %s", type(model).__name__, obstacle)
        return None
    if not findings.calls or findings.mixes_tokens:
        return None
    return findings


def _run_alone(model: PreTrainedModel) -> _Run:
    findings = Findings(is_encoder=True, backbone=model.base_model)
    results: list[tuple[nn.Module, Any]] = []
    with runnable(model, findings, {}, is_flat=False), contextlib.ExitStack() as undo:
        for module in model.base_model.modules():
            if module is not model.base_model:
                hook = module.register_forward_hook(lambda part, _, out: results.append((part, out)))
                undo.callback(hook.remove)
        output = run_backbone(model.base_model, _DRY_TOKENS, None)
    return _Run(findings, output, results)


def _read_by_head(model: PreTrainedModel) -> set[nn.Module]:
    """Returns the linear layers whose weight the code of the whole class reads itself."""
    findings = Findings(is_encoder=True)
    with runnable(model, findings, {}, is_flat=False):
        model(input_ids=_DRY_TOKENS)
    return findings.raw


def _source(model: PreTrainedModel, run: _Run) -> tuple[nn.Module, Any, frozenset[nn.Module]]:
    """Returns the module that the head follows, its output, and the modules of the base that ran later.

    It is the base, unless that makes more of the hidden states, such as a pooled vector.
    """
    base = model.base_model
    if base is model or getattr(run.output, "pooler_output", None) is None:
        return base, run.output, frozenset()
    states = first_tensor(run.output)
    places = [index for index, (_, out) in enumerate(run.results) if _is_made_of(out, states)]
    if not places:
        raise ModelLoadError("its head reads more than the last hidden states")
    source, output = run.results[places[-1]]
    later = {module for module, _ in run.results[places[-1] + 1 :] if source not in set(module.modules())}
    return source, output, frozenset(later - {module for module, _ in run.results[: places[-1] + 1]})


def _is_made_of(output: Any, states: Tensor) -> bool:
    try:
        return first_tensor(output) is states
    except (IndexError, KeyError, TypeError):  # the module returns no tensor
        return False
