"""The archives that `torch.save` writes: how they are read and written."""
