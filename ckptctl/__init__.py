"""Which checkpoint do we resume from, and did the resume work?"""

__version__ = "0.1.0"
