"""Why is loading slow, and what helps? A doctor for anybody's ``DataLoader``: in a script, unchanged, and in a program."""

from dataloading.doctor.diagnosis import diagnose

__all__ = ["diagnose"]
