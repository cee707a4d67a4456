"""The router's formula, what it remembers, and what it forgets."""

import os
import random
import subprocess
import sys

from quire.core.routing.engine_load import SEQUENCE_TOKENS, EngineLoad
from quire.core.routing.prompt_blocks import prompt_blocks
from quire.core.routing.router import FULL, Router, RoutingRules
from quire.core.wire.protocol import SchedulerStats

TOKENS = [each * 7919 % 50_000 for each in range(4096)]


def router_of(*loads: float, **rules: int) -> Router:
    router = Router(len(loads), RoutingRules(**rules))  # type: ignore[arg-type]
    for engine, load in enumerate(loads):
        router.set_load(engine, load)
    return router


def chosen(router: Router, blocks: list[int]) -> tuple[int, int]:
    choice = router.choose(blocks)
    assert choice is not None
    router.add_prompt(choice.engine, blocks)
    return tuple(choice)


def test_a_block_stands_for_all_before_it_and_for_what_else_differs() -> None:
    whole = prompt_blocks(TOKENS[:640], None)
    assert len(whole) == 10
    assert prompt_blocks(TOKENS[:200], None) == whole[:3]
    assert prompt_blocks(TOKENS[:63], None) == []
    changed = prompt_blocks([1, *TOKENS[1:640]], None)
    assert not set(changed) & set(whole)
    assert not set(prompt_blocks(TOKENS[:640], "salt")) & set(whole)


def test_blocks_before_an_adapter_begins_are_the_base_models() -> None:
    whole, late = prompt_blocks(TOKENS[:640]), prompt_blocks(TOKENS[:640], adapter=b"digest", adapter_start=200)
    assert late[:3] == whole[:3]
    assert not set(late[3:]) & set(whole)
    assert late != prompt_blocks(TOKENS[:640], adapter=b"other", adapter_start=200)
    assert not set(prompt_blocks(TOKENS[:640], adapter=b"digest")) & {*whole, *late}


def test_processes_with_one_key_of_hashes_give_the_same_names() -> None:
    program = (
        "from quire.core.routing.prompt_blocks import prompt_blocks\n"
        "print(prompt_blocks(range(130), None, None), prompt_blocks(range(64), 'salt', b'digests'))"
    )
    names = [
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("5", "5", "6")
    ]
    first, second, other = (each.stdout for each in names)
    assert first == second != other
    assert len(first.split()) == 3


def test_the_engine_that_has_the_longest_part_is_taken() -> None:
    router = router_of(0, 0, 0)
    router.add_prompt(1, prompt_blocks(TOKENS[:640]))
    router.add_prompt(2, prompt_blocks(TOKENS[:1280]))
    assert router.choose(prompt_blocks(TOKENS[:2000])) == (2, 1280)
    assert router.choose(prompt_blocks([*TOKENS[:640], *TOKENS[:700]])) == (1, 640)  # both have it: the first


def test_a_cache_excuses_the_root_of_what_it_saves() -> None:
    """sqrt(2 * 128 * 1280) = 572.4 tokens in hand."""
    blocks = prompt_blocks(TOKENS[:1280])
    router = router_of(572, 0)
    router.add_prompt(0, blocks)
    assert router.choose(blocks) == (0, 1280)
    router.set_load(0, 573)
    assert router.choose(blocks) == (1, 0)


def test_a_prefix_that_many_ask_for_spreads_over_the_engines() -> None:
    """Requests that stay: the prefix of 1,280 tokens excuses 4.5 of them beyond the idlest engine, not ten."""
    blocks, router = prompt_blocks(TOKENS[:1280]), router_of(*[0] * 50)
    counts = [0] * 50
    holders = set()
    for number in range(1, 101):
        engine = chosen(router, blocks)[0]
        counts[engine] += 1
        router.set_load(engine, counts[engine] * SEQUENCE_TOKENS)
        holders.add(engine)
        assert max(counts) - min(counts) <= 5
        assert len(holders) <= 1 + number / 5
    assert len(holders) == 20


def test_load_alone_decides_where_prefixes_are_not_followed() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(1, 0, follows_prefixes=False)
    router.add_prompt(0, blocks)
    assert router.choose(blocks) == (1, 0)


