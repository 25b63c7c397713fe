"""Parts common to all services: process, options, health, metrics, API keys, certificates."""
