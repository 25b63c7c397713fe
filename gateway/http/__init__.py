"""The HTTP edge: connections, API keys, protection from foreign web pages, and the pages that are served."""
