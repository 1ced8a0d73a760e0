"""Does one process with several devices pay? Its steps are timed, and the verdict says why."""
