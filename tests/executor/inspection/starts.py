"""Starts of a model in the test's own process: without engine and frontend, whose processes take seconds to begin."""

from pathlib import Path
from typing import Any

from quire.core.config.engine_args import EngineArgs
from quire.core.config.resolved import EngineConfig
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.frontend.launch.options import resolve
from quire.frontend.launch.speculation import read_draft
from tests.executor.step.test_model_runner import generate, request

PROMPTS = [list(range(start, start + 30)) for start in (5, 80)]


def config_of(folder: Path, **options: Any) -> EngineConfig:
    """The options of a start with these engine options."""
    args = EngineArgs.from_flat(model=str(folder), device="cpu", **options)
    spec = read_model_spec(folder, args.model)
    return resolve(args, spec, "server", draft=read_draft(args, spec))


def outputs(folder: Path, **options: Any) -> list[Any]:
    """Tokens and the log-probabilities of the likeliest ones, with all their digits."""
    worker = Worker(config_of(folder, num_gpu_blocks_override=64, **options), Rank(), ParallelGroup())
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    requests = [request(str(i), prompt, max_tokens=8, logprobs=3) for i, prompt in enumerate(PROMPTS)]
    deltas = generate(worker, requests, kv_groups=ready.kv_groups, num_pages=ready.num_pages)
    return [[(delta.token_ids, delta.logprobs) for delta in deltas[each]] for each in sorted(deltas)]
