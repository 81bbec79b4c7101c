"""Failpoints: places where a test lets this very process be killed, to see what is there after a restart.

`FELIX_FAILPOINT=<step>[:n]` kills the process (SIGKILL) when it comes to the step for the n-th time (1 where it is left
out). Read once, when the agent starts. For tests only: nothing else sets it, and without it a step costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

from felix.errors import Code, RequestError

VARIABLE: Final = "FELIX_FAILPOINT"
STEPS: Final = (
    "read", "open", "transform", "intent-appended", "intent-durable", "sent", "receipt", "ack-appended", "cosign",
)  # fmt: skip
"""In the order in which a batch comes by: after it was read, opened, transformed, its INTENT appended, durable, sent,
its receipt received, its ACK appended; and after a checkpoint was cosigned."""
DOCUMENT_STEPS: Final = ("document-kept", "document-logged", "documents-brought")
"""The same of signed documents: before its leaf is appended, after it is durable, after a round was brought to a region."""


class Failpoints:
    """At most one step at which the process dies."""

    __slots__ = ("_left", "_step")

    def __init__(self, step: str = "", times: int = 1) -> None:
        """Raises RequestError(CONFIG_INVALID) for a step that there is none of."""
        if step and (step not in (*STEPS, *DOCUMENT_STEPS) or times < 1):
            raise RequestError(
                f"{VARIABLE} names {step}:{times}; steps are {', '.join((*STEPS, *DOCUMENT_STEPS))}.",
                code=Code.CONFIG_INVALID,
            )
        self._step, self._left = step, times

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Failpoints:
        """What the environment says; usually nothing."""
        step, _, times = environment.get(VARIABLE, "").partition(":")
        return cls(step, int(times) if times.isdecimal() else 1)

    def is_at(self, step: str) -> bool:
        """True where the process is to die at `step`."""
        return step == self._step

    def at(self, step: str) -> None:
        """The process has come to `step`."""
        if step == self._step:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
