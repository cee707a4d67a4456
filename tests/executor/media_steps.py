"""Runs a prompt with images or sounds through a model in chunks, as a worker computes them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.wire.media import MediaItem, spans_of
from quire.executor.models.base import InputEmbeds, ReadsMedia
from tests.executor.paged_driver import PagedDriver


class MediaPrompt:
    """One prompt, whose items the model's tower encodes at once.

    Attributes:
        spans: tokens that must be computed in the same step.
        places: of the tokens, in time, height and width; None: each token's position is all three.
    """

    def __init__(
        self, model: ReadsMedia, token_ids: list[int], items: Sequence[MediaItem], num_output_tokens: int = 0
    ) -> None:
        """Takes the number of tokens at the end that are no prompt."""
        prompt_len = len(token_ids) - num_output_tokens
        assert model.media is not None
        self._driver = PagedDriver(model, 1, len(token_ids))
        self._token_ids = token_ids
        self._items = items
        self.spans = spans_of(items) if model.media.sees_both_ways else []
        if any(layer.sees_prompt for layer in model.kv_layers):
            self.spans = [(0, prompt_len)]
        with torch.inference_mode():
            self._rows = model.encode_media(items)
            self.places = model.media_positions(token_ids, items)
        self._driver.spans_in_windows = model.media.in_windows
        if self.spans:
            self._driver.prefix_spans = {0: self.spans}
        self._driver.prompt_lens = {0: prompt_len}

    def logits(self, cuts: Sequence[int]) -> Tensor:
        """Computes the prompt in steps that end before the tokens at `cuts`, except those inside of a span: logits
        [num_tokens, vocab_size]."""
        ends = [cut for cut in cuts if not any(start < cut < end for start, end in self.spans)]
        ends = [end for end in ends if end < len(self._token_ids)]
        return torch.cat([self._run(*part) for part in zip([0, *ends], [*ends, len(self._token_ids)], strict=True)])

    def _run(self, start: int, end: int) -> Tensor:
        places, rows, deep = [], [], []
        layer_tokens: list[int] = []
        for item, made in zip(self._items, self._rows, strict=True):
            positions = np.concatenate([np.arange(*run) for run in item.runs])
            own = np.flatnonzero((positions >= start) & (positions < end))
            places.append(torch.from_numpy(positions[own] - start))
            rows.append(made.rows[own])
            if made.deep is not None:
                deep.append(made.deep[:, own])
            if made.layer_token is not None:
                layer_tokens += [made.layer_token] * len(own)
        beside = torch.tensor(layer_tokens, dtype=torch.int64) if layer_tokens else None
        embeds = InputEmbeds(torch.cat(places), torch.cat(rows), torch.cat(deep, 1) if deep else None, beside)
        self._driver.rotary_positions = None if self.places is None else self.places[:, start:end]
        has_rows = bool(len(embeds.places))
        return self._driver.step({0: self._token_ids[start:end]}, input_embeds=embeds if has_rows else None)[0]
