"""Bytes to model: what writers leave on disk, decoded without running any of it."""
