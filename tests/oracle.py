"""A class of drafts for tests: knows outputs, and is right most of the time."""

import os
import random
from pathlib import Path
from typing import Any

import msgspec

OUTPUTS = "ORACLE_OUTPUTS"
"""Names the file of the outputs: JSON, a list of [prompt, output]. A prompt may have several."""


class Oracle:
    """Proposes what follows in the output of each prompt, and wrong tokens among it."""

    share = 0.8  # of right drafts

    def __init__(self, config: Any) -> None:
        known = msgspec.json.decode(Path(os.environ[OUTPUTS]).read_bytes())
        self._outputs: dict[tuple[int, ...], list[list[int]]] = {}
        for prompt, output in known:
            self._outputs.setdefault(tuple(prompt), []).append(output)
        self._lengths = {len(prompt) for prompt in self._outputs}

    def propose(self, token_ids: list[list[int]], most: int) -> list[list[int]]:
        """Up to `most` drafts for each request."""
        return [self._drafts(known, most) for known in token_ids]

    def _drafts(self, known: list[int], most: int) -> list[int]:
        for length in self._lengths:
            outputs = self._outputs.get(tuple(known[:length]), [])
            output = next((each for each in outputs if each[: len(known) - length] == known[length:]), None)
            if output is not None:
                rng = random.Random(len(known))  # the same on all ranks
                following = output[len(known) - length :][:most]
                return [token if rng.random() < self.share else (token + 1) % 100 for token in following]
        return []


class Liar(Oracle):
    """Is never right."""

    share = 0.0


class Guesser:
    """Knows nothing, and proposes the newest token again and the next ids, which are seldom right."""

    def __init__(self, config: Any) -> None:
        pass

    def propose(self, token_ids: list[list[int]], most: int) -> list[list[int]]:
        """`most` drafts for each request."""
        return [[(known[-1] + place) % 100 for place in range(most)] for known in token_ids]
