"""Masks of the library, read by what they let through."""

from torch import Tensor

from quire.executor.models.transformers.masks import Mask, Visible, read_mask


def test_masks_are_read_by_what_they_let_through() -> None:
    def windowed(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 4096)

    def chunked(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 8191 == query // 8191)

    assert read_mask(lambda _, __, query, key: key <= query) == Visible()
    assert read_mask(windowed) == Visible(window=4096)
    assert read_mask(chunked) == Visible(chunk=8191)
    assert read_mask(lambda _, __, query, key: key == key).is_bidirectional


def test_a_mask_knows_what_a_slice_of_it_means() -> None:
    mask = Mask.build(1, 4, 4, mask_function=lambda _, __, query, key: (key <= query) & (key > query - 7))
    assert mask[:, :, :, :2].visible == Visible(window=7)
    assert (mask & mask).visible is None
