"""How does each program print its training log? One module for each family of formats."""
