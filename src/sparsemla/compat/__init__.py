"""Other libraries' interfaces over the ops: their names, layouts and conventions, no maths."""
