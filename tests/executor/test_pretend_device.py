"""Models on an accelerator that is not there, in a process of its own; see `pretend_device`."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.executor.pretend_device import PretendDevice

pytestmark = pytest.mark.turns(4, among="whole systems")

MODELS = "tests/executor/models/"
SOME = [
    MODELS + "test_models.py::test_log_probabilities_and_greedy_tokens_are_those_of_transformers[gemma3-window]",
    MODELS + "transformers/test_programs.py::test_steps_use_our_operations_alone[bloom]",
    MODELS + "transformers/test_programs.py::test_steps_use_our_operations_alone[gptj]",
    MODELS + "transformers/test_programs.py::test_experts_and_their_routers_are_ours[mixtral-1]",
    MODELS + "test_latent_models.py::test_log_probabilities_and_greedy_tokens_are_those_of_transformers[deepseek_v32]",
    "tests/executor/weights/test_quantized_checkpoints.py::test_outputs_are_those_of_the_numbers[gptq-order]",
    "tests/executor/weights/test_quantized_checkpoints.py::test_outputs_are_those_of_the_numbers[ct-w4-zeros]",
]
"""Of the tests that run on it with `QUIRE_TEST_DEVICE=pretend pytest tests/executor/models`."""


def test_models_keep_their_tensors_together() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME]
    environment = os.environ | {"QUIRE_TEST_DEVICE": "pretend"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "." * len(SOME) in done.stdout, "all of them ran"


def test_tensors_of_two_devices_do_not_mix() -> None:
    with PretendDevice():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert [each.device.type for each in (here, there, there + 1, there[1:], there.to("cpu"))] == [
            *("cpu", "cuda", "cuda", "cuda", "cpu")
        ]  # fmt: skip
        assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]
        assert torch.zeros(3, device="cuda").copy_(here).sum() == 3
        assert there[here.long()].tolist() == [1, 1, 1]
        for mixed in (
            lambda: here + there,
            lambda: torch.equal(here, there),
            lambda: torch.cat((here, there)),
            lambda: here[there.long()],
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        for taken in (there.numpy, lambda: np.asarray(there)):
            with pytest.raises(TypeError, match="to numpy"):
                taken()
