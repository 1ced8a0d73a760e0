"""Results: their tables, figures and JSON, and benchmarks that take turns."""