def test_engines_of_equal_load_take_turns() -> None:
    router = router_of(3, 3, 3)
    assert [chosen(router, [number])[0] for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_full_engines_get_nothing_even_what_they_have_in_their_cache() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(FULL, 500)
    router.add_prompt(0, blocks)
    assert router.choose(blocks) == (1, 0)
    router.set_load(1, FULL)
    assert router.choose(blocks) is None


def test_an_engine_that_died_is_known_to_have_nothing() -> None:
    blocks = prompt_blocks(TOKENS)
    router = router_of(0, 0)
    for engine in (0, 1):
        router.add_prompt(engine, blocks)
    router.forget(0)
    assert router.choose(blocks) == (1, 4096)
    router.forget(1)
    assert router.choose(blocks) == (0, 0)


def test_prefixes_are_forgotten_in_lru_order_and_from_their_end() -> None:
    one, other, third = (prompt_blocks([first, *TOKENS[:639]]) for first in (1, 2, 3))
    router = router_of(0)
    router.set_capacity(0, 25 * 64)
    for blocks in (one, other, one, third):  # `other` is the oldest when room is short by 5 blocks
        router.add_prompt(0, blocks)
    assert [router.choose(blocks) for blocks in (one, other, third)] == [(0, 640), (0, 320), (0, 640)]


def test_memory_is_bounded_over_all_engines() -> None:
    router = router_of(0, 0, max_blocks=20)
    for engine in (0, 1):
        router.add_prompt(engine, prompt_blocks(TOKENS))
    assert [router.choose(prompt_blocks(TOKENS))] == [(0, 10 * 64)]


def test_choices_depend_on_the_calls_before_and_nothing_else() -> None:
    def run() -> list[tuple[int, int]]:
        draw, router = random.Random(5), router_of(*[0] * 20)
        answers = []
        for _ in range(300):
            router.set_load(draw.randrange(20), draw.randrange(30))
            length = draw.randrange(64, 1500)
            answers.append(chosen(router, prompt_blocks([draw.randrange(6), *TOKENS[:length]])))
        return answers

    assert run() == run()


def test_what_a_prompt_has_in_common_with_what_was_sent_is_told_when_it_is_sent() -> None:
    router = router_of(0, 0)
    assert router.add_prompt(0, prompt_blocks(TOKENS[:640])) == 0
    assert router.add_prompt(0, prompt_blocks(TOKENS[:1280])) == 640
    assert router.add_prompt(1, prompt_blocks(TOKENS[:640])) == 0
    router.set_capacity(1, 0)
    assert router.add_prompt(1, prompt_blocks(TOKENS[:640])) == 0


def test_load_is_the_work_of_the_last_report_and_of_what_was_sent_since() -> None:
    load = EngineLoad()
    load.add(3)
    assert load.value == 3 * 128
    load.send(3, 500)
    assert (load.value, load.num_sequences) == (500 + 3 * 128, 3)
    load.report(SchedulerStats(num_running=6, num_waiting=2, num_pending_tokens=700))  # of all frontends
    assert load.value == 700 + 8 * 128
    load.add(1)
    load.send(1, 90)
    assert (load.value, load.num_sequences) == (790 + 9 * 128, 9)
    load.report(SchedulerStats())  # made before anything sent arrived
    assert (load.value, load.num_own) == (4 * 128, 4)
    load.remove(4)
    assert load.value == 0
    load.add(1)
    load.send(1, 50)
    load.forget()
    assert load.value == 128
    load.send(1, 60)  # again, to the next engine
    assert load.value == 60 + 128


def test_a_prefix_that_hundreds_of_engines_have_leads_to_the_least_loaded_of_them() -> None:
    drawn = random.Random(2)
    loads = [drawn.randrange(5, 400) for _ in range(700)]
    router = router_of(*loads)
    blocks = prompt_blocks(TOKENS[:1280])
    holders = sorted(drawn.sample(range(700), 300))
    for engine in holders:
        router.add_prompt(engine, blocks)
    for _ in range(20):
        least = min(holders, key=lambda engine: (loads[engine], engine))
        assert chosen(router, blocks) == (least, 1280)
        loads[least] += 50
        router.set_load(least, loads[least])
