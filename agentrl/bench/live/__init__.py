"""Live comparisons on this machine: real engines, sandboxes, weights and trainer; every arm a run in its own folder."""
