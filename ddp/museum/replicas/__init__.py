"""Bugs after which the ranks' replicas differ, or nobody trains them."""
