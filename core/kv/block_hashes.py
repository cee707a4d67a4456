"""Chained hashes of the full blocks of a request, which name its pages in the prefix cache."""

from array import array

from quire.core.kv.page_pool import block_hash, root_hash
from quire.core.kv.paged_request import PagedRequest
from quire.core.wire.protocol import ROW_DIGEST_BYTES


def hash_blocks(request: PagedRequest, num_blocks: int, block_size: int) -> None:
    """Extends `request.block_hashes` to the first `num_blocks` blocks, whose tokens are known.

    Blocks of the prompt alone are hashed once for all sequences that share it.
    """
    hashes, shared = request.block_hashes, request.prompt.block_hashes
    if len(hashes) >= num_blocks:
        return
    num_shared = min(num_blocks, request.num_prompt_tokens // block_size)
    _extend(shared, request, num_shared, block_size)
    hashes += shared[len(hashes) : num_shared]
    _extend(hashes, request, num_blocks, block_size)


def _extend(hashes: list[bytes], request: PagedRequest, num_blocks: int, size: int) -> None:
    """Extends the hashes of the leading blocks of `request`, of `size` tokens each, to `num_blocks` of them."""
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.prompt.cache_salt)
    token_bytes = array("q", request.known_tokens(start * size, num_blocks * size)).tobytes()
    stride = size * 8
    if request.prompt.embeds is None:
        for offset in range(0, len(token_bytes), stride):
            parent = block_hash(parent, token_bytes[offset : offset + stride])
            hashes.append(parent)
        return
    digests, length = request.prompt.embeds.row_digests, size * ROW_DIGEST_BYTES
    for index in range(start, num_blocks):
        offset = (index - start) * stride
        rows = digests[index * length : (index + 1) * length]  # of the block's prompt tokens
        parent = block_hash(parent, token_bytes[offset : offset + stride], rows)
        hashes.append(parent)
