"""Who gets one of the scheduler's places, who waits for one in which order, and who gives way to whom."""

from __future__ import annotations

import time

import pytest

from gateway.rounds.scheduler import MOST_STALLED, Scheduler
from gateway.sequence import LEAST_RUN, Stage, State
from spire.errors import OutOfCapacity
from tests.gateway.sequences import ask, names, sequence, start_all


def test_lost_sequences_return_to_where_they_were() -> None:
    scheduler = Scheduler(capacity=3, max_waiting=9)
    scheduler.add([sequence(name) for name in "abcde"])
    start_all(scheduler)
    scheduler.lose_all()
    assert names(scheduler.waiting) == list("abcde")


def run_for(scheduler: Scheduler, tokens: int) -> None:
    for one in list(scheduler.running.values()):
        for _ in range(tokens):
            scheduler.commit(one, [7], drafted=0)


@pytest.mark.fault(29)
def test_who_is_refused_goes_back_to_where_it_was_and_not_to_the_front() -> None:
    scheduler = Scheduler(capacity=2, max_waiting=9)
    for name in "abcd":
        ask(scheduler, name)
    a, b = scheduler.admit()
    scheduler.put_back(b)
    scheduler.put_back(a)
    assert names(scheduler.waiting) == list("abcd")
    assert names(scheduler.admit()) == ["a", "b"]


@pytest.mark.fault(31)
def test_a_request_of_many_choices_is_one_among_others_and_a_key_too() -> None:
    scheduler = Scheduler(capacity=4, max_waiting=99)
    ask(scheduler, "abcdefgh", "one")
    ask(scheduler, "r", "one")
    ask(scheduler, "s", "one")
    ask(scheduler, "x", "other")
    ask(scheduler, "y", "other")
    assert names(scheduler.admit()) == ["a", "x", "r", "y"]


@pytest.mark.fault(31)
def test_the_youngest_beyond_its_share_yields_to_waiters_down_to_its_share() -> None:
    scheduler = Scheduler(capacity=6, max_waiting=99)
    ask(scheduler, "abcdef")
    start_all(scheduler)
    ask(scheduler, "r")
    ask(scheduler, "s")
    assert names(scheduler.admit()) == ["r"]
    assert names(scheduler.waiting) == ["f", "s"]
    assert scheduler.admit() == [], "while a place is being released nobody else gives way"
    scheduler.released(scheduler.take_ended())
    assert names(scheduler.admit()) == ["s"]
    assert names(scheduler.waiting) == ["e", "f"]
    scheduler.released(scheduler.take_ended())
    assert scheduler.admit() == []


@pytest.mark.fault(31)
def test_the_release_of_who_ended_by_itself_keeps_nobody_from_giving_way() -> None:
    scheduler = Scheduler(capacity=6, max_waiting=99)
    *_, last = ask(scheduler, "abcdef")
    start_all(scheduler)
    ask(scheduler, "rs")
    scheduler.finish(last, "stop")
    assert names(scheduler.admit()) == ["r", "s"], "one place became free, one is made before its release is answered"


def test_nobody_gives_way_to_its_equal() -> None:
    scheduler = Scheduler(capacity=2, max_waiting=99)
    for name in "abcd":
        ask(scheduler, name)
    start_all(scheduler)
    assert scheduler.admit() == []
    assert names(scheduler.running.values()) == ["a", "b"]


@pytest.mark.fault(31)
def test_who_came_back_runs_for_a_while_before_it_gives_way_again() -> None:
    scheduler = Scheduler(capacity=2, max_waiting=99)
    first, second = sequence("a", max_tokens=90), sequence("b", max_tokens=90)
    scheduler.add([first, second])
    start_all(scheduler)
    (other,) = ask(scheduler, "r")
    assert names(scheduler.admit()) == ["r"]
    scheduler.finish(other, "abort")
    assert start_all(scheduler) == [second]
    ask(scheduler, "s")
    run_for(scheduler, LEAST_RUN - 2)
    scheduler.released(scheduler.take_ended())
    assert names(scheduler.admit()) == ["s"]
    assert first.state is State.WAITING, "the younger one has come back just now"
    assert second.state is State.RUNNING


