"""The machine: text, files, host, device, check, distributed. Imports no other folder."""
