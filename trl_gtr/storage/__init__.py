"""Safe storage: atomic writes, and data that loads without executing code."""
