"""Logs of a job to lines, rows and markers: for the loss, failures, goodput and the supervisor."""
