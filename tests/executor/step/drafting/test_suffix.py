"""Suffix decoding: the drafts that the counts of what followed make likely."""

import numpy as np
import pytest
import torch

from quire.core.config.speculative import Speculation
from quire.core.wire.protocol import NewSlot
from quire.core.wire.sampling_params import SamplingParams
from quire.executor.step.drafting.suffix import Suffix
from quire.executor.step.request_table import RequestTable


def suffix(**options: float) -> Suffix:
    table = RequestTable(4, 256, 16, torch.device("cpu"))
    return Suffix(Speculation(method="suffix", num_tokens=16, **options), table)


def drafts_after(known: list[int], history: list[list[int]], **options: float) -> list[int]:
    drafter = suffix(**options)
    for number, tokens in enumerate(history):
        request = NewSlot(number % 4, tokens[:1], 1, [[1]], SamplingParams())
        drafter._table.admit(request)
        drafter.admit(request)
        drafter._table.token_ids[number % 4, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        drafter._num_known[number % 4] = len(tokens)
        drafter.release([number % 4])
    return drafter._draft(np.array(known), 16)


@pytest.mark.parametrize(
    ("known", "history", "options", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [], {}, [7, 8]),  # as many as are equal
        ([5, 6, 7, 8, 9, 5, 6], [], {"max_spec_factor": 2.0}, [7, 8, 9, 5]),
        ([5, 6, 7, 8, 9, 5, 6], [], {"max_spec_factor": 2.0, "max_tree_depth": 4}, [7, 8, 9]),
        ([1, 2, 3], [[0, 1, 2, 3, 4, 5, 6, 7]], {}, [4, 5, 6]),  # of another request's answer
        ([1, 2, 3], [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 1, 2, 3, 8, 9]], {}, [4, 5]),  # the most frequent
        ([1, 2, 3], [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 8, 9]], {"min_token_prob": 0.6}, []),  # none is likely enough
        ([1, 2, 3], [[0, 1, 2, 3, 4, 5]], {"max_cached_requests": 0}, []),
        ([1, 2, 3, 9, 1, 2, 3], [[0, 7, 2, 3, 4, 5, 6]], {}, [9, 1, 2]),  # the request's own text is equal for longer
        ([1], [[0, 1, 2]], {}, []),
    ],
)
def test_drafts_are_what_mostly_followed(
    known: list[int], history: list[list[int]], options: dict[str, float], expected: list[int]
) -> None:
    assert drafts_after(known, history, **options) == expected
