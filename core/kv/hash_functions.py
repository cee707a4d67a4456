"""The hash that names a block's content, by the names of `--prefix-caching-hash-algo`."""

import importlib
from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

BlockHash = Callable[[bytes, bytes, bytes], bytes]
"""(parent, token_bytes, extra) to the name of a full block: a digest of all that its keys and values depend on.

`parent` represents all tokens before the block, and `token_bytes` has 8 bytes a token. Each has one length for all
blocks of a pool, so different inputs never give the same bytes. `extra` represents anything else that changes
the content (embeddings, images and sounds, and prefix spans).
"""


def hash_function(algorithm: str) -> BlockHash:
    """The function for a name of `CacheConfig.prefix_caching_hash_algo`, which checks that its packages are installed.

    `sha256` resists collisions: a block cannot be forged to have another's name. `xxhash` (XXH3, 128 bits) does not.
    `_cbor` hashes the canonical CBOR (RFC 8949, 4.2) of [parent, token ids, extra or null], not the bytes in a row.
    """
    match algorithm:
        case "sha256":
            return _sha256_of_bytes
        case "sha256_cbor":
            return _of_cbor(lambda content: sha256(content).digest())
        case "xxhash":
            digest = _xxh3()
            return lambda parent, token_bytes, extra: digest(parent + token_bytes + extra)
        case "xxhash_cbor":
            return _of_cbor(_xxh3())
    raise ValueError(f"no hash function is called {algorithm}")


def root_hash(hash_of: BlockHash, cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block. Requests share pages only if their salts are equal (or both absent)."""
    salt = b"unsalted" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return hash_of(b"", b"", salt)


def _sha256_of_bytes(parent: bytes, token_bytes: bytes, extra: bytes) -> bytes:
    return sha256(parent + token_bytes + extra).digest()


def _xxh3() -> Callable[[bytes], bytes]:
    digest: Callable[[bytes], bytes] = importlib.import_module("xxhash").xxh3_128_digest
    return digest


def _of_cbor(digest: Callable[[bytes], bytes]) -> BlockHash:
    dumps: Callable[..., bytes] = importlib.import_module("cbor2").dumps

    def hash_of(parent: bytes, token_bytes: bytes, extra: bytes) -> bytes:
        content: list[Any] = [parent, array("q", token_bytes).tolist(), extra or None]
        return digest(dumps(content, canonical=True))

    return hash_of
