"""The options of CUDA graphs, of compilation and of attention's kernels: honoured, or answered truly."""

import logging
import shlex
from typing import Any

import pytest

from quire.core.config.device import DeviceConfig
from quire.core.config.engine_args import EngineArgs, convert_group
from quire.core.config.graphs import GraphConfig
from quire.core.config.resolved import EngineConfig
from quire.core.errors import ConfigError
from quire.frontend.launch.graphs import check_attention_backend, resolve_graphs
from quire.frontend.launch.options import resolve
from tests.frontend.launch.test_options import SPEC
from tests.frontend.refusals.test_flags import parser_of, refusal, serve

BIG = 80 * 2**30


def graphs(**options: Any) -> GraphConfig:
    return resolve_graphs(convert_group(DeviceConfig, options), "cuda", 8192)


def config(*, gpu_bytes: int | None = BIG, **options: Any) -> EngineConfig:
    return resolve(EngineArgs.from_flat(model="tiny", **options), SPEC, "server", gpu_bytes=gpu_bytes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GraphConfig()),
        ({"cudagraph_capture_sizes": [8, 1, 8, 2]}, GraphConfig(sizes=[1, 2, 8])),
        ({"compilation_config": {"cudagraph_capture_sizes": [4]}}, GraphConfig(sizes=[4])),
        ({"max_cudagraph_capture_size": 20}, GraphConfig(max_size=20)),
        ({"max_cudagraph_capture_size": 0}, GraphConfig(is_enabled=False, max_size=0)),
        ({"cudagraph_capture_sizes": [1, 8], "max_cudagraph_capture_size": 8}, GraphConfig(sizes=[1, 8], max_size=8)),
        ({"compilation_config": {"cudagraph_mode": "none"}}, GraphConfig(is_enabled=False)),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, GraphConfig()),
        ({"optimization_level": 0}, GraphConfig(is_enabled=False)),
        ({"optimization_level": 0, "compilation_config": {"cudagraph_mode": "FULL"}}, GraphConfig()),
        ({"optimization_level": 1}, GraphConfig()),
        ({"optimization_level": 3}, GraphConfig()),
        ({"enforce_eager": True}, GraphConfig(is_enabled=False)),
        ({"performance_mode": "interactivity"}, GraphConfig(is_fine=True)),
        ({"performance_mode": "throughput"}, GraphConfig()),
    ],
    ids=str,
)
def test_steps_with_graphs(options: dict[str, Any], expected: GraphConfig) -> None:
    assert graphs(**options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cudagraph_capture_sizes": []}, "--max-cudagraph-capture-size 0 turns graphs off"),
        ({"cudagraph_capture_sizes": [4], "max_cudagraph_capture_size": 8}, "8 is not the greatest of .*, 4; leave"),
        (
            {"cudagraph_capture_sizes": [4], "compilation_config": {"cudagraph_capture_sizes": [4]}},
            "--cudagraph-capture-sizes and --compilation-config.cudagraph_capture_sizes say the same",
        ),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "got 'PIECEWISE'.* FULL_DECODE_ONLY captures"),
        ({"compilation_config": {"cudagraph_modus": "FULL"}}, "unknown field `cudagraph_modus`"),
        ({"compilation_config": {"cudagraph_capture_sizes": [0]}}, "Expected `int` >= 1"),
        ({"optimization_level": 4}, "optimization_level: There is no such value .got 4.* Choose from 0, 1, 2, 3"),
        ({"performance_mode": "fast"}, "performance_mode: .*'interactivity'"),
    ],
    ids=str,
)
def test_what_contradicts_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphs(**options)


def test_sizes_that_no_step_has_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_graphs(DeviceConfig(cudagraph_capture_sizes=[4, 100]), "cuda", 64).sizes == [4]
    assert "at most 64 requests" in caplog.text
    assert graphs(cudagraph_capture_sizes=[4, 1024]).sizes == [4]
    assert not graphs(cudagraph_capture_sizes=[1024]).is_enabled


def test_keys_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    graphs(compilation_config={"mode": 3, "custom_ops": ["all"], "splitting_ops": [], "pass_config": {}})
    assert "these keys change nothing: mode, custom_ops" in caplog.text
    caplog.clear()
    graphs(compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE"})
    assert "steps with prompts run without" in caplog.text


def test_a_cpu_has_no_graphs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = DeviceConfig(cudagraph_capture_sizes=[4], compilation_config=None, optimization_level=0)
    assert resolve_graphs(options, "cpu", 512) == GraphConfig()
    assert "no CUDA graphs on a CPU, so cudagraph_capture_sizes changes nothing" in caplog.text
    caplog.clear()
    resolve_graphs(DeviceConfig(), "cpu", 512)
    assert caplog.text == ""


def test_the_mode_of_throughput_doubles_defaults_alone() -> None:
    usual, double = config(), config(performance_mode="throughput")
    assert double.limits.max_num_seqs == 2 * usual.limits.max_num_seqs
    assert double.limits.max_num_batched_tokens == 2 * usual.limits.max_num_batched_tokens
    given = config(performance_mode="throughput", max_num_seqs=7, max_num_batched_tokens=99)
    assert (given.limits.max_num_seqs, given.limits.max_num_batched_tokens) == (7, 99)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(None, "cpu"), ("auto", "cuda"), ("TRITON_ATTN", "cuda"), ("triton_attn", "cuda"), ("CPU_ATTN", "cpu")],
)
def test_the_device_s_own_attention_may_be_named(name: str | None, kind: Any) -> None:
    check_attention_backend(name, kind)


@pytest.mark.parametrize(
    ("name", "kind", "here"), [("FLASHINFER", "cuda", "TRITON_ATTN"), ("TRITON_ATTN", "cpu", "CPU_ATTN")]
)
def test_another_attention_is_refused_with_the_one_that_there_is(name: str, kind: Any, here: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: .*{here}"):
        check_attention_backend(name, kind)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-O0", "optimization_level", 0),
        ("-O 1", "optimization_level", 1),
        ("-O=3", "optimization_level", 3),
        ("--optimization-level 3", "optimization_level", 3),
        ("--cudagraph-capture-sizes 1 2 4", "cudagraph_capture_sizes", [1, 2, 4]),
        ("--max-cudagraph-capture-size 16", "max_cudagraph_capture_size", 16),
        ("--performance-mode throughput", "performance_mode", "throughput"),
        ("--attention-backend TRITON_ATTN", "attention_backend", "TRITON_ATTN"),
    ],
)
def test_flags(words: str, name: str, value: Any) -> None:
    args = parser_of(serve).parse_args(["some-model", *words.split(), "--port", "1"])
    assert getattr(args.engine_args.device, name) == value
    assert args.server_config.port == 1


@pytest.mark.parametrize("words", ['--compilation-config \'{"cudagraph_mode": "NONE"}\'', "-cc.cudagraph_mode NONE"])
def test_the_object_by_keys(words: str) -> None:
    device = parser_of(serve).parse_args(["some-model", *shlex.split(words)]).engine_args.device
    assert device.compilation_config.cudagraph_mode == "NONE"


def test_a_level_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--optimization-level: choose from 0, 1, 2, 3 (got '7')" in refusal("some-model -O7", capsys)
