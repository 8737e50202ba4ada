"""Runbooks that run: documents in Markdown whose command blocks and tables are the procedure."""
