"""The scheduler holds its invariants under any history, and a sequence its tokens through rounds and losses."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.rounds.scheduler import MAX_FRUITLESS_LIVES, Batch, Scheduler
from gateway.sequence import Logprob, Sequence, Stage, State
from spire.errors import OutOfCapacity
from tests.gateway.sequences import END, ask, names, sequence, start_all


class SchedulerMachine(RuleBasedStateMachine):
    """Random histories of what the engine may tell a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(capacity=3, max_waiting=5)
        # Rounds under way: the second one of those who are not in the first, or sent ahead.
        self.rounds: list[Batch] = []
        self.ahead = False
        self.all: list[Sequence] = []
        self.admitted: list[str] = []
        self.ended: list[str] = []

    def one_of(self, state: State, at: int) -> Sequence | None:
        found = [s for s in self.all if s.state is state]
        return found[at % len(found)] if found else None

    @rule(choices=st.integers(1, 3), max_tokens=st.integers(1, 6), key=st.sampled_from("ab"))
    def add(self, choices: int, max_tokens: int, key: str) -> None:
        new = [sequence(f"s{len(self.all) + i}", max_tokens=max_tokens) for i in range(choices)]
        waiting = [one.key for one in self.scheduler.waiting]
        room = self.scheduler.max_waiting // len({*waiting, key}) - waiting.count(key)
        try:
            self.scheduler.add(new, key)
            assert choices <= room
            self.all += new
        except OutOfCapacity:
            assert choices > room

    @rule(released=st.booleans())
    def admit(self, released: bool) -> None:
        if released:
            self.take_ended()
            self.scheduler.released(self.ended)
        waiting, stalled = list(self.scheduler.waiting), self.scheduler.stalled
        starts = self.scheduler.admit()
        self.admitted += [s.wire_id for s in starts]
        recalled = [s for s in stalled if s in starts or s.state is State.WAITING]
        before = sorted([*waiting, *recalled], key=lambda s: s.arrival)
        for request in {s.request for s in before}:
            of_request = [s for s in before if s.request == request]
            started = [s for s in starts if s.request == request]
            assert started == of_request[: len(started)]

    @rule(at=st.integers(0, 9), stage=st.sampled_from([Stage.STALLED, Stage.ADMITTED, Stage.COMPUTED]))
    def stand(self, at: int, stage: Stage) -> None:
        if one := self.one_of(State.STARTING, at):
            self.scheduler.stands(one.wire_id, stage)

    @rule()
    def begin_round(self) -> None:
        if len(self.rounds) == 2:
            return
        batch = self.scheduler.batch()
        assert all(s.state is State.RUNNING for s in batch.values())
        assert not any(batch.keys() & other.keys() for other in self.rounds)
        self.rounds.append(batch)
        self.ahead = False

    @rule()
    def begin_round_ahead(self) -> None:
        if len(self.rounds) != 1:
            return
        (before,) = self.rounds
        batch = self.scheduler.batch(after=before)
        for wire_id, one in batch.items():
            assert one.state is State.RUNNING
            assert one.under_way == 1 + (wire_id in before)
            assert one.tokens_left >= one.under_way
        self.rounds.append(batch)
        self.ahead = True

    @rule(at=st.integers(0, 1))
    def end_round(self, at: int) -> None:
        if at < len(self.rounds):
            over = self.rounds.pop(0 if self.ahead else at)
            assert self.scheduler.still(over) == [
                s for wire_id, s in over.items() if s.state is State.RUNNING and s.wire_id == wire_id
            ]
            self.scheduler.end_round(over)

    @rule(at=st.integers(0, 9), token=st.sampled_from([END, 7]))
    def started(self, at: int, token: int) -> None:
        if one := self.one_of(State.STARTING, at):
            self.scheduler.started(one, token)
            assert one.state is not State.STARTING

    @rule(at=st.integers(0, 9), tokens=st.lists(st.sampled_from([7, 7, 7, END]), min_size=1, max_size=5))
    def commit(self, at: int, tokens: list[int]) -> None:
        if one := self.one_of(State.RUNNING, at):
            before = len(one.output)
            kept = self.scheduler.commit(one, tokens, drafted=4)
            assert one.output[before:] == tokens[:kept]
            assert END not in one.output[:-1]

    @rule(at=st.integers(0, 9), state=st.sampled_from([State.STARTING, State.RUNNING]))
    def lose(self, at: int, state: State) -> None:
        if one := self.one_of(state, at):
            output = list(one.output)
            if not self.scheduler.lose(one):
                self.scheduler.finish(one, "error")
            assert one.output == output

    @rule(died=st.booleans())
    def lose_all(self, died: bool) -> None:
        self.scheduler.lose_all()
        assert self.scheduler.held == 0
        lives = {one.id: one.fruitless_lives for one in self.all}
        for given_up in self.scheduler.settle(died):
            self.scheduler.finish(given_up, "error")
        assert died or lives == {one.id: one.fruitless_lives for one in self.all}

    @rule(at=st.integers(0, 9), state=st.sampled_from(list(State)))
    def finish(self, at: int, state: State) -> None:
        if one := self.one_of(state, at):
            reason = one.finish_reason
            self.scheduler.finish(one, "abort")
            assert one.finish_reason == (reason or "abort")

    @rule()
    def take_ended(self) -> None:
        self.ended += self.scheduler.take_ended()
        assert self.scheduler.take_ended() == []

    @invariant()
    def everyone_is_where_its_state_says(self) -> None:
        scheduler = self.scheduler
        assert {s for s in self.all if s.state is State.WAITING} == set(scheduler.waiting)
        assert {s for s in self.all if s.state is State.STARTING} == set(scheduler.starting.values())
        assert {s for s in self.all if s.state is State.RUNNING} == set(scheduler.running.values())
        assert all(s.finish_reason for s in self.all if s.finished)

    @invariant()
    def they_wait_in_the_order_of_their_arrival(self) -> None:
        arrivals = [s.arrival for s in self.scheduler.waiting]
        assert arrivals == sorted(arrivals)

    @invariant()
    def whatever_is_in_no_round_may_begin_one(self) -> None:
        for wire_id, one in self.scheduler.running.items():
            assert one.under_way == sum(wire_id in batch for batch in self.rounds)
        busy = {wire_id for batch in self.rounds for wire_id in batch}
        assert self.scheduler.has_free == bool(self.scheduler.running.keys() - busy)

    @invariant()
    def no_more_are_held_than_there_are_places(self) -> None:
        assert self.scheduler.held <= self.scheduler.capacity

    @invariant()
    def nothing_is_generated_beyond_the_limit(self) -> None:
        for one in self.all:
            assert len(one.output) <= one.max_tokens
            assert one.depth < max(1, one.tokens_left)
            if one.state is State.RUNNING:
                assert one.base == len(one.tokens) - 1

    @invariant()
    def every_place_is_released_exactly_once(self) -> None:
        told = self.ended + self.scheduler._ended
        held = [s.wire_id for s in [*self.scheduler.starting.values(), *self.scheduler.running.values()]]
        assert sorted(told + held) == sorted(self.admitted)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.fault(34)
