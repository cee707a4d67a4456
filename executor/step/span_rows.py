"""The rows of attention in steps that compute prefix spans: each row has one span at most."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.wire.prefix_spans import PrefixSpan


@dataclass(frozen=True)
class SpanRows:
    """Rows of a step, cut where a further span begins.

    Attributes:
        sequences: [num_rows] int64; the rows of the step that these are parts of.
        query_lens: [num_rows] int64; new tokens of each.
        seq_lens: [num_rows] int64; tokens of the sequence up to each row's last.
        spans: [num_rows, 2] int64; see `Backend.attention_batch`.
    """

    sequences: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    spans: np.ndarray

    @classmethod
    def of(cls, query_lens: np.ndarray, seq_lens: np.ndarray, spans: Sequence[Sequence[PrefixSpan]]) -> "SpanRows":
        """Forms rows of the last `query_lens` tokens of sequences with `spans`; those without such tokens have none."""
        rows: list[tuple[int, int, int, PrefixSpan]] = []
        lengths = zip(query_lens.tolist(), seq_lens.tolist(), spans, strict=True)
        for sequence, (num_tokens, end, own) in enumerate(lengths):
            start = end - num_tokens
            met = [span for span in own if span[0] < end and start < span[1]] or [(0, 0)]
            ends = [*(begin for begin, _ in met[1:]), end]
            for span, until in zip(met, ends, strict=True):
                if until > start:
                    rows.append((sequence, until - start, until, span))
                start = until
        sequences, counts, untils, met_spans = zip(*rows, strict=True)
        return cls(*(np.array(column, np.int64) for column in (sequences, counts, untils, met_spans)))
