"""Mixers that model.py imports when a config names them: eigen, kernel; and feedback between blocks."""
