"""Options: images, videos and sounds in prompts."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from quire.core.config.media_io import check_io_options
from quire.core.errors import ConfigError

DEFAULT_LIMIT = 999
"""Items of one kind that a prompt may hold."""
_LIMIT_OPTIONS = {
    "image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",)
}  # fmt: skip
"""Sizes beside a limit, for which vLLM plans its memory. They bound nothing, there as here."""


TowerMode = Literal["weights", "data"]
"""What ranks of tensor parallelism divide of towers: their weights, or the items of a step."""


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
            description='How files are read: {"video": {"num_frames": 32, "fps": 2}}, so many frames at most, and so '
            'many a second at most, -1 for all; {"document": {"dpi": 144, "max_pages": 100}}, pixels an inch of a '
            'PDF, and its most pages; {"image": {"rgba_background_color": [255, 255, 255]}}, what transparent images '
            "lie on.",
            extra={"parse": "json"},
        ),
    ] = None
    mm_processor_cache_gb: Annotated[
        float,
        Meta(ge=0, description="GiB of processed items that are kept, so that one which comes again is not decoded."),
    ] = 4.0
    mm_processor_cache_type: Annotated[
        Literal["lru", "shm"],
        Meta(
            description="Where processed items are kept: lru, in each frontend, or shm, in memory that all share "
            "(/dev/shm), so that one of several API servers finds what another has processed."
        ),
    ] = "lru"
    mm_shm_cache_max_object_size_mb: Annotated[
        int, Meta(ge=0, description="MiB of the largest processed item that is kept in shared memory.")
    ] = 128
    enable_mm_embeds: Annotated[
        bool,
        Meta(
            description="Take rows that a tower has made elsewhere in place of images (image_embeds). Their sender "
            "decides what the model sees."
        ),
    ] = False
    mm_encoder_tp_mode: Annotated[
        TowerMode,
        Meta(
            description="What ranks of tensor parallelism divide of towers: weights, or data, the images of a step, "
            "with the weights whole on each rank."
        ),
    ] = "weights"
    skip_mm_profiling: Annotated[
        bool,
        Meta(description="Leave the activations of towers out of the memory plan: its pages may take their room."),
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
                raise ConfigError(f"--limit-mm-per-prompt: {name!r} is no kind of item; name image, audio or video.")
            count = limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
            known = ("count", *_LIMIT_OPTIONS.get(name, ()))
            for key, value in limit.items() if isinstance(limit, dict) else ():
                if key not in known:
                    raise ConfigError(f"--limit-mm-per-prompt: {name} has no {key!r}; it has {', '.join(known)}.")
                if key != "count" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    raise ConfigError(f"--limit-mm-per-prompt: {key} must be a whole number above 0, got {value!r}.")
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"--limit-mm-per-prompt: {name} must be a whole number from 0, got {limit!r}.")
        if self.mm_processor_cache_type != "shm" and self.mm_shm_cache_max_object_size_mb != 128:
            raise ConfigError("mm_shm_cache_max_object_size_mb goes with --mm-processor-cache-type shm.")
        check_io_options(self.media_io_kwargs or {})

    @property
    def shares_items(self) -> bool:
        """True if processed items are kept for all frontends together."""
        return self.mm_processor_cache_type == "shm" and self.mm_processor_cache_gb > 0

    def limit_of(self, modality: str) -> int:
        """The most items of a kind in a prompt."""
        limit = (self.limit_mm_per_prompt or {}).get(modality, DEFAULT_LIMIT)
        return limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
