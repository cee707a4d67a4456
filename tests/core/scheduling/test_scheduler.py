"""Each rule of the scheduler alone. `test_workloads.py` tests all rules together."""

from collections.abc import Callable

import msgspec
import pytest

from quire.core.errors import EngineError
from quire.core.wire.pooling import Pooling
from quire.core.wire.protocol import FinishReason, StepResult
from quire.core.wire.row_outputs import OutputKind, PooledVector, RequestFailure, TokenLogprobs
from tests.core.scheduling.fake_worker import EOS, FULL, NAN_MESSAGE, Harness, alone, is_nan, make_request


def tokens_of(harness: Harness) -> list[list[int]]:
    """num_scheduled of every plan so far."""
    return [plan.num_scheduled for plan in harness.plans]


def always(token: int) -> Callable[[StepResult], StepResult]:
    """Replaces every sampled token by `token`. The fake worker's table keeps its own, which no rule here reads."""
    return lambda result: StepResult(result.step_id, [[token] for _ in result.token_ids])


# ------------------------------------------------------------------------------------------------ budgets and chunks


def test_a_long_prompt_is_split_over_steps_and_samples_once() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.add("a", 25, max_tokens=3)
    harness.run()
    assert tokens_of(harness) == [[10], [10], [5], [1], [1]]
    assert [plan.num_wanted for plan in harness.plans] == [[0], [0], [1], [1], [1]]


def test_decodes_come_before_a_prompt_that_takes_the_rest_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.add("a", 4, max_tokens=9)
    harness.step()
    harness.add("b", 30)
    harness.step()
    assert harness.plans[-1].num_scheduled == [1, 9]


def test_the_threshold_leaves_room_for_other_prompts() -> None:
    harness = Harness(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    harness.add("long", 30)
    harness.add("short", 5)
    harness.step()
    assert harness.plans[0].num_scheduled == [6, 5]


def test_what_is_left_of_prompts_is_told() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.add("a", 25, max_tokens=3)
    harness.add("b", 8)
    harness.add("c", 7)
    left = [harness.scheduler.stats().num_pending_tokens]
    for _ in range(4):
        harness.step()
        left.append(harness.scheduler.stats().num_pending_tokens)
    assert left == [40, 30, 20, 10, 1]  # at last one more token of a, 3 of b's prompt and 6 of c's
    harness.add("d", 6)
    assert harness.scheduler.stats().num_pending_tokens == 7
    harness.abort("d")
    assert harness.scheduler.stats().num_pending_tokens == 1
    harness.step()
    assert harness.scheduler.stats().num_pending_tokens == 0


def test_whole_prompts_wait_until_they_fit_and_nobody_overtakes() -> None:
    harness = Harness(max_num_batched_tokens=10, enable_chunked_prefill=False)
    harness.add("a", 6)
    harness.add("b", 8)
    harness.add("c", 1)
    harness.run()
    assert tokens_of(harness)[:2] == [[6], [1, 8, 1]]


def test_no_more_requests_run_than_there_are_slots() -> None:
    harness = Harness(max_num_seqs=3)
    for index in range(7):
        harness.add(str(index), 4)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 4)
    harness.run()
    assert max(len(plan.slots) for plan in harness.plans) == 3


# -------------------------------------------------------------------------------------------------------------- ends


def test_eos_ends_unless_ignored() -> None:
    for ignore_eos, reason in ((False, FinishReason.STOP), (True, FinishReason.LENGTH)):
        harness = Harness()
        harness.on_result = always(EOS)
        harness.add("a", 4, max_tokens=3, ignore_eos=ignore_eos)
        harness.run()
        stream = harness.streams["a"]
        assert stream.finish_reason is reason
        assert stream.token_ids == [EOS] * (3 if ignore_eos else 1)
        assert stream.last is not None
        assert stream.last.stop_token_id is None


