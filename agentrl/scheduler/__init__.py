"""The pure core: facts in, orders out. No clock, no await, no randomness; `docs/laws.md` states what always holds."""
