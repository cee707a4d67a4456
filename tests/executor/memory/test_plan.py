"""The memory plan, with numbers."""

import re

import pytest

from quire.core.config.cache import CacheConfig
from quire.core.errors import ModelLoadError
from quire.core.wire.kv_groups import KVGroupSpec
from quire.executor.memory import plan as memory
from quire.executor.memory.plan import GIB, CachePlan, DeviceMemory, MemoryNeeds, RequestPages

MIB = 2**20
NEEDS = MemoryNeeds(weights_bytes=10 * GIB, workspace_bytes=2 * GIB, page_bytes=2 * MIB)
FULL = RequestPages([KVGroupSpec("full", [0], 2 * MIB)], block_size=16, largest_chunk=512)
GPU = DeviceMemory(total_bytes=40 * GIB, free_bytes=39 * GIB)


def plan(needs: MemoryNeeds = NEEDS, mem: DeviceMemory = GPU, **options) -> CachePlan:
    cache = {key: options.pop(key) for key in list(options) if key in CacheConfig.__struct_fields__}
    request = {"device": "cuda", "max_num_seqs": 64, "max_model_len": 4096, "fit_max_model_len": False, **options}
    return memory.plan_cache(CacheConfig(**cache), needs, mem, **{"pages": FULL, **request})


def test_the_cache_gets_what_weights_and_workspace_leave() -> None:
    assert plan(gpu_memory_utilization=0.5) == CachePlan(8 * GIB // (2 * MIB), 4096)


def test_memory_that_others_hold_is_not_planned_with() -> None:
    assert plan(mem=DeviceMemory(40 * GIB, 15 * GIB)).num_pages == 3 * GIB // (2 * MIB)


def test_bytes_or_pages_may_be_named() -> None:
    assert plan(kv_cache_memory_bytes=GIB).num_pages == 512
    assert plan(num_gpu_blocks_override=7) == CachePlan(7, 4096)
    assert plan(num_gpu_blocks_override=7, fit_max_model_len=True) == CachePlan(7, 112)


def test_a_cpu_gets_four_gibibytes_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ram = DeviceMemory(100 * GIB, 100 * GIB)
    cpu = {"device": "cpu", "mem": ram}
    assert plan(**cpu).num_pages == 2048
    assert plan(**cpu, max_num_seqs=2).num_pages == 512, "two full-length requests cannot fill more"
    assert plan(**cpu, max_model_len=65536) == CachePlan(4096, 65536), "one full-length request must fit"
    assert plan(**cpu, max_model_len=65536, fit_max_model_len=True) == CachePlan(2048, 32768)
    assert plan(**cpu, gpu_memory_utilization=0.13).num_pages == 512
    assert plan(**cpu, gpu_memory_utilization=0.2).num_pages == 4096, "a share that is named has no other limit"
    assert plan(**cpu, gpu_memory_utilization=0.2, max_num_seqs=2).num_pages == 512
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "6.5")
    assert plan(**cpu).num_pages == 3328
    monkeypatch.setenv("QUIRE_CPU_KVCACHE_SPACE", "1")
    assert plan(**cpu).num_pages == 512
    assert plan().num_pages == int(40 * GIB * 0.92 - 12 * GIB) // (2 * MIB), "says nothing about other devices"


def test_auto_takes_the_length_that_fits() -> None:
    assert plan(max_model_len=10**6, fit_max_model_len=True, kv_cache_memory_bytes=5 * MIB) == CachePlan(2, 32)
    assert plan(max_model_len=4096, fit_max_model_len=True).max_model_len == 4096


def test_a_window_needs_no_more_pages_than_it_sees() -> None:
    window = KVGroupSpec("window", [1], 2 * MIB, window=1024)
    mixed = RequestPages([KVGroupSpec("full", [0], 2 * MIB), *[window] * 5], block_size=16, largest_chunk=512)
    most = (1023 + 512 - 1) // 16 + 2  # of a window group, in the middle of a long prompt
    assert mixed.needed(32768) == 2048 + 5 * most
    assert mixed.needed(100) == 6 * 7
    assert mixed.longest(2048 + 5 * most, 10**6) == 32768
    assert mixed.longest(2048 + 5 * most - 1, 10**6) == 32752
    assert RequestPages([window], 16, 512).longest(most, 10**6) == 10**6, "a window is all that it ever keeps"
    exact = {"pages": mixed, "max_model_len": 32768, "kv_cache_memory_bytes": mixed.needed(32768) * 2 * MIB}
    assert plan(**exact) == CachePlan(mixed.needed(32768), 32768)
    with pytest.raises(ModelLoadError, match=r"--max-model-len 32752 .*--kv-cache-memory-bytes "):
        plan(**exact | {"kv_cache_memory_bytes": exact["kv_cache_memory_bytes"] - 1})
    assert plan(pages=mixed, fit_max_model_len=True, num_gpu_blocks_override=13).max_model_len == 32
    with pytest.raises(ModelLoadError, match=r"5 is too few.* takes 6 pages"):
        plan(pages=mixed, num_gpu_blocks_override=5)


