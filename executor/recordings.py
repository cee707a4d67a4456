"""The decode steps that are recorded: a backend's rules and the user's choice, and the memory that recordings take."""

from bisect import bisect_left
from collections.abc import Sequence

from quire.core.config.graphs import GraphConfig
from quire.ops.recording import RecordingRules

MAX_ROWS = 512
"""Steps of more rows are not recorded."""

MAX_DRAFT_ROWS = 64
"""Steps that check drafts and have more tokens are not recorded: kernels take most of their time."""

MAX_RECORDINGS = 128
"""The most recordings, of the shapes used last. On a CPU, one takes about 100 kB for a model with 28 layers."""

_NUM_CHOICES = 5
"""The recordings of one shape: with the likeliest tokens or any choice of tokens, each also with scores, and with
logits alone. Steps that check drafts have one more.
"""

MAX_FINE_ROWS = 32
"""The most rows of steps that have recordings of their own with `GraphConfig.is_fine`."""


def rules_for(rules: RecordingRules, graphs: GraphConfig) -> RecordingRules:
    """Returns a backend's rules with the user's choice of steps. One that pads no steps records no CUDA graphs."""
    if not rules.row_counts or (graphs.sizes is None and graphs.max_size is None and not graphs.is_fine):
        return rules
    counts = set(rules.row_counts if graphs.sizes is None else graphs.sizes)
    if graphs.is_fine and graphs.sizes is None:
        counts |= set(range(1, MAX_FINE_ROWS + 1))
    if graphs.max_size is not None:
        counts = {count for count in counts if count < graphs.max_size} | {graphs.max_size}
    has_limit = graphs.sizes is not None or graphs.max_size is not None
    return rules._replace(row_counts=sorted(counts), max_rows=max(counts) if has_limit else None)


def largest_step(rules: RecordingRules, max_num_seqs: int, *, checks_drafts: bool = False) -> int:
    """Returns the rows of the largest step that is recorded."""
    rows = min(max_num_seqs, MAX_ROWS)
    if checks_drafts and rules.drafts_as is not None:
        rows = max(rows, MAX_DRAFT_ROWS)
    return round_up(rows if rules.max_rows is None else min(rows, rules.max_rows), rules.row_counts, rows)


def num_recordings(rules: RecordingRules, max_num_seqs: int, max_seq_len: int, *, checks_drafts: bool = False) -> int:
    """Bounds the recordings that exist at a time."""
    checks_drafts = checks_drafts and rules.drafts_as is not None
    counts = bisect_left(rules.row_counts, largest_step(rules, max_num_seqs, checks_drafts=checks_drafts)) + 1
    lengths = bisect_left(rules.max_seq_lens, max_seq_len) + 1
    return min(MAX_RECORDINGS, counts * lengths * (_NUM_CHOICES + checks_drafts))


def round_up(number: int, steps: Sequence[int], beyond: int) -> int:
    """Returns the least of `steps` that is no less than `number`; `beyond` if all are less."""
    place = bisect_left(steps, number)
    return steps[place] if place < len(steps) else beyond
