"""Pages that the pool evicts go to the host and come back: the real scheduler and real workers, the same tokens."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from quire.core.config.cache import CacheConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire.protocol import EngineRequest, RequestDelta, StepPlan
from tests.core.scheduling.host_pages import HostPages
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_model_runner import LIMITS, MAX_MODEL_LEN, execute, prompt_of, request, tokens_of
from tests.executor.step.test_sameness import BLOCK_SIZE, INTERVAL, Served, alone, start

torch.set_num_threads(1)

NUM_HOST_PAGES = 1000
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "keys and values": ("qwen3", {}),
    "windows": ("gemma3", {"sliding_window": 8, "num_hidden_layers": 6, "tie": True}),
    "latents": ("deepseek_v3", {}),
}


@pytest.fixture(scope="module", params=[*FAMILIES, "lfm2", "qwen3.5"])
def served(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    hybrid: Callable[[str], Path],  # noqa: F811
) -> Served:
    if request.param in FAMILIES:
        family, options = FAMILIES[request.param]
        folder = checkpoint(family, **options)
    else:
        folder = hybrid(request.param)
    interval = None if request.param in FAMILIES else INTERVAL
    cache = CacheConfig(num_gpu_blocks_override=600, mamba_block_size=interval)
    return start(folder, cache=cache, num_host_pages=NUM_HOST_PAGES)


class Driver:
    """The real scheduler over a small pool and the host's pages."""

    def __init__(self, served: Served, num_pages: int) -> None:
        self._served = served
        self.plans: list[StepPlan] = []
        self.scheduler = Scheduler(
            replace(LIMITS, block_size=BLOCK_SIZE, max_num_seqs=4),
            kv_groups=served.ready.kv_groups,
            num_pages=num_pages,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[2],
            lower_tiers=HostPages(NUM_HOST_PAGES),
        )

    def run(self, requests: list[EngineRequest], depth: int = 2) -> dict[str, list[RequestDelta]]:
        for each in requests:
            assert self.scheduler.add(each) == []
        deltas: dict[str, list[RequestDelta]] = {each.sequences[0].request_id: [] for each in requests}
        plans: deque[StepPlan] = deque()
        while self.scheduler.has_unfinished():
            while len(plans) < depth and (plan := self.scheduler.schedule()) is not None:
                plans.append(plan)
                self.plans.append(plan)
            for delta in self.scheduler.update(execute(self._served.worker, plans.popleft())):
                deltas[delta.request_id].append(delta)
        while plans:
            self.scheduler.update(execute(self._served.worker, plans.popleft()))
        self.scheduler.check_invariants()
        return deltas


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_goes_on_from_pages_that_others_had_meanwhile(served: Served, depth: int) -> None:
    groups = served.ready.kv_groups
    prompt = prompt_of(7, 70)
    first = request("first", prompt, max_tokens=20)
    # The worker's pages are the driver's own once that begins.
    expected = alone(served, [first])
    second = request("second", [*prompt, *expected["first"], 9], max_tokens=20)
    others = [request(f"other{index}", prompt_of(20 + index, 90), max_tokens=20) for index in range(3)]
    expected |= alone(served, [second, *others])
    # As many pages as one request takes, and a few more for snapshots.
    limits = {"block_size": BLOCK_SIZE, "largest_chunk": LIMITS.largest_chunk}
    num_pages = 12 + sum(group.max_pages(115, **limits) for group in groups)
    driver = Driver(served, num_pages)
    for each in (first, *others):
        assert tokens_of(driver.run([each], depth)) == {(name := each.sequences[0].request_id): expected[name]}
    saved = [move for plan in driver.plans for move in plan.moves_before if move.target == "host"]
    assert saved, "others had the pages meanwhile"
    num_before = len(driver.plans)
    deltas = driver.run([second], depth)
    assert tokens_of(deltas) == {"second": expected["second"]}
    loaded = [move for plan in driver.plans[num_before:] for move in plan.moves_before if move.source == "host"]
    assert loaded
    assert deltas["second"][0].num_cached_tokens == (80 if any(group.is_recurrent for group in groups) else 88)
