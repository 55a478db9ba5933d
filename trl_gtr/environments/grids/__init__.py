"""Grid worlds: Sokoban, written here, and what the experts of gymnasium's own need."""
