"""Benchmarks: `make bench`. Never imported by the services or the tests."""
