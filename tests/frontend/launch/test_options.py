"""Options that contradict each other are refused, with the way out."""

from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from quire.core.config.cache import CacheConfig
from quire.core.config.engine_args import EngineArgs
from quire.core.config.model import ModelConfig
from quire.core.config.parallel import EplbConfig, ParallelConfig
from quire.core.config.quantization import QuantizationConfig, quantization_flags
from quire.core.config.resolved import ModelSpec
from quire.core.config.scheduler import SchedulerConfig
from quire.core.errors import ConfigError
from quire.core.logging import LoggingConfig
from quire.core.wire.rank import EnginePlace
from quire.frontend.launch.layout import divide_engines, engine_places, layout_of, remote_places
from quire.frontend.launch.nodes import node_start
from quire.frontend.launch.options import UsageContext, resolve

SPEC = ModelSpec(
    path="", name="tiny", architecture="", hf_config={}, config_json={}, dtype="float32", vocab_size=8, num_layers=1,
    num_attention_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, max_position_embeddings=64, eos_token_ids=[],
)  # fmt: skip


def resolve_cache(**cache: Any) -> CacheConfig:
    return resolve(EngineArgs(model=ModelConfig(model="tiny"), cache=CacheConfig(**cache)), SPEC, "llm").cache


def test_states_are_kept_at_the_ends_of_blocks_and_for_the_prefix_cache_alone() -> None:
    assert resolve_cache(mamba_block_size=48).mamba_block_size == 48
    assert resolve_cache(mamba_block_size=40, block_size=8).mamba_block_size == 40
    with pytest.raises(ConfigError, match="--mamba-block-size 40 is not a multiple of --block-size 16; use 48"):
        resolve_cache(mamba_block_size=40)
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching turns off"):
        resolve_cache(mamba_block_size=48, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("base", "config", "message"),
    [
        ("online", None, "online needs --quantization-config"),
        (None, {"ignore": ["lm_head"]}, "names no format: give it linear, moe or targets, or give --quantization"),
        ("int8", {"targets": {"o_proj": "fp8"}}, "leave --quantization int8 out"),
        ("gptq", {"moe": "fp8"}, "--quantization gptq names a format of checkpoints"),
        (None, {"targets": {"o_proj": "fp8"}, "moe": "fp8"}, "leave linear and moe out"),
        (None, {"moe": {"activation": "mxfp8"}}, "moe: activation is not chosen by layer: leave it out"),
        ("int8", {"ignore": ["re:layers.(0"]}, r"quantization_config: ignore has re:layers\.\(0, .*missing \), unterm"),
        (None, {"targets": {"re:*q": "fp8"}}, r"quantization_config: targets has re:\*q, .*nothing to repeat"),
        (None, {"targets": {"o": "fp8", "q": "int8"}, "ignore": ["o"]}, "o is in both ignore and targets: leave it in"),
        (None, {"moe": {"weight": "nvfp4"}}, r"quantization_config\.moe\.weight: Invalid enum value 'nvfp4'"),
    ],
)
def test_formats_by_layer_that_cannot_be_are_refused(
    base: str | None, config: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs.from_flat(quantization=base, quantization_config=config), SPEC, "server")


def test_formats_by_layer_have_those_of_all_layers_below_them() -> None:
    config = {"linear": {"activation": None}, "moe": {"weight": None}, "ignore": ["lm_head"]}
    asked = resolve(EngineArgs.from_flat(quantization="int8", quantization_config=config), SPEC, "server").quantization
    assert asked == QuantizationConfig(linear="int8", ignore=["lm_head"])
    assert quantization_flags(asked) == """ --quantization-config '{"ignore":["lm_head"],"linear":"int8"}'"""