def test_any_of_several_eos_tokens_ends() -> None:
    harness = Harness(eos_token_ids=(EOS, 33))
    harness.on_result = always(33)
    harness.add("a", 4, ignore_eos=False)
    harness.run()
    assert harness.streams["a"].finish_reason is FinishReason.STOP


def test_a_stop_token_is_named_in_the_last_delta() -> None:
    harness = Harness()
    harness.on_result = always(17)
    harness.add("a", 4, stop_token_ids=[16, 17])
    harness.run()
    last = harness.streams["a"].last
    assert last is not None
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([17], FinishReason.STOP, 17)


def test_eos_as_a_stop_token_counts_even_when_eos_is_ignored() -> None:
    harness = Harness()
    harness.on_result = always(EOS)
    harness.add("a", 4, stop_token_ids=[EOS], ignore_eos=True)
    harness.run()
    last = harness.streams["a"].last
    assert last is not None
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, EOS)


def test_nothing_stops_before_min_tokens() -> None:
    harness = Harness()
    harness.on_result = always(17)
    harness.add("a", 4, stop_token_ids=[17], max_tokens=9, min_tokens=4)
    harness.run()
    assert harness.streams["a"].token_ids == [17] * 4


def test_max_model_len_ends_what_max_tokens_would_not() -> None:
    harness = Harness(max_model_len=20)
    for request_id, max_tokens in (("bounded", 100), ("unbounded", None)):
        harness.add(request_id, 15, max_tokens=max_tokens)
    harness.run()
    for stream in harness.streams.values():
        assert (len(stream.token_ids), stream.finish_reason) == (5, FinishReason.LENGTH)


def test_stopping_at_the_last_token_is_a_stop() -> None:
    harness = Harness()
    harness.on_result = always(EOS)
    harness.add("a", 4, max_tokens=1, ignore_eos=False)
    harness.run()
    assert harness.streams["a"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2])
def test_broken_logits_fail_one_request_and_leave_nothing_in_the_cache(depth: int) -> None:
    prompt = next(p for p in ([n] * 9 for n in range(40, 999)) if alone(make_request("x", p, seed=7), 99)[0] == [])
    harness = Harness(depth=depth)
    harness.add("bad", prompt, seed=7)
    harness.add("good", prompt, seed=8)
    harness.run()
    bad, good = harness.streams["bad"], harness.streams["good"]
    assert (bad.token_ids, bad.finish_reason) == ([], FinishReason.ERROR)
    assert bad.last is not None
    assert bad.last.failure is not None
    assert (bad.last.failure.kind, bad.last.failure.message) == ("internal", NAN_MESSAGE)
    assert good.finish_reason is FinishReason.LENGTH
    harness.add("later", prompt, seed=8)
    harness.run()
    last = harness.streams["later"].last
    assert last is not None
    assert last.num_cached_tokens == 0
    assert not is_nan(8, 1)


def test_a_dead_end_ends_an_output_and_refuses_a_request_without_any() -> None:
    """What was sampled stands, and the other request of the step goes on."""
    harness = Harness()
    harness.add("begun", 4, max_tokens=9)
    harness.add("other", 4, max_tokens=9)
    harness.step()
    harness.add("new", 4, max_tokens=9)
    dead_ends = [(0, RequestFailure("dead_end", "no way on")), (2, RequestFailure("dead_end", "no way in"))]
    harness.on_result = lambda result: msgspec.structs.replace(result, outputs=dead_ends)
    harness.step()
    harness.on_result = lambda result: result
    harness.run()
    begun, other, new = (harness.streams[each] for each in ("begun", "other", "new"))
    assert begun.last is not None
    assert new.last is not None
    assert (len(begun.token_ids), begun.finish_reason) == (1, FinishReason.LENGTH)
    assert begun.last.failure == RequestFailure("dead_end", "no way on")
    assert (len(other.token_ids), other.finish_reason) == (9, FinishReason.LENGTH)
    assert (new.token_ids, new.finish_reason) == ([], FinishReason.ERROR)
    assert new.last.failure == RequestFailure("invalid", "no way in")


