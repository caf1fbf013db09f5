"""The states of a ledger's recording, event by event, as the tables of the module say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtrcompile.steps.recording import Recording, RecordingState

UNRECORDED, RECORDED, PARTLY_OBSERVED, OBSERVED = RecordingState


def in_state(state: RecordingState) -> Recording:
    recording = Recording()
    if state is RECORDED:
        recording.inference_graph_compiled()
    elif state is not UNRECORDED:
        recording.training_graph_compiled(others_wait=state is PARTLY_OBSERVED)
    assert recording.state is state
    return recording


def train(recording: Recording) -> None:
    recording.training_graph_compiled(others_wait=False)


def train_beside_others(recording: Recording) -> None:
    recording.training_graph_compiled(others_wait=True)


def begin_larger_step(recording: Recording) -> None:
    recording.larger_call(begins_step=True)


def go_on_with_larger_call(recording: Recording) -> None:
    recording.larger_call(begins_step=False)


@pytest.mark.parametrize(
    ("event", "after"),
    [
        (train, (OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (train_beside_others, (PARTLY_OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (Recording.inference_graph_compiled, (RECORDED, RECORDED, PARTLY_OBSERVED, OBSERVED)),
        (Recording.unforeseen_call, (PARTLY_OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (begin_larger_step, (OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (go_on_with_larger_call, (PARTLY_OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (Recording.outputs_are_held, (PARTLY_OBSERVED, OBSERVED, PARTLY_OBSERVED, OBSERVED)),
        (Recording.step_is_over, (UNRECORDED, UNRECORDED, OBSERVED, RECORDED)),
        (Recording.reset, (UNRECORDED,) * 4),
    ],
)
def test_each_event_in_each_state(
    event: Callable[[Recording], object], after: tuple[RecordingState, ...]
) -> None:
    for before, expected in zip(RecordingState, after, strict=True):
        recording = in_state(before)
        event(recording)
        assert recording.state is expected, before


def test_a_step_that_had_begun_before_is_not_planned_but_the_next_is() -> None:
    recording = in_state(PARTLY_OBSERVED)
    assert [recording.step_is_over() for _ in range(5)] == [False, True, False, False, False]
    assert not recording.is_on


def test_steps_of_a_known_form_are_recorded_for_a_while() -> None:
    recording = in_state(OBSERVED)
    states = []
    while recording.is_on:
        recording.step_is_over()
        states.append(recording.state)
    assert states == [RECORDED, RECORDED, RECORDED, UNRECORDED]


def test_outputs_held_in_every_other_step_are_planned_for_four_times() -> None:
    recording = in_state(OBSERVED)
    observed = 0
    for _ in range(40):
        if recording.state is RECORDED:
            recording.outputs_are_held()
        observed += recording.step_is_over()
    assert observed == 1 + 4
    assert not recording.is_on


def test_steps_of_another_form_each_time_are_observed_four_times() -> None:
    recording = Recording()
    observed = 0
    for _ in range(20):
        recording.unforeseen_call()
        observed += recording.step_is_over()
        observed += recording.step_is_over()
    assert observed == 4
    recording.reset()
    recording.unforeseen_call()
    assert recording.is_observing