def test_only_who_was_computed_when_a_verifier_died_is_to_blame() -> None:
    scheduler = Scheduler(capacity=9, max_waiting=9)
    waits, read, runs, rests = (ask(scheduler, name)[0] for name in "abcd")
    for _ in range(MAX_FRUITLESS_LIVES - 1):
        scheduler.admit()
        for one in (runs, rests):
            one.output.clear()
            scheduler.started(one, 7)
        scheduler.stands(read.wire_id, Stage.COMPUTED)
        runs.under_way = 1
        scheduler.lose_all()
        assert scheduler.settle(died=True) == []
        runs.fruitless_lives = 0
    assert [one.fruitless_lives for one in (waits, read, rests)] == [0, MAX_FRUITLESS_LIVES - 1, 0]
    scheduler.admit()
    scheduler.stands(read.wire_id, Stage.COMPUTED)
    scheduler.lose_all()
    assert scheduler.settle(died=True) == [read]


def test_a_lost_sequence_restarts_from_all_its_tokens_under_a_new_name() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=9)
    scheduler.add([sequence("a")])
    (one,) = start_all(scheduler)
    scheduler.commit(one, [8, 9], drafted=1)
    first_name = one.wire_id
    assert scheduler.lose(one)
    (again,) = scheduler.admit()
    assert again is one
    assert one.tokens == [2, 3, 4, 7, 8, 9]
    assert one.wire_id != first_name
    assert one.round == 0
    assert first_name not in scheduler.starting
    assert scheduler.take_ended() == [first_name]


