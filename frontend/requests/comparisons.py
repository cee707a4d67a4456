"""Scores of two texts by their vectors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def cosine(first: "np.ndarray", second: "np.ndarray") -> float:
    """The cosine of two vectors; 0 where one has no length."""
    import numpy as np  # imported here, because most servers do without

    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def late_interaction(query: "np.ndarray", document: "np.ndarray") -> float:
    """ColBERT's score (MaxSim): for each of the query's token vectors, the largest product with one of the document's;
    their sum.

    Args:
        query, document: [num_tokens, width].
    """
    import numpy as np

    return float((query.astype(np.float32) @ document.astype(np.float32).T).max(axis=1).sum(dtype=np.float64))
