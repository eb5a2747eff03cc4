"""The library behind the five top-level files, one topic per file. It imports only configurator from them."""
