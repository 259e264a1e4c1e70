"""Benchmarks that take minutes, for people to read; tests assert their deterministic results too."""
