"""Can this job start here and now, and from which step?"""
