"""Silent bugs in what a run keeps and resumes from: checkpoints, averages, and learning rates."""
