"""Storage: one contract, and the stores that implement it."""
