"""Adapters that requests use, while engines end and requests come together."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.errors import EngineDeadError, EngineError, ParameterError, QuireError, UnavailableError
from quire.core.wire.adapters import CONFIG_NAME, WEIGHTS_NAMES, Adapter
from quire.frontend.checkpoint.adapters import AdapterNames, FoundAdapter, LoRARequest
from quire.frontend.requests.adapter_resolvers import FolderResolver
from quire.frontend.requests.adapters import Adapters
from tests.storage import hung_file


class Engines:
    """Engines' client that only prepares adapters, or fails."""

    def __init__(self, error: QuireError | None = None) -> None:
        self.error = error
        self.prepared: list[str] = []

    async def prepare_adapter(self, adapter: Adapter) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.prepared.append(adapter.name)


class Resolver:
    """Finds each name in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest:
        return LoRARequest(lora_name, 1, str(self._folder))


def adapters(engines: Engines, *resolvers: Resolver) -> Adapters:
    names = AdapterNames(["base"], resolves=bool(resolvers))
    model: Any = SimpleNamespace(name="base", adapters=names, takes_adapters=True)
    client: Any = engines
    return Adapters(model, client, resolvers=resolvers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (CONFIG_NAME, WEIGHTS_NAMES[0]):
        (tmp_path / name).write_bytes(b"{}")
    return tmp_path


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ParameterError("rank 99", param="lora_path"), ParameterError),
        (EngineError("The engine ended before its workers answered."), UnavailableError),
        (EngineDeadError("gone"), EngineDeadError),
    ],
)
def test_an_adapter_is_not_blamed_for_an_engine_that_ends(folder: Path, error: QuireError, kind: type) -> None:
    place = adapters(Engines(error))
    with pytest.raises(kind, match=str(error)) as found:
        asyncio.run(place.load("a", str(folder)))
    assert type(found.value) is kind


def test_requests_that_come_together_bring_an_adapter_once(folder: Path) -> None:
    engines = Engines()
    place = adapters(engines, Resolver(folder))

    async def together() -> list[FoundAdapter | None]:
        return await asyncio.gather(*(place.resolve("a") for _ in range(5)))

    assert len({each.adapter.digest for each in asyncio.run(together()) if each is not None}) == 1
    assert engines.prepared == ["a"]


class HungFolder(FolderResolver):
    """A folder whose storage does not answer before `answers` is set."""

    answers = threading.Event()

    def _find(self, name: str) -> LoRARequest | None:
        self.answers.wait()
        return super()._find(name)


class SlowResolver:
    """Never answers."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest:
        await asyncio.sleep(1000)
        raise AssertionError


def test_files_that_do_not_come_are_given_up_and_other_adapters_are_served(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LORA_LOAD_TIMEOUT_S", "0.3")
    other, engines = tmp_path_factory.mktemp("other"), Engines()
    for name in (CONFIG_NAME, WEIGHTS_NAMES[0]):
        (other / name).write_bytes(b"{}")

    async def run() -> None:
        place = adapters(engines)
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"'slow' is not loaded: the files were not read in 0\.3 s"):
                await place.load("slow", str(folder))
        with pytest.raises(UnavailableError, match="QUIRE_LORA_LOAD_TIMEOUT_S allows more time"):
            await place.resolve(LoRARequest("slow", 1, str(folder)))
        await place.load("fast", str(other))
        assert engines.prepared == ["fast"]

    with hung_file(folder / WEIGHTS_NAMES[0]):
        asyncio.run(run())


def test_resolvers_that_do_not_answer_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LORA_LOAD_TIMEOUT_S", "0.3")

    async def run(resolver: Any) -> None:
        with pytest.raises(UnavailableError, match="'slow' is not loaded"):
            await adapters(Engines(), resolver).resolve("slow")

    asyncio.run(run(SlowResolver()))
    asyncio.run(run(HungFolder(tmp_path, ["base"])))
    HungFolder.answers.set()
