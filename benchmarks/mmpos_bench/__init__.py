"""Benchmarks for users' own machines: check equality, then measure times relative to memory limits and to peers.

A suite is a module with a function ``cases(options)`` that yields ``suites.Comparison`` objects; ``suites.run`` checks
that the results of their contestants are equal and then measures the contestants.
"""
