"""Playing whole episodes with an agent, and comparing the results."""
