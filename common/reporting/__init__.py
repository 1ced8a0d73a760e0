"""Results: a run's summary and its figures, and where each number comes from."""
