"""Benchmarks that users run on their own machines: equality first, then ratios to what memory can do and to peers.

A suite is a module with a function ``cases(options)`` that yields one ``suites.Comparison`` after the other;
``suites.run`` proves and measures them.
"""
