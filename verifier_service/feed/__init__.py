"""Activations of committed positions: kept for replay, and sent to drafts."""
