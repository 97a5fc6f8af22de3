"""Adapters that plug the ops into other libraries. Each module imports the library it is for."""
