"""The HTTP layer: connections, API keys, protection from foreign web pages, and the gateway's own pages."""
