"""The parser of command lines, where vLLM's programs import it."""

from quire.frontend.flags.programs import ProgramParser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
