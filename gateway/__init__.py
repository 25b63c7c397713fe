"""The gateway: REST in, rounds out. It holds every request's text and tokens, and never imports torch."""
