"""Reads videos into what a model's tower reads, by the model's processor."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from quire.frontend.media.library_processor import LibraryProcessor, check_usable, facts_of, load_processor
from quire.frontend.media.messages import DescribeVideo, ItemFacts, ReadVideo, ReadyItem
from quire.frontend.media.videos.decoding import Video, read_frames, read_video

_TRIAL = Video(np.full((4, 48, 64, 3), 127, np.uint8), 4, 1.0, range(4))


class VideoReader:
    """Reads videos for the model in `folder`."""

    _library: LibraryProcessor

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._facts = facts_of(self._load)

    @property
    def processor(self) -> Any:
        """The library's own."""
        assert not self._facts.fault, self._facts.fault
        return self._library.processor

    def read(self, question: DescribeVideo | ReadVideo) -> ItemFacts | ReadyItem:
        """A video as the tower reads it, or the facts of all. Raises MediaError."""
        if isinstance(question, DescribeVideo):
            return self._facts
        check_usable(self._facts)
        if question.frames is None:
            video = read_video(question.data, question.sampling, question.max_pixels)
        else:
            video = read_frames(question.data, question.frames, question.sampling, question.max_pixels)
        return self._library.read("video", video.frames, question.options, keywords(video))

    def _load(self) -> ItemFacts:
        self._library = load_processor(self._folder)
        if getattr(self._library.processor, "video_processor", None) is None:
            raise ValueError("the checkpoint's files name no processor of videos")
        mark = self._library.mark("video")
        self._library.process("video", _TRIAL.frames, keywords(_TRIAL))
        return mark.facts


def keywords(video: Video) -> Mapping[str, Any]:
    """What the library's processor is told of a video: its frames are taken already, and these are their times."""
    metadata = VideoMetadata(
        total_num_frames=video.total,
        fps=video.fps,
        width=video.frames.shape[2],
        height=video.frames.shape[1],
        duration=video.total / video.fps if video.fps else None,
        frames_indices=list(video.indices),
    )
    return {"video_metadata": [metadata], "do_sample_frames": False, "input_data_format": "channels_last"}