def test_logprobs_go_to_the_request_that_asked() -> None:
    harness = Harness()
    values = TokenLogprobs([5], [-0.5], 1)
    harness.on_result = lambda result: StepResult(result.step_id, result.token_ids, [(1, [values])])
    harness.add("a", 4)
    harness.add("b", 4, logprobs=0)
    assert [delta.logprobs for delta in harness.step()] == [None, [values]]


def test_a_request_for_a_vector_may_fill_the_model_but_not_exceed_it() -> None:
    harness = Harness(max_model_len=8, max_num_batched_tokens=6)
    wire = msgspec.structs.replace(make_request("a", 8), pooling=Pooling("last"))
    assert harness.offer(wire) is None
    plans = [harness.plan() for _ in range(3)]
    assert [(plan.num_wanted, plan.outputs) for plan in plans if plan] == [([0], []), ([0], [(0, OutputKind.POOLED)])]
    harness.run()
    assert harness.streams["a"].finish_reason is FinishReason.STOP
    refused = harness.offer(msgspec.structs.replace(make_request("b", 9), pooling=Pooling("last")))
    assert refused is not None
    assert (refused.kind, refused.message[:44]) == ("invalid", "The prompt has 9 tokens, but the model compu")


def test_a_request_for_a_vector_that_was_preempted_before_its_result_ends_with_it() -> None:
    harness = Harness(depth=2)
    assert harness.offer(msgspec.structs.replace(make_request("a", 8), pooling=Pooling("mean"))) is None
    assert harness.plan() is not None
    harness.scheduler.reset_prefix_cache(preempt_running=True)
    [delta] = harness.result()
    assert isinstance(delta.output, PooledVector)
    assert not harness.scheduler.has_unfinished()
    harness.run()


def test_results_must_answer_the_plan_that_was_next() -> None:
    harness = Harness()
    harness.add("a", 4)
    assert harness.scheduler.schedule() is not None
    with pytest.raises(EngineError, match="step 5 with 1 rows; step 0 with 1 was next"):
        harness.scheduler.update(StepResult(5, [[1]]))


# ---------------------------------------------------------------------------------------------------- plans made ahead


def test_steps_are_planned_before_results_return() -> None:
    harness = Harness()
    harness.add("a", 4, max_tokens=9)
    plans = [harness.plan() for _ in range(3)]
    assert [plan.num_computed for plan in plans if plan] == [[0], [4], [5]]
    assert all(plan.num_wanted == [1] for plan in plans if plan)


def test_nothing_is_planned_past_the_length_limit() -> None:
    harness = Harness()
    harness.add("a", 4, max_tokens=2)
    assert [harness.plan() is None for _ in range(3)] == [False, False, True]
    harness.run()
    assert len(harness.streams["a"].token_ids) == 2


def test_a_token_sampled_past_the_stop_is_dropped() -> None:
    harness = Harness(depth=2)
    harness.on_result = always(EOS)
    harness.add("a", 4, ignore_eos=False, max_tokens=9)
    harness.run()
    assert len(harness.plans) == 2
    assert harness.streams["a"].token_ids == [EOS]


def test_an_id_may_return_while_its_old_results_are_in_flight() -> None:
    harness = Harness(depth=2)
    harness.add("a", 4, seed=1)
    harness.plan()
    harness.abort("a")
    harness.add("a", 4, seed=2)
    harness.run()
    assert harness.streams["a"].token_ids == alone(make_request("a", 4, seed=2), 128)[0]


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    harness = Harness(num_pages=6, depth=2)
    harness.add("a", 8, max_tokens=12)
    harness.add("b", 7, max_tokens=12)
    while harness.scheduler.stats().num_preemptions == 0:
        harness.step()
    assert harness.in_flight  # of b too
    harness.run()
    for request_id, num_prompt in (("a", 8), ("b", 7)):
        assert (
            harness.streams[request_id].token_ids == alone(make_request(request_id, num_prompt, max_tokens=12), 99)[0]
        )


