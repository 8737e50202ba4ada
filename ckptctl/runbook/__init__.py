"""Executable runbooks: Markdown documents whose command blocks and tables are the procedure."""
