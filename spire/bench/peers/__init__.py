"""Measurements of other servers and libraries under the same loads."""
