"""Known mistakes in job scripts, environments and storage."""
