"""How fast a loader is, stage by stage and setting by setting, and which setting to pick."""
