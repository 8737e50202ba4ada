"""What is wrong with a job script, an environment or a storage, before a job depends on it?"""
