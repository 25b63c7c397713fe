"""Text files, documents, and chat messages rendered by a chat template."""
