"""The gateway: takes REST requests and drives rounds. Holds text and tokens of every request; never imports torch."""
