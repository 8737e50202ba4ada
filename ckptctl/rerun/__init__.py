"""Replays of a suspicious step, on the same nodes and on others."""
