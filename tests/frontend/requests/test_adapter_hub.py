"""Adapters from the hub: a server on this machine answers as the hub does, to a process that knows no other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.frontend.requests.adapter_resolvers import Hub, resolvers_of
from tests.hub import hub

_ASKS = """
import asyncio, json, sys
from quire.core.errors import UnavailableError
from quire.frontend.requests.adapter_resolvers import Hub, resolvers_of

async def ask(resolver, name):
    try:
        found = await resolver.resolve_lora("base", name)
    except UnavailableError as error:
        return str(error)
    return None if found is None else [found.lora_name, found.lora_path]

[resolver] = resolvers_of(["owner/base"], Hub(cache=sys.argv[1]))
print(json.dumps([asyncio.run(ask(resolver, name)) for name in sys.argv[2:]]))
"""


def ask(address: str, cache: Path, *names: str) -> list[Any]:
    """What a process finds that has the hub at `address`."""
    environment = {
        "HF_ENDPOINT": address, "QUIRE_LORA_RESOLVER_HF_REPO_LIST": "owner/one, owner/many,owner/none",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "2",
    }  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", _ASKS, str(cache), *names], env=os.environ | environment, capture_output=True, check=True
    )
    return json.loads(process.stdout)


def test_adapters_are_downloaded_from_the_listed_repositories(tmp_path: Path) -> None:
    config = json.dumps({"base_model_name_or_path": "owner/base"}).encode()
    other = json.dumps({"base_model_name_or_path": "another/model"}).encode()
    adapter = {"adapter_config.json": config, "adapter_model.safetensors": b"weights", "model.bin": b"large"}
    many = {f"fr/{name}": content for name, content in adapter.items()} | {"others/adapter_config.json": other}
    repositories = {"owner/one": adapter, "owner/many": many, "owner/unlisted": adapter}
    with hub(repositories) as address:
        one, unlisted, fr, *missing = ask(
            address, tmp_path, "owner/one", "owner/unlisted", "owner/many/fr",
            *("owner/many", "owner/many/others", "owner/many/none", "owner/many/*", "owner/one/../fr", "owner/oneself"),
            "owner/none",
        )  # fmt: skip
    assert unlisted is None
    assert missing == [None] * 7
    for name, found in (("owner/one", one), ("owner/many/fr", fr)):
        assert found[0] == name
        names = sorted(path.name for path in Path(found[1]).iterdir())
        assert names == ["adapter_config.json", "adapter_model.safetensors"], "and no more"
        assert (Path(found[1]) / names[1]).read_bytes() == b"weights"
    away, known = ask("http://127.0.0.1:9", tmp_path, "owner/none", "owner/one")
    assert "the hub does not answer for 'owner/none'" in away
    assert known == one, "what was downloaded before needs no hub"


def test_the_hub_is_not_asked_for_each_name_that_is_not_there(tmp_path: Path) -> None:
    """However often clients name it, and however many names they invent; a new folder is found after a while."""
    other = json.dumps({"base_model_name_or_path": "another/model"}).encode()
    files = {"others/adapter_config.json": other, "others/adapter_model.safetensors": b"weights"}
    asked: list[str] = []
    names = ["owner/many/others", *(f"owner/many/{number}" for number in range(5)), "owner/none", "owner/none/x"]
    with hub({"owner/many": files}, asked) as address:
        assert ask(address, tmp_path, *names, *names) == [None] * 16
    listings = [path for path in asked if path.startswith("api/models/") and path.count("/") == 3]
    assert sorted(set(listings)) == ["api/models/owner/many", "api/models/owner/none"]
    assert len(listings) == 2
    assert len(asked) < 10, "and the files of the one that is there"


def test_a_list_of_wrong_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LORA_RESOLVER_HF_REPO_LIST", "owner/one,two")
    with pytest.raises(ConfigError, match="'two' is no repository"):
        resolvers_of([], Hub())
