"""Read one step at a level and report its findings."""
