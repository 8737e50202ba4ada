"""The functions behind the commands: look, judge, choose."""
