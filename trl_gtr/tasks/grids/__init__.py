"""Tasks around grid worlds: read positions from the picture, then move."""
