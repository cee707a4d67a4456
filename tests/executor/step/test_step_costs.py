"""What a decode step of a dense model asks of a card: launches, and bytes. Kernels are counted, and do not run."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.core.config.cache import CacheConfig
from quire.core.config.load import LoadConfig
from quire.core.config.model import ModelConfig
from quire.core.wire.protocol import StepPlan
from quire.executor.worker import Worker
from quire.frontend.checkpoint.model_spec import read_model_spec
from quire.ops.triton import launch, sampling
from quire.ops.triton.backend import TritonBackend
from tests.executor.step.test_model_runner import LIMITS, engine_config, generate, prompt_of, request, start_worker

KV_HEADS, HEAD_DIM = 8, 128
SIZES = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": 3072,
}  # fmt: skip
"""Of Qwen3-0.6B. Its vocabulary is smaller here, and it has fewer layers."""

LAYER = [
    *("add_rms_norm_rows", "multiply_few", "rotate_and_attend", "multiply_few"),
    *("add_rms_norm_rows", "multiply_few", "multiply_few"),
]
WITHOUT_KERNELS = (
    *("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh"),
    *("zeros", "ones"),
)
"""torch's operations, beside views, that only make tensors; the last two are those of `_first_tokens`."""


SCRATCH = ("partials_ptr", "parts_ptr", "part_sums_ptr")
"""Memory that one kernel writes and reads again, out of the second-level cache."""
MAX_SCRATCH_BYTES = 25 << 20
"""Half of that cache on an H100."""


class Launched(NamedTuple):
    """A kernel and the tensors that it is given, without scratch."""

    name: str
    tensors: Sequence[Tensor]


class Card(TorchDispatchMode):
    """Stands for the launcher of kernels, and sees torch's operations; keeps what would run on a card."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []

    def launch(self, kernel: Any, grid: Any, arguments: Sequence[Any], *_: Any) -> None:
        given = [
            (name, each) for name, each in zip(kernel.arguments, arguments, strict=True) if isinstance(each, Tensor)
        ]
        assert sum(each.nbytes for name, each in given if name in SCRATCH) <= MAX_SCRATCH_BYTES
        self.launched.append(Launched(kernel.name, [each for name, each in given if name not in SCRATCH]))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in WITHOUT_KERNELS:
            read = [each for each in args if isinstance(each, Tensor)]
            self.launched.append(Launched(name, [*read, *([out] if isinstance(out, Tensor) else [])]))
        return out


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(launch, "launcher_of_process", lambda: card)
    monkeypatch.setattr("quire.executor.worker.bind", lambda *_, **__: TritonBackend())
    monkeypatch.setattr(sampling, "_tokens", lambda logits: _first_tokens(len(logits)))
    return card


def _first_tokens(num_rows: int) -> tuple[Tensor, Tensor]:
    """Outputs that a kernel which does not run leaves as they should be."""
    return torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.int8)


class DecodeStep(NamedTuple):
    """What a step launched, and the keys that its rows see."""

    launched: list[Launched]
    seq_lens: list[int]


class Model(NamedTuple):
    """A worker, and its decode steps."""

    worker: Worker
    steps: list[DecodeStep]

    def run(self, num_rows: int, prompt_len: int) -> DecodeStep:
        """Returns a decode step of so many rows. Prompts come in steps of so few tokens that kernels would run them."""
        self.steps.clear()
        requests = [request(str(i), prompt_of(i, prompt_len), max_tokens=4 + 2 * num_rows) for i in range(num_rows)]
        generate(self.worker, requests, depth=1, enable_prefix_caching=False, max_num_batched_tokens=128)
        return next(step for step in reversed(self.steps) if len(step.seq_lens) == num_rows)


@pytest.fixture
def start(checkpoint: Callable[..., Path], card: Card, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Model]:
    def start(num_layers: int) -> Model:
        folder = checkpoint("qwen3")
        sizes = {**SIZES, "num_hidden_layers": num_layers, "layer_types": num_layers * ["full_attention"]}
        options = ModelConfig(model=str(folder), dtype="bfloat16", hf_overrides=sizes)
        spec = read_model_spec(folder, options)
        config = engine_config(
            folder, spec=spec, load=LoadConfig(load_format="dummy"), enforce_eager=True,
            limits=LIMITS, cache=CacheConfig(num_gpu_blocks_override=600),
        )  # fmt: skip
        worker = start_worker(config)
        model, launch_step = Model(worker, []), worker.launch

        def counted(plan: StepPlan) -> Any:
            card.launched = []
            with card:
                step = launch_step(plan)
            if plan.slots and not plan.admitted and plan.num_scheduled == [1] * len(plan.slots):
                model.steps.append(DecodeStep(card.launched, [computed + 1 for computed in plan.num_computed]))
            return step

        monkeypatch.setattr(worker, "launch", counted)
        return model

    return start


def names_of(step: DecodeStep) -> list[str]:
    return [each.name for each in step.launched]


@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_dense_layer_is_seven_launches(start: Callable[[int], Model], num_rows: int) -> None:
    steps = []
    for num_layers in (2, 3):
        steps.append(names_of(start(num_layers).run(num_rows, 5)))
    few, many = steps
    assert len(many) - len(few) == len(LAYER) == 7
    assert any(many[place : place + 7] == LAYER for place in range(len(many) - 6))
    assert len(few) - 2 * len(LAYER) <= 8, f"beside layers: {few}"


@pytest.mark.parametrize(("num_rows", "length"), [(1, 250), (4, 3), (16, 200)])
def test_a_step_moves_few_bytes_beside_weights_and_cache(
    start: Callable[[int], Model], num_rows: int, length: int
) -> None:
    """The goal of 1.03 is that of all layers, which the vocabulary's ends are no part of."""
    steps = [start(num_layers).run(num_rows, length) for num_layers in (2, 4)]
    assert steps[0].seq_lens == steps[1].seq_lens
    num_keys = sum(steps[0].seq_lens)
    moved = [sum(bytes_of(each, num_keys) for each in step.launched) for step in steps]
    hidden, size, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"] + 2 * KV_HEADS
    weights = hidden * (heads + SIZES["num_attention_heads"]) * HEAD_DIM + 3 * hidden * size
    needed = 2 * 2 * (weights + num_keys * 2 * KV_HEADS * HEAD_DIM)
    assert needed <= moved[1] - moved[0] <= 1.03 * needed


def bytes_of(launched: Launched, num_keys: int) -> int:
    """Bytes that a launch reads and writes, each tensor once; of a cache, the keys and values that its rows see."""
    total = 0
    for tensor in {each.data_ptr(): each for each in launched.tensors}.values():
        is_cache = tensor.dim() == 5
        total += 2 * 2 * num_keys * KV_HEADS * HEAD_DIM if is_cache else math.prod(tensor.shape) * tensor.itemsize
    return total
