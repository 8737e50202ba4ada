"""Check that a job can start here and now, and choose its step."""
