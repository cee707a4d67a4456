"""Torch without its Python code for the meta device, in processes of their own, as a worker imports it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.turns(4, among="whole systems")

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


FORKING = """
import os
while code := sys.stdin.readline():
    if os.fork() == 0:
        exec(eval(code))
        sys.exit()
    print(os.wait()[1], flush=True)
"""

Run = Callable[[str], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs code in a fork of a process that has imported a light torch and done nothing else."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LIGHT + FORKING], **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(code: str) -> None:
            print(repr(code), file=requests, flush=True)
            assert answers.readline() == "0\n"  # else it has written why

        yield run
        requests.close()


def test_a_worker_is_imported_without_the_code_for_the_meta_device(run: Run) -> None:
    run("""
import quire.executor.processes.worker_factory, quire.executor.models.dense.qwen3
assert META not in sys.modules
""")


@pytest.mark.parametrize("name", ["torch._refs", "torch.utils._content_store", "torch.distributed.tensor"])
def test_a_further_module_of_torch_is_loaded_once_and_after_what_it_needs(run: Run, name: str) -> None:
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
def test_what_needs_all_of_torch_completes_it(run: Run, use: str) -> None:
    run(f"{use}; assert META in sys.modules")


def test_a_look_for_what_torch_never_has_ends(run: Run) -> None:
    run("""
for _ in range(2):
    assert not hasattr(torch, "nothing")
from torch import Generator, _refs
assert Generator is torch.Generator
""")


def test_what_was_left_out_is_added_once(run: Run) -> None:
    run("assert light_torch.complete() and not light_torch.complete() and META in sys.modules")


def test_random_weights_are_drawn(run: Run) -> None:
    run("""
from quire.executor.weights.dummy import DummyWeights
assert DummyWeights(torch.float32, 0).read("a.weight", (2, 3)).std() > 0
""")


def test_torch_compiles(run: Run) -> None:
    run(WORKS)


def test_an_operation_of_a_dry_build_that_has_no_other_code_is_computed(run: Run) -> None:
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
