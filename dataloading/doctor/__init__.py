"""Why a loader is slow, and what helps: measured on anybody's ``DataLoader``."""
