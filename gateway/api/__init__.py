"""The REST API: endpoints, completions and their answers."""
