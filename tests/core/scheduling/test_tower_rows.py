"""Images in prompts: their rows are made before the tokens that need them, once, and within a step's budget."""

import random

import pytest

from quire.core.wire.media import Array, MediaItem, Run, spans_of
from tests.core.scheduling.fake_worker import FULL, Harness, alone, make_request, window

ARRAY = {"pixels": Array("<f4", (1,), b"0000")}


def image(name: str, *runs: Run) -> MediaItem:
    return MediaItem("image", name.encode().ljust(32), list(runs), {}, ARRAY)


def test_an_image_is_encoded_by_the_step_that_needs_it_first() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.add("a", 40, media=[image("x", (20, 30))])
    harness.run()
    assert [[item.digest[:1] for item in plan.to_encode] for plan in harness.plans[:3]] == [[], [b"x"], []]
    assert [plan.num_scheduled for plan in harness.plans[:3]] == [[16], [16], [8]]  # the image ends in the third


def test_workers_get_arrays_only_where_they_encode() -> None:
    harness = Harness()
    harness.add("a", 40, media=[image("x", (20, 30))])
    harness.run()
    [new] = harness.plans[0].admitted
    assert [item.arrays for item in new.media] == [{}]
    assert [item.arrays for item in harness.plans[0].to_encode] == [ARRAY]


def test_a_step_encodes_images_within_its_budget() -> None:
    """The second of three images does not fit beside the first, so the step ends before it."""
    harness = Harness(max_num_batched_tokens=16)
    harness.add("a", [3] * 16, media=[image("x", (0, 6)), image("y", (7, 18 - 4))])
    harness.add("b", [4] * 12, media=[image("z", (1, 11))])
    harness.run()
    assert [[item.digest[:1] for item in plan.to_encode] for plan in harness.plans[:2]] == [[b"x", b"y"], [b"z"]]


def test_an_image_larger_than_the_budget_is_encoded_alone() -> None:
    harness = Harness(max_num_batched_tokens=16)
    harness.add("a", 60, media=[image("x", (4, 10)), image("y", (11, 55))])
    harness.run()
    assert [[item.digest[:1] for item in plan.to_encode] for plan in harness.plans[:2]] == [[b"x"], [b"y"]]
    assert harness.plans[0].num_scheduled == [11]


def test_an_image_that_comes_again_is_not_encoded_again() -> None:
    harness = Harness(enable_prefix_caching=False)
    for name in "abc":
        harness.add(name, 20, media=[image("x", (4, 14))])
    harness.run()
    harness.add("d", 30, media=[image("x", (14, 24))])
    harness.run()
    assert harness.worker.num_rows_made == 10


def test_rows_are_forgotten_when_others_need_the_room() -> None:
    harness = Harness(max_num_batched_tokens=16)
    for number in range(4):
        harness.add(f"r{number}", 20, media=[image(f"{number}", (2, 10))])
        harness.run()
    assert sum(harness.worker.rows.values()) <= 16
    assert [digest[:1] for digest in harness.worker.rows] == [b"2", b"3"]


def test_workers_keep_more_rows_than_a_step_makes() -> None:
    harness = Harness(max_num_batched_tokens=16, media_rows=32, enable_prefix_caching=False)
    for name in ("0", "1", "2", "3", "0", "3"):
        harness.add(f"r{len(harness.plans)}", 20, media=[image(name, (2, 10))])
        harness.run()
    assert harness.worker.num_rows_made == 32
    harness.add("another", 20, media=[image("4", (2, 10))])
    harness.run()
    assert {digest[:1] for digest in harness.worker.rows} == {b"2", b"0", b"3", b"4"}


