"""The interface of a grammar library that compiles constraints, and its error."""

from typing import Protocol

from quire.frontend.grammar.constraint import Constraint


class GrammarError(Exception):
    """The library cannot compile the constraint. The message names the keyword or the place."""


class Backend(Protocol):
    """One library, set up for one vocabulary."""

    def compile(self, constraint: Constraint) -> bytes:
        """The compiled grammar, for the worker's loader of the same name.

        Raises:
            GrammarError: the library cannot compile the constraint, or the constraint is malformed.
        """
