"""The transition table is closed, and says what the product promises."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.core.errors import Conflict
from skerry.core.lifecycle import FINAL, GONE_CODE, LIVE, TRANSITIONS, EndReason, Event, State, gone, transition


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_a_state_or_a_conflict(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert transition(state, event) in State
    else:
        with pytest.raises(Conflict) as refused:
            transition(state, event)
        assert refused.value.code == "sandbox_state"
        assert refused.value.context["state"] == state.value


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_no_path_leads_out_of_the_table_or_back_to_life(events: list[Event]) -> None:
    state, over = State.CREATING, False
    for event in events:
        try:
            state = transition(state, event)
        except Conflict:
            continue
        assert not (over and state in LIVE)
        over = state in FINAL


def test_a_kill_is_legal_in_every_state_but_killed() -> None:
    assert {state for state in State if Event.KILL in TRANSITIONS[state]} == set(State) - {State.KILLED}
    assert all(TRANSITIONS[s][Event.KILL] is State.KILLED for s in State if s is not State.KILLED)


def test_every_state_can_be_reached_and_the_live_ones_can_end() -> None:
    reached = {State.CREATING}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS[state].values()}
    assert reached == set(State)
    assert set(State) == FINAL | LIVE
    assert not FINAL & LIVE


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_has_its_code_and_its_words(reason: EndReason) -> None:
    error = gone("sb1", reason)
    assert error.status == 410
    assert error.code == GONE_CODE[reason]
    assert error.context == {"sandbox_id": "sb1", "reason": reason.value}
    assert "sb1" in str(error)


def test_an_end_without_a_reason_was_a_kill() -> None:
    assert gone("sb1", None).code == "sandbox_killed"
