"""Diagnose job scripts, environments and storage: known mistakes."""
