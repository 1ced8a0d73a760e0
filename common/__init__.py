"""The parts that the three subjects share. Imports none of them."""
