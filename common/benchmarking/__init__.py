"""Benchmarks on a noisy machine: variants take turns, and their times pair up. Their clocks, tables and figures."""
