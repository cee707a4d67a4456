"""Cohere's own client: embeddings in each of its forms, and ranks."""

import base64
import struct

import cohere
from vectors import QUERY, TEXTS, URL, check_ranks, check_vectors

client = cohere.ClientV2(api_key="none", base_url=URL)
types = ["float", "binary", "ubinary", "base64"]
answer = client.embed(model="quire-demo", texts=TEXTS, input_type="search_document", embedding_types=types)
check_vectors(answer.embeddings.float_)
check_vectors(
    [list(struct.unpack(f"<{len(raw) // 4}f", raw)) for raw in map(base64.b64decode, answer.embeddings.base64)]
)
for vector, bits in zip(answer.embeddings.float_, answer.embeddings.ubinary, strict=True):
    shown = "".join(f"{byte:08b}" for byte in bits)
    assert shown[: len(vector)] == "".join("1" if each >= 0 else "0" for each in vector)
assert [[byte - 128 for byte in row] for row in answer.embeddings.ubinary] == answer.embeddings.binary
assert answer.meta.billed_units.input_tokens > 0

ranks = client.rerank(model="quire-demo", query=QUERY, documents=TEXTS)
check_ranks([(each.index, each.relevance_score) for each in ranks.results])
assert len(client.rerank(model="quire-demo", query=QUERY, documents=TEXTS, top_n=1).results) == 1
