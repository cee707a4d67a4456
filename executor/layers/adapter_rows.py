"""Rows of an embedding or a head that an adapter replaces, as low-rank weights: one more rank for each row."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ModelLoadError
from quire.executor.layers.adapters import AdapterWeight, BaseLayer
from quire.executor.weights.peft.config import PeftConfig
from quire.executor.weights.peft.tensors import ModuleTensors


class NewRows(NamedTuple):
    """Rows that replace those of a weight.

    Attributes:
        numbers: [num_rows] int64.
        rows: [num_rows, size].
        key: the tensor's name in the adapter.
    """

    numbers: Tensor
    rows: Tensor
    key: str


def new_rows(tensors: ModuleTensors, base: BaseLayer) -> NewRows | None:
    """Returns the rows that a module's tensors replace: those of some tokens, or the changed ones of a whole weight.

    None if it replaces none. A whole weight must have the layer's shape.
    """
    if "tokens" in tensors.by_kind:
        rows, key = tensors.by_kind["tokens"], tensors.keys["tokens"]
        if len(rows) != len(tensors.token_ids):
            raise ModelLoadError(
                f"{key} has {len(rows)} rows, and adapter_config.json names {len(tensors.token_ids)} tokens for them "
                "(trainable_token_indices)."
            )
        return NewRows(torch.tensor(tensors.token_ids, dtype=torch.int64), rows, key)
    if "weight" not in tensors.by_kind:
        return None
    own, rows, key = (
        _rows_of(base, base.read_stored or base.read_weight),
        tensors.by_kind["weight"],
        tensors.keys["weight"],
    )
    if own.shape != rows.shape:
        raise ModelLoadError(
            f"{key} is {list(rows.shape)}, and the served model's weight is {list(own.shape)}. Rows of another number "
            "of tokens or labels cannot be served beside others; merge the adapter into its base model."
        )
    [numbers] = (rows.to(own.dtype) != own).any(1).nonzero(as_tuple=True)
    return NewRows(numbers, rows[numbers], key)


def with_rows(weight: AdapterWeight | None, new: NewRows, base: BaseLayer, most: int) -> AdapterWeight | None:
    """Returns a layer's `weight` with new rows besides; None: the layer stays as it is.

    Args:
        most: ranks of an adapter.

    Raises:
        ModelLoadError: the rows are too many, or no rows of the layer.
    """
    if not len(new.numbers):
        return weight
    own, num_others = _rows_of(base, base.read_weight), 0 if weight is None else len(weight.a)
    if len(new.numbers) + num_others > most:
        raise ModelLoadError(
            f"{new.key} replaces {len(new.numbers)} rows of {base.part.name}. Tokens with other adapters share its "
            f"product, so each new row takes a rank, and --max-lora-rank is {most}. Raise it, or merge the adapter "
            "into its base model."
        )
    if int(new.numbers.max()) >= len(own) or new.rows.shape[1] != own.shape[1]:
        raise ModelLoadError(f"{new.key} is {list(new.rows.shape)}; the weight has {len(own)} rows of {own.shape[1]}.")
    changes = new.rows.float() - own[new.numbers].float()
    places = F.one_hot(new.numbers, len(own)).float()
    a, b = (places, changes.T) if base.is_table else (changes, places.T)
    if weight is None:
        return AdapterWeight(a, b)
    return weight._replace(a=torch.cat([weight.a, a]), b=torch.cat([weight.b, b], dim=1))


def tied_weight(
    weight: AdapterWeight | None, tensors: ModuleTensors, base: BaseLayer, config: PeftConfig, most: int
) -> AdapterWeight | None:
    """Returns a head's `weight` with what `tensors` change in the embedding that shares its weight.

    PEFT keeps the two alike for new rows of tokens, and for all else with `ensure_weight_tying`. Errors are those of
    `with_rows`.
    """
    a, b = (tensors.by_kind.get(kind) for kind in ("embedding_a", "embedding_b"))
    if config.ensure_weight_tying and weight is None and a is not None and b is not None:
        weight = AdapterWeight(b.T.float(), a.T.float() * tensors.scale)
    new = new_rows(tensors, base) if config.ensure_weight_tying or "tokens" in tensors.by_kind else None
    return weight if new is None else with_rows(weight, new, base, most)


def _rows_of(base: BaseLayer, read: Callable[[], Tensor]) -> Tensor:
    """The layer's weight with a row for each input of a table, and for each output of other layers."""
    own = read().cpu()
    return own.T if base.is_table else own
