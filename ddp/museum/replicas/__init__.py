"""Bugs after which the ranks' replicas differ, or are not trained."""
