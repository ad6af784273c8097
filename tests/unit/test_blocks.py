"""The KV pool and its prefix cache against a naive model of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from twofold.core import links as links_module
from twofold.core.blocks import BlockPool, Hold
from twofold.core.links import Link
from twofold.core.lru import Lru

B = 2
N_BLOCKS = 7
Prefix = tuple[str, tuple[int, ...]]  # salt and all tokens up to the end of a block

small_token = st.integers(0, 1)
prompts = st.lists(small_token, min_size=1, max_size=9).map(tuple)
salts = st.sampled_from(["", "a"])


def narrow(bits: int) -> Callable[[bytes, Sequence[int]], bytes]:
    """A `block_key` with 2**bits values only."""

    def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
        full = blake2b(parent + bytes(tokens), digest_size=1).digest()
        return bytes([full[0] % (1 << bits)])

    return block_key


class PoolMachine(RuleBasedStateMachine):
    """Users place prompts, compute them, leave, hold and let go; content is tracked by hand."""

    bits = 128

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N_BLOCKS, B)
        self.users: dict[int, tuple[Prefix, list[int], list[Link], int]] = {}
        self.content: dict[int, Prefix] = {}  # block: what was last computed into it
        self.lru: list[int] = []
        self.n = 0

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        if self.bits < 128:
            self.patch.setattr(links_module, "block_key", narrow(self.bits))

    def teardown(self) -> None:
        self.patch.undo()

    @rule(tokens=prompts, salt=salts, n_computed=st.integers(0, 4))
    def place(self, tokens: tuple[int, ...], salt: str, n_computed: int) -> None:
        links: list[Link] = []
        hits = self.pool.lookup(tokens, salt, links)
        assert len(hits) * B < len(tokens), "a hit covers the whole prompt"
        for i, block in enumerate(hits):
            assert self.content[block] == (salt, tokens[: (i + 1) * B]), "a hit with other content"
        n = -(-len(tokens) // B) - len(hits)
        if n > self.pool.available - (len(hits) - self.pool.busy(hits)):
            return
        self.pool.share(hits)
        self.lru = [b for b in self.lru if b not in hits]
        free = self.pool.counts().free
        new = self.pool.allocate(n)
        evicted, self.lru = self.lru[: max(0, n - free)], self.lru[max(0, n - free) :]
        assert new[len(new) - len(evicted) :] == evicted, "not the ones used longest ago"
        for block in new:
            self.content.pop(block, None)
        self.n += 1
        self.users[self.n] = ((salt, tokens), hits + new, links, len(hits))
        for _ in range(n_computed):
            self._compute(self.n)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self._compute(data.draw(st.sampled_from(sorted(self.users))))

    def _compute(self, user: int) -> None:
        (salt, tokens), blocks, links, done = self.users[user]
        if done < len(tokens) // B:
            self.content[blocks[done]] = (salt, tokens[: (done + 1) * B])
            self.pool.remember(blocks, done, done + 1, tokens, salt, links)
            self.users[user] = ((salt, tokens), blocks, links, done + 1)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), hold=st.booleans())
    def leave(self, data: st.DataObject, hold: bool) -> None:
        user = data.draw(st.sampled_from(sorted(self.users)))
        _, blocks, _, _ = self.users[user]
        if hold and user not in self.pool.holds:
            owned = Hold(owner=user, generation=0, peer="", expiry_ns=1, blocks=tuple(blocks))
            self.pool.hold(owned)
            return
        if user in self.pool.holds:
            assert self.pool.unhold(user) == tuple(blocks)
        del self.users[user]
        self.pool.release(blocks)
        for block in reversed(blocks):
            if self.pool.references(block) == 0 and block in self.pool.cache:
                self.lru.append(block)

    @precondition(lambda self: self.n % 5 == 4)
    @rule()
    def drop_cache(self) -> None:
        self.n += 1
        self.pool.drop_cache()
        self.lru = []

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        used = [b for _, blocks, _, _ in self.users.values() for b in blocks]
        held = {b for u in self.pool.holds for b in self.users[u][1]}
        assert counts.held == len(held)
        assert counts.active == len(set(used) - held)
        assert counts.cached == len(self.lru)
        for block in range(N_BLOCKS):
            assert self.pool.references(block) == used.count(block)


class CollidingPoolMachine(PoolMachine):
    """The same with keys of one bit: nearly all prompts collide."""

    bits = 1


class CrowdedPoolMachine(PoolMachine):
    """The same with keys of three bits: some prompts collide, chains grow all the same."""

    bits = 3


machines = settings(max_examples=120, stateful_step_count=30)
TestPool = PoolMachine.TestCase
TestPool.settings = machines
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = machines
TestCrowdedPool = CrowdedPoolMachine.TestCase
TestCrowdedPool.settings = machines


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    made = BlockPool(4, B)
    yield made
    made.check()


def fill(pool: BlockPool, tokens: tuple[int, ...], salt: str = "") -> list[int]:
    links: list[Link] = []
    hits = pool.lookup(tokens, salt, links)
    pool.share(hits)
    blocks = hits + pool.allocate(-(-len(tokens) // B) - len(hits))
    for i in range(len(hits), len(tokens) // B):
        pool.remember(blocks, i, i + 1, tokens, salt, links)
    return blocks


def test_blocks_are_back_after_use(pool: BlockPool) -> None:
    blocks = fill(pool, (1, 2, 3, 4, 5))
    assert pool.counts() == (type(pool.counts()))(free=1, cached=0, active=3, held=0)
    pool.release(blocks)
    assert pool.counts() == (type(pool.counts()))(free=2, cached=2, active=0, held=0)


def test_tail_of_a_prompt_is_evicted_before_its_head(pool: BlockPool) -> None:
    pool.release(fill(pool, (1, 1, 2, 2, 3, 3, 4, 4)))
    evicted = pool.allocate(2)
    assert len(pool.lookup((1, 1, 2, 2, 3, 3, 4, 4), "", [])) == 2
    pool.release(evicted)


def test_least_recently_used_is_evicted_first(pool: BlockPool) -> None:
    first, second = fill(pool, (1, 1)), fill(pool, (2, 2))
    rest = pool.allocate(2)
    pool.release(second)
    pool.release(first)
    pool.release(fill(pool, (2, 2, 9)[:2]))
    pool.share(pool.lookup((2, 2, 9), "", []))
    pool.release(second)
    pool.allocate(1)
    assert pool.lookup((1, 1, 9), "", []) == []
    assert pool.lookup((2, 2, 9), "", []) == second
    pool.release(rest)


def test_overdrawn_and_double_released_are_caught(pool: BlockPool) -> None:
    with pytest.raises(AssertionError, match="5 blocks asked, 4 available"):
        pool.allocate(5)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_held_block_cannot_be_let_go(pool: BlockPool) -> None:
    blocks = pool.allocate(2)
    hold = Hold(owner=1, generation=0, peer="", expiry_ns=5, blocks=tuple(blocks))
    pool.hold(hold)
    assert pool.counts().held == 2
    with pytest.raises(AssertionError, match="while held"):
        BlockPool.release(pool, blocks[1:])
    pool._refs[blocks[1]] = 1  # as it was before the refused release
    pool.release(pool.unhold(1))


def test_no_caching_keeps_nothing() -> None:
    pool = BlockPool(4, B, caching=False)
    pool.release(fill(pool, (1, 1, 2, 2)))
    assert pool.counts().free == 4
    assert pool.lookup((1, 1, 2, 2, 3), "", []) == []


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_needs_blocks_and_tokens(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(blocks, size)


# ------------------------------------------------------------------------------------ the order


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "remove", "pop"]), st.integers(0, 7))))
def test_blocks_leave_in_the_order_of_their_last_use(moves: list[tuple[str, int]]) -> None:
    lru, expected = Lru(8), OrderedDict[int, None]()
    for move, n in moves:
        if move == "append":
            new = [block for block in (n, (n + 3) % 8, (n + 5) % 8) if block not in expected]
            lru.append(new)
            expected.update(dict.fromkeys(new))
        elif move == "remove" and n in expected:
            lru.remove(n)
            del expected[n]
        elif move == "pop":
            n = min(n, len(expected))
            assert lru.pop(n) == [expected.popitem(last=False)[0] for _ in range(n)]
        assert list(lru) == list(expected)
        assert len(lru) == len(expected)


def test_what_was_taken_out_of_the_order_does_not_pile_up() -> None:
    lru = Lru(4)
    for _ in range(100):
        lru.append([2])
        lru.remove(2)
    assert len(lru._order) <= 16
    assert list(lru) == []
