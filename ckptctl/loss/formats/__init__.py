"""Readers of the training logs of each program, one module per family of formats."""
