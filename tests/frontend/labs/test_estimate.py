"""The analytic model against hand-made arithmetic, and its laws."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.resolved import EngineConfig, ModelSpec, SchedulerLimits
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.model_cost import AttentionCost, ModelCost, ShardCost, WeightCost
from quire.core.wire.rank import Layout
from quire.frontend.labs.cluster_model.comparison import reason
from quire.frontend.labs.cluster_model.estimate import Estimate, Estimator, estimate_all
from quire.frontend.labs.cluster_model.hardware import Cluster, Device, Efficiency, Network
from quire.frontend.labs.cluster_model.layouts import ClusterLayout, layouts, tensor_sizes
from quire.frontend.labs.cluster_model.load import Load
from quire.frontend.labs.cluster_model.step_time import (
    BUBBLE,
    CACHE,
    COMPUTE,
    EXCHANGE,
    OVERHEAD,
    REDUCE_BYTES,
    REDUCE_LATENCY,
    SEND,
    WEIGHTS,
    Rows,
    StepTime,
)  # fmt: skip

EXACT = Efficiency(
    memory_efficiency=1, compute_efficiency=1, link_efficiency=1, expert_balance=1, layer_microseconds=0,
    step_microseconds=0,
)  # fmt: skip
DEVICE = Device(
    memory_bytes=10**10, bytes_per_second=1e9, operations_per_second=1e12, link_bytes_per_second=1e8, link_seconds=1e-3
)
NETWORK = Network(bytes_per_second=1e7, seconds=2e-3, is_shared=False)
PAGE = 16 * 1000


def cluster(nodes: int = 1, devices: int = 1, **changes: Any) -> Cluster:
    return Cluster(
        num_nodes=nodes, devices_per_node=devices, device=DEVICE, network=NETWORK,
        efficiency=msgspec.structs.replace(EXACT, **changes),
    )  # fmt: skip


def shard(tensor: int = 1, **changes: Any) -> ShardCost:
    made = ShardCost(
        tensor=tensor,
        layers=WeightCost(2 * 10**9 // tensor, 10**9 // tensor),
        head=WeightCost(10**8 // tensor, 5 * 10**7 // tensor),
        experts=WeightCost(),
        rest_bytes=0,
        embedding_bytes=10**8 // tensor,
        workspace_bytes=0,
        state_bytes=0,
        page_bytes=PAGE // tensor,
        kv_groups=[KVGroupSpec("full", [0], page_bytes=PAGE // tensor)],
        attention=[AttentionCost(None, 1000 // tensor, 0)],
    )
    return msgspec.structs.replace(made, **changes)


def model(*shards: ShardCost, **changes: Any) -> ModelCost:
    cost = ModelCost(
        num_layers=10, hidden_size=1000, vocab_size=5000, activation_bytes=2, num_experts=0, experts_per_token=0,
        num_expert_layers=0, shards=list(shards), refusals=[],
    )  # fmt: skip
    return msgspec.structs.replace(cost, **changes)


def step(layout: ClusterLayout, part: ShardCost, where: Cluster, **changes: Any) -> StepTime:
    return StepTime(where, model(part, **changes), part, layout)


def config(**limits: Any) -> EngineConfig:
    spec = ModelSpec(
        path="", name="m", architecture="M", hf_config={}, dtype="bfloat16", vocab_size=5000, num_layers=10,
        num_attention_heads=8, num_kv_heads=8, head_dim=8, hidden_size=1000, max_position_embeddings=4096,
        eos_token_ids=[], config_json={},
    )  # fmt: skip
    return EngineConfig(
        spec=spec, limits=SchedulerLimits(**{"max_num_seqs": 64, "max_num_batched_tokens": 512, **limits}),
        load=LoadConfig(), cache=CacheConfig(gpu_memory_utilization=1.0), device="cuda", layout=Layout(),
        executor="uni", max_model_len=4096, fit_max_model_len=False, seed=0,
    )  # fmt: skip


ONE = ClusterLayout(tensor=1, pipeline=1, data=1)


def test_few_rows_read_the_weights_and_many_multiply_by_them() -> None:
    [few] = step(ONE, shard(), cluster()).stages(Rows(1, seen=500))
    assert few[WEIGHTS] == pytest.approx(2.1)
    assert few[CACHE] == pytest.approx(500 * 1000 / 1e9)
    [many] = step(ONE, shard(), cluster()).stages(Rows(2000))
    assert many[COMPUTE] == pytest.approx(2 * 2000 * 1.05e9 / 1e12)
    assert many[WEIGHTS] == 0


def test_a_prompt_has_logits_for_its_last_token_only() -> None:
    [terms] = step(ONE, shard(), cluster()).stages(Rows(0, prompt_tokens=4000, prompts=1))
    assert terms[COMPUTE] == pytest.approx(2 * 4000 * 1e9 / 1e12)
    assert terms[WEIGHTS] == pytest.approx(0.1)  # the head, for one row


def test_windows_bound_what_a_token_sees() -> None:
    part = shard(attention=[AttentionCost(100, 1000, 0), AttentionCost(None, 1000, 0)])
    [terms] = step(ONE, part, cluster()).stages(Rows(1, seen=500))
    assert terms[CACHE] == pytest.approx((100 + 500) * 1000 / 1e9)


def test_states_are_read_and_written() -> None:
    [terms] = step(ONE, shard(state_bytes=10**6, attention=[]), cluster()).stages(Rows(3))
    assert terms[CACHE] == pytest.approx(2 * 3 * 1e6 / 1e9)


def test_all_reduces_within_a_node() -> None:
    [terms] = step(ClusterLayout(tensor=4, pipeline=1, data=1), shard(4), cluster(1, 4)).stages(Rows(8))
    assert terms[REDUCE_LATENCY] == pytest.approx(21 * 1e-3)
    hidden, logits = 8 * 1000 * 2, 8 * 5000 * 2
    assert terms[REDUCE_BYTES] == pytest.approx((20 * hidden + logits / 2) * 2 * 3 / 4 / 1e8)


def test_all_reduces_between_nodes_move_a_devices_part_over_the_network() -> None:
    [terms] = step(ClusterLayout(tensor=8, pipeline=1, data=1), shard(8), cluster(2, 4)).stages(Rows(8))
    assert terms[REDUCE_LATENCY] == pytest.approx(21 * (1e-3 + 2 * 2e-3))
    moved = 20 * 8 * 1000 * 2 + 8 * 5000 * 2 / 2
    assert terms[REDUCE_BYTES] == pytest.approx(moved * (2 * 3 / 4 / 1e8 + 2 * 1 / 2 / 4 / 1e7))


def test_a_shared_adapter_is_divided_among_the_devices_of_a_node() -> None:
    shared = msgspec.structs.replace(cluster(2, 4), network=msgspec.structs.replace(NETWORK, is_shared=True))
    assert shared.network_bytes_per_second == NETWORK.bytes_per_second / 4


def test_experts_that_no_token_chose_are_not_read() -> None:
    part = shard(layers=WeightCost(), head=WeightCost(), attention=[], experts=WeightCost(8 * 10**9, 4 * 10**9))
    sizes = {"num_experts": 8, "experts_per_token": 2, "num_expert_layers": 10}
    [one] = step(ONE, part, cluster(), **sizes).stages(Rows(1))
    assert one[WEIGHTS] == pytest.approx(8 * 2 / 8)
    [several] = step(ONE, part, cluster(), **sizes).stages(Rows(4))
    assert several[WEIGHTS] == pytest.approx(8 * (1 - 0.75**4))


def test_divided_experts_see_the_tokens_of_all_engines() -> None:
    part = shard(layers=WeightCost(), head=WeightCost(), attention=[], experts=WeightCost(8 * 10**9, 4 * 10**9))
    sizes = {"num_experts": 8, "experts_per_token": 2, "num_expert_layers": 10}
    layout = ClusterLayout(tensor=1, pipeline=1, data=4, expert=4)
    [terms] = step(layout, part, cluster(2, 2), **sizes).stages(Rows(1))
    assert terms[WEIGHTS] == pytest.approx(8 * (1 - 0.75**4) / 4)
    row = (1000 + 1000) * 2 + 2 * (8 + 4)  # there and back, with two choices
    assert terms[EXCHANGE] == pytest.approx(10 * (row * (1 / 1e8 + 2 / 1e7) + 2 * (1e-3 + 2e-3)))
    # Of many tokens, each goes only to the ranks with experts that it chose, and it is told before how many come.
    share = 1 - 6 / 8 * 5 / 7
    [terms] = step(layout, part, cluster(2, 2), **sizes).stages(Rows(1000))
    assert terms[EXCHANGE] == pytest.approx(10 * (share * 1000 * row * (1 / 1e8 + 2 / 1e7) + 3 * (1e-3 + 2e-3)))
    # Over gloo, rows bring their number, so that is worth it for any.
    over_gloo = msgspec.structs.replace(cluster(2, 2), device=msgspec.structs.replace(DEVICE, transport="gloo"))
    [terms] = step(layout, part, over_gloo, **sizes).stages(Rows(1))
    assert terms[EXCHANGE] == pytest.approx(10 * (share * row * (1 / 1e8 + 2 / 1e7) + 2 * (1e-3 + 2e-3)))


def test_an_unbalanced_mixture_waits_for_its_busiest_rank() -> None:
    part = shard(layers=WeightCost(), head=WeightCost(), attention=[], experts=WeightCost(8, 4 * 10**9))
    sizes = {"num_experts": 8, "experts_per_token": 2, "num_expert_layers": 10}
    layout = ClusterLayout(tensor=1, pipeline=1, data=4, expert=4)
    [terms] = step(layout, part, cluster(1, 4, expert_balance=0.5), **sizes).stages(Rows(10))
    assert terms[COMPUTE] == pytest.approx(2 * 40 * 2 / 8 * 4e9 / 4 / 1e12 / 0.5)


def test_the_last_stage_has_the_head_and_all_wait_for_the_slowest() -> None:
    layout = ClusterLayout(tensor=1, pipeline=4, data=1)
    model_step = step(layout, shard(attention=[]), cluster(1, 4))
    [middle, last] = model_step.stages(Rows(1))
    assert middle[WEIGHTS] == pytest.approx(0.6)  # 3 of 10 layers
    assert last[WEIGHTS] == pytest.approx(0.4 + 0.1)
    assert middle[SEND] == pytest.approx(1000 * 2 / 1e8 + 1e-3)
    period = model_step.period(Rows(1), Rows(1), 0.0)
    assert sum(period.values()) == pytest.approx(4 * sum(middle.values()))
    assert period[BUBBLE] == pytest.approx(sum(middle.values()) - sum(last.values()))


def test_plans_wait_for_one_with_a_chunk() -> None:
    layout = ClusterLayout(tensor=1, pipeline=2, data=1)
    model_step = step(layout, shard(head=WeightCost(), attention=[]), cluster(1, 2))
    short, long = Rows(1), replace(Rows(1), prompt_tokens=4000)
    times = [sum(model_step.period(short, long, share).values()) for share in (0.0, 0.5, 1.0)]
    assert times[1] == pytest.approx(0.25 * times[0] + 0.75 * times[2])


def test_overheads_are_those_of_layers_and_of_a_step() -> None:
    [terms] = step(ONE, shard(), cluster(layer_microseconds=10, step_microseconds=300)).stages(Rows(1))
    assert terms[OVERHEAD] == pytest.approx(400e-6)


def estimate(load: Load, layout: ClusterLayout = ONE, where: Cluster | None = None, **limits: Any) -> Estimate:
    part = shard(layout.tensor)
    where = where or cluster(1, layout.tensor * layout.pipeline * layout.data)
    return Estimator(config(**limits), where, model(part), part, layout, load).estimate()


@pytest.mark.parametrize("layout", [ONE, ClusterLayout(tensor=2, pipeline=2, data=1)], ids=str)
@pytest.mark.parametrize("concurrency", [1, 16, 60])
def test_littles_law_holds(layout: ClusterLayout, concurrency: int) -> None:
    load = Load(input_len=100, output_len=50, concurrency=concurrency)
    found = estimate(load, layout)
    requests_per_second = found.output_tokens_per_second / load.output_len
    assert requests_per_second * found.request_seconds(load) == pytest.approx(concurrency, rel=0.02)
    assert sum(found.terms.values()) == pytest.approx(found.tpot_seconds)


def test_requests_beyond_the_slots_wait() -> None:
    load = Load(input_len=100, output_len=50, concurrency=100)
    found = estimate(load)
    assert (found.running, found.limit) == (64, "max_num_seqs")
    assert found.output_tokens_per_second / 50 * found.request_seconds(load) == pytest.approx(100, rel=0.02)


def test_requests_beyond_the_cache_wait() -> None:
    load = Load(input_len=3000, output_len=1000, concurrency=10_000)
    found = estimate(load, max_num_seqs=5000)
    room = 10**10 - int(2.2e9)
    assert found.fit.requests == room // (4000 / 16 * PAGE)
    assert (found.running, found.limit) == (found.fit.requests, "cache")


def test_a_rate_is_sustained_or_not() -> None:
    load = Load(input_len=100, output_len=50, rate=0.1)
    found = estimate(load)
    assert found.is_sustained
    assert found.output_tokens_per_second == pytest.approx(0.1 * 50)
    assert found.running == math.ceil(0.1 * found.request_seconds(load))
    over = estimate(msgspec.structs.replace(load, rate=1000.0))
    assert not over.is_sustained
    assert over.ttft_seconds == math.inf


def test_a_model_that_is_too_large_says_what_is_missing() -> None:
    part = shard(layers=WeightCost(2 * 10**10, 10**10))
    [found] = estimate_all(config(), cluster(), model(part), Load())
    assert "weights 18.8 GiB" in (found.fit.obstacle or "")
    assert found.output_tokens_per_second == 0


def test_layouts_use_all_devices_and_divide_experts_over_engines() -> None:
    cost = model(shard(1), shard(2), num_experts=8, experts_per_token=2, num_expert_layers=10)
    found = list(layouts(cluster(2, 2), cost, experts_over_engines=True))
    assert all(each.tensor * each.pipeline * each.data == 4 for each in found)
    assert {str(each) for each in found} == {
        "TP 1 × DP 4", "TP 1 × DP 4 × EP 4", "TP 1 × PP 2 × DP 2", "TP 1 × PP 2 × DP 2 × EP 2", "TP 1 × PP 4",
        "TP 2 × DP 2", "TP 2 × DP 2 × EP 4", "TP 2 × PP 2",
    }  # fmt: skip
    assert all(each.expert == 1 for each in layouts(cluster(2, 2), cost, experts_over_engines=False))
    on_hosts = layouts(cluster(4, 1), cost, experts_over_engines=True)
    assert {str(each) for each in on_hosts if each.expert > 1} == {"TP 1 × DP 4 × EP 4"}  # engines of one host each
    assert found[1].flags == ["--data-parallel-size", "4", "--enable-expert-parallel"]
    assert tensor_sizes(cluster(4, 8)) == [1, 2, 4, 8, 16]


def test_the_best_is_first_and_others_name_what_costs_them() -> None:
    cost = model(shard(1), shard(2), shard(4))
    load = Load(input_len=100, output_len=50, concurrency=16)
    slow = msgspec.structs.replace(cluster(2, 2), network=Network(bytes_per_second=1e7, seconds=0.1))
    found = estimate_all(config(), slow, cost, load)
    seconds = [each.request_seconds(load) for each in found]
    assert seconds == sorted(seconds)
    assert reason(found[0], found[0], load) == ""
    reasons = {str(each.layout): reason(each, found[0], load) for each in found}
    assert str(found[0].layout) == "TP 2 × DP 2"
    assert reasons["TP 1 × DP 4"].startswith("weights read: ")
    assert reasons["TP 4"].startswith("all-reduce")
