"""Model to findings, one question a module."""
