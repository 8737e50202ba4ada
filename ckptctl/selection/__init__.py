"""The functions behind the commands: list, inspect, choose, seal, remove."""
