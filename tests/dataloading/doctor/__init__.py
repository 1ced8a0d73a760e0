"""The doctor, tried on scripts that are slow for one known reason each."""
