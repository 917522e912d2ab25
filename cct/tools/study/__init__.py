"""Studies: recipes over seeds, run in parallel and resumable, then statistics."""
