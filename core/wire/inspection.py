"""What a process that looks at a model without running it answers: one message, on its standard output."""

from msgspec import Struct

from quire.core.wire.kv_groups import KVGroupSpec


class RankPlan(Struct, array_like=True):
    """Bytes that one rank needs, and those of its device. `state_bytes` are for one sequence."""

    weights_bytes: int
    workspace_bytes: int
    state_bytes: int
    page_bytes: int
    total_bytes: int
    free_bytes: int


class LoadPlan(Struct, array_like=True, tag="planned"):
    """How a model would be loaded. Pages and length are those that every rank grants; 0 if the model does not fit."""

    is_native: bool  # else the model is Transformers' own class with our layers
    num_parameters: int  # of the whole model, as the checkpoint stores them
    ranks: list[RankPlan]
    kv_groups: list[KVGroupSpec]
    num_pages: int
    max_model_len: int
    obstacle: str | None = None  # why the model does not fit, and what would make it


class ShardsSaved(Struct, array_like=True, tag="saved"):
    """The files of all ranks together."""

    num_files: int
    num_bytes: int


class Refused(Struct, array_like=True, tag="refused"):
    """The user's mistake, in a sentence that says what to change."""

    message: str


InspectionAnswer = LoadPlan | ShardsSaved | Refused
