"""The only package that knows concrete classes: it builds runs and services out of them."""

from agentrl.wiring.derive import policy_of
from agentrl.wiring.live import Run, build_live
from agentrl.wiring.trial import Trial

__all__ = ["Run", "Trial", "build_live", "policy_of"]
