"""Measurements of other servers and libraries under the loads that `spire bench` also runs on Spire."""
