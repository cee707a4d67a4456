"""The scheduler's time for a step, in microseconds, by the number of running requests; without other processes."""

import time
from typing import Any

import msgspec
import numpy as np

from quire.core.config.resolved import EngineConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.wire import protocol
from quire.core.wire.kv_groups import KVGroupSpec
from quire.core.wire.protocol import EngineRequest, SchedulerStats, SequenceStart, StepOutputs, StepResult
from quire.core.wire.sampling_params import SamplingParams

INPUT_LEN = 32
WARMUP_STEPS = 5


def measure_steps(config: EngineConfig, num_running: int, num_steps: int) -> dict[str, Any]:
    """Medians over decode steps of `num_running` requests: scheduling, updating, and encoding both messages."""
    scheduler = _filled(config, num_running, INPUT_LEN + WARMUP_STEPS + num_steps + 1)
    encode = protocol.encoder().encode
    rows = []
    for _ in range(WARMUP_STEPS + num_steps):
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, [[1] for _ in plan.slots])
        t2 = time.perf_counter()
        deltas = scheduler.update(result)
        t3 = time.perf_counter()
        encode(plan)
        encode(StepOutputs(deltas, SchedulerStats(), 0.0))
        t4 = time.perf_counter()
        rows.append((t1 - t0, t3 - t2, t4 - t3))
    schedule, update, messages = np.median(np.asarray(rows[WARMUP_STEPS:]), axis=0) * 1e6
    total = schedule + update
    return {
        "running": num_running,
        "schedule_us": float(schedule),
        "update_us": float(update),
        "encode_us": float(messages),
        "step_us": float(total),
        "us_per_request": float(total / num_running),
    }


def _filled(config: EngineConfig, num_running: int, max_model_len: int) -> Scheduler:
    """A scheduler whose requests have all been prefilled and still have many tokens to decode."""
    limits = msgspec.structs.replace(
        config.limits, max_num_seqs=num_running, max_num_batched_tokens=num_running * INPUT_LEN
    )
    pages = num_running * -(-max_model_len // limits.block_size)
    groups = [KVGroupSpec("full", [0], page_bytes=0)]
    scheduler = Scheduler(limits, kv_groups=groups, num_pages=pages, max_model_len=max_model_len, eos_token_ids=())
    prompts = np.random.default_rng(0).integers(0, config.spec.vocab_size, (num_running, INPUT_LEN)).tolist()
    sampling = SamplingParams(max_tokens=max_model_len - INPUT_LEN, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        scheduler.add(EngineRequest([SequenceStart(str(index), seed=0)], prompt, sampling))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(StepResult(plan.step_id, [[1] for _ in plan.slots]))
    return scheduler
