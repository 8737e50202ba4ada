"""Restart a job as long as it makes progress."""
