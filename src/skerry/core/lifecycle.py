"""The life of a sandbox: which state follows which event. Nothing else decides a state.

Stores apply a transition by compare-and-set on the state it starts from, so that of two racing acts exactly one wins.
A kill is legal in every state that is not final, and so beats whatever is under way.
"""

from enum import StrEnum
from typing import Final

from skerry.core.errors import Conflict, Gone


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    KILLED = "killed"
    ERROR = "error"


class Event(StrEnum):
    STARTED = "started"  # the guest answered
    START_FAILED = "start_failed"
    PAUSE = "pause"
    PAUSE_DONE = "pause_done"
    PAUSE_FAILED = "pause_failed"  # the sandbox runs on
    RESUME = "resume"
    RESUME_DONE = "resume_done"
    RESUME_FAILED = "resume_failed"  # the image is still there: paused, not lost
    KILL = "kill"
    CRASHED = "crashed"  # the VM ended without our asking


class EndReason(StrEnum):
    """Why a sandbox is in a final state."""

    KILLED = "killed"  # by request
    EXPIRED = "expired"  # its timeout was reached
    IDLE = "idle"  # nobody used it for its idle time
    MAX_LIFETIME = "max_lifetime"  # the tenant's absolute maximum
    START_FAILED = "start_failed"
    CRASHED = "crashed"  # the VM or its kernel died
    POWEROFF = "poweroff"  # the guest shut itself down
    LOST = "lost"  # a server found its record but no VM


FINAL: Final = frozenset({State.KILLED, State.ERROR})
LIVE: Final = frozenset(State) - FINAL

TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.CREATING: {
        Event.STARTED: State.RUNNING,
        Event.START_FAILED: State.ERROR,
        Event.KILL: State.KILLED,
        Event.CRASHED: State.ERROR,
    },
    State.RUNNING: {Event.PAUSE: State.PAUSING, Event.KILL: State.KILLED, Event.CRASHED: State.ERROR},
    State.PAUSING: {
        Event.PAUSE_DONE: State.PAUSED,
        Event.PAUSE_FAILED: State.RUNNING,
        Event.KILL: State.KILLED,
        Event.CRASHED: State.ERROR,
    },
    State.PAUSED: {Event.RESUME: State.RESUMING, Event.KILL: State.KILLED},
    State.RESUMING: {
        Event.RESUME_DONE: State.RUNNING,
        Event.RESUME_FAILED: State.PAUSED,
        Event.KILL: State.KILLED,
        Event.CRASHED: State.PAUSED,
    },
    State.KILLED: {},
    State.ERROR: {Event.KILL: State.KILLED},
}

if set(TRANSITIONS) != set(State):
    raise RuntimeError("every state needs its row in TRANSITIONS")


def transition(state: State, event: Event) -> State:
    """The state that follows. Raises Conflict (`sandbox_state`) where the event is not legal in `state`."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        allowed = sorted(e.value for e in TRANSITIONS[state])
        raise Conflict(
            f"a sandbox that is {state.value} cannot {event.value.replace('_', ' ')}",
            code="sandbox_state",
            state=state.value,
            event=event.value,
            allowed=", ".join(allowed) or "nothing",
        ) from None


GONE_CODE: Final = {
    EndReason.KILLED: "sandbox_killed",
    EndReason.EXPIRED: "sandbox_expired",
    EndReason.IDLE: "sandbox_idle",
    EndReason.MAX_LIFETIME: "sandbox_expired",
    EndReason.START_FAILED: "sandbox_failed",
    EndReason.CRASHED: "sandbox_failed",
    EndReason.POWEROFF: "sandbox_failed",
    EndReason.LOST: "sandbox_failed",
}


def gone(sandbox_id: str, reason: EndReason | None) -> Gone:
    """The error for an act on a sandbox that is over."""
    reason = reason or EndReason.KILLED
    said = {
        EndReason.KILLED: "was killed",
        EndReason.EXPIRED: "reached its timeout and was killed",
        EndReason.IDLE: "was idle for too long and was killed",
        EndReason.MAX_LIFETIME: "reached the longest life its tenant allows and was killed",
        EndReason.START_FAILED: "failed to start",
        EndReason.CRASHED: "crashed",
        EndReason.POWEROFF: "was powered off from inside",
        EndReason.LOST: "was lost with its machine",
    }[reason]
    return Gone(f"sandbox {sandbox_id} {said}", code=GONE_CODE[reason], sandbox_id=sandbox_id, reason=reason.value)
