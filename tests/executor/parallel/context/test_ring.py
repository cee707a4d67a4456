"""Attention over ranks that divide positions: queries gathered, queries that travel, and keys that travel."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.executor.layers.attention.layer_kv import LayerKV, kept_tokens
from quire.executor.models.base import LayerCache, Wanted
from quire.executor.parallel.context import divided
from quire.executor.parallel.context.divided import DividedContext
from quire.executor.parallel.context.ring import pass_keys
from quire.executor.parallel.groups import Messages
from quire.executor.parallel.token_shares import TokenShares
from quire.executor.step.divided_forward import DividedForward
from quire.executor.step.input_batch import GroupPages, InputBatch
from quire.executor.step.stage import PipelineStage
from quire.ops import bind
from quire.ops.backend import AttentionForm
from tests.executor.parallel.test_groups import reports_of
from tests.executor.thread_group import ThreadGroup, on_every_rank

torch.set_num_threads(1)

BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_COLUMNS = 2, 16, 4, 60


class Counted(ThreadGroup):
    """Counts what it sends from rank to rank."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group.rank, group.size, group.meeting)
        self.num_bytes = self.num_messages = 0

    def begin_exchange(self, sent: Any, received: Any) -> Messages:
        self.num_bytes += sum(tensor.nbytes for _, tensor in sent)
        self.num_messages += len(sent)
        return super().begin_exchange(sent, received)


class Load(NamedTuple):
    """New tokens of each sequence, and all of its tokens."""

    query_lens: np.ndarray
    seq_lens: np.ndarray


NEW_PROMPTS = Load(np.array([31, 9, 5, 2]), np.array([33, 9, 5, 7]))
LONG_CONTEXTS = Load(np.array([15, 1, 5, 2]), np.array([160, 200, 5, 90]))


class Case(NamedTuple):
    """Ranks, parts of the tokens, neighbouring positions of a rank, KV heads, and the form of all heads."""

    size: int
    num_parts: int
    run: int
    num_kv_heads: int
    form: AttentionForm

    @property
    def num_same(self) -> int:
        return self.size // self.num_parts

    def heads(self, rank: int) -> slice:
        place = rank % self.num_same
        return slice(place * NUM_HEADS, (place + 1) * NUM_HEADS)

    def own_form(self, rank: int) -> AttentionForm:
        sinks, slopes = (None if x is None else x[self.heads(rank)] for x in (self.form.sinks, self.form.slopes))
        return self.form._replace(sinks=sinks, slopes=slopes)


FORM = AttentionForm(0.25)
CASES = {
    "three": Case(3, 3, 1, 2, FORM),
    "runs": Case(2, 2, 2, 1, FORM),
    "windows-sinks": Case(4, 4, 1, 2, FORM._replace(window=8, sinks=torch.linspace(-1, 1, 4))),
    "chunks": Case(2, 2, 1, 2, FORM._replace(chunk=8)),
    "slopes": Case(3, 3, 1, 1, FORM._replace(slopes=torch.linspace(0.1, 0.4, 4))),
    "heads": Case(4, 2, 1, 1, FORM),
    "heads-slopes-sinks": Case(
        4, 2, 1, 1, FORM._replace(slopes=torch.linspace(0.1, 0.8, 8), sinks=torch.linspace(-1, 1, 8))
    ),
}


class Outcome(NamedTuple):
    """What all ranks did.

    Attributes:
        outputs: [num_tokens, heads of all ranks, HEAD_DIM].
        groups: what the ranks sent.
        num_shared: tokens that each computed.
        block_bytes: of the pages that tokens see.
    """

    outputs: Tensor
    groups: list[Counted]
    num_shared: int
    block_bytes: int


