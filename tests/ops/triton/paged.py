"""Attention kernels beside plain torch: steps, the rows of a step on the device, and the forms of scores."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.backend import AttentionForm
from quire.ops.cache_pages import ScalePlanes
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from quire.ops.triton.attention import Attention, covers
from quire.ops.triton.rows import PagedRows
from tests.ops.test_attention import Step
from tests.ops.triton.conftest import DEVICE

EAGER = EagerBackend(PlainLinear(), pages=ScalePlanes())
ATTENTION = Attention(torch.device(DEVICE))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FORMS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 20, "sinks": torch.tensor([0.5, -3.0, 60.0, -torch.inf])},
    {"window": 4096, "softcap": 0.7},
    {"chunk": 16},
    {"chunk": 32, "chunks": "previous"},
    {"chunk": 20, "chunks": "earlier"},
    {"chunk": 64, "window": 30, "chunks": "previous"},
    {"slopes": SLOPES},
    {"distance_bias": torch.linspace(-3, 4, 4 * 41).view(4, 41)},
    {"softcap": 3.0, "sinks": SLOPES, "slopes": -SLOPES},
]


def rows_of(step: Step) -> PagedRows:
    plan = step.batch

    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    return PagedRows(
        query_starts=send(np.concatenate(([0], plan.query_lens.cumsum()))),
        seq_lens=send(plan.seq_lens),
        block_tables=send(plan.block_tables),
        slot_mapping=plan.slot_mapping.to(DEVICE),
        prefix_spans=None if plan.prefix_spans is None else send(plan.prefix_spans),
        block_size=plan.block_size,
        max_query_len=int(plan.query_lens.max()),
        max_seq_len=int(plan.seq_lens.max()),
    )


def run(step: Step, rows: PagedRows | None = None, **form: Any) -> tuple[Tensor, Tensor]:
    """The outputs of the kernel and its logarithms."""
    q, cache, rows = step.q.to(DEVICE), step.kv_cache.to(DEVICE), rows or rows_of(step)
    form = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in form.items()}
    asked = AttentionForm(step.scale, **form)
    assert covers(q, cache, rows, asked)
    lse = torch.full(q.shape[:2], torch.nan, device=DEVICE)
    return ATTENTION.attend(q, cache, rows, asked, lse).cpu(), lse.cpu()


def assert_equal_to_eager(step: Step, got: tuple[Tensor, Tensor], **form: Any) -> None:
    sinks = form.pop("sinks", None)
    asked = AttentionForm(step.scale, **form)
    out, lse = EAGER.partial_attention(step.q, step.kv_cache, step.batch, asked)
    if sinks is not None:
        out = EAGER.attention(step.q, step.kv_cache, step.batch, asked._replace(sinks=sinks))
        lse = torch.logaddexp(lse, sinks)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[step.q.dtype]
    is_seen = lse > -torch.inf
    torch.testing.assert_close(got[0][is_seen], out[is_seen], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], lse, rtol=tolerance, atol=tolerance)
