"""What the three subjects share. Imports none of them."""
