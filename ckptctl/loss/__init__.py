"""Check whether the loss continued across a resume: readers of logs, and the assessment."""
