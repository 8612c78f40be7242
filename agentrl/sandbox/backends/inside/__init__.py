"""What runs on the far side of a backend: launcher, init, supervisor. Standard library only, no import of the rest.

A launcher of a few megabytes is forked for each box, so that neither the daemon's memory nor its imports are paid per
box, and so that no third-party code runs with the privileges that building a box needs.
"""
