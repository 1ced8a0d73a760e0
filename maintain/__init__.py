"""Tools for those who change this repository. They know all subjects, and are not installed; see README.md here."""
