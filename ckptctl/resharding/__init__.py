"""The same tensors for another world size."""
