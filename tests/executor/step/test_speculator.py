"""A speculator sees each step's forward pass: hidden states, outputs of layers and logits are Transformers' own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.core.errors import ModelLoadError
from quire.core.wire.protocol import NewSlot, RequestDelta
from quire.core.wire.rank import Rank
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.step.drafts import Proposal
from quire.executor.step.request_table import RequestTable
from quire.executor.step.speculator import ForwardPass, ForwardReads, SampledTokens
from quire.executor.worker import Worker
from tests.executor.models.test_hybrid_models import VARIANTS
from tests.executor.models.test_hybrid_models import folder as hybrid  # noqa: F401
from tests.executor.step.test_model_runner import (
    engine_config,
    generate,
    mixed_requests,
    prompt_of,
    request,
    start_worker,
    tokens_of,
)


class Onlooker:
    """Proposes nothing, and keeps what it sees: by slot and position, copies of values."""

    sees_all_steps = True

    def __init__(self, reads: ForwardReads) -> None:
        self.reads = reads
        self.seen: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        self.num_steps = 0

    def admit(self, request: NewSlot) -> None:
        pass

    def release(self, slots: list[int]) -> None:
        pass

    def propose(self, forward: ForwardPass, sampled: SampledTokens, table: RequestTable) -> Proposal:
        self.num_steps += 1
        plan = forward.plan
        places = [
            (slot, start + offset)
            for slot, start, count in zip(plan.slots, plan.num_computed, plan.num_scheduled, strict=True)
            for offset in range(count)
        ]
        assert forward.batch.positions[: len(places)].tolist() == [position for _, position in places]
        for row, known in zip(sampled.rows.tolist(), sampled.num_known.tolist(), strict=True):
            assert known == plan.num_computed[row] + plan.num_scheduled[row] + 1
        values: dict[str, torch.Tensor | None] = {"hidden": forward.hidden}
        values |= {f"layer {layer}": output for layer, output in forward.layers.items()}
        for name, rows in values.items():
            if rows is not None:
                self.seen.setdefault(name, {}).update(zip(places, rows.clone(), strict=True))
        wanted = [place for place, count in zip(places, self._wanted(forward), strict=True) if count]
        self.seen.setdefault("logits", {}).update(zip(wanted, forward.logits.clone(), strict=True))
        num_asked = int(sampled.wants_drafts.sum())
        return Proposal(torch.zeros(num_asked, 1, dtype=torch.int64), torch.zeros(num_asked, dtype=torch.int64))

    @staticmethod
    def _wanted(forward: ForwardPass) -> list[bool]:
        marks: list[bool] = []
        for count, wanted in zip(forward.plan.num_scheduled, forward.plan.num_wanted, strict=True):
            marks += [False] * (count - wanted) + [True] * wanted
        return marks


def serve(folder: Path, onlooker: Onlooker) -> Callable[..., dict[str, list[RequestDelta]]]:
    worker = Worker(engine_config(folder), Rank(), ParallelGroup(), speculator=onlooker)
    ready = worker.load()
    worker.allocate(ready.num_pages, ready.max_model_len)
    return partial(generate, worker, kv_groups=ready.kv_groups)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-next", "olmo-hybrid"])
def test_a_speculator_reads_the_forward_pass(
    family: str,
    checkpoint: Callable[..., Path],
    hybrid: Callable[[str], Path],  # noqa: F811
) -> None:
    folder = hybrid(family) if family in VARIANTS else checkpoint(family)
    onlooker = Onlooker(ForwardReads(hidden=True, layers=(0, 1), logits=True))
    prompt = prompt_of(3, 40)
    # The sampler changes the logits of this request in place, which the speculator must not see.
    one = request("a", prompt, max_tokens=5, allowed_token_ids=list(range(3, 60)))
    [tokens] = tokens_of(serve(folder, onlooker)([one], max_num_batched_tokens=16)).values()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = torch.tensor([[*prompt, *tokens[:-1]]])
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(reference.model.layers[:2]):
        layer.register_forward_hook(lambda _, __, output, index=index: outputs.update({index: output}))
    with torch.inference_mode():
        result = reference(known, output_hidden_states=True)
    expected = {"hidden": result.hidden_states[-1], "logits": result.logits}
    expected |= {
        f"layer {index}": output[0] if isinstance(output, tuple) else output for index, output in outputs.items()
    }
    assert set(onlooker.seen) == set(expected)
    for name, values in onlooker.seen.items():
        positions = sorted(position for _, position in values)
        assert positions == list(range(len(known[0])))[-len(tokens) if name == "logits" else 0 :]
        got = torch.stack([values[0 if (0, p) in values else 31, p] for p in positions])
        np.testing.assert_allclose(got, expected[name][0][positions], atol=2e-4, err_msg=name)


def test_a_speculator_that_reads_nothing_leaves_steps_as_they_are(checkpoint: Callable[..., Path]) -> None:
    folder, requests = checkpoint("llama"), mixed_requests()[:6]
    onlooker = Onlooker(ForwardReads())
    got = tokens_of(serve(folder, onlooker)(requests, max_num_batched_tokens=40))
    assert got == tokens_of(generate(start_worker(engine_config(folder)), requests, max_num_batched_tokens=40))
    assert set(onlooker.seen) == {"logits"}
    assert onlooker.num_steps >= 24, "it is called in steps without samples, too"


def test_a_model_that_does_not_show_its_layers_is_refused(checkpoint: Callable[..., Path]) -> None:
    onlooker = Onlooker(ForwardReads(layers=(2,)))
    with pytest.raises(ModelLoadError, match=r"reads the output of layer 2, but .* shows those of its first 2 layers"):
        Worker(engine_config(checkpoint("llama")), Rank(), ParallelGroup(), speculator=onlooker).load()
