"""Hashes of blocks: what they cover, by each algorithm."""

import hashlib
from array import array
from typing import get_args

import pytest

from quire.core.config.cache import CacheConfig, HashAlgorithm
from quire.core.errors import ConfigError
from quire.core.kv.hash_functions import hash_function, root_hash

TOKENS = array("q", range(4)).tobytes()
SIZES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


@pytest.fixture(params=get_args(HashAlgorithm))
def algorithm(request: pytest.FixtureRequest) -> str:
    for package in ("xxhash",) * request.param.startswith("xxhash") + ("cbor2",) * request.param.endswith("_cbor"):
        pytest.importorskip(package)
    return str(request.param)


def test_hashes_differ_with_parent_tokens_extra_and_salt(algorithm: str) -> None:
    hash_of = hash_function(algorithm)
    root, salted = root_hash(hash_of, None), root_hash(hash_of, "a")
    hashes = {
        hash_of(root, TOKENS, b""),
        hash_of(root_hash(hash_of, ""), TOKENS, b""),
        hash_of(salted, TOKENS, b""),
        hash_of(hash_of(root, TOKENS, b""), TOKENS, b""),
        hash_of(root, bytes(32), b""),
        hash_of(root, TOKENS, b"embeddings"),
    }
    assert len(hashes) == 6
    assert {len(digest) for digest in (*hashes, root, salted)} == {SIZES[algorithm]}
    assert hash_function(algorithm)(salted, TOKENS, b"") in hashes  # and nothing random in them


def test_what_each_algorithm_hashes(algorithm: str) -> None:
    content = b"p" * 32 + TOKENS + b"e"
    if algorithm.endswith("_cbor"):  # an array of 3: 32 bytes, an array of 4 small numbers, 1 byte
        content = bytes.fromhex("83 5820") + b"p" * 32 + bytes.fromhex("84 00 01 02 03") + bytes.fromhex("41") + b"e"
    if algorithm.startswith("xxhash"):
        digest = pytest.importorskip("xxhash").xxh3_128_digest(content)
    else:
        digest = hashlib.sha256(content).digest()
    assert hash_function(algorithm)(b"p" * 32, TOKENS, b"e") == digest


def test_a_missing_package_is_told_when_options_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "cbor2" else object())
    for name in ("sha256", "xxhash"):
        assert CacheConfig(prefix_caching_hash_algo=name).prefix_caching_hash_algo == name  # type: ignore[arg-type]
    for name in ("sha256_cbor", "xxhash_cbor"):
        with pytest.raises(
            ConfigError, match=rf"{name} needs cbor2, .*pip install 'quire\[hashes\]', or choose sha256"
        ):
            CacheConfig(prefix_caching_hash_algo=name)  # type: ignore[arg-type]
