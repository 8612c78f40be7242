"""Asynchronous agentic reinforcement learning: the next fresh, valid batch, sooner."""

__version__ = "0.1.0"