def test_ranks_that_do_not_divide_the_heads_are_refused_before_any_is_started() -> None:
    def resolved(size: int, num_heads: int) -> int:
        args = EngineArgs(model=ModelConfig(model="tiny"), parallel=ParallelConfig(tensor_parallel_size=size))
        return resolve(args, msgspec.structs.replace(SPEC, num_attention_heads=num_heads), "server").layout.tensor

    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 99 .* 6 attention heads; choose one of 1, 2, 3, 6"):
        resolved(99, 6)
    assert [resolved(size, 6) for size in (1, 2, 6)] == [1, 2, 6]
    assert resolved(2, 1) == 2  # states alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "give --enable-expert-parallel, too"),
        ({"enable_expert_parallel": True, "enable_eplb": True}, "nothing to balance on one worker"),
        (
            {"enable_expert_parallel": True, "eplb_config": EplbConfig(num_redundant_experts=2)},
            "no effect without --enable-eplb",
        ),
        (
            {"enable_expert_parallel": True, "enable_eplb": True, "expert_placement_strategy": "round_robin"},
            "drop --expert-placement-strategy",
        ),
        ({"tensor_parallel_size": 3, "decode_context_parallel_size": 2}, "2 must divide --tensor-parallel-size 3"),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2, "prefill_context_parallel_size": 2},
            "over all engines, whose workers have a step's tokens whole",
        ),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2, "distributed_executor_backend": "uni"},
            "several that work together; use mp",
        ),
        ({"cp_kv_cache_interleave_size": 2}, "no effect without --decode-context-parallel-size"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 3},
            "3 does not divide --block-size 16",
        ),
    ],
)
def test_contradictory_options_of_workers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs(model=ModelConfig(model="tiny"), parallel=ParallelConfig(**options)), SPEC, "server")


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, [EnginePlace(0, 0, 1)]),
        ({"data_parallel_size": 2}, [EnginePlace(0, 0, 2), EnginePlace(1, 1, 2)]),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, [EnginePlace(3, 0, 1)]),
        (
            {"data_parallel_size": 4, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}
            | {"data_parallel_start_rank": 1},
            [EnginePlace(1, 0, 2), EnginePlace(2, 1, 2)],
        ),
        ({"data_parallel_external_lb": True}, "--data-parallel-rank must say which"),
        ({"data_parallel_size": 4, "data_parallel_rank": 4}, "must be below --data-parallel-size 4"),
        ({"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_size_local": 2}, "runs that engine alone"),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "--data-parallel-size-local must say"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, [EnginePlace(0, 0, 2), EnginePlace(1, 1, 2)]),
        ({"data_parallel_size": 2, "data_parallel_start_rank": 1}, "exceed --data-parallel-size 2"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0}, []),
        ({"data_parallel_size_local": 0}, "0 is for node 0 of several engines"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0, "headless": True}, "0 is for node 0"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_hybrid_lb": True}, "-local must say"),
    ],
)
def test_the_engines_of_a_server(options: dict[str, Any], places: list[EnginePlace] | str) -> None:
    if isinstance(places, str):
        with pytest.raises(ConfigError, match=places):
            engine_places(ParallelConfig(**options))
    else:
        assert engine_places(ParallelConfig(**options)) == places


def test_engines_that_a_server_does_not_run_are_on_other_hosts_unless_it_does_not_use_them() -> None:
    options = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 1}
    assert remote_places(ParallelConfig(**options)) == [EnginePlace(0), EnginePlace(3)]
    assert remote_places(ParallelConfig(**options, data_parallel_hybrid_lb=True)) == []
    assert remote_places(ParallelConfig(data_parallel_size=4, data_parallel_rank=1)) == []
    options = {"data_parallel_size": 2, "data_parallel_size_local": 0}
    assert remote_places(ParallelConfig(**options)) == [EnginePlace(0), EnginePlace(1)]
    assert resolve(EngineArgs.from_flat(**options), SPEC, "server").served_engines == (0, 1)


@pytest.mark.parametrize(
    ("options", "here", "elsewhere"),
    [
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, [EnginePlace(0)], [EnginePlace(1)]),
        (
            {"data_parallel_size": 4, "node_rank": 1, "headless": True},
            [EnginePlace(2, 0, 2), EnginePlace(3, 1, 2)],
            [EnginePlace(0), EnginePlace(1)],
        ),
        (
            {"data_parallel_size": 4, "node_rank": 1, "data_parallel_hybrid_lb": True},
            [EnginePlace(2, 0, 2), EnginePlace(3, 1, 2)],
            [],
        ),
        ({"data_parallel_size": 2, "node_rank": 1, "data_parallel_external_lb": True}, [EnginePlace(1)], []),
        ({"data_parallel_size": 3}, "make one of the two a multiple of the other", None),
        ({"data_parallel_size": 2, "node_rank": 2, "headless": True}, "2 is not below --nnodes 2", None),
        ({"data_parallel_size": 2, "node_rank": 1}, "1 needs --headless", None),
        ({"node_rank": 1}, "1 needs --headless", None),
        ({"data_parallel_size": 2, "headless": True}, "--headless is for nodes 1 and up", None),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1}, "give this host engines 0 to 1", None),
        ({"data_parallel_size": 2, "node_rank": 1, "data_parallel_rank": 0}, "numbered as the host", None),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, "one engine on each host", None),
    ],
)
def test_engines_are_divided_evenly_among_nodes(
    options: dict[str, Any], here: list[EnginePlace] | str, elsewhere: list[EnginePlace] | None
) -> None:
    asked = ParallelConfig(nnodes=2, **options)
    if isinstance(here, str):
        with pytest.raises(ConfigError, match=here):
            divide_engines(asked)
        return
    divided = divide_engines(asked)
    assert (engine_places(divided), remote_places(divided)) == (here, elsewhere)
    assert layout_of(divided).nodes == 1  # of each engine
    assert divide_engines(divided) == divided


