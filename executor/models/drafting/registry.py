"""Builds the layers that draft by a method."""

import importlib

from quire.core.config.resolved import DraftMethod, ModelSpec
from quire.executor.models.base import BlockDraftHeads, DraftHeads, LastStateHeads, ModelContext

_CLASSES: dict[DraftMethod, tuple[str, str]] = {
    "mtp": ("mtp", "TokenPredictor"),
    "eagle": ("eagle", "EagleHeads"),
    "eagle3": ("eagle", "Eagle3Heads"),
    "medusa": ("last_state", "MedusaHeads"),
    "mlp_speculator": ("last_state", "MLPSpeculator"),
    "dflash": ("dflash", "BlockHeads"),
}
"""Method → (module of this folder, class)."""


def build_drafting(spec: ModelSpec, context: ModelContext) -> DraftHeads | LastStateHeads | BlockDraftHeads:
    """Builds the layers with their weights, for the target whose ends `context` has.

    Raises:
        ModelLoadError: the checkpoint does not have such layers, or the target does not serve them.
    """
    assert spec.drafts_by is not None
    module, name = _CLASSES[spec.drafts_by]
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)(spec, context)
