"""Chained hashes of the full blocks of a request, which name its pages in the prefix cache."""

from array import array
from collections.abc import Sequence

from quire.core.kv.hash_functions import hash_function, root_hash
from quire.core.kv.paged_request import PagedPrompt, PagedRequest
from quire.core.wire.media import MediaItem
from quire.core.wire.prefix_spans import PrefixSpan
from quire.core.wire.protocol import ROW_DIGEST_BYTES, PromptEmbeds


class BlockHasher:
    """Hashes the blocks of requests.

    Args:
        block_size: tokens of a block.
        algorithm: a name of `CacheConfig.prefix_caching_hash_algo`.
    """

    def __init__(self, block_size: int, algorithm: str = "sha256") -> None:
        self._size = block_size
        self._hash_of = hash_function(algorithm)

    def root(self, prompt: PagedPrompt) -> bytes:
        """The parent of a prompt's first block. It covers what all keys depend on besides tokens: the salt, an
        adapter of all tokens, and the encoder input.

        It is computed once for all sequences that share the prompt.
        """
        if not prompt.root_hash:
            prompt.root_hash = root_hash(self._hash_of, prompt.cache_salt)
            if prompt.adapter is not None and not prompt.adapter_start:
                prompt.root_hash = self._hash_of(prompt.root_hash, b"", b"adapter:" + prompt.adapter.digest)
            if (encoder := prompt.encoder) is not None:
                tokens = array("q", encoder.token_ids).tobytes()
                kind = b"encoder" if encoder.features is None else b"features" + encoder.features.digest
                prompt.root_hash = self._hash_of(prompt.root_hash, tokens, kind)
        return prompt.root_hash

    def extend(self, request: PagedRequest, num_blocks: int) -> None:
        """Extends `request.block_hashes` to the first `num_blocks` blocks, whose tokens are known.

        Blocks of the prompt alone are hashed once for all sequences that share it.
        """
        hashes, shared = request.block_hashes, request.prompt.block_hashes
        if len(hashes) >= num_blocks:
            return
        num_shared = min(num_blocks, request.num_prompt_tokens // self._size)
        self._extend(shared, request, num_shared)
        hashes += shared[len(hashes) : num_shared]
        self._extend(hashes, request, num_blocks)

    def _extend(self, hashes: list[bytes], request: PagedRequest, num_blocks: int) -> None:
        """Extends the hashes of the leading blocks of `request` to `num_blocks` of them."""
        start, size, hash_of = len(hashes), self._size, self._hash_of
        if start >= num_blocks:
            return
        parent = hashes[-1] if hashes else self.root(request.prompt)
        token_bytes = array("q", request.known_tokens(start * size, num_blocks * size)).tobytes()
        stride = size * 8
        embeds, media = request.prompt.embeds, request.prompt.media
        adapter, adapter_start = request.prompt.adapter, request.prompt.adapter_start
        is_invoked = adapter is not None and start * size <= adapter_start < num_blocks * size and adapter_start > 0
        if embeds is None and not media and not request.prompt.prefix_spans and not is_invoked:
            for offset in range(0, len(token_bytes), stride):
                parent = hash_of(parent, token_bytes[offset : offset + stride], b"")
                hashes.append(parent)
            return
        of_spans = self._span_digests(request, start * size, num_blocks * size)
        for index in range(start, num_blocks):
            offset = (index - start) * stride
            extra = b"" if embeds is None else _rows(embeds, index * size, (index + 1) * size)
            extra += _digests(media, index * size, (index + 1) * size)
            for (begin, end), digest in of_spans:
                extra += digest if begin < (index + 1) * size and index * size < end else b""
            if adapter is not None and is_invoked and index == adapter_start // size:
                extra += b"adapter%d:" % (adapter_start % size) + adapter.digest
            parent = hash_of(parent, token_bytes[offset : offset + stride], extra)
            hashes.append(parent)

    def _span_digests(self, request: PagedRequest, start: int, end: int) -> list[tuple[PrefixSpan, bytes]]:
        """Returns the spans that share tokens with positions `start` to `end`, each with a digest of its content."""
        found = []
        for span in request.prompt.prefix_spans:
            if span[0] < end and start < span[1]:
                rows = b"" if request.prompt.embeds is None else _rows(request.prompt.embeds, *span)
                rows += _digests(request.prompt.media, *span)
                tokens = array("q", request.known_tokens(*span)).tobytes()
                found.append((span, self._hash_of(b"", tokens, b"span:%d:%d:" % span + rows)))
        return found


def _rows(embeds: PromptEmbeds, start: int, end: int) -> bytes:
    """The digests of the rows of the prompt's tokens at positions `start` to `end`."""
    return embeds.row_digests[start * ROW_DIGEST_BYTES : end * ROW_DIGEST_BYTES]


def _digests(media: Sequence[MediaItem], start: int, end: int) -> bytes:
    """The images and sounds with rows among the tokens at positions `start` to `end`, and where each begins.

    The tokens before tell which of an item's rows these are: their block hashes are part of the hash.
    """
    found = [item for item in media if item.start < end and item.first_row(start, end) is not None]
    return b"".join(b"media%d:" % (item.start - start) + item.digest for item in found)
