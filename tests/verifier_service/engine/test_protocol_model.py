"""Whatever a gateway does, in whatever order, the verifier holds what it promised: a model of the sequence protocol."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spire.model.target import Target
from spire.v1 import tensor_pb2 as codes, verifier_pb2 as pb
from tests.verifier_service.harness import GREEDY, VOCAB, plain_greedy, prompt_of
from verifier_service.config import VerifierConfig
from verifier_service.engine.batch import VerifyTask
from verifier_service.engine.engine import VerifierEngine
from verifier_service.engine.sequence import StartTask
from verifier_service.serve.server import load

pytestmark = pytest.mark.usefixtures("each_backend")

NAMES = st.sampled_from("abc")
LENGTHS = st.sampled_from([1, 2, 7, 8, 9, 30])
LONGEST = 60
MAX_DEPTH = 4
OK, INVALID, NOT_FOUND, STALE = (
    codes.CODE_OK,
    codes.CODE_INVALID_ARGUMENT,
    codes.CODE_NOT_FOUND,
    codes.CODE_FAILED_PRECONDITION,
)


@dataclass
class Live:
    """A sequence as the protocol says that the verifier holds it."""

    start: pb.Start
    wanted: list[int]
    gateway: str
    done: int = 1
    round: int = 0
    last: tuple[pb.VerifyItem, pb.VerifyResult] | None = None
    first: pb.Started = field(default_factory=pb.Started)

    @property
    def base(self) -> int:
        return len(self.start.tokens) + self.done - 1

    def item(self, right: int, wrong: int) -> pb.VerifyItem:
        draft = self.wanted[self.done : self.done + right]
        draft += [(self.wanted[self.done + right] + 1) % VOCAB] * wrong
        return pb.VerifyItem(
            sequence_id=self.start.sequence_id, round=self.round + 1, base=self.base, draft_tokens=draft
        )


class Gateways(RuleBasedStateMachine):
    """Two gateways and all that they may do wrong."""

    def __init__(self, engine: VerifierEngine, target: Target):
        super().__init__()
        self.engine, self.target = engine, target
        self.replies: queue.SimpleQueue[pb.RoundsResponse] = queue.SimpleQueue()
        self.live: dict[str, Live] = {}

    def teardown(self) -> None:
        self.engine.call(self.engine.slots.release, list(self.live)).result(20)

    def _start(self, start: pb.Start, gateway: str) -> pb.Started:
        self.engine.submit(StartTask(start, gateway, self.replies.put, lambda told: None))
        return self.replies.get(timeout=20).started

    def _verify(self, gateway: str, *items: pb.VerifyItem) -> list[pb.VerifyResult]:
        self.engine.submit(VerifyTask(pb.VerifyBatch(batch_id=1, items=items), gateway, self.replies.put))
        results = list(self.replies.get(timeout=20).verified.results)
        assert [result.sequence_id for result in results] == [item.sequence_id for item in items]
        return results

    @initialize(lengths=st.tuples(LENGTHS, LENGTHS, LENGTHS))
    def start_all(self, lengths: tuple[int, int, int]) -> None:
        for name, length in zip("abc", lengths, strict=True):
            self.start(name, length, "two" if name == "c" else "one")

    @rule(name=NAMES, length=LENGTHS, gateway=st.sampled_from(["one", "two"]))
    def start(self, name: str, length: int, gateway: str) -> None:
        start = pb.Start(sequence_id=name, tokens=prompt_of(length), sampling=GREEDY)
        started = self._start(start, gateway)
        if live := self.live.get(name):
            same = live.start == start and live.gateway == gateway
            assert started == live.first if same else started.status.code == INVALID
            return
        wanted = _reference(self.target, length)
        assert (started.status.code, started.base, started.token) == (OK, length, wanted[0])
        self.live[name] = Live(start, wanted, gateway, first=started)

    @rule(
        names=st.sets(NAMES, min_size=1),
        gateway=st.sampled_from(["one", "two"]),
        right=st.integers(0, 3),
        wrong=st.integers(0, 1),
    )
    def go_on(self, names: set[str], gateway: str, right: int, wrong: int) -> None:
        """A batch of whoever is live, each with draft tokens that are the target's own, and perhaps one that is not."""
        batch = [live for name in sorted(names) if (live := self._own(name, gateway))]
        items = [live.item(right, wrong) for live in batch]
        if not items:
            return
        self._take(batch, items, self._verify(gateway, *items), right)

    def _own(self, name: str, gateway: str) -> Live | None:
        """This sequence, if it is that gateway's and has not grown too long."""
        live = self.live.get(name)
        return live if live and live.gateway == gateway and live.done + 5 < LONGEST else None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def take_what_is_another_s(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(list(self.live.values())))
        (refused,) = self._verify("two" if live.gateway == "one" else "one", live.item(0, 0))
        assert refused.status.code == NOT_FOUND

    def _take(self, batch: list[Live], items: list[pb.VerifyItem], results: list[pb.VerifyResult], right: int) -> None:
        for live, item, result in zip(batch, items, results, strict=True):
            assert (result.status.code, result.round, result.accepted) == (OK, item.round, right)
            assert list(result.tokens) == live.wanted[live.done : live.done + right + 1]
            live.done, live.round, live.last = live.done + right + 1, item.round, (item, result)

    @precondition(lambda self: any(live.last for live in self.live.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A block whose answer was lost is answered again, without a second draw."""
        live = data.draw(st.sampled_from([live for live in self.live.values() if live.last]))
        assert live.last is not None
        assert self._verify(live.gateway, live.last[0]) == [live.last[1]]

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(), off=st.sampled_from([(-1, 1), (-1, -1), (0, -1), (0, 2), (1, 0), (-2, 0)]), mates=st.booleans()
    )
    def be_wrong(self, data: st.DataObject, off: tuple[int, int], mates: bool) -> None:
        """A block of another round or place is refused, and its batch mates are not."""
        rounds, positions = off
        wrong = data.draw(st.sampled_from(list(self.live.values())))
        item = wrong.item(1, 0)
        item.round, item.base = max(0, item.round + rounds), max(0, item.base + positions)
        repeated = wrong.last is not None and (item.round, item.base) == (wrong.last[0].round, wrong.last[0].base)
        if repeated or (item.round, item.base) == (wrong.round + 1, wrong.base) or not item.base:
            return  # base 0 is wherever the round before ended
        own = [self._own(name, wrong.gateway) for name in self.live]
        others = [live for live in own if live and live is not wrong and mates]
        items = [live.item(0, 0) for live in others]
        refused, *fine = self._verify(wrong.gateway, item, *items)
        assert refused.status.code == STALE
        self._take(others, items, fine, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), draft=st.sampled_from([[VOCAB], [2**31], [5] * (MAX_DEPTH + 1)]))
    def say_nonsense(self, data: st.DataObject, draft: list[int]) -> None:
        live = data.draw(st.sampled_from(list(self.live.values())))
        item = live.item(0, 0)
        item.draft_tokens.extend(draft)
        (result,) = self._verify(live.gateway, item)
        assert result.status.code == INVALID

    @precondition(lambda self: len(self.live) < 3)
    @rule(data=st.data())
    def ask_for_what_is_not_there(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*"abc"} - self.live.keys())))
        (result,) = self._verify("one", pb.VerifyItem(sequence_id=name, round=1, base=3))
        assert result.status.code == NOT_FOUND

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        known = self.live.pop(name, None) is not None
        assert self.engine.call(self.engine.slots.release, [name, "nobody"]).result(20) == known

    @rule(gateway=st.sampled_from(["one", "two"]))
    def lose_a_gateway(self, gateway: str) -> None:
        self.engine.call(self.engine.slots.release_gateway, gateway).result(20)
        self.live = {name: live for name, live in self.live.items() if live.gateway != gateway}

    @invariant()
    def the_verifier_holds_what_was_committed_and_nothing_else(self) -> None:
        held = self.engine.call(self._held).result(20)
        expected = {
            name: ([*live.start.tokens, *live.wanted[: live.done]], live.base) for name, live in self.live.items()
        }
        assert held == expected

    def _held(self) -> dict[str, tuple[list[int], int]]:
        lengths = self.engine.steps.cache.lengths
        return {name: (one.tokens, lengths[one.slot]) for name, one in self.engine.sequences.items()}


_references: dict[int, list[int]] = {}


def _reference(target: Target, length: int) -> list[int]:
    if length not in _references:
        _references[length] = plain_greedy(target, prompt_of(length), LONGEST)
    return _references[length]


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[VerifierEngine]:
    values = {"model": model_dir, "dtype": "float32", "max_sequences": 3, "token_budget": 16, "max_depth": MAX_DEPTH}
    loaded, _ = load(VerifierConfig.model_validate(values))
    loaded.start()
    yield loaded
    loaded.stop()
    loaded.ended.result(20)


def test_the_sequence_protocol_holds_under_any_history(engine: VerifierEngine, target: Target) -> None:
    histories = settings(max_examples=40, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(partial(Gateways, engine, target), settings=histories)
    assert engine.sequences == {}