@pytest.mark.parametrize("flag", ["--data-parallel-hybrid-lb", "--data-parallel-external-lb", "--data-parallel-rank"])
def test_a_host_with_a_server_of_its_own_is_not_headless(flag: str) -> None:
    value = 1 if flag.endswith("rank") else True
    options = {"data_parallel_size": 2, flag.removeprefix("--").replace("-", "_"): value}
    with pytest.raises(ConfigError, match=f"{flag} gives each host a server of its own, and --headless is for"):
        divide_engines(ParallelConfig(**options, headless=True))
    divide_engines(ParallelConfig(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_rank": 3}, "--data-parallel-rank 3 must be below --data-parallel-size 1"),
        ({"data_parallel_size_local": 0}, "0 is for node 0 of several engines"),
        ({"data_parallel_size_local": 4}, "exceed --data-parallel-size 1"),
        ({"data_parallel_start_rank": 5}, "exceed --data-parallel-size 1"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-size-local must say"),
        ({"data_parallel_external_lb": True}, "--data-parallel-rank must say which"),
    ],
)
def test_one_engine_on_several_hosts_is_not_one_of_several(options: dict[str, Any], message: str) -> None:
    asked = {"nnodes": 2, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=message):
        resolve(EngineArgs.from_flat(**asked, **options), SPEC, "server")
    assert resolve(EngineArgs.from_flat(**asked), SPEC, "server").served_engines == (0,)
    headless = ParallelConfig(**asked, **options, node_rank=1, headless=True)
    with pytest.raises(ConfigError, match="--data-parallel-"):
        node_start(divide_engines(headless), Path("/nowhere"), LoggingConfig())


def test_each_of_several_engines_may_be_spread_over_hosts() -> None:
    options = {"nnodes": 4, "data_parallel_size": 2, "tensor_parallel_size": 2}
    divided = divide_engines(ParallelConfig(**options))
    assert divide_engines(ParallelConfig(**options, node_rank=3, headless=True)).node_rank == 3
    assert (engine_places(divided), remote_places(divided)) == ([EnginePlace(0), EnginePlace(1)], [])
    assert layout_of(divided).nodes == 2  # of each engine
    with pytest.raises(ConfigError, match="2 hosts, and node 0 serves all: leave out --data-parallel-hybrid-lb"):
        divide_engines(ParallelConfig(**options, data_parallel_hybrid_lb=True))
    with pytest.raises(ConfigError, match="each of which is on one host then: lower --nnodes to 2"):
        resolve(EngineArgs.from_flat(**options, enable_expert_parallel=True), SPEC, "server")
    with pytest.raises(ConfigError, match="does not divide the 1 workers"):
        layout_of(ParallelConfig(nnodes=4, data_parallel_size=2))


@pytest.mark.parametrize("usage", ["llm", "server"])
def test_a_step_of_an_encoder_has_room_for_a_text_of_full_length(usage: Any) -> None:
    encoder = msgspec.structs.replace(SPEC, is_encoder=True, max_position_embeddings=8192)
    for options, expected in (({}, 8192), ({"max_model_len": 6000}, 6000), ({"max_num_batched_tokens": 600}, 600)):
        limits = resolve(EngineArgs.from_flat(device="cpu", **options), encoder, usage).limits
        assert limits.max_num_batched_tokens == expected
    assert resolve(EngineArgs.from_flat(device="cpu"), SPEC, usage).limits.max_num_batched_tokens < 8192


def test_a_server_that_is_told_nothing_bounds_its_queue_by_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(total=64 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def bounds(program: UsageContext, **asked: int) -> tuple[int | None, ...]:
        args = EngineArgs(model=ModelConfig(model="tiny"), scheduler=SchedulerConfig(**asked))
        limits = resolve(args, SPEC, program).limits
        return limits.max_num_queued_reqs, limits.max_num_queued_tokens, limits.max_num_queued_bytes

    assert bounds("server") == (2**18, 2**26, 2**32)
    assert bounds("server", max_num_queued_bytes=5, max_num_queued_tokens=7) == (2**18, 7, 5)
    assert bounds("llm") == (None, None, None)
