"""Faults in a user's own job, on a copy of its newest step, and how the job survives them."""