def attend(case: Case, load: Load) -> Outcome:
    """Attention on threads, each with its part of the keys."""
    ops, num_rows, num_tokens = bind("cpu"), len(load.query_lens), int(load.query_lens.sum())
    q, k, v = inputs(case, load)
    page_size = BLOCK_SIZE * case.size
    spare_page = num_rows * NUM_COLUMNS
    tables = np.random.default_rng(2).permutation(spare_page).reshape(num_rows, NUM_COLUMNS).astype(np.int32)
    rows, at = np.repeat(np.arange(num_rows), load.seq_lens), np.concatenate([np.arange(n) for n in load.seq_lens])
    pages_of_tokens = tables[rows, at // page_size]
    none, zeros = torch.empty(0), torch.zeros(num_tokens).long()  # of the rest of a step, nothing is read
    batch = InputBatch(
        zeros, zeros, [GroupPages(zeros, tables)], *load, load.query_lens, none, np.empty(0), np.empty(0)
    )

    def on_rank(group: ThreadGroup) -> tuple[Tensor, Counted, TokenShares, int]:
        counted = Counted(group)
        sequences = DividedContext(counted, case.num_parts, case.run)
        shape = ops.kv_cache_shape(spare_page + 1, BLOCK_SIZE, case.num_kv_heads, HEAD_DIM, torch.float32)
        pages = torch.zeros(shape)
        slots = sequences.shard.slots(pages_of_tokens, at % page_size, page_size, spare_page)
        ops.write_kv(k, v, pages, torch.from_numpy(slots))
        model: Any = SimpleNamespace(kv_layers=[LayerKV(case.num_kv_heads, HEAD_DIM, kept_tokens(case.form))])
        forward = DividedForward(model, ops, [LayerCache(pages, 0)], BLOCK_SIZE, PipelineStage(), sequences)
        division = forward._divide(batch)
        [attention], shard_view = forward._attend(batch, division, division.shares)
        assert shard_view.rounds is not None
        own = q[division.shares.tokens[group.rank // case.num_same]][:, case.heads(group.rank)].contiguous()
        wanted = Wanted(torch.empty(0), [attention], shard_view)
        out = sequences.attend(ops, own, pages, wanted, 0, case.own_form(group.rank), case.num_kv_heads)
        return out, counted, division.shares, len(shard_view.rounds.page_ids(0)) * pages[0].nbytes

    outs, groups, [shares, *_], [block_bytes, *_] = zip(*on_every_rank(case.size, on_rank), strict=True)
    parts = [torch.cat(outs[first : first + case.num_same], 1) for first in range(0, case.size, case.num_same)]
    return Outcome(torch.cat(parts)[shares.places], list(groups), shares.size, block_bytes)


def inputs(case: Case, load: Load) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the new tokens, of all ranks' heads, and keys and values of all tokens."""
    generator = torch.Generator().manual_seed(1)
    num_keys = int(load.seq_lens.sum())
    k, v = (torch.randn(num_keys, case.num_kv_heads, HEAD_DIM, generator=generator) for _ in range(2))
    q = torch.randn(int(load.query_lens.sum()), case.num_same * NUM_HEADS, HEAD_DIM, generator=generator)
    return q, k, v


def attend_whole(case: Case, load: Load) -> Tensor:
    """The same on one rank."""
    ops, num_rows = bind("cpu"), len(load.seq_lens)
    q, k, v = inputs(case, load)
    pages = torch.zeros(ops.kv_cache_shape(num_rows, 256, case.num_kv_heads, HEAD_DIM, torch.float32))
    slots = np.concatenate([row * 256 + np.arange(n) for row, n in enumerate(load.seq_lens)])
    ops.write_kv(k, v, pages, torch.from_numpy(slots))
    tables = np.arange(num_rows, dtype=np.int32)[:, None]
    batch = ops.attention_batch(*load, tables, torch.from_numpy(slots), block_size=256)
    return ops.attention(q, pages, batch, case.form)


@pytest.mark.parametrize("load", [NEW_PROMPTS, LONG_CONTEXTS], ids=["keys-travel", "queries-travel"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_smaller_travels(case: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever travels, outputs have the bits of gathered queries, and bytes are those in the documentation."""
    ranks = CASES[case]
    gathered = attend(ranks, load)
    assert [group.num_messages for group in gathered.groups] == [0] * ranks.size
    torch.testing.assert_close(gathered.outputs, attend_whole(ranks, load), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(divided, "GATHERED_BYTES", 0)
    passed = attend(ranks, load)
    assert torch.equal(passed.outputs, gathered.outputs)
    query_bytes = passed.num_shared * NUM_HEADS * (2 * HEAD_DIM + 1) * 4  # of a block, its outputs and logarithms
    others = ranks.size - 1
    for group in passed.groups:
        if load is NEW_PROMPTS:
            assert (group.num_bytes, group.num_messages) == (others * passed.block_bytes, others)
        else:
            assert (group.num_bytes, group.num_messages) == (others * query_bytes, 3 * others)
    assert (passed.block_bytes < query_bytes) == (load is NEW_PROMPTS)


def test_windows_leave_keys_behind() -> None:
    """Only pages that a token of the step sees travel: of 160, 200 and 90 tokens, those of the last 22, 8 and 9."""
    case = CASES["windows-sinks"]
    page_bytes = 2 * case.num_kv_heads * HEAD_DIM * BLOCK_SIZE * 4
    assert attend(case, LONG_CONTEXTS).block_bytes == (3 + 1 + 1 + 2) * page_bytes
    whole = case._replace(form=FORM)
    assert attend(whole, LONG_CONTEXTS).block_bytes == (20 + 25 + 1 + 12) * page_bytes


# One rank: blocks of 4 MB travel by gloo. Keys of each rank are its number; queries too, and parts add the two.
RANK = """
import json, sys
import torch
from quire.core.wire.rank import Layout
from quire.executor.parallel.context.ring import pass_keys, pass_queries
from quire.executor.parallel.groups import RankGroups, leave

torch.set_num_threads(1)
number, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
layout = Layout(prefill=size)
group = RankGroups.join(layout.ranks()[number], layout, "cpu", f"file://{folder}/rendezvous").context

def attend(source, block):
    return 10 * block + number, (10 * block + number)[0, 0] + source

own = torch.full((1024, 1024), float(number))
report = []
for _ in range(3):
    for parts in (pass_queries(group, own, attend), pass_keys(group, lambda: own, attend)):
        report.append([(out.unique().tolist(), lse.unique().tolist()) for out, lse in parts])
print(json.dumps(report))
leave()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_travel_between_processes(size: int, tmp_path: Path) -> None:
    for number, report in enumerate(reports_of(RANK, size, str(size), str(tmp_path))):
        queries = [[[10.0 * number + rank], [11.0 * number + rank]] for rank in range(size)]
        keys = [[[10.0 * rank + number], [11.0 * rank + number]] for rank in range(size)]
        assert report == [queries, keys] * 3


class Holding(Counted):
    """Counts the blocks that there are whenever one is added."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group)
        self._blocks: list[weakref.ref[Tensor]] = []
        self.most = 0

    def add(self, block: Tensor) -> Tensor:
        self._blocks.append(weakref.ref(block))
        self.most = max(self.most, sum(each() is not None for each in self._blocks))
        return block

    def begin_exchange(self, sent: Any, received: Any) -> Messages:
        for _, block in received:
            self.add(block)
        return super().begin_exchange(sent, received)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_holds_two_blocks_of_keys(size: int) -> None:
    """Blocks come in the order of the ring, and are gone when the next but one comes."""

    def on_rank(group: ThreadGroup) -> tuple[list[int], list[list[int]], int]:
        holding, order = Holding(group), []

        def attend(source: int, block: Tensor) -> tuple[Tensor, Tensor]:
            order.append(source)
            return block + 10, block + 20

        parts = pass_keys(holding, lambda: holding.add(torch.full((3,), group.rank)), attend)
        return order, [out.tolist() for out, _ in parts], holding.most

    for rank, (order, outs, most) in enumerate(on_every_rank(size, on_rank)):
        assert order == [(rank - turn) % size for turn in range(size)]
        assert outs == [[10 + source] * 3 for source in range(size)]
        assert most == 2
