"""Options: images, videos and sounds in prompts."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.core.errors import ConfigError

DEFAULT_LIMIT = 999
"""Items of one kind that a prompt may hold."""


class MultimodalConfig(Struct, frozen=True, kw_only=True):
    """Images, videos and sounds in prompts: which are read, from where, and what is kept of them."""

    language_model_only: Annotated[
        bool, Meta(description="Serve the text model alone: towers are not loaded, and images and sounds are refused.")
    ] = False
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None,
        Meta(
            description='Most items of one prompt, as {"image": 4, "audio": {"count": 2}}; 0 refuses a kind, and '
            "leaves its tower out where the model reads no other. 999 when unset.",
            extra={"parse": "json"},
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(
            description='Keywords of the model\'s processor for all requests, such as {"max_pixels": 1003520}.',
            extra={"parse": "json"},
        ),
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(
            description='Which frames of a video file are taken, such as {"video": {"num_frames": 32, "fps": 2}}: so '
            "many at most, and so many a second at most. 32 when unset; -1: all.",
            extra={"parse": "json"},
        ),
    ] = None
    mm_processor_cache_gb: Annotated[
        float,
        Meta(ge=0, description="GiB of processed items that are kept, so that one which comes again is not decoded."),
    ] = 4.0
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="Take rows that a tower has made elsewhere in place of images (image_embeds). Their sender "
            "decides what the model sees."
        ),
    ] = False
    interleave_mm_strings: Annotated[
        bool,
        Meta(
            description="Leave items where they are among the texts of a message whose content the chat template gets "
            "as a string; they stand before all texts otherwise."
        ),
    ] = False
    allowed_local_media_path: Annotated[
        str, Meta(description="Folder whose files requests may name as file:// addresses; none may when unset.")
    ] = ""
    allowed_media_domains: Annotated[
        list[str] | None,
        Meta(description="Hosts, and those below them, that items are fetched from; any public host when unset."),
    ] = None

    def __post_init__(self) -> None:
        for name, limit in (self.limit_mm_per_prompt or {}).items():
            if name not in ("image", "audio", "video", "vision_chunk"):
                raise ConfigError(f"limit_mm_per_prompt: {name!r} is no kind of item; name image, audio or video.")
            count = limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"limit_mm_per_prompt: {name} must be a whole number from 0, got {limit!r}.")
        for name, options in (self.media_io_kwargs or {}).items():
            if name != "video" or not isinstance(options, dict):
                raise ConfigError(
                    f"media_io_kwargs: {name!r} has no options here; video has, as an object such as "
                    '{"video": {"num_frames": 32}}.'
                )
            for key, value in options.items():
                if key not in ("num_frames", "fps"):
                    raise ConfigError(f"media_io_kwargs: video has no {key!r}; it has num_frames and fps.")
                kinds = (int,) if key == "num_frames" else (int, float)
                if isinstance(value, bool) or not isinstance(value, kinds) or not (value > 0 or value == -1):
                    raise ConfigError(f"media_io_kwargs: {key} must be a number above 0, or -1, got {value!r}.")

    def io_options(self, modality: str) -> dict[str, Any]:
        """How files of a kind are read."""
        return (self.media_io_kwargs or {}).get(modality, {})

    def limit_of(self, modality: str) -> int:
        """The most items of a kind in a prompt."""
        limit = (self.limit_mm_per_prompt or {}).get(modality, DEFAULT_LIMIT)
        return limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
