"""The gateway: serves REST requests and runs rounds. Keeps text and tokens of every request; never imports torch."""
