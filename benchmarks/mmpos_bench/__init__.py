"""Benchmarks that users run on their own machines: check equality, then measure ratios to memory limits and to peers.

A suite is a module with a function ``cases(options)`` that yields ``suites.Comparison`` objects; ``suites.run`` checks
that their results are equal, then measures them.
"""