# ---------------------------------------------------------------------------------------------- preemption and policy


def test_fcfs_preempts_whoever_came_last_and_resumes_with_all_known_tokens() -> None:
    harness = Harness(num_pages=6)
    harness.add("a", 8, max_tokens=12)
    harness.add("b", 8, max_tokens=12)
    harness.run()
    first, second = harness.streams["a"].last, harness.streams["b"].last
    assert first is not None
    assert second is not None
    assert first.num_preemptions == 0
    assert second.num_preemptions > 0
    resumed = harness.plans[-1].admitted or next(plan.admitted for plan in reversed(harness.plans) if plan.admitted)
    assert resumed[0].num_prompt_tokens == 8
    assert len(resumed[0].token_ids) > 8


def test_priority_runs_the_lowest_value_first_and_preempts_the_highest() -> None:
    harness = Harness(num_pages=6, max_num_seqs=2, policy="priority")
    harness.add("low", 8, max_tokens=12, priority=5)
    harness.step()
    harness.add("later", 8, max_tokens=12, priority=3)
    harness.add("urgent", 8, max_tokens=12, priority=0)
    order = []
    while harness.scheduler.has_unfinished():
        for delta in harness.step():
            if delta.finish_reason:
                order.append(delta.request_id)
    assert order == ["urgent", "later", "low"]
    last = harness.streams["low"].last
    assert last is not None
    assert last.num_preemptions > 0


def test_priorities_tie_by_arrival() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    for request_id in "abc":
        harness.add(request_id, 4, priority=1)
    ends = []
    while harness.scheduler.has_unfinished():
        ends += [delta.request_id for delta in harness.step() if delta.finish_reason]
    assert ends == ["a", "b", "c"]


def test_a_newcomer_leaves_a_page_for_each_request_that_runs() -> None:
    harness = Harness(num_pages=7)
    harness.add("a", 8, max_tokens=6)  # grows to four pages
    harness.step()
    harness.add("b", 16, max_tokens=2)  # needs the four that are free once a has three
    harness.run()
    last = harness.streams["b"].last
    assert last is not None
    assert last.num_preemptions == 0


# --------------------------------------------------------------------------------------------------- cache and slots


def test_equal_prompts_admitted_together_share_their_pages() -> None:
    harness = Harness(max_num_batched_tokens=200)
    prompt = list(range(100, 121))
    for index in range(4):
        harness.add(str(index), prompt, seed=index, max_tokens=2)
    harness.step()
    assert harness.plans[0].num_scheduled == [21, 1, 1, 1]
    assert [stream.last.num_cached_tokens for stream in harness.streams.values() if stream.last] == [0, 20, 20, 20]
    harness.run()


