"""What the tests stand on."""

PATIENCE = 4  # limits are for processes that hang: a machine that others share may be as many times slower
