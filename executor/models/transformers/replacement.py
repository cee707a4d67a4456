"""Replaces layers of a Transformers model by ours."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.executor.layers.attention.expansion import LatentExpansion
from quire.executor.layers.context import ModelContext
from quire.executor.layers.linear import ColumnLinear, GatedLinear, RowLinear
from quire.executor.layers.vocabulary import VocabularyWeight
from quire.executor.models.transformers import layer_modules
from quire.executor.models.transformers.experts import load_experts, read_experts
from quire.executor.models.transformers.matching import (
    GatedForm,
    NormForm,
    read_activation,
    read_gated,
    read_norm,
    read_plain_norm,
)
from quire.executor.models.transformers.probe import Findings, is_linear, sizes_of
from quire.executor.models.transformers.splits import Split
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard


@dataclass(frozen=True)
class LayerReplacement:
    """Replaces one model's layers; `context` reads their weights under the modules' names. Those in `kept` stay."""

    model: PreTrainedModel
    context: ModelContext
    findings: Findings
    splits: Mapping[nn.Module, Split]
    kept: Collection[nn.Module] = ()

    def run(self) -> dict[nn.Module, layer_modules.Expansion]:
        """Replaces all layers that have a counterpart. Others stay, with their parameters on the meta device.

        Returns the replacements of the layers that expand latents into keys and values.
        """
        names = {module: name for name, module in self.model.named_modules()}
        routers = self._replace_experts(names)
        expansions = self._replace_expansions(names)
        self._replace_ends(names)
        self._replace_layers(names, routers)
        return expansions

    def replace_layers(self) -> None:
        """Replaces linear layers, gated networks, norms and activations, and neither experts nor embedding and head."""
        self._replace_layers({module: name for name, module in self.model.named_modules()}, ())

    def _replace_layers(self, names: Mapping[nn.Module, str], routers: Collection[nn.Module]) -> None:
        self._replace_gated(names)
        self._replace_fused(names)
        for name, module in list(self.model.named_modules()):
            if module in self.kept or module in routers:
                continue  # the weights of a router are read unchanged, see `routing.py`
            if module in self.splits and is_linear(module) and name:
                self._put(name, self._linear(name, module))
            elif name and (form := read_norm(module)) is not None:
                self._put(name, self._norm(name, module, form))
            elif name and (eps := read_plain_norm(module)) is not None:
                self._put(name, layer_modules.PlainNorm(module, eps))
            elif (
                name
                and not isinstance(module, layer_modules.LayerModule)
                and (activation := read_activation(module)) is not None
            ):
                self._put(name, layer_modules.Activation(module, activation))

    def _norm(self, name: str, module: nn.Module, form: NormForm) -> nn.Module:
        shape = tuple(module.get_parameter("weight").shape)
        weight = self.context.read(f"{name}.weight", shape)
        # In place, on a copy: in a dry build, an out-of-place sum imports torch's compiler.
        weight = weight.to(torch.float32, copy=True).add_(1) if form.is_offset else weight
        if not form.is_centred:
            return layer_modules.RMSNorm(self.context.ops, weight, form.eps)
        bias = self.context.read(f"{name}.bias", shape) if module._parameters.get("bias") is not None else None
        return layer_modules.LayerNorm(
            self.context.ops, weight, bias if bias is None else bias.to(weight.dtype), form.eps
        )

    def _put(self, name: str, part: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        self.model.get_submodule(parent)._modules[child] = part

    # ------------------------------------------------------------------------------------------------- experts

    def _replace_experts(self, names: Mapping[nn.Module, str]) -> set[nn.Module]:
        """Replaces the experts of mixtures. Returns the linear layers in the same blocks that may be their routers."""
        routers = set()
        for module, top_k in self.findings.top_k.items():
            form = read_experts(module, self.context.ops)
            if form is None:
                continue
            experts = load_experts(self.context, names[module], form, top_k)
            num_experts = form.shape.num_experts
            self._put(names[module], layer_modules.Experts(self.context, experts, num_experts))
            block = self.model.get_submodule(names[module].rpartition(".")[0])
            routers |= {each for each in block.modules() if is_linear(each) and sizes_of(each)[1] == num_experts}
        return routers

    # ------------------------------------------------------------------------------------------------- latents

    def _replace_expansions(self, names: Mapping[nn.Module, str]) -> dict[nn.Module, layer_modules.Expansion]:
        """Replaces the layers that expand latents into keys and values."""
        replaced: dict[nn.Module, layer_modules.Expansion] = {}
        for call in self.findings.calls:
            if call.expansion is None or call.expansion.linear in replaced:
                continue
            linear, nope_head_dim = call.expansion
            rank, num_outputs = sizes_of(linear)
            split = self.splits[linear]
            shard = split.shard if split.style == "column" else Shard(0, 0, num_outputs)
            latent = LatentExpansion.read(
                self.context, LinearPart(names[linear], num_outputs, shard), rank, nope_head_dim, call.value_dim
            )
            replaced[linear] = layer_modules.Expansion(latent, call.key_dim - nope_head_dim)
            self._put(names[linear], replaced[linear])
        return replaced

    # ---------------------------------------------------------------------------------------------- vocabulary

    def _replace_ends(self, names: Mapping[nn.Module, str]) -> None:
        """Replaces the token embedding and the head."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        table = f"{names[embedding]}.weight" if embedding in names else None
        has_head = type(head) is nn.Linear and head not in self.findings.raw
        is_tied = has_head and table is not None and self.context.weights.are_same(f"{names[head]}.weight", table)
        rows = None
        if table is not None and (scale := _embedding_scale(embedding)) is not None:
            shape = embedding.get_parameter("weight").shape
            rows, start = self._vocabulary_rows(table, shape)
            adapters = VocabularyWeight(self.context, table, *shape, is_shared=is_tied).table_adapters(scale)
            self._put(names[embedding], layer_modules.Embedding(self.context, rows, start, scale, adapters))
        if has_head:
            name = names[head]
            source = f"{name}.weight"
            tied = rows if is_tied else None
            adapters = VocabularyWeight(
                self.context,
                table if is_tied and table is not None else source,
                *head.weight.shape,
                bias=None if head.bias is None else f"{name}.bias",
                is_shared=is_tied,
            ).head_adapters()

            def read() -> tuple[Tensor, Tensor | None]:
                weight = self._vocabulary_rows(source, head.weight.shape)[0] if tied is None else tied
                bias = None if head.bias is None else self._vocabulary_rows(f"{name}.bias", head.bias.shape)[0]
                return weight, bias

            self._put(name, layer_modules.Head(self.context, read, head.out_features, adapters))

    def _vocabulary_rows(self, name: str, shape: torch.Size) -> tuple[Tensor, int]:
        """Returns this rank's rows and the index of the first. All ranks have equally many; past the end they are
        zeros.
        """
        group = self.context.group
        count = -(-shape[0] // group.size)
        start = min(group.rank * count, shape[0])
        rows = self.context.read(name, tuple(shape), Shard(0, start, min(start + count, shape[0])))
        return layer_modules.padded(rows, count), start

    # ------------------------------------------------------------------------------------------- linear layers

    def _replace_gated(self, names: Mapping[nn.Module, str]) -> None:
        order: dict[str, list[tuple[str, nn.Module]]] = {}
        for module, _ in self.findings.inputs:
            parent, _, child = names[module].rpartition(".")
            order.setdefault(parent, []).append((child, module))
        for parent, called in order.items():
            layers = dict(called)
            network = self.model.get_submodule(parent)
            weighty = {part for part in network.modules() if any(True for _ in part.parameters(recurse=False))}
            is_whole = weighty == set(layers.values()) <= set(self.splits) and all(map(_is_plain, weighty))
            if is_whole and len(layers) == len(called) in (2, 3):
                form = read_gated(network, list(layers))
                if form is not None and self._fits(layers, form):
                    self._put(parent, self._gated(parent, layers, form))

    def _fits(self, layers: Mapping[str, nn.Module], form: GatedForm) -> bool:
        """Returns True if a network's outputs are as wide as its inputs, and ranks can divide what is between."""
        size, width = sizes_of(layers[form.down])
        return sizes_of(layers[form.gate])[0] == width and size % self.context.group.size == 0

    def _gated(self, name: str, layers: Mapping[str, nn.Module], form: GatedForm) -> layer_modules.MLP:
        gate, up, down = (layers[each] for each in (form.gate, form.up, form.down))
        size, width = sizes_of(down)
        own = self.context.shard(0, size, "intermediate (feed-forward) dimensions")
        starts = (0, 0) if gate is not up else (0, size) if form.is_gate_first else (size, 0)
        gate_part, up_part = (
            LinearPart(f"{name}.{each}", sizes_of(layers[each])[1], Shard(0, start + own.start, start + own.stop))
            for each, start in zip((form.gate, form.up), starts, strict=True)
        )
        gate_up = GatedLinear(
            self.context, gate_part, up_part, width, form.activation, bias=gate.bias is not None
        )  # fmt: skip
        down_shard = Shard(1, own.start, own.stop)
        return layer_modules.MLP(
            gate_up, RowLinear(self.context, f"{name}.{form.down}", size, width, down_shard, bias=down.bias is not None)
        )

    def _replace_fused(self, names: Mapping[nn.Module, str]) -> None:
        """Fuses linear layers of one module that read the same tensor."""
        groups: dict[tuple[str, int, bool], list[nn.Module]] = {}
        for module, x in self.findings.inputs:
            is_current = module in self.splits and self.model.get_submodule(names[module].rpartition(".")[0])
            if (
                is_current
                and self.splits[module].style in ("whole", "column")
                and _is_there(self.model, names[module], module)
            ):
                parent = names[module].rpartition(".")[0]
                groups.setdefault((parent, id(x), module.bias is not None), []).append(module)
        for (_, _, has_bias), members in groups.items():
            if len(members) < 2 or len(set(members)) < len(members):
                continue
            column_parts = [LinearPart(names[each], sizes_of(each)[1], self.splits[each].shard) for each in members]
            layer = ColumnLinear(self.context, column_parts, sizes_of(members[0])[0], bias=has_bias)
            fused = layer_modules.FusedLinear(layer, [part.shard.stop - part.shard.start for part in column_parts])
            for index, each in enumerate(members):
                self._put(names[each], layer_modules.FusedPart(fused, index))

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        num_inputs, num_outputs = sizes_of(module)
        style, shard = self.splits[module]
        has_bias = module.bias is not None
        if style in ("row", "split_input"):
            row = RowLinear(self.context, name, num_inputs, num_outputs, shard, bias=has_bias)
            if style == "split_input":
                return layer_modules.SplitInputLinear(row, shard.start, shard.stop)
            return layer_modules.Linear(row, shard.stop - shard.start, num_outputs)
        column = ColumnLinear(self.context, [LinearPart(name, num_outputs, shard)], num_inputs, bias=has_bias)
        if style == "gather":
            return layer_modules.GatheredLinear(self.context, column)
        return layer_modules.Linear(column, num_inputs, shard.stop - shard.start)


def transposed_weights(model: nn.Module, splits: Mapping[nn.Module, Split]) -> list[str]:
    """Lists the weights that Transformers stores as [in, out], of layers that are replaced."""
    return [f"{name}.weight" for name, module in model.named_modules() if type(module) is Conv1D and module in splits]


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _is_there(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Returns True if the module and its parents have not been replaced."""
    try:
        return model.get_submodule(name) is module
    except AttributeError:
        return False


def _embedding_scale(embedding: nn.Module) -> float | None:
    """Returns the factor by which an embedding multiplies its rows; None if it does something else."""
    if type(embedding) is nn.Embedding:
        return 1.0
    if not isinstance(embedding, nn.Embedding) or len(list(embedding.parameters())) != 1:
        return None
    small = nn.Embedding(3, embedding.embedding_dim)
    twin = embedding.__new__(type(embedding))
    twin.__dict__ = {**embedding.__dict__, "_parameters": {"weight": small.weight.detach()}}
    try:
        factors = twin(torch.tensor([1, 2])) / small(torch.tensor([1, 2]))
    except Exception:  # a subclass whose code needs more than token ids
        return None
    factor = factors.flatten()[0].item()
    return factor if torch.allclose(factors, torch.full_like(factors, factor)) else None
