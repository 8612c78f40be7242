"""Models of the fleet in virtual time: engines, sandbox hosts, workloads, and a player of attempts against them.

Each constant has its unit and source in `constants`; the laws they keep are in tests/sim.
"""
