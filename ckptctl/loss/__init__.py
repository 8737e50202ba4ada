"""Did the loss continue across a resume? Readers of logs, and the assessment."""
