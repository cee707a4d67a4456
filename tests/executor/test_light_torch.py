"""Torch without its Python code for the meta device, in processes of their own, as a worker imports it."""

import subprocess
import sys

import pytest

LIGHT = """
import importlib, sys
from quire.executor import light_torch
import torch
META = "torch._meta_registrations"
assert META not in sys.modules and "_meta_registrations" not in vars(torch)
"""

WORKS = """
def plain(x):
    return (x.softmax(-1) * 2).sort().values
assert torch.equal(torch.compile(plain, backend="aot_eager")(torch.ones(3)), plain(torch.ones(3)))
"""


def run(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT + code], capture_output=True, text=True)
    assert not result.returncode, result.stderr


def test_a_worker_is_imported_without_the_code_for_the_meta_device() -> None:
    run("""
import quire.executor.processes.worker_factory, quire.executor.models.qwen3
assert META not in sys.modules
""")


@pytest.mark.parametrize("name", ["torch._refs", "torch.utils._content_store", "torch.distributed.tensor"])
def test_a_further_module_of_torch_is_loaded_once_and_after_what_it_needs(name: str) -> None:
    run(f"""
module = importlib.import_module("{name}")
assert META in sys.modules and torch._meta_registrations is sys.modules[META]
assert module is sys.modules["{name}"] and module.__spec__.origin == module.__file__
""")


@pytest.mark.parametrize(
    "use",
    [
        "torch.Generator().manual_seed(1)",
        "torch.broadcast_shapes((1, 2), (2, 1))",
        "torch._decomp.decomposition_table",
        "isinstance(1, torch.Generator)",
    ],
)
def test_what_needs_all_of_torch_completes_it(use: str) -> None:
    run(f"{use}; assert META in sys.modules")


def test_a_look_for_what_torch_never_has_ends() -> None:
    run("""
for _ in range(2):
    assert not hasattr(torch, "nothing")
from torch import Generator, _refs
assert Generator is torch.Generator
""")


def test_what_was_left_out_is_added_once() -> None:
    run("assert light_torch.complete() and not light_torch.complete() and META in sys.modules")


def test_random_weights_are_drawn() -> None:
    run("""
from quire.executor.weights.dummy import DummyWeights
assert DummyWeights(torch.float32, 0).read("a.weight", (2, 3)).std() > 0
""")


def test_torch_compiles() -> None:
    run(WORKS)


def test_an_operation_of_a_dry_build_that_has_no_other_code_is_computed() -> None:
    run("""
from quire.executor.memory.dry_build import _LightMeta
values = torch.empty(2, 3, device="meta")
try:
    values.flip(0)
except NotImplementedError:
    pass
else:
    raise AssertionError("torch has other code for this operation: try another one")
with _LightMeta():
    assert values.flip(0).shape == (2, 3)
""")
