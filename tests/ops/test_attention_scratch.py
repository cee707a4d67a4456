"""What attention in plain torch has in memory at once, on an accelerator that is not there: what the plan counts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from quire.ops.backend import AttentionForm
from quire.ops.eager import attention_plan
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.linear import PlainLinear
from tests.executor.pretend_device import PretendDevice

GROUPS = {"MAX_SCORES": 1 << 17, "WORKSPACE_BYTES": 1 << 17, "MAX_KEPT_BIAS": 1 << 15, "MAX_KEPT_BIASES": 1 << 19}
"""Smaller than they are, by the same factor, so that the test is quick."""

FORMS: dict[str, Callable[[int], AttentionForm]] = {
    "plain": lambda heads: AttentionForm(0.1),
    "window": lambda heads: AttentionForm(0.1, window=300, softcap=30.0),
    "sinks": lambda heads: AttentionForm(0.1, sinks=torch.ones(heads, device="cuda")),
    "slopes": lambda heads: AttentionForm(0.1, slopes=torch.ones(heads, device="cuda")),
    "distances": lambda heads: AttentionForm(0.1, distance_bias=torch.ones(heads, 65, device="cuda")),
}

STEPS = {
    "prompts": (8, [(128, 700)] * 3),
    "prompts-of-one-head": (1, [(128, 700)] * 3),
    "tokens": (8, [(1, 300)] * 40),
    "one-long-row": (8, [(1, 9000)]),
    "of-all": (8, [(90, 500), (1, 99), (7, 450)] * 4),
}
"""Heads, and new tokens and length of each row."""


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of all that `run` allocates, while it runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_attention_takes_no_more_than_the_plan_counts(
    form: str, dtype: torch.dtype, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in GROUPS.items():
        monkeypatch.setattr(attention_plan, name, value)
    heads, rows = STEPS[step]
    ops, block_size, head_dim, kv_heads = EagerBackend(PlainLinear()), 16, 64, -(-heads // 4)
    query_lens, seq_lens = (np.array(each) for each in zip(*rows, strict=True))
    num_pages = -(-int(seq_lens.max()) // block_size)
    tables = np.arange(len(seq_lens) * num_pages).reshape(len(seq_lens), num_pages)
    kept = torch.bfloat16 if dtype == torch.int8 else dtype
    with PretendDevice(), torch.inference_mode():
        cache = torch.zeros(
            ops.kv_cache_shape(tables.size, block_size, kv_heads, head_dim, dtype), dtype=dtype, device="cuda"
        )
        q = torch.zeros(int(query_lens.sum()), heads, head_dim, dtype=kept, device="cuda")
        slots = torch.zeros(len(q), dtype=torch.long, device="cuda")
        attention = FORMS[form](heads)

        def layers() -> Tensor:
            batch = ops.attention_batch(query_lens, seq_lens, tables, slots, block_size=block_size)
            return [ops.attention(q, cache, batch, attention) for _ in range(2)][-1]

        row_bytes = 2 * kv_heads * head_dim * kept.itemsize * num_pages * block_size
        counted = ops.scratch_bytes(q.device, row_bytes, is_quantized=dtype == torch.int8)
        peak = peak_bytes(layers)
    assert peak - 5 * q.nbytes < counted, "beside queries and results, some of them in the order of the groups"
    if step == "prompts" and form != "window":
        assert peak > counted / 3, "the plan counts what is taken, and not much more"