def test_a_reset_of_the_prefix_cache_forgets_rows() -> None:
    """The weights may be others since. Rows that a prompt is in the midst of stay, unless it begins again."""
    harness = Harness(max_num_batched_tokens=16)
    for number in range(2):
        harness.add(f"done {number}", 8, media=[image("x", (2, 6))])
        harness.run()
        assert harness.worker.num_rows_made == 4 * (number + 1)
        harness.scheduler.reset_prefix_cache()
    harness.add("underway", 40, media=[image("y", (4, 20))])
    harness.step()
    harness.scheduler.reset_prefix_cache()
    harness.run()
    assert harness.worker.num_rows_made == 8 + 16
    harness.add("again", 40, media=[image("z", (4, 20))])
    harness.step()
    harness.scheduler.reset_prefix_cache(preempt_running=True)
    harness.run()
    assert harness.worker.num_rows_made == 8 + 16 + 32
    assert set(harness.worker.rows) == {image("z", (4, 20)).digest}


def test_a_cached_prefix_needs_no_image_again() -> None:
    harness = Harness()
    harness.add("a", list(range(1, 25)), media=[image("x", (4, 12))])
    harness.run()
    harness.add("b", list(range(1, 25)), media=[image("x", (4, 12))])
    harness.run()
    assert harness.worker.num_rows_made == 8
    assert harness.streams["b"].last is not None
    assert harness.streams["b"].last.num_cached_tokens == 20


def test_equal_tokens_of_other_images_are_other_blocks() -> None:
    harness = Harness()
    for name in "ab":
        harness.add(name, list(range(1, 25)), media=[image(name, (6, 14))])
        harness.run()
    assert harness.streams["b"].last is not None
    assert harness.streams["b"].last.num_cached_tokens == 4  # of the block before the image
    assert harness.worker.num_rows_made == 16


def test_a_prefix_may_end_inside_an_image() -> None:
    """Only its first blocks were computed before the request ended, so another one goes on from there."""
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=1)
    harness.add("a", list(range(1, 31)), media=[image("x", (6, 28))])
    harness.step()
    harness.abort("a")
    harness.add("b", list(range(1, 31)), media=[image("x", (6, 28))])
    harness.run()
    assert harness.streams["b"].last is not None
    assert harness.streams["b"].last.num_cached_tokens == 16
    assert harness.worker.num_rows_made == 22


def test_images_whose_tokens_see_each_other_are_not_divided() -> None:
    """The fake worker fails where a span is cut."""
    harness = Harness(max_num_batched_tokens=16, media_spans=True)
    harness.add("a", 60, media=[image("x", (10, 20)), image("y", (22, 30), (35, 50))])
    harness.run()
    assert spans_of([image("x", (10, 20)), image("y", (20, 30))]) == [(10, 30)]


@pytest.mark.parametrize("media_spans", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_give_the_outputs_of_each_request_alone(seed: int, media_spans: bool) -> None:
    """With preemptions, shared images and prefixes, chunks and aborts."""
    rng = random.Random(seed)
    harness = Harness(
        num_pages=24, max_num_batched_tokens=24, depth=rng.choice([1, 2]), media_spans=media_spans,
        kv_groups=[window(10)] if seed == 2 and not media_spans else [FULL],
    )  # fmt: skip
    requests = []
    for number in range(24):
        runs, position = [], rng.randrange(1, 6)
        while position < 36 and len(runs) < 3:
            runs.append((position, position + rng.randrange(1, 12)))
            position = runs[-1][1] + rng.randrange(1, 6)
        media = [image(rng.choice("uvwxyz") + str(end - start), (start, end)) for start, end in runs]
        prompt = [1 + index for index in range(max(position, 4))]
        requests.append(make_request(f"r{number}", prompt, media=media, seed=number, max_tokens=rng.randrange(1, 9)))
    for request in requests:
        assert harness.offer(request) is None
        if rng.random() < 0.5:
            harness.step()
    harness.run()
    for request in requests:
        stream = harness.streams[request.sequences[0].request_id]
        assert (stream.token_ids, stream.finish_reason) == alone(request, harness.max_model_len)
