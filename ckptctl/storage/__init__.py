"""Where the bytes are: one contract, and the stores that keep it."""
