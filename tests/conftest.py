"""Fixtures that the whole suite shares: tiny checkpoints, and one server process on one of them."""

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Set before torch is imported, and inherited by engines. Tiny models gain nothing from threads, and on a busy machine
# OpenMP's barriers make each step fifty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A new HTTP client reads the certificates of all authorities, which takes longer than most calls, and tests and their
# processes make thousands of clients. Tests call this machine only, so there are none to read: the folder has no such
# files, and those who test TLS name the certificate to trust.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

import torch

from quire.frontend.media.torchvision_parts import install

# Transformers looks for torchvision when it is imported, and as often finds what helper processes find.
install()

# Without an accelerator, kernels run in Triton's interpreter. It is chosen when Triton is imported, for the functions
# of its language as well, and Transformers imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import httpx
import pytest

from quire.ops.cpu.compiler import cache_folder
from tests import suite_report, turns
from tests.checkpoints import make_checkpoint
from tests.servers import ServerProcess
from tests.vector_servers import (  # noqa: F401
    embedding_checkpoint,
    embedding_server,
    labelling_checkpoint,
    labelling_server,
    ranking_checkpoint,
    ranking_server,
)

for _wait in ("connect", "read", "write", "pool"):  # 5 s by default, which an answer may take on a busy machine
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _wait, 60.0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes a million objects that stay: garbage collections find nothing in them, now and during tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    suite_report.add_options(parser)
    turns.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    suite_report.register(config)
    turns.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of other turns. Files that take long come first, and then those of whole systems, which
    wait much: none begins when all else is done."""
    turns.leave_out(items, config)
    seconds = suite_report.seconds_by_file()

    def place(item: pytest.Item) -> tuple[float, bool]:
        return -seconds.get(suite_report.file_of(item.nodeid), 0.0), item.path.parent != Path(__file__).parent

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before all fixtures: a test's random tensors are the same whichever tests ran before it in its process."""
    torch.manual_seed(0)


_LOGGER = logging.getLogger("quire")
_LOGGING = list(_LOGGER.handlers), _LOGGER.propagate, _LOGGER.level


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process, in tests or in the fixtures of a module, set up logging for it."""
    yield
    _LOGGER.handlers[:], _LOGGER.propagate = _LOGGING[:2]
    _LOGGER.setLevel(_LOGGING[2])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama", tie=True)`: the folder of a tiny random checkpoint, made once per set of arguments."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def get(family: str = "llama", **options: object) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(root / f"{family}-{len(made)}", family, **options)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture
def gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, for this process and its children, with the kernels of the user's."""
    root = tmp_path / "cache"
    root.mkdir()
    kernels = cache_folder()
    kernels.mkdir(parents=True, exist_ok=True)
    (root / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(root))
    return root


@pytest.fixture(scope="session")
def server(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `quire serve` process with a tiny Llama, shared by all tests that do not change its state."""
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), str(checkpoint("llama")), "--served-model-name", "tiny", "tiny-alias",
        "--enable-server-load-tracking", "--enable-request-id-headers", "--num-gpu-blocks-override", "512",
        "--enable-prompt-embeds",
    )  # fmt: skip
    yield process.wait_until_ready()
    process.stop()


@pytest.fixture(scope="session")
def base_url(server: ServerProcess) -> str:
    return server.base_url


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A `quire serve` process without options: it serves the embedded demo model."""
    process = ServerProcess(tmp_path_factory.mktemp("demo")).wait_until_ready()
    yield process
    process.stop()
