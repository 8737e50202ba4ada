"""What does a failure cost, and how often is it best to save?"""
