"""Splits the linear layers of a Transformers model over ranks (Megatron-LM, arXiv:1909.08053).

The class's own plan is used if there is one. Otherwise the query, key and value projections of attention are column
layers and its output is a row layer, if no weights lie between them. Other layers are computed in parts and gathered.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from quire.executor.layers.attention.grouped_query import kv_head_shard
from quire.executor.layers.context import ModelContext
from quire.executor.models.transformers.probe import AttentionCall, Findings, is_linear, sizes_of
from quire.executor.parallel.context.strategy import WHOLE
from quire.executor.weights.readers import Shard

Style = Literal["whole", "column", "row", "gather", "split_input"]
"""`gather`: every rank gets all outputs of a column layer. `split_input`: a row layer takes its part of whole inputs.
"""

_STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "rowwise_split_input": "split_input",
    "rowwise_rep": "split_input",
}


class Split(NamedTuple):
    """One layer's part on this rank: `shard` is of its weight [out, in]."""

    style: Style
    shard: Shard


def choose_splits(
    model: PreTrainedModel, findings: Findings, context: ModelContext, *, with_plan: bool = True
) -> dict[nn.Module, Split]:
    """Splits each plain linear layer except the head; without the plan, all layers are gathered.

    Raises:
        ModelLoadError: the number of ranks does not fit the heads.
    """
    styles = _planned(model) or _derived(findings) if with_plan else {}
    heads = {part: call for call in findings.calls for part in call.module.modules()}
    size = context.group.size
    splits = {}
    head = model.get_output_embeddings()  # the head is split by tokens
    for module in model.modules():
        if not is_linear(module) or module in findings.raw or module is head:
            continue
        num_inputs, num_outputs = sizes_of(module)
        style = styles.get(module, "gather" if size > 1 and num_outputs % size == 0 else "whole")
        if size == 1:
            style = "whole"
        if style in ("row", "split_input"):
            shard = context.shard(1, num_inputs, "inputs of a layer")
        elif style == "whole":
            shard = Shard(0, 0, num_outputs)
        elif style == "column" and module in heads:
            shard = _head_shard(context, heads[module], num_outputs)
        else:
            shard = context.shard(0, num_outputs, "outputs of a layer")
        splits[module] = Split(style, shard)
    return splits


def local_outputs(splits: Mapping[nn.Module, Split]) -> dict[nn.Module, int]:
    """Returns this rank's outputs of each column layer."""
    return {module: split.shard.stop - split.shard.start for module, split in splits.items() if split.style == "column"}


def _head_shard(context: ModelContext, call: AttentionCall, num_outputs: int) -> Shard:
    if call.expansion is None:
        context.sequences.check_heads(context.group.size, call.num_kv_heads)
    context = replace(context, sequences=WHOLE)  # these heads are not KV heads
    for num_heads, head_dim in (
        (call.num_heads, call.key_dim), (call.num_kv_heads, call.key_dim), (call.num_kv_heads, call.value_dim),
    ):  # fmt: skip
        if num_outputs == num_heads * head_dim:
            return kv_head_shard(context, num_heads, head_dim)
    return context.shard(0, num_outputs, "outputs of a layer")


def _planned(model: PreTrainedModel) -> dict[nn.Module, Style]:
    plan = model.tp_plan or {}
    styles = {}
    for name, module in model.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if is_linear(module) and plan.get(pattern) in _STYLES:
            styles[module] = _STYLES[plan[pattern]]
    return styles


def _derived(findings: Findings) -> dict[nn.Module, Style]:
    styles: dict[nn.Module, Style] = {}
    column: Style = "column"
    for call in findings.calls:
        weighty = [part for part in call.module.modules() if any(True for _ in part.parameters(recurse=False))]
        if not all(is_linear(part) for part in weighty) or len(weighty) != 4:
            continue
        *inputs, output = [part for part, _ in findings.inputs if part in weighty]
        if len(inputs) == 3 and sizes_of(output)[0] == call.num_heads * call.value_dim:
            styles.update(dict.fromkeys(inputs, column))
            styles[output] = "row"
    return styles
