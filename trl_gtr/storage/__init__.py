"""Writing to disk safely: atomic files, data that is read back without executing anything."""
