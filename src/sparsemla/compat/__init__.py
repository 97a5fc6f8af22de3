"""Interfaces of other libraries on top of the ops: their names, layouts and conventions."""
