"""Studies: recipes times seeds, run side by side and resumable, then statistics."""
