"""Classify failures by logs, exit codes and scheduler states: infrastructure or job."""
