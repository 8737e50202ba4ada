"""What failures cost, and how often to save."""
