"""Pickles: interpreted without executing anything in them."""
