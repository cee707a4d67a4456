"""Engine options, where vLLM's programs import them."""

from quire.frontend.flags.programs import CommandLineOptions as AsyncEngineArgs
from quire.frontend.flags.programs import CommandLineOptions as EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
