"""From the model of a step to findings, without I/O: one topic a module."""