@pytest.mark.fault(29)
def test_while_the_verifier_has_no_room_only_a_few_prompts_wait_there() -> None:
    scheduler = Scheduler(capacity=64, max_waiting=99)
    for number in range(30):
        ask(scheduler, chr(ord("A") + number))
    starts = scheduler.admit()
    assert len(starts) == 30, "until it says so there is room"
    for one in starts[:10]:
        scheduler.stands(one.wire_id, Stage.COMPUTED)
        scheduler.started(one, 7)
    for one in starts[10:]:
        scheduler.stands(one.wire_id, Stage.STALLED)
    for one in starts[10:]:
        scheduler.finish(one, "abort")
    later = [sequence(f"later {number}") for number in range(20)]
    for one in later:
        scheduler.add([one])
    assert scheduler.admit() == later[:MOST_STALLED]
    assert scheduler.admit() == []
    scheduler.stands(later[0].wire_id, Stage.STALLED)
    scheduler.stands(later[0].wire_id, Stage.COMPUTED)
    assert scheduler.admit() == [later[MOST_STALLED]]
    scheduler.stands(later[1].wire_id, Stage.COMPUTED)
    assert len(scheduler.admit()) == 15, "it had room at once: there is more"


@pytest.mark.fault(31)
def test_the_first_in_line_is_not_queued_behind_others_at_the_verifier() -> None:
    scheduler = Scheduler(capacity=8, max_waiting=99)
    many = ask(scheduler, "abcdefgh")
    starts = scheduler.admit()
    for one in starts:
        scheduler.stands(one.wire_id, Stage.COMPUTED if one in many[:3] else Stage.STALLED)
    ask(scheduler, "r")
    assert names(scheduler.admit())[0] == "r"
    assert {one.id for one in scheduler.waiting} <= set("defgh")
    assert len(scheduler.take_ended()) == 5


@pytest.mark.fault(31)
def test_no_choice_of_a_request_overtakes_an_earlier_one_at_the_verifier() -> None:
    scheduler = Scheduler(capacity=2, max_waiting=99)
    earlier, ended, _ = ask(scheduler, "abc")
    for one in scheduler.admit():
        scheduler.stands(one.wire_id, Stage.STALLED)
    scheduler.finish(ended, "abort")
    ask(scheduler, "r")
    assert names(scheduler.admit()) == ["r"]
    assert earlier.state is State.STARTING
    assert names(scheduler.waiting) == ["c"]


def test_a_request_is_queued_whole_or_not_at_all() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=3)
    scheduler.add([sequence("a"), sequence("b")])
    with pytest.raises(OutOfCapacity, match="2 of 3"):
        scheduler.add([sequence("c"), sequence("d")])
    assert names(scheduler.waiting) == ["a", "b"]


def test_a_key_that_fills_the_queue_leaves_others_their_share() -> None:
    scheduler = Scheduler(capacity=1, max_waiting=4)
    ask(scheduler, "abcd", "flood")
    ask(scheduler, "xy", "victim")
    for key, places in (("flood", "4 of 2"), ("victim", "2 of 2"), ("other", "0 of 1")):
        with pytest.raises(OutOfCapacity, match=places):
            scheduler.add([sequence("e"), sequence("f")], key)
    ask(scheduler, "z", "other")


def test_places_for_many_among_a_full_queue_are_found_in_a_short_stretch() -> None:
    scheduler = Scheduler(capacity=64, max_waiting=1024)
    for number in range(1024):
        ask(scheduler, chr(0x4E00 + number))
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        started = scheduler.admit()
        seconds.append(time.thread_time() - began)
        assert len(started) == 64
        for one in started:
            scheduler.finish(one, "abort")
    assert min(seconds) < 0.01


@pytest.mark.fault(30)
def test_prompts_that_are_read_keep_no_other_from_the_verifier() -> None:
    scheduler = Scheduler(capacity=64, max_waiting=99)
    ask(scheduler, "abcd", "one")
    for one in scheduler.admit():
        scheduler.stands(one.wire_id, Stage.STALLED)
        scheduler.stands(one.wire_id, Stage.ADMITTED)
    ask(scheduler, "r", "other")
    assert names(scheduler.admit()) == ["r"]
