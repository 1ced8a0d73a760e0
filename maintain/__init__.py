"""What knows all subjects: tools of those who change this repository. Not installed; see README.md here."""
