"""Processed items in memory that several processes share."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.config.multimodal import MultimodalConfig
from quire.core.errors import ConfigError
from quire.core.wire.media import Array
from quire.frontend.media.item_cache import OwnItems
from quire.frontend.media.messages import ReadyItem
from quire.frontend.media.shared_items import ItemFolder, SharedItems, cache_of


def item(num_bytes: int, mark: bytes = b"a") -> ReadyItem:
    values = Array("|u1", (num_bytes,), mark * num_bytes)
    return ReadyItem("<image>", 3, {}, {"pixels": values}, mark)


@pytest.fixture
def folder() -> Iterator[ItemFolder]:
    made = ItemFolder()
    yield made
    made.close()
    assert not made.path.exists()


def names(folder: ItemFolder) -> list[str]:
    return sorted(each.name for each in folder.path.iterdir() if len(each.name) == 2)


def test_what_one_keeps_another_finds(folder: ItemFolder) -> None:
    async def run() -> None:
        one, other = (SharedItems(folder.path, 10**6, 10**5) for _ in range(2))
        assert await other.get(b"\x01") is None
        await one.put(b"\x01", item(500))
        assert await other.get(b"\x01") == item(500)
        await one.put(b"\x02", item(10**5 + 1))
        assert names(folder) == ["01"], "an item that is too large is not kept"
        other.clear()
        assert await one.get(b"\x01") is None

    asyncio.run(run())
    assert oct(folder.path.stat().st_mode)[-3:] == "700"


def test_items_unused_for_longest_are_forgotten_first(folder: ItemFolder) -> None:
    async def run() -> None:
        kept = SharedItems(folder.path, 2500, 10**5)
        for number in (1, 2):
            await kept.put(bytes([number]), item(1000))
            os.utime(folder.path / f"0{number}", (number, number))
        assert await kept.get(b"\x01") is not None, "which is used now"
        await kept.put(b"\x03", item(1000))

    asyncio.run(run())
    assert names(folder) == ["01", "03"]


def test_a_file_that_is_damaged_or_gone_is_no_item(folder: ItemFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        kept = SharedItems(folder.path, 10**6, 10**6)
        (folder.path / "01").write_bytes(b"\x93no item")
        assert await kept.get(b"\x01") is None
        unfinished = folder.path / ".02.999"
        unfinished.write_bytes(b"half")
        os.utime(unfinished, (1, 1))
        await kept.put(b"\x03", item(10))
        assert not unfinished.exists()
        folder.close()
        for _ in range(2):
            await kept.put(b"\x03", item(10))
        assert await kept.get(b"\x03") is None

    asyncio.run(run())


def test_the_folder_of_a_killed_process_is_removed() -> None:
    code = "from quire.frontend.media.shared_items import ItemFolder as F; f = F(); print(f.path, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))
    ItemFolder().close()
    assert path.exists(), "its process lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.utime(path, (long_ago, long_ago))
    ItemFolder().close()
    assert not path.exists()


def test_options_choose_the_cache(folder: ItemFolder) -> None:
    assert isinstance(cache_of(MultimodalConfig()), OwnItems)
    assert isinstance(cache_of(MultimodalConfig(mm_processor_cache_type="shm", mm_processor_cache_gb=0)), OwnItems)
    shared = cache_of(MultimodalConfig(mm_processor_cache_type="shm", mm_shm_cache_max_object_size_mb=1))
    assert isinstance(shared, SharedItems)
    shared.close()
    with pytest.raises(ConfigError, match="goes with --mm-processor-cache-type shm"):
        MultimodalConfig(mm_shm_cache_max_object_size_mb=1)
