"""Slots and workspaces."""