def test_chunks_are_shared_as_soon_as_they_are_planned() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.add("a", list(range(100, 125)))
    harness.add("b", list(range(100, 125)))
    harness.run()
    assert tokens_of(harness)[:3] == [[10], [10], [5, 1]]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_shared_while_their_request_still_runs(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.add("a", list(range(100, 104)), max_tokens=40)
    while len(harness.streams["a"].token_ids) < 10:
        harness.step()
    harness.add("b", list(range(100, 104)) + harness.streams["a"].token_ids[:9])
    while not harness.streams["b"].token_ids:
        harness.step()
    last = harness.streams["b"].last
    assert last is not None
    assert last.num_cached_tokens == 12
    harness.run()


def test_a_finished_request_leaves_its_prompt_for_the_next() -> None:
    harness = Harness()
    prompt = list(range(100, 120))
    for request_id, expected in (("a", 0), ("b", 16)):
        harness.add(request_id, prompt)
        harness.run()
        last = harness.streams[request_id].last
        assert last is not None
        assert last.num_cached_tokens == expected
    assert harness.scheduler.reset_prefix_cache()
    harness.add("c", prompt)
    harness.run()
    assert harness.plans[-4].num_scheduled == [20]


def test_pages_of_running_requests_are_reset_only_when_that_is_asked() -> None:
    harness = Harness(depth=2)
    prompt = list(range(100, 120))
    harness.add("a", prompt, max_tokens=40)
    while len(harness.streams["a"].token_ids) < 5:
        harness.step()
    assert not harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.stats().num_preemptions == 0
    assert harness.scheduler.reset_prefix_cache(preempt_running=True)
    assert harness.scheduler.stats().num_preemptions == 1
    harness.run()
    assert harness.streams["a"].token_ids == alone(make_request("a", prompt, max_tokens=40), 128)[0]


def test_salts_keep_prompts_apart() -> None:
    harness = Harness()
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        harness.add(request_id, list(range(100, 120)), cache_salt=salt)
        harness.run()
    assert [stream.last.num_cached_tokens for stream in harness.streams.values() if stream.last] == [0, 0, 0, 16]


def test_slots_are_released_with_the_next_plan() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("a", 4, max_tokens=1)
    harness.run()
    assert harness.plan() is None  # a release alone is no plan
    harness.add("b", 4, max_tokens=1)
    plan = harness.plan()
    assert plan is not None
    assert plan.released == [0]
    assert [new.slot for new in plan.admitted] == [0]


def test_abort_frees_pages_at_once_and_may_be_repeated() -> None:
    harness = Harness(depth=2)
    harness.add("a", 20, max_tokens=50)
    harness.add("b", 20, max_tokens=50)
    harness.plan()
    (delta,) = harness.scheduler.abort(["a", "unknown"])
    assert (delta.request_id, delta.finish_reason) == ("a", FinishReason.ABORT)
    harness.abort("b")
    assert harness.scheduler.abort(["a", "b"]) == []
    assert not harness.scheduler.has_unfinished()
    assert harness.scheduler.stats().kv_cache_usage == 0
    assert harness.result() == []
    harness.run()


def test_a_waiting_request_can_be_aborted() -> None:
    harness = Harness(max_num_seqs=1)
    for request_id in "abc":
        harness.add(request_id, 4)
    harness.step()
    harness.abort("b")
    harness.run()
    assert [stream.finish_reason for stream in harness.streams.values()] == ["length", "abort", "length"]


# ------------------------------------------------------------------------------------------------------------ reports


def test_a_resumed_request_goes_on_after_what_was_delivered() -> None:
    whole = make_request("a", 6, max_tokens=8)
    tokens, _ = alone(whole, 128)
    harness = Harness()
    harness.add("a", 6, max_tokens=8, output=tokens[:3])
    harness.run()
    assert harness.streams["a"].token_ids == tokens[3:]
    new = harness.plans[0].admitted[0]
    assert (len(new.token_ids), new.num_prompt_tokens) == (9, 6)


def test_deltas_tell_when_a_request_was_queued_and_scheduled() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("a", 4, max_tokens=2)
    harness.add("b", 4, max_tokens=2)
    for _ in range(4):
        harness.clock.now += 1.0
        harness.step()
    last = harness.streams["b"].last
    assert last is not None
    assert (last.queued_at, last.scheduled_at) == (100.0, 103.0)


def test_stats_are_totals_that_reading_leaves_alone() -> None:
    harness = Harness(num_pages=10)
    prompt = list(range(100, 109))
    harness.add("a", prompt, max_tokens=4)
    harness.step()
    harness.add("b", prompt, max_tokens=4)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (2, 0, 0.4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)
    assert (stats.num_prompt_tokens, stats.num_prefilled_tokens) == (9 + 1, 9 + 1)
    assert stats.num_generated_tokens == 3
    assert (stats.num_steps, stats.num_preemptions, stats.started_at) == (2, 0, 100.0)
    assert harness.scheduler.stats() == stats


def test_a_prompt_is_counted_once_chunk_by_chunk() -> None:
    harness = Harness(max_num_batched_tokens=4, depth=2)
    harness.add("a", 10, max_tokens=4)
    counted = []
    for _ in range(5):
        harness.step()
        counted.append(harness.scheduler.stats().num_prompt_tokens)
        if len(counted) == 2:
            harness.scheduler.reset_prefix_cache(preempt_running=True)
    harness.run()
    stats = harness.scheduler.stats()
    assert counted[:2] == [4, 8]
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (10, 4)


def test_a_prompt_enters_the_count_of_prefilled_tokens_with_its_first_token() -> None:
    harness = Harness(max_num_batched_tokens=4, depth=2, num_pages=40)
    prompt = list(range(100, 110))
    harness.add("a", prompt, max_tokens=4)
    counted = []
    while not counted or counted[-1][1] < 4:
        harness.step()
        stats = harness.scheduler.stats()
        counted.append((stats.num_steps, stats.num_generated_tokens, stats.num_prefilled_tokens))
    assert counted == [(0, 0, 0), (0, 0, 0), (1, 1, 10), (2, 2, 10), (3, 3, 10), (4, 4, 10)]
    harness.add("b", prompt, max_tokens=2)  # two of its blocks are in the cache
    harness.run()
    harness.add("c", 10, max_tokens=4)
    harness.step()
    harness.abort("c")
    harness.run()
    assert harness.scheduler.stats().num_prefilled_tokens == 10 + 2


def test_a_prompt_that_is_computed_again_is_counted_once_as_prefilled() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add("a", 10, max_tokens=4)
    for _ in range(4):
        harness.step()
        harness.scheduler.reset_prefix_cache(preempt_running=True)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_prefilled_tokens, stats.num_generated_tokens) == (10, 4)


