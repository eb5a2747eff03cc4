"""The parts behind the five commands, one idea a file. Nothing here imports a command."""
