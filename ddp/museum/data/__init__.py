"""Silent bugs in what the ranks read: samples, their order, their noise, and what an evaluation counts."""
