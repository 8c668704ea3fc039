"""Benchmarks whose last line of output is one JSON document."""
