"""The page pool: reference counts, eviction of the oldest page first, and hashes of what a page depends on."""

import random

import pytest

from quire.core.kv.page_pool import PagePool


def key(content: str, group: int = 0) -> tuple[bytes, int]:
    return content.encode(), group


def test_allocates_every_page_once_and_no_more() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2) + pool.allocate(3)
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert pool.num_available == 0
    with pytest.raises(ValueError, match="asked for 1 pages, 0 are available"):
        pool.allocate(1)
    pool.check_invariants(pages)


def test_unnamed_pages_are_reused_before_any_cached_one_is_evicted() -> None:
    pool = PagePool(4)
    named, unnamed = pool.allocate(2), pool.allocate(2)
    for page, content in zip(named, "ab", strict=True):
        pool.name(page, key(content))
    pool.release(named)
    pool.release(unnamed)
    assert sorted(pool.allocate(2)) == sorted(unnamed)
    assert [pool.find(key(content)) for content in "ab"] == named


def test_evicts_the_least_recently_released_first() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page, content in zip(pages, "abc", strict=True):
        pool.name(page, key(content))
    pool.release([pages[1], pages[0], pages[2]])
    pool.share([pages[1]])  # used again: now the most recent
    pool.release([pages[1]])
    assert pool.allocate(1) == [pages[0]]
    assert pool.find(key("a")) is None
    assert pool.allocate(2) == [pages[2], pages[1]]
    pool.check_invariants(pages)


def test_a_touched_page_is_evicted_last_and_one_in_use_stays_so() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page, content in zip(pages, "abc", strict=True):
        pool.name(page, key(content))
    pool.release(pages[:2])
    pool.touch([pages[2], pages[0]])
    assert pool.allocate(2) == [pages[1], pages[0]]
    assert pool.find(key("c")) == pages[2]
    pool.check_invariants(pages)


def test_a_shared_page_is_in_use_until_its_last_holder_leaves() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.name(page, key("a"))
    pool.share([page])
    pool.release([page])
    assert pool.num_in_use == 1
    pool.check_invariants([page])
    pool.release([page])
    assert (pool.num_in_use, pool.find(key("a"))) == (0, page)


def test_sharing_a_cached_page_takes_it_out_of_what_is_available() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.name(pages[0], key("a"))
    pool.release(pages[:1])
    assert pool.num_cached_among(pages) == pool.num_available == 1
    pool.share(pages[:1])
    assert pool.num_cached_among(pages) == pool.num_available == 0


def test_the_first_page_with_a_content_stays_the_one_to_be_found() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.name(first, key("a"))
    pool.name(second, key("a"))
    assert pool.find(key("a")) == first
    pool.release([second])  # its content is known elsewhere: plainly free
    pool.check_invariants([first])
    assert pool.allocate(1) == [second]


def test_groups_do_not_share_content() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.name(first, key("a", group=0))
    assert pool.find(key("a", group=1)) is None
    pool.name(second, key("a", group=1))
    assert (pool.find(key("a", 0)), pool.find(key("a", 1))) == (first, second)


def test_disowned_content_is_found_no_more_whether_in_use_or_cached() -> None:
    pool = PagePool(3)
    used, cached, other = pages = pool.allocate(3)
    for page, content in zip(pages, "abc", strict=True):
        pool.name(page, key(content))
    pool.release([cached, other])
    pool.disown([key("a"), key("b"), key("never seen")])
    assert [pool.find(key(content)) for content in "abc"] == [None, None, other]
    pool.check_invariants([used])


def test_drop_cached_keeps_what_is_in_use() -> None:
    pool = PagePool(2)
    used, cached = pool.allocate(2)
    pool.name(used, key("a"))
    pool.name(cached, key("b"))
    pool.release([cached])
    assert not pool.drop_cached()
    assert [pool.find(key("a")), pool.find(key("b"))] == [used, None]
    pool.release([used])
    assert pool.drop_cached()
    pool.check_invariants([])


def test_invariants_notice_a_page_released_twice() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    pool.release([page])
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.check_invariants()


def test_invariants_notice_a_block_table_that_the_pool_does_not_know_of() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="block tables and reference counts"):
        pool.check_invariants([1])


def test_random_use_keeps_every_page_counted_once() -> None:
    rng = random.Random(0)
    pool = PagePool(50)
    tables: list[list[int]] = []
    for _ in range(5000):
        match rng.randrange(4):
            case 0 if pool.num_available:
                tables.append(pool.allocate(rng.randint(1, min(8, pool.num_available))))
            case 1 if tables:
                pool.name(rng.choice(rng.choice(tables)), key(str(rng.randrange(60))))
            case 2 if (page := pool.find(key(str(rng.randrange(60))))) is not None:
                pool.share([page])
                tables.append([page])
            case 3 if tables:
                pool.release(reversed(tables.pop(rng.randrange(len(tables)))))
        pool.check_invariants([page for table in tables for page in table])
