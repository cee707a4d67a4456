"""Chooses what reads the prompts of a model: by what its encoder reads, if it has one, and by its towers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.core.config.resolved import EngineConfig
from quire.core.wire.media import Modality
from quire.frontend.checkpoint.served_model import ServedModel
from quire.frontend.media.decoder import MediaDecoder
from quire.frontend.media.hearing import Hearing
from quire.frontend.media.reader import MediaReader
from quire.frontend.media.shared_items import cache_of
from quire.frontend.metrics.metrics import Metrics
from quire.frontend.requests.async_tokenizer import AsyncTokenizer
from quire.frontend.requests.context_limit import ContextLimit
from quire.frontend.requests.encoder_prompts import EncoderDecoderReader
from quire.frontend.requests.feature_prompts import FeaturePromptReader
from quire.frontend.requests.image_prompts import Seeing, SeenPrompts
from quire.frontend.requests.media_prompts import MediaPrompts
from quire.frontend.requests.prompt_reader import PromptReader, embeds_reader


class PromptReaders(NamedTuple):
    """What reads prompts.

    Attributes:
        prompts: in all their forms.
        media: those with images, videos and sounds; None where the model reads text alone.
        hearing: sounds for an encoder; None where it hears none.
    """

    prompts: PromptReader
    media: MediaPrompts | None = None
    hearing: Hearing | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: ServedModel,
        tokenizer: AsyncTokenizer,
        limit: ContextLimit,
        reads: Callable[[], Sequence[Modality]],
        metrics: Metrics | None,
        item_folder: str,
    ) -> "PromptReaders":
        """Builds those of one model.

        Args:
            reads: tells what its towers read, once the engine has started.
            item_folder: as of `RequestIntake`.
        """
        spec, rules = config.spec, model.decoder

        def media_reader(kinds: Callable[[], Sequence[Modality]], decoder: MediaDecoder) -> MediaReader:
            return MediaReader(
                spec.path,
                model.multimodal,
                decoder,
                kinds,
                max_rows=lambda: limit.longest_prompt,
                cache=cache_of(model.multimodal, item_folder),
                on_item=(lambda _: None) if metrics is None else metrics.requests[0].on_item,
            )

        if spec.encoder is not None and rules is not None:
            if not spec.encoder.reads_features:
                return cls(
                    EncoderDecoderReader(
                        tokenizer, limit, vocab_size=spec.vocab_size, encoder=spec.encoder, rules=rules
                    )
                )
            source: Hearing | Seeing = (
                Seeing(media_reader(lambda: ["image"], MediaDecoder(spec.path)), spec.encoder)
                if spec.encoder.reads_images
                else Hearing(MediaDecoder(spec.path), spec.encoder)
            )
            prompts = FeaturePromptReader(tokenizer, limit, vocab_size=spec.vocab_size, rules=rules, source=source)
            if isinstance(source, Hearing):
                return cls(prompts, hearing=source)
            return cls(prompts, SeenPrompts(source, tokenizer, prompts))
        media = None
        if config.reads_media and tokenizer.is_there:
            media = MediaPrompts(media_reader(reads, MediaDecoder(spec.path, dtype=spec.dtype)), tokenizer)
        read_embeds = embeds_reader(spec.hidden_size) if model.takes_embeds else None
        return cls(
            PromptReader(tokenizer, limit, vocab_size=spec.vocab_size, read_embeds=read_embeds, media=media), media
        )

    def close(self) -> None:
        """Ends the processes that decode."""
        if self.hearing is not None:
            self.hearing.close()
        if self.media is not None:
            self.media.reader.close()
