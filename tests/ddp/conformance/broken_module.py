"""A module that cannot be imported."""

raise RuntimeError("what this module needs is not here")
