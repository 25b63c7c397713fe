"""Commands that train models, and that write text for training."""
