"""The machine: text, files, host, device, distributed processes, memory. Imports no other folder."""
