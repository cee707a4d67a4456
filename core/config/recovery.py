"""Options: what follows the failure of an engine."""

from typing import Annotated

from msgspec import Meta, Struct

from quire.core.config.types import NotNegative, Positive


class RecoveryConfig(Struct, frozen=True, kw_only=True):
    """How often and how fast an engine that failed is started again."""

    max_restarts: Annotated[
        NotNegative | None,
        Meta(
            description="Restarts of an engine within --restart-window seconds. One more failure ends the server with "
            "the reason, for its supervisor to start it again. Unset: there is no such limit.",
        ),
    ] = None
    restart_window: Annotated[Positive, Meta(description="Seconds in which --max-restarts counts.")] = 600
    enable_warm_spare: Annotated[
        bool | None,
        Meta(
            description="Keep a spare engine process with its workers that has imported everything, so that a restart "
            "costs little more than loading the weights. It takes about 250 MiB of RAM, and as much for each worker. "
            "Unset: a server has one, unless its engines span hosts or share experts, and LLM has none.",
        ),
    ] = None
