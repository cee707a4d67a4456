"""Vectors in JSON are read back to the last bit, and are short."""

import json

import numpy as np
import pytest

from quire.core.errors import ParameterError
from quire.frontend.pooling.vectors import base64_text, json_numbers, plain_bytes


def test_every_float_comes_back_from_json() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    drawn = bits.view(np.float32)
    edges = [0.0, -0.0, 1.0, -1.0, 1e-13, 1e9, 16777216.0, 16777217.0, 0.1, np.finfo(np.float32).max, 1e-45]
    values = np.concatenate([drawn[np.isfinite(drawn)], np.array(edges, np.float32)])
    found = np.array(json.loads(bytes(json_numbers(values))), np.float64).astype(np.float32)
    assert (found.view(np.uint32) == values.view(np.uint32)).all()


def test_usual_numbers_have_ten_digits_at_most() -> None:
    values = (np.random.default_rng(1).normal(size=2000) / 30).astype(np.float32)
    texts = bytes(json_numbers(values)).decode().strip("[]").split(",")
    mantissas = [text.lower().split("e")[0].lstrip("-").replace(".", "").strip("0") for text in texts]
    assert max(map(len, mantissas)) <= 10
    assert json.loads(bytes(json_numbers(np.array([[0.5, -2.0]], np.float32)))) == [[0.5, -2.0]]


def test_base64_is_a_string_of_json() -> None:
    assert bytes(base64_text(np.array([1.0, -2.0], np.float32), "float32", "little")) == b'"AACAPwAAAMA="'


def test_the_places_of_many_vectors_do_not_fit_into_a_header() -> None:
    vectors = [np.zeros(2, np.float32)] * 1000
    with pytest.raises(ParameterError, match="bytes_only") as caught:
        plain_bytes(vectors, "float32", "native", {"id": "a"})
    assert caught.value.param == "encoding_format"
    assert len(plain_bytes(vectors, "float32", "native", None).content) == 8000