def test_a_request_that_cannot_fit_is_refused_with_remedies_that_work() -> None:
    options = {"gpu_memory_utilization": 0.31, "max_model_len": 20_000}
    with pytest.raises(ModelLoadError) as error:
        plan(**options)
    text = str(error.value)
    wanted = 1250 * 2 * MIB
    left = int(40 * GIB * 0.31) - 12 * GIB
    assert f"{wanted - left} bytes are missing" in text
    flags = dict(re.findall(r"--([a-z-]+) ([0-9.]+\d)", text))
    assert set(flags) == {"max-model-len", "kv-cache-memory-bytes", "gpu-memory-utilization"}
    assert plan(**{**options, "max_model_len": int(flags["max-model-len"])})
    assert plan(**{**options, "gpu_memory_utilization": float(flags["gpu-memory-utilization"])})
    assert plan(**options, kv_cache_memory_bytes=int(flags["kv-cache-memory-bytes"])).num_pages == 1250
    with pytest.raises(ModelLoadError):
        plan(**{**options, "max_model_len": int(flags["max-model-len"]) + 1})


def test_remedies_that_cannot_work_are_not_offered() -> None:
    with pytest.raises(ModelLoadError) as error:
        plan(max_model_len=10**6)
    assert "--max-model-len" in str(error.value)
    assert "--kv-cache-memory-bytes" not in str(error.value)
    with pytest.raises(ModelLoadError, match="smaller model"):
        plan(mem=DeviceMemory(12 * GIB, 12 * GIB))
    with pytest.raises(ModelLoadError, match="smaller model"):
        plan(mem=DeviceMemory(12 * GIB, 12 * GIB), fit_max_model_len=True)


def test_more_than_there_is_cannot_be_asked_for() -> None:
    with pytest.raises(ModelLoadError) as error:
        plan(kv_cache_memory_bytes=30 * GIB)
    assert f"{3 * GIB} bytes are missing" in str(error.value)
    assert f"--kv-cache-memory-bytes {27 * GIB} or less" in str(error.value)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="24 bytes are missing"):
        memory.check_weights(1024, DeviceMemory(2000, 1000), "shape")
    memory.check_weights(1024, DeviceMemory(2000, 1024), "shape")


def test_states_of_all_sequences_come_before_pages() -> None:
    needs = MemoryNeeds(10 * GIB, 2 * GIB, page_bytes=2 * MIB, state_bytes=100 * MIB)
    with_states = plan(needs, gpu_memory_utilization=0.5)
    assert with_states.num_pages == (8 * GIB - 64 * 100 * MIB) // (2 * MIB)
    with pytest.raises(
        ModelLoadError, match=r"states of 64 sequences need 6.25 GiB, 100.0 MiB each.* Use --max-num-seqs 40"
    ):
        plan(needs, gpu_memory_utilization=0.4)
    with pytest.raises(ModelLoadError, match=r"Use a smaller model"):
        plan(needs, gpu_memory_utilization=0.3)


def test_a_model_of_states_alone_has_pages_for_the_snapshots_that_its_requests_can_fill() -> None:
    needs = MemoryNeeds(GIB, GIB, page_bytes=100 * MIB, state_bytes=100 * MIB)

    def recurrent(interval: int | None) -> RequestPages:
        group = KVGroupSpec("recurrent", [0], 100 * MIB, state_bytes=100 * MIB, interval=interval)
        return RequestPages([group], 16, 512)

    assert plan(needs, pages=recurrent(1024), max_num_seqs=4) == CachePlan(4 * 4, 4096)
    assert plan(needs, pages=recurrent(1024), max_num_seqs=4, device="cpu") == CachePlan(4 * 4, 4096)
    assert plan(needs, pages=recurrent(1024), kv_cache_memory_bytes=GIB) == CachePlan(10, 4096)
    assert plan(needs, pages=recurrent(None)) == CachePlan(0, 4096)
