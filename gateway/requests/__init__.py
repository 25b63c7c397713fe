"""Request bodies: their fields, checked and turned into prompts, output shapes and logit adjustments."""
