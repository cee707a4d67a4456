"""For the clients of vectors: what the server itself answers, and whether a client's answer is the same."""

import json
import math
import os
import urllib.request

URL = os.environ["QUIRE_URL"]
TEXTS = ["What is the capital of France?", "A quire is a gathering of pages.", "Paris"]
QUERY = TEXTS[0]


def ask(path: str, **body: object) -> dict:
    """The answer to a body."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))


VECTORS = [each["embedding"] for each in ask("/v1/embeddings", input=TEXTS)["data"]]
RANKS = [(each["index"], each["relevance_score"]) for each in ask("/rerank", query=QUERY, documents=TEXTS)["results"]]


def check_vectors(found: list[list[float]], expected: list[list[float]] = VECTORS) -> None:
    """Fails unless the vectors are the server's."""
    assert len(found) == len(expected), len(found)
    for vector, own in zip(found, expected, strict=True):
        assert math.dist(vector, own) < 1e-5, (vector[:4], own[:4])


def check_ranks(found: list[tuple[int, float]]) -> None:
    """Fails unless the ranks are the server's."""
    assert [index for index, _ in found] == [index for index, _ in RANKS], found
    assert all(abs(score - own) < 1e-5 for (_, score), (_, own) in zip(found, RANKS, strict=True)), found
