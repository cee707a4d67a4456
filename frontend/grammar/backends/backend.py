"""What a grammar library must do to compile constraints, and how compiling fails."""

from typing import Protocol

from quire.frontend.grammar.constraint import Constraint


class GrammarError(Exception):
    """This library cannot do what is asked. The message names the keyword or the place."""


class Backend(Protocol):
    """One library, set up for one vocabulary."""

    def compile(self, constraint: Constraint) -> bytes:
        """What the worker's loader of the same name reads.

        Raises:
            GrammarError: it cannot be done, or is wrong.
        """
