"""Finds the layers of a model that the tensors of an adapter belong to."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapter_rows import new_rows, tied_weight, with_rows
from quire.executor.layers.adapters import Adapters, AdapterWeight, BaseLayer
from quire.executor.layers.expert_matching import ExpertMatching
from quire.executor.layers.module_names import ModuleNames
from quire.executor.weights.peft.tensors import ModuleTensors, PeftCheckpoint, is_of_media, plain_name


class MatchedAdapter(NamedTuple):
    """An adapter's weights for the layers of a rank.

    Attributes:
        weights: by the names of layers.
        left_over: tensors that belong to no layer here.
    """

    weights: dict[str, AdapterWeight]
    left_over: list[str]


def match_layers(checkpoint: PeftCheckpoint, place: Adapters) -> MatchedAdapter:
    """Finds the weights of each layer of `place` in an adapter.

    A layer of the base model that is several layers here, such as one for queries, keys and values, gives each its
    rows. A head that shares an embedding's weight has its new rows, unless the adapter has such for the head.

    Raises:
        ModelLoadError: a name fits several layers, or a module's tensors are incomplete or of the wrong shape.
    """
    layers = _layers_by_module(place, checkpoint.modules)
    experts = ExpertMatching(place, checkpoint.config)
    weights: dict[str, AdapterWeight] = {}
    replaced: set[str] = set()
    left_over: list[str] = []
    for module, tensors in checkpoint.modules.items():
        found = layers.get(module, {})
        taken: set[str] = set()
        for name, (base, outputs) in found.items():
            weight = _weight_of(tensors, base, outputs, taken)
            if weight is not None and base.meets_past and checkpoint.config.alora_invocation_tokens:
                raise ModelLoadError(
                    f"The activated adapter changes {module}, which attention multiplies with all of a sequence, and "
                    "it begins within the sequence. Train it without this layer."
                )
            if outputs is None and (new := new_rows(tensors, base)) is not None:
                taken.update(("weight", "tokens"))
                weight = with_rows(weight, new, base, base.most_ranks(place.limits))
                replaced.add(name)
            if weight is not None:
                weights[name] = weight
        if not found and (of_experts := experts.weights(tensors)):
            weights |= of_experts
            taken.update(tensors.keys)
        if not taken and is_of_media(module):
            raise ModelLoadError(
                f"The adapter changes {module}, a layer for images or sounds, where adapters change the language model "
                "alone. Train it without these layers (exclude_modules), or merge it into its base model."
            )
        left_over += [key for kind, key in tensors.keys.items() if kind not in taken]
    modules = ModuleNames(checkpoint.modules)
    for base in (base for layer in place.layers for base in layer.bases):
        name = base.part.name
        if base.shares is None or name in replaced:
            continue
        table = _only_name(plain_name(base.shares), modules)
        if table is not None:  # perhaps of an embedding in another stage
            tensors, most = checkpoint.modules[table], place.limits.max_rank
            changed = tied_weight(weights.get(name), tensors, base, checkpoint.config, most)
            if changed is not None:
                weights[name] = changed
    return MatchedAdapter(weights, left_over)


def _layers_by_module(
    place: Adapters, modules: Iterable[str]
) -> Mapping[str, dict[str, tuple[BaseLayer, Tensor | None]]]:
    """Returns the layers, by name, of each of an adapter's modules, with their rows in the module."""
    bases: dict[str, dict[str, tuple[BaseLayer, Tensor | None]]] = defaultdict(dict)
    for base in (base for layer in place.layers for base in layer.bases):
        stored = base.locate()
        own, outputs = (base.part.name, None) if stored is None else (stored.name, stored.outputs)
        bases[plain_name(own)][base.part.name] = base, outputs
    names = ModuleNames(bases)
    return {module: bases[name] for module in modules if (name := _only_name(module, names)) is not None}


def _only_name(module: str, names: ModuleNames) -> str | None:
    """Returns the name that is the same as the module's, or the only one that ends like it; None if there is none."""
    similar = [name for name in names.alike(module) if is_of_media(name) == is_of_media(module)]
    if len(similar) > 1:
        raise ModelLoadError(
            f"The adapter's module {module} may be {' or '.join(similar[:2])} of the model; its tensors' names are too "
            "short."
        )
    return similar[0] if similar else None


def _weight_of(
    tensors: ModuleTensors, base: BaseLayer, outputs: Tensor | None, taken: set[str]
) -> AdapterWeight | None:
    """Returns what a module's tensors mean for a layer, and notes which of their kinds were `taken`; None: nothing."""
    has = tensors.by_kind
    kinds = ("embedding_a", "embedding_b") if base.is_table else ("a", "b")
    a, b = (has.get(kind) for kind in kinds)
    if (a is None) != (b is None):
        [only] = [kind for kind in kinds if kind in has]
        raise ModelLoadError(f"The adapter has {tensors.keys[only]}, and not the other of the two.")
    of_outputs, of_inputs = _factors(tensors)
    if a is None or b is None:
        if not (has.keys() & {"factors"} or ("bias" in has and base.has_bias)):
            return None
        num_outputs = base.part.out_features if outputs is None else int(outputs.max()) + 1
        a, b = torch.zeros(0, base.in_features), torch.zeros(num_outputs, 0)
    if a.dim() != 2 or b.dim() != 2:
        return None
    taken.update(kind for kind in (*kinds, "b_bias", "factors") if kind in has)
    taken.update(("magnitude",) if not base.is_table else ())
    if base.has_bias and "bias" in has:
        taken.add("bias")
    added = has.get("b_bias")
    weight = AdapterWeight(
        a.float(),
        b.float() * tensors.scale,
        has.get("magnitude"),
        has.get("bias") if base.has_bias else None,
        None if added is None else added.float() * tensors.scale,
        of_outputs,
    )
    if outputs is not None:
        for kind in ("b", "magnitude", "bias", "b_bias", *(["factors"] if of_inputs is None else [])):
            if kind in has and len(has[kind]) <= int(outputs.max()):
                raise ModelLoadError(f"{tensors.keys[kind]} has {len(has[kind])} rows; the layer has more outputs.")
        rows = (None if each is None else each[outputs] for each in weight[1:])
        weight = AdapterWeight(weight.a, *rows)  # type: ignore[arg-type]
    return weight._replace(in_factors=of_inputs)


def _factors(tensors: ModuleTensors) -> tuple[Tensor | None, Tensor | None]:
    """Returns the factors of a module's outputs [out], and those of its inputs [in]; it has one of the two or none."""
    factors = tensors.by_kind.get("factors")
    if factors is None:
        return None, None
    if factors.dim() != 2 or 1 not in factors.shape:
        raise ModelLoadError(
            f"{tensors.keys['factors']} is {list(factors.shape)}; [outputs, 1] or [1, inputs] is needed."
        )
    return (factors[:, 0], None) if factors.shape[1] == 1 else (None, factors[0])
