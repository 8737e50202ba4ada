"""The record engine: open, read, verify, copy and write the records of a step."""
