"""What attempts and failures cost, and how often to save."""
