"""What frameworks call their steps, files and kinds of train state."""
