"""`when_stale = mask`: over-age tokens stay in the conversation, with their reward, and train nothing."""

from __future__ import annotations

import msgspec

from agentrl.records import Trajectory, Version


def masked(trajectory: Trajectory, floor: Version) -> Trajectory:
    """The trajectory with every token older than `floor` made untrainable; itself where there is none."""
    if all(span.version >= floor for span in trajectory.spans):
        return trajectory
    trainable, logprobs = list(trajectory.trainable), list(trajectory.logprobs)
    for span in trajectory.spans:
        if span.version < floor:
            for position in range(span.start, span.end):
                trainable[position], logprobs[position] = False, 0.0
    return msgspec.structs.replace(
        trajectory,
        trainable=tuple(trainable),
        logprobs=tuple(logprobs),
        spans=tuple(span for span in trajectory.spans if span.version >= floor),
    )
