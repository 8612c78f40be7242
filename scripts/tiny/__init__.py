"""How the tiny policy is made. `build_tiny_policy.py` is the way in."""
