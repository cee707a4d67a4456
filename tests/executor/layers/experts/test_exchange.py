"""Experts that engines share, against one engine with all of them."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.config.parallel import ExpertPlacement
from quire.core.config.resolved import ModelSpec
from quire.core.errors import ModelLoadError
from quire.core.wire.expert_rows import COUNTS_COST
from quire.core.wire.rank import Layout, Rank
from quire.executor.layers.experts.parallel import ExpertParallel
from quire.executor.models.registry import build_model
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.parallel.lockstep import Lockstep
from tests.executor.models.test_hybrid_models import Folder
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.models.test_moe_models import VARIANTS
from tests.executor.paged_driver import (
    Checkpoints,
    PagedDriver,
    load_model,
    model_context,
    read_spec,
    transformers_spec,
)
from tests.executor.thread_group import ThreadGroup

torch.set_num_threads(1)

Step = dict[int, list[int]]
"""The new tokens of an engine's requests; empty: it has none."""

BUSY: list[list[Step]] = [
    [{0: list(range(20, 37)), 1: [5, 6, 7]}, {0: [8], 1: [9]}, {1: [3]}],
    [{0: [100, 101]}, {}, {0: [7], 1: list(range(9))}],
    [{}, {0: list(range(60, 90))}, {}],
]
"""Steps by engine."""


def thread_groups(count: int, size: int) -> list[list[ThreadGroup]]:
    """`count` groups of `size` ranks each."""
    return [ThreadGroup.all_of(size) for _ in range(count)]


def run_together(
    spec: ModelSpec,
    steps: list[list[Step]],
    tensor: int,
    *,
    counts_cost: int = 0,
    loads: dict[Rank, list[int]] | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """Logits of each engine's first rank, step by step. Ranks are threads.

    Args:
        counts_cost: with 0, tokens go only where they chose experts, unless they choose all.
        loads: gets the choices that each rank counts, layer by layer.
    """
    layout = Layout(data=len(steps), tensor=tensor, expert=len(steps) * tensor)
    building = threading.Lock()
    stages, peers = thread_groups(layout.data, tensor), thread_groups(tensor, layout.data)

    def run(rank: Rank) -> list[Tensor]:
        stage, engines = stages[rank.data][rank.tensor], peers[rank.tensor][rank.data]
        engines.counts_cost = counts_cost
        try:
            lockstep = Lockstep(torch.distributed, rank, layout, engines, (torch.distributed.group.WORLD, None, None))
            experts = ExpertParallel(lockstep, ExpertPlacement(), num_engines=layout.data)
            with building:  # ranks are processes, and do not share Transformers' tables
                context = model_context(spec, group=stage, experts=experts, **options)
                with contextlib.closing(context.weights), torch.inference_mode():
                    model = build_model(spec, context)
            for layer in experts.layers:
                layer.places.count(on=True)
            driver, got = PagedDriver(model, 2, 64), []
            for step in zip(*steps, strict=True):
                lockstep.num_tokens = [sum(map(len, each.values())) for each in step]
                if own := step[rank.data]:
                    got += driver.step(own).values()
                else:
                    experts.run_dummy_step()
            if loads is not None:
                loads[rank] = [int(layer.places.loads.sum()) for layer in experts.layers]
            return got
        except BaseException:
            for group in (stage, engines):
                group.meeting.abort()  # the others would wait for ever
            raise

    ranks = [rank for data in range(layout.data) for rank in layout.ranks(data)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))[::tensor]


def run_alone(spec: ModelSpec, steps: list[Step], **options: Any) -> list[Tensor]:
    driver = PagedDriver(load_model(spec, **options), 2, 64)
    return [logits for step in steps if step for logits in driver.step(step).values()]


@pytest.mark.parametrize(
    ("family", "options", "tensor", "quantization"),
    [
        ("qwen3_moe", {}, 1, None),
        ("mixtral", {"num_local_experts": 2}, 1, None),  # a rank without any
        ("gpt_oss", {}, 2, None),
        ("llama4", {}, 1, "int4"),
        ("deepseek_v3", {}, 2, None),
        ("gemma4", VARIANTS["gemma4"][1], 1, None),
    ],
)
def test_engines_have_the_logits_of_one_with_all_experts(
    family: Any, options: dict[str, Any], tensor: int, quantization: Any, checkpoint: Checkpoints
) -> None:
    spec = read_spec(checkpoint(family, **options))
    got = run_together(spec, BUSY, tensor, quantization=quantization)
    for engine, steps in enumerate(BUSY):
        expected = run_alone(spec, steps, quantization=quantization)
        torch.testing.assert_close(got[engine], expected, atol=1e-4, rtol=1e-4)


def test_a_latent_space_of_experts(hybrid: Folder) -> None:  # noqa: F811
    spec = read_spec(hybrid("nemotron-h-experts"))
    got = run_together(spec, BUSY[:2], 1)
    torch.testing.assert_close(got[1], run_alone(spec, BUSY[1]), atol=1e-4, rtol=1e-4)


def test_bits_do_not_depend_on_what_other_engines_do(checkpoint: Checkpoints) -> None:
    spec = read_spec(checkpoint("qwen3_moe"), dtype="bfloat16")
    idle: list[Step] = [{}] * 3
    alone = run_together(spec, [BUSY[0], idle, idle], 1)[0]
    beside = run_together(spec, BUSY, 1)[0]
    to_all = run_together(spec, BUSY, 1, counts_cost=COUNTS_COST)[0]
    for one, *others in zip(alone, beside, to_all, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_each_rank_counts_the_choices_of_its_engine(checkpoint: Checkpoints) -> None:
    """And not those of tokens that come to its experts."""
    spec = read_spec(checkpoint("qwen3_moe"))
    loads: dict[Rank, list[int]] = {}
    run_together(spec, BUSY, 1, loads=loads)
    per_token = spec.hf_config["num_experts_per_tok"]
    for rank, counted in loads.items():
        num_tokens = sum(len(tokens) for step in BUSY[rank.data] for tokens in step.values())
        assert counted == [num_tokens * per_token] * 2


def test_a_rank_counts_its_share_of_all_engines(checkpoint: Checkpoints) -> None:
    """Before it is built, too: it reads as many experts as it has among all ranks, and has room for all tokens."""
    spec = read_spec(checkpoint("qwen3_moe"))
    experts = ExpertParallel(ParallelGroup(2, 3), ExpertPlacement(), num_engines=3)
    load_model(spec, experts=experts)
    own = ExpertParallel(ParallelGroup(2, 3), ExpertPlacement())
    load_model(spec, experts=own)
    assert [len(layer.places.own) for layer in experts.layers] == [3, 3]
    assert experts.layers[0].activation_size == 3 * own.layers[0].activation_size


def test_classes_of_transformers_are_refused(checkpoint: Checkpoints) -> None:
    experts = ExpertParallel(ParallelGroup(0, 2), ExpertPlacement(), num_engines=2)
    with pytest.raises(ModelLoadError, match="classes of Transformers cannot share experts between engines"):
        load_model(transformers_spec(checkpoint("qwen3_moe")), experts=experts)
