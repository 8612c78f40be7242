"""Small shell tasks, generated in the Harbor folder format: the demo's and the tests' own world."""

from agentrl.tasks.chores.folder import chore, demo, generate
from agentrl.tasks.chores.kinds import KINDS, Chore
from agentrl.tasks.chores.source import ChoresSource

__all__ = ["KINDS", "Chore", "ChoresSource", "chore", "demo", "generate"]
