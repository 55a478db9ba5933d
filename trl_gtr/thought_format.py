"""The JSON response format: instructions, parse, render."""
