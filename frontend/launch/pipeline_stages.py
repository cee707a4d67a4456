"""Divides a model's layers among pipeline stages."""

from quire.core.errors import ConfigError


def divide_layers(num_layers: int, num_stages: int, partition: str | None) -> list[int]:
    """The number of layers of each stage; empty for one stage.

    Without a partition, the remainder of an even division goes to the stages before the last one, which has the head.

    Args:
        partition: the numbers, with commas between them, as `QUIRE_PP_LAYER_PARTITION` has them; None: as even as
            possible.

    Raises:
        ConfigError: there are fewer layers than stages, or the partition does not fit.
    """
    if num_stages == 1:
        return []
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} exceeds the model's {num_layers} layers, and each stage needs one; "
            f"use {num_layers} or less."
        )
    if partition:
        return _read(partition, num_layers, num_stages)
    share, remainder = divmod(num_layers, num_stages)
    larger = range(num_stages - 1 - remainder, num_stages - 1)
    return [share + (stage in larger) for stage in range(num_stages)]


def _read(partition: str, num_layers: int, num_stages: int) -> list[int]:
    texts = [text.strip() for text in partition.split(",")]
    if all(text.isdecimal() and int(text) for text in texts):
        sizes = [int(text) for text in texts]
        if len(sizes) == num_stages and sum(sizes) == num_layers:
            return sizes
    raise ConfigError(
        f"QUIRE_PP_LAYER_PARTITION={partition} must name a number of layers, 1 or more, for each of {num_stages} "
        f"pipeline stages (--pipeline-parallel-size), with commas between them, and {num_layers} layers in all."
    )
