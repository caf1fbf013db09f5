"""Whether the calls of a step are recorded, and whether the step is planned when it is over.

==================  ==============================================================================
state               meaning
==================  ==============================================================================
``UNRECORDED``      the graphs are planned for the steps that come: their calls are not recorded
``RECORDED``        calls are recorded, so that they can release what they saved; the form of the
                    step is known, and nothing is planned when it is over
``PARTLY_OBSERVED`` the step that runs had begun before it was to be observed; the next is observed
``OBSERVED``        all calls of the step are recorded, and it is planned when it is over
==================  ==============================================================================

===========================================  ==================================================
event                                        transition
===========================================  ==================================================
a training graph was compiled                ``UNRECORDED`` → ``OBSERVED``, or
                                             ``PARTLY_OBSERVED`` if calls of earlier graphs wait;
                                             ``RECORDED`` → ``OBSERVED``
a graph without a backward was compiled      ``UNRECORDED`` → ``RECORDED``, for one step
a call came that the plans do not foresee    ``UNRECORDED`` → ``PARTLY_OBSERVED``;
                                             ``RECORDED`` → ``OBSERVED``; at most four times
a call is larger than all whose loss was     as an unforeseen call; ``UNRECORDED`` →
seen                                         ``OBSERVED`` if it begins a step
the caller holds what it seemed to give up   ``UNRECORDED`` → ``PARTLY_OBSERVED``;
                                             ``RECORDED`` → ``OBSERVED``, at most four times,
                                             those of unforeseen calls included
the step is over                             ``PARTLY_OBSERVED`` → ``OBSERVED`` → ``RECORDED``;
                                             ``RECORDED`` → ``UNRECORDED`` when enough steps were
                                             recorded
Dynamo is reset                              any → ``UNRECORDED``
===========================================  ==================================================

Any other event leaves the state as it is.
"""

from __future__ import annotations

import enum

# Steps that are recorded from the one on that is to be observed: a training loop may take two or
# three forms of steps in turn, and each of them has to find room before it is known.
_RECORDED_STEPS = 4
# Times that a step is observed because of calls that were not foreseen.  A step that takes another
# form each time is not looked at for ever.
_MAX_UNFORESEEN = 4


class RecordingState(enum.Enum):
    """See the tables above."""

    UNRECORDED = enum.auto()
    RECORDED = enum.auto()
    PARTLY_OBSERVED = enum.auto()
    OBSERVED = enum.auto()


_OBSERVING = (RecordingState.PARTLY_OBSERVED, RecordingState.OBSERVED)


class Recording:
    """The state of one ledger.

    Attributes:
        state: see the tables above.
        steps_left: steps that are still recorded, this one included; 0 in ``UNRECORDED`` alone.
        unforeseen: how often a step was observed because of calls that were not foreseen or were
            larger, or of what the caller held after all while steps were recorded.
    """

    def __init__(self) -> None:
        self.state = RecordingState.UNRECORDED
        self.steps_left = 0
        self.unforeseen = 0

    @property
    def is_on(self) -> bool:
        """Whether calls are recorded, and may release what they saved."""
        return self.state is not RecordingState.UNRECORDED

    @property
    def is_observing(self) -> bool:
        """Whether this step, or the next, is planned when it is over."""
        return self.state in _OBSERVING

    @property
    def has_begun_late(self) -> bool:
        """Whether the step that runs had begun before its calls were recorded."""
        return self.state is RecordingState.PARTLY_OBSERVED

    @property
    def has_all_calls(self) -> bool:
        """Whether every call of the step that runs is recorded."""
        return self.state in (RecordingState.RECORDED, RecordingState.OBSERVED)

    def training_graph_compiled(self, *, others_wait: bool) -> None:
        """A graph with a backward, or one that others follow, was compiled.

        Args:
            others_wait: calls of other graphs wait for their backward.
        """
        if (
            self.state is RecordingState.UNRECORDED and others_wait
        ) or self.state is RecordingState.PARTLY_OBSERVED:
            self._observe(RecordingState.PARTLY_OBSERVED)
        else:
            self._observe(RecordingState.OBSERVED)

    def inference_graph_compiled(self) -> None:
        """A graph without a backward was compiled, which may begin a training step."""
        if self.state is RecordingState.UNRECORDED:
            self.state, self.steps_left = RecordingState.RECORDED, 1

    def unforeseen_call(self) -> None:
        """A call came that the plans of its graph do not foresee."""
        self._look_again(from_here=self.is_on)

    def larger_call(self, *, begins_step: bool) -> None:
        """A call came at sizes for which the loss outside of the graphs is only estimated."""
        self._look_again(from_here=self.is_on or begins_step)

    def _look_again(self, *, from_here: bool) -> None:
        if self.is_observing or self.unforeseen >= _MAX_UNFORESEEN:
            return
        self.unforeseen += 1
        self._observe(RecordingState.OBSERVED if from_here else RecordingState.PARTLY_OBSERVED)

    def outputs_are_held(self) -> None:
        """The caller holds what earlier steps gave up."""
        if self.state is RecordingState.UNRECORDED:
            self._observe(RecordingState.PARTLY_OBSERVED)
        elif self.state is RecordingState.RECORDED and self.unforeseen < _MAX_UNFORESEEN:
            self.unforeseen += 1
            self._observe(RecordingState.OBSERVED)

    def step_is_over(self) -> bool:
        """A step is over; whether it is to be planned now."""
        before = self.state
        self.steps_left = max(0, self.steps_left - 1)
        if before is RecordingState.PARTLY_OBSERVED:
            self.state = RecordingState.OBSERVED
        elif self.steps_left:
            self.state = RecordingState.RECORDED
        else:
            self.state = RecordingState.UNRECORDED
        return before is RecordingState.OBSERVED

    def reset(self) -> None:
        """All graphs will be compiled anew."""
        self.state = RecordingState.UNRECORDED
        self.steps_left = self.unforeseen = 0

    def _observe(self, state: RecordingState) -> None:
        self.state, self.steps_left = state, _RECORDED_STEPS