def test_every_kv_group_gets_its_own_pages() -> None:
    harness = Harness(kv_groups=[FULL, FULL], num_pages=20)
    harness.add("a", 9, max_tokens=6)
    harness.run()
    (new,) = harness.plans[0].admitted
    assert [len(table) for table in new.page_ids] == [3, 3]
    grown = [pages for plan in harness.plans for _, pages in plan.appended_pages]
    assert [len(pages) for pages in grown] == [2]
    assert len({page for table in new.page_ids for page in table} | {p for g in grown[0] for p in g}) == 8


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 5},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_samples_of_one_prompt_share_its_pages_and_its_computation(limits: dict[str, int]) -> None:
    """Four samples of a prompt of eight full pages and a token: 8 + 4 * 1 pages, and only the last token four times."""
    harness = Harness(max_num_seqs=8, block_size=4, **limits)
    prompt = list(range(1, 34))
    for index in range(4):
        harness.add(f"r_{index}", prompt, max_tokens=3, seed=index)
    most = 0
    while harness.scheduler.has_unfinished():
        harness.step()
        running = harness.scheduler.stats()
        most = max(most, round(running.kv_cache_usage * 64))
    assert most == 8 + 4
    assert harness.worker.num_computed_tokens == 32 + 4 * (1 + 2)


def test_a_prompt_that_begins_alike_waits_no_longer_than_for_that() -> None:
    """The prompt is admitted once its shared prefix is computed, long before the rest of the other prompt."""
    harness = Harness(max_num_batched_tokens=64, long_prefill_token_threshold=4, block_size=4, max_num_seqs=8)
    prompt = list(range(1, 34))
    harness.add("long", prompt)
    harness.add("alike", prompt[:8] + [99] * 5)
    harness.add("other", [77] * 5)
    admitted = {}
    while harness.scheduler.has_unfinished():
        harness.step()
        for request_id, stream in harness.streams.items():
            if stream.token_ids:
                admitted.setdefault(request_id, len(harness.plans))
    assert admitted["alike"] < admitted["long"]
    assert admitted["other"] < admitted["long"]
