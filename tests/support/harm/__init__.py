"""Three ways to hurt a run: kill or stop its processes, fill or lock its disk, cut its network; and a look at what is left."""
