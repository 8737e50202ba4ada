"""Write a step for another world size, convert formats, compare steps."""
