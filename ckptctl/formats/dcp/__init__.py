"""DCP metadata: decoded without running any of it, and written."""
