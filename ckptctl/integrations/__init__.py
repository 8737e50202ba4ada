"""Adapters to training frameworks, each in a module that imports its framework.

`recorder` does what all of them share; an adapter calls it from the hooks of its framework.
"""