def test_a_sequence_lost_repeatedly_without_a_token_is_given_up() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=9)
    scheduler.add([sequence("a")])
    lives = 0
    while scheduler.waiting:
        (one,) = scheduler.admit()
        lives += 1
        if not scheduler.lose(one):
            scheduler.finish(one, "error")
    assert lives == MAX_FRUITLESS_LIVES


def test_a_sequence_put_back_for_want_of_room_is_not_blamed() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=9)
    scheduler.add([sequence("a")])
    for _ in range(3 * MAX_FRUITLESS_LIVES):
        (one,) = scheduler.admit()
        scheduler.put_back(one)
    assert one.fruitless_lives == 0


def test_tokens_after_an_end_token_do_not_count() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a")])
    (one,) = start_all(scheduler)
    assert scheduler.commit(one, [8, END, 9, 10], drafted=3) == 2
    assert (one.output, one.finish_reason, one.accepted) == ([7, 8, END], "stop", 2)


def test_drafting_stops_short_of_max_tokens() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a", max_tokens=4, k=8)])
    (one,) = start_all(scheduler)
    assert one.depth == 2
    scheduler.commit(one, [8, 9], drafted=2)
    assert one.depth == 0


def test_of_a_rounds_tokens_all_but_the_last_are_the_drafts() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a", max_tokens=7)])
    (one,) = start_all(scheduler)
    scheduler.commit(one, [8, 9, 10], drafted=4)
    scheduler.commit(one, [11], drafted=4)
    scheduler.commit(one, [12, 13, 14], drafted=2)
    assert one.output == [7, 8, 9, 10, 11, 12, 13]
    assert one.from_draft == [False, True, True, False, False, True, True]


def test_logprobs_keep_in_step_with_the_tokens_that_are_kept() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a")])
    (one,) = scheduler.admit()
    scheduler.started(one, 7, logprobs=[Logprob(-7, [])])
    scheduler.commit(one, [8, END, 9], drafted=2, logprobs=[Logprob(-8, []), Logprob(-1, []), Logprob(-9, [])])
    assert [logprob.token for logprob in one.logprobs] == [-token for token in one.output] == [-7, -8, -END]


def test_a_sequence_without_output_ends_when_its_prompt_is_done() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a", max_tokens=0)])
    (one,) = start_all(scheduler)
    assert (one.output, one.finish_reason) == ([], "length")
    assert scheduler.take_ended() == [one.wire_id]


def test_whoever_starts_beside_a_round_is_in_the_next_one() -> None:
    scheduler = Scheduler(capacity=16, max_waiting=16)
    scheduler.add([sequence(str(i)) for i in range(8)])
    start_all(scheduler)
    current = scheduler.batch()
    scheduler.add([sequence("new")])
    (new,) = start_all(scheduler)
    scheduler.end_round(current)
    assert list(scheduler.batch().values()) == [*current.values(), new]


def test_a_round_sent_ahead_holds_unfinished_and_newly_started_sequences() -> None:
    scheduler = Scheduler(capacity=16, max_waiting=16)
    scheduler.add([sequence("goes on", max_tokens=3), sequence("ends", max_tokens=2)])
    start_all(scheduler)
    current = scheduler.batch()
    scheduler.add([sequence("new")])
    start_all(scheduler)
    following = scheduler.batch(after=current)
    assert names(following.values()) == ["goes on", "new"]
    for one in current.values():
        scheduler.commit(one, [7], drafted=0)
    scheduler.end_round(current)
    assert not scheduler.batch()
    assert names(scheduler.batch(after=following).values()) == ["new"]
