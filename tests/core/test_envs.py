"""Environment variables: ours before vLLM's, checked before anything starts."""

import re
from pathlib import Path

import pytest

from quire.core import envs
from quire.core.errors import ConfigError

DOCUMENTED = Path(__file__).parents[2] / "docs/environment.md"


def test_ours_win_over_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.read_float("LOG_STATS_INTERVAL") == 10.0
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3")
    assert envs.read_float("LOG_STATS_INTERVAL") == 3.0
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0.5")
    assert envs.read_float("LOG_STATS_INTERVAL") == 0.5


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("QUIRE_LOG_STATS_INTERVAL", "often", "above 0"),
        ("QUIRE_ENGINE_HEARTBEAT_TIMEOUT_S", "-1", "above 0"),
        ("QUIRE_ENGINE_ITERATION_TIMEOUT_S", "0", "above 0"),
        ("QUIRE_HTTP_TIMEOUT_KEEP_ALIVE", "nan", "0 or more"),
        ("VLLM_CPU_KVCACHE_SPACE", "inf", "0 or more"),
        ("QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH", "perhaps", "1 or 0"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "2", "1 or 0"),
        ("VLLM_CPU_ACTIVATION_BITS", "4", "8 or 16"),
        ("QUIRE_DISABLED_KERNELS", "cpu-native", "empty or cpu_native"),
        ("VLLM_DISABLED_KERNELS", "nobodys", "empty or cpu_native"),
    ],
)
def test_a_wrong_value_is_refused_by_the_variable_that_holds_it(
    name: str, text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs.check()
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name} must be .*{says}, got '{text}'"):
        envs.check()


def test_kernels_of_vllm_may_be_disabled_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel, cpu_native")
    envs.check()


@pytest.mark.parametrize(("text", "on"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False)])
def test_a_flag_may_be_a_word(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH", text)
    assert envs.read_flag("KEEP_ALIVE_ON_ENGINE_DEATH") is on


def test_nothing_is_said_of_a_zero_that_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HTTP_TIMEOUT_KEEP_ALIVE", "0")
    assert envs.read_float("HTTP_TIMEOUT_KEEP_ALIVE") == 0.0


def test_the_documented_defaults_are_the_real_ones() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| `?([^`|]*?)`? \|", DOCUMENTED.read_text(), re.MULTILINE))
    del rows["CPU_KVCACHE_SPACE"]  # of the memory plan
    numbers = {name: number.default for name, number in envs.NUMBERS.items() if name in rows}
    assert numbers == {name: float(rows[name]) for name in numbers}
    assert {name: bool(int(rows[name])) for name in envs.FLAGS} == envs.FLAGS
    assert set(rows) == {*numbers, *envs.FLAGS, *envs.TEXTS}
